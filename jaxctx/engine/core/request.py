"""Request: one call's way through the engine, bound to one context: a fill, a generation, a forward or an opening.

    waiting ──admit──▶ restoring ──▶ running ──last token computed──▶ ended
       ▲                  │             │
       └────preempt───────┴─────────────┘

While it restores, pages that other tiers hold come back to the device; then it computes the tokens that no tier had.

Most rows are *standard rows*: a token at the position of its index, which sees all tokens before it. The other rows
go into steps of their own, custom-mask forwards: tokens with attention overrides, and tokens that a forward call asks
about.

Progress. Three counts run ahead of each other, because a step's result arrives after later steps were sent:

    tokens of the context
    0          seq_len           next_position        dispatch_end                       final length
    ├──computed───┼────in flight──────┼───may be sent──────┼── not sampled yet ───────────────┤
    │ the host has│ sent to the device│ token known to the │
    │ the result  │                   │ host or on device  │

`prompt_end` is where `dispatch_end` stood when the request was admitted: rows before it are of the prompt, rows from it
on are of sampled tokens. A fill is done when `seq_len` reaches it.

A step in flight carries the run number that the request had when the step was made. Preempting or ending a request
raises its run number, so that results that arrive later are ignored.
"""

import itertools
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.forward_pass import NO_FORWARD, CustomMaskForward, ForwardAnswer
from jaxctx.engine.core.output import Output
from jaxctx.engine.core.output_stream import ResultFuture
from jaxctx.engine.drafting.pace import DraftPace
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.forecast import Demand
from jaxctx.engine.scheduler.prompt_lookup import PromptLookup
from jaxctx.types import ContextInfo, FillResult, Usage

