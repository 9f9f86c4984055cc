"""What the scheduler decides, as data: the next step, slots to load, and events that the engine core carries out.

The methods of the scheduler return these:

    schedule()        ──▶ SchedulerOutput: a Batch or None, slots to load, events
    process_output()  ──▶ the scheduled requests that still want the step's result
    submit()          ──▶ events
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.forward_pass import needs_logits
from jaxctx.engine.core.request import Request
from jaxctx.errors import JaxctxError
from jaxctx.types import ContextInfo


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The rows of one request in one step."""

    request: Request
    run_number: int  # of the request when the step was made; the results count only if it still has this one
    first_row: int  # in the step
    rows: int
    position: int  # token index of the first row
    output_positions: Sequence[int]  # token indices of the rows that are sampled, or that a forward call asks about
    sample_offset: int  # of the first of these among all samples of the step
    drafts: Sequence[int] = ()  # guessed tokens, which the last rows compute
    drafted_by_model: bool = False  # whether a draft model guessed them, and not a prompt lookup


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step."""

    scheduled: Sequence[ScheduledRequest]
    rows: int
    outputs: int = 0  # of a custom-mask forward, which has one request: outputs that the step must have, at least 1

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of whole rows are to be copied to the host."""
        for scheduled in self.scheduled:
            asked = scheduled.request.forward.outputs
            if asked and any(needs_logits(asked[index]) for index in scheduled.output_positions if index in asked):
                return True
        return False


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request that ended without a row: once its pages were restored, nothing was left to compute."""

    request: Request
    context: ContextInfo  # its context when it ended: a later event of the same call may suspend it


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that was ended with an error for its caller."""

    request: Request
    error: JaxctxError


@dataclass(frozen=True, slots=True)
class ContextSuspended:
    """A context that gave up its pages for others. It keeps its tokens."""

    context: Context


SchedulerEvent: TypeAlias = RequestFinished | RequestFailed | ContextSuspended


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one call of `schedule` decided."""

    batch: Batch | None  # None: there is nothing to compute now
    slots_to_load: Sequence[Request] = ()  # whose penalties, bias and min_tokens the device must know before the batch
    events: Sequence[SchedulerEvent] = ()  # in the order in which they happened
    to_draft: Mapping[Request, int] = field(
        default_factory=dict
    )  # guesses that the draft model is to make before the next step
    to_follow: Sequence[Request] = ()  # whose tokens the draft model is to compute after the batch


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Requests and pages now, and counts since the engine started."""

    running: int
    waiting: int
    pages_reserved: int
    tokens_computed: int
    tokens_cached: int
    tokens_restored: int
    tokens_drafted: int
    tokens_accepted: int
    tokens_drafted_by_model: int
    tokens_accepted_by_model: int
    preemptions: int
    suspensions: int
    tokens_queried: int
    requests_admitted: int
    queue_seconds: float
    step_seconds: float