_arrivals = itertools.count()
NO_SLOT = -1
NO_DEMAND = Demand()


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Changed by the scheduler and the engine core only, on the step thread."""

    context: Context
    caller: Caller
    reply: ResultFuture
    output: Output | None = None  # of a generation
    prompt_lookup: PromptLookup | None = None  # proposes drafts; None: this request has none
    draft_pace: DraftPace | None = None  # of the draft model's; None: the draft model guesses nothing of it
    forward: CustomMaskForward = NO_FORWARD  # of a forward call
    compute_to: int | None = None  # of an opening: this many tokens get KV, the others stay buffered
    appended_tokens: int = 0  # appended to the context for this request; removed again if it is refused
    arrival: int = field(default_factory=lambda: next(_arrivals))

    # Progress of the present run, from admission to the end or to preemption. See the picture above.
    run_number: int = 0  # grows when a run ends
    slot: int = NO_SLOT  # of the device's sampling state; NO_SLOT: the request does not run
    prompt_end: int = 0  # tokens known to the host when the request was admitted
    dispatch_end: int = 0  # positions below this may be sent
    next_position: int = 0  # first position that was not sent
    samples_left: int = 0  # samples that no step was sent for
    restoring: bool = False  # pages of other tiers come back before anything is computed
    custom_mask_rows: Set[int] = frozenset()  # token indices whose rows go into custom-mask forwards
    reserved_pages: int = 0  # pages promised and not taken yet
    taken_pages: int = 0  # pages taken of those; unused ones are given back when the run ends

    # Of the whole request.
    pending_tokens: int = 0  # tokens of the prompt without KV when the request was first admitted
    restored_tokens: int = 0  # of those, tokens brought back from other tiers
    computed_tokens: int | None = None  # of those, tokens left to compute; None before the first admission
    forward_answers: dict[int, ForwardAnswer] = field(default_factory=dict)  # answers so far, by token index
    custom_mask_turn: int = 0  # when it last had a step of custom-mask rows, counted in these; 0: never
    ended: bool = False
    prefix_owner: "Request | None" = None  # computes a page that this request needs, which waits for it meanwhile
    demand: Demand = NO_DEMAND  # expected rows and tokens, judged when the request was submitted
    submitted_at: float = 0.0  # when it came, by the clock of deadlines
    start_by: float = math.inf  # if it still waits at this time of the deadline clock, its deadline is checked again

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def priority(self) -> int:
        return self.context.priority

    @property
    def runs(self) -> bool:
        """Whether it is admitted: it has a slot."""
        return self.slot != NO_SLOT

    @property
    def never_ran(self) -> bool:
        """Whether it was never admitted, so that nothing of it is computed and it can still be taken back.

        One that was preempted while it restored pages has computed nothing either, but its context holds these pages.
        """
        return self.run_number == 0 and not self.runs and not self.ended

    @property
    def backpressured(self) -> bool:
        """Whether its reader is too far behind to take more."""
        return self.reply.backpressured()

    @property
    def awaits_mask(self) -> bool:
        """Whether its next row must wait until it is known which tokens the output's format allows behind it."""
        return self.output is not None and self.output.awaits_mask

    @property
    def must_wait(self) -> bool:
        """Whether it has no rows for the next step, whatever its progress."""
        return self.backpressured or self.awaits_mask

    @property
    def has_certain_length(self) -> bool:
        """Whether only `max_tokens` can end its output."""
        return self.output is not None and not (self.output.stop_ids or self.output.request.stop)

    @property
    def rows_ready(self) -> int:
        """Rows that could go into the next step."""
        return self.dispatch_end - self.next_position

    @property
    def is_decoding(self) -> bool:
        """Whether all rows of its prompt were sent, so that its next rows are of sampled tokens."""
        return self.next_position >= self.prompt_end

    @property
    def is_computing_prompt(self) -> bool:
        """Whether it computes its prompt now, so that others who need the same pages had better wait."""
        return self.slot >= 0 and self.context.seq_len < self.prompt_end and not self.reply.backpressured()

    @property
    def is_passed_over(self) -> bool:
        """Whether others are admitted before it while its reader is behind, or its prefix owner computes."""
        if self.reply.backpressured():
            return True
        return self.prefix_owner is not None and self.prefix_owner.is_computing_prompt

    @property
    def resident_tokens(self) -> int:
        """Pending tokens that were found on the device."""
        if self.computed_tokens is None:
            return 0
        return max(self.pending_tokens - self.computed_tokens - self.restored_tokens, 0)

    @property
    def tokens_left(self) -> int:
        """Samples that the host has not seen; 0 for a fill."""
        return 0 if self.output is None else self.output.max_tokens - self.output.tokens

    @property
    def prefill_end(self) -> int:
        """Tokens that must have KV before any is sampled."""
        return self.context.length if self.compute_to is None else self.compute_to

    @property
    def lookup_end(self) -> int:
        """Tokens of its context that may come from the cache: those of a forward call are always computed."""
        return min(self.prefill_end, self.forward.start)

    @property
    def worst_case_tokens(self) -> int:
        """Tokens that will have KV when it ends: the last sampled one stays buffered."""
        return self.prefill_end + max(self.tokens_left - 1, 0)

    def next_standard_rows(self, limit: int) -> int:
        """Standard rows that could go into the next step, up to `limit`."""
        end = min(self.dispatch_end, self.next_position + limit)
        if self.output is not None and self.output.matcher is not None:
            end = min(end, self.context.length)  # the host must know a token before the one after it is sampled
        if not self.custom_mask_rows:
            return max(end - self.next_position, 0)
        for index in range(self.next_position, end):
            if index in self.custom_mask_rows:
                return index - self.next_position
        return max(end - self.next_position, 0)

    def standard_rows_behind(self, limit: int) -> int:
        """How many rows behind the next one are standard ones without a gap, up to `limit`."""
        if not self.custom_mask_rows:
            return limit
        first = self.next_position + 1
        return next((rows for rows in range(limit) if first + rows in self.custom_mask_rows), limit)

    def next_custom_mask_rows(self, limit: int) -> int:
        """Rows that could go into a custom-mask forward now, up to `limit`."""
        if not self.custom_mask_rows:
            return 0
        end = min(self.dispatch_end, self.next_position + limit)
        if self.output is not None and self.output.matcher is not None:
            end = min(end, self.context.length)  # as of standard rows
        for index in range(self.next_position, end):
            if index not in self.custom_mask_rows:
                return index - self.next_position
        return max(end - self.next_position, 0)

    def usage(self) -> Usage:
        """Token counts of a generation. Tokens that a resumed output had count in no figure of the prompt."""
        assert self.computed_tokens is not None
        assert self.output is not None
        prompt_tokens = self.context.length - self.output.tokens
        # What is computed is always the end of what was there, and the tokens of a resumed output come last.
        computed = max(self.computed_tokens - self.output.request.resume_tokens, 0)
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=prompt_tokens - computed,
            computed_tokens=computed,
            completion_tokens=self.output.tokens,
            restored_tokens=min(self.restored_tokens, prompt_tokens - computed),
        )

    def result(self, info: ContextInfo) -> FillResult | tuple[Sequence[ForwardAnswer], ContextInfo]:
        """The result of a fill, an opening or a forward call that is done; `info` describes its context."""
        if self.forward is not NO_FORWARD:
            return [*self.forward_answers.values()], info
        assert self.computed_tokens is not None
        return FillResult(
            resident=self.resident_tokens,
            restored=self.restored_tokens,
            computed=self.computed_tokens,
            context=info,
        )
