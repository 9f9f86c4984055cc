"""Sequence: one request's way through the engine, bound to one context: a fill, a generation, a pass or an opening.

    waiting ──admit──▶ restoring ──▶ running ──last token settled──▶ done
       ▲                  │             │
       └────preempt───────┴─────────────┘

While it restores, pages that other tiers hold come back; then its rows begin with what no tier had. Most rows are
*usual*: a token at the position of its index, seeing all before it. Others go into steps of their own (`unusual`):
those whose tokens have marks, and those of a pass that are asked about.

A sequence counts three things that run ahead of each other: tokens *settled* (the host has seen the step's result; this
is the context's own `seq_len`), positions *dispatched* (`next`), and tokens *known* (dispatched samples included, whose
value may still be on the device). Steps in flight carry the epoch they were made in; preempting or ending a sequence
raises its epoch, so that late results are ignored.
"""

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.forward_pass import NO_FORWARD, CustomMaskForward, ForwardAnswer
from jaxctx.engine.core.output import Output
from jaxctx.engine.core.output_stream import ResultFuture
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.drafts import PromptLookup
from jaxctx.engine.scheduler.forecast import Demand
from jaxctx.types import ContextInfo, FillResult, Usage

_arrivals = itertools.count()
NOTHING = Demand()


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Mutated by the scheduler only, on the step thread."""

    context: Context
    caller: Caller
    reply: ResultFuture
    output: Output | None = None  # of a generation
    lookup: PromptLookup | None = None  # if drafts may be made for it
    passing: CustomMaskForward = NO_FORWARD
    compute_to: int | None = None  # of an opening: so many tokens are to have KV, the rest stays buffered
    appended: int = 0  # tokens that its context got for it, and loses again if it is refused before it ran
    arrival: int = field(default_factory=lambda: next(_arrivals))

    epoch: int = 0

    # Progress of the present run, from admission to the end or to preemption.
    slot: int = -1  # none: it does not run
    prompt_end: int = 0  # tokens known on the host at admission
    known: int = 0  # positions below this may be dispatched
    next: int = 0  # first position not dispatched
    remaining: int = 0  # samples not dispatched
    restoring: bool = False  # pages of other tiers come back before its rows begin
    unusual: Set[int] = frozenset()  # indices of rows that go into steps of their own: marked, or asked about by a pass
    reserved: int = 0  # pages promised and not yet taken
    taken: int = 0  # pages taken from those; what is left of them at the end is given back

    # Of the whole request.
    pending: int = 0  # tokens of the prompt without KV when it was first admitted
    restored: int = 0  # of those, brought back from other tiers
    computed: int | None = None  # rows of the prompt that its first admission left to compute; None before that
    rows: dict[int, ForwardAnswer] = field(default_factory=dict)  # of a pass, those that have been answered, by index
    ended: bool = False
    prefix_owner: "Request | None" = None  # computes what this one needs: it waits while that one `leads`
    demand: Demand = NOTHING  # what it was expected to take when it was submitted
    start_by: float = math.inf  # by the clock of deadlines: if it waits longer, whether it is too late is looked at

    @property
    def certain_length(self) -> bool:
        """Whether nothing but `max_tokens` can end its output."""
        return self.output is not None and not (self.output.stop_ids or self.output.request.stop)

    @property
    def rows_ready(self) -> int:
        """Rows that could go into the next step."""
        return self.known - self.next

    @property
    def decoding(self) -> bool:
        """Whether its rows are of sampled tokens: those of the prompt were dispatched."""
        return self.next >= self.prompt_end

    @property
    def leads(self) -> bool:
        """Whether it is computing its prompt, so that others who need the same pages had better wait."""
        return self.slot >= 0 and self.context.seq_len < self.prompt_end and not self.reply.backpressured()

    @property
    def passed_over(self) -> bool:
        """Whether others go before it where it waits: its reader lags, or it waits for its leader."""
        return self.reply.backpressured() or (self.prefix_owner is not None and self.prefix_owner.leads)

    @property
    def resident(self) -> int:
        """Pending tokens that were found on the device."""
        return 0 if self.computed is None else max(self.pending - self.computed - self.restored, 0)

    @property
    def match_to(self) -> int:
        """Tokens of its context that may be looked up: those of a pass are computed."""
        return min(self.wanted, self.passing.start)

    def next_rows(self, limit: int, *, unusual: bool = False) -> int:
        """Rows that could go into the next step, up to `limit`: beside those of others, or `unusual` by themselves."""
        rows = range(self.next, min(self.known, self.next + limit))
        if not self.unusual:
            return 0 if unusual else len(rows)
        return next((count for count, index in enumerate(rows) if (index in self.unusual) != unusual), len(rows))

    @property
    def tokens_left(self) -> int:
        """Samples that the host has not seen; 0 for a fill."""
        return 0 if self.output is None else self.output.max_tokens - self.output.tokens

    @property
    def wanted(self) -> int:
        """Tokens that are to have KV before any is sampled."""
        return self.context.length if self.compute_to is None else self.compute_to

    @property
    def worst_case_tokens(self) -> int:
        """Tokens that will have KV when it ends: the last sampled one stays buffered."""
        return self.wanted + max(self.tokens_left - 1, 0)

    def usage(self) -> Usage:
        """Of a generation. Tokens that a resumed output had are its own: they are in no figure of the prompt."""
        assert self.computed is not None
        assert self.output is not None
        prompt_tokens = self.context.length - self.output.tokens
        # What is computed is always the end of what was there, and that begins with the tokens of a resumed output.
        computed = max(self.computed - self.output.request.resume_tokens, 0)
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=prompt_tokens - computed,
            computed_tokens=computed,
            completion_tokens=self.output.tokens,
            restored_tokens=min(self.restored, prompt_tokens - computed),
        )

    def result(self, info: ContextInfo) -> FillResult | tuple[Sequence[ForwardAnswer], ContextInfo]:
        """Of a fill, an opening or a pass that is done; `info` is of its context."""
        if self.passing is not NO_FORWARD:
            return [*self.rows.values()], info
        assert self.computed is not None
        return FillResult(resident=self.resident, restored=self.restored, computed=self.computed, context=info)


class WaitingQueue:
    """Sequences that want to run: by priority, tenants of equal priority take turns, first come first served in one.

    Never skips the head of a class: a large request waits for its pages but small ones behind it do not starve it. Only
    those that could not go on, or only at a cost, are passed over.
    """

    def __init__(self) -> None:
        # By priority and tenant; those of one priority in the order of their turns.
        self._queues: OrderedDict[tuple[int, str], deque[Request]] = OrderedDict()
        self._demands: dict[tuple[int, str], Demand] = {}  # of each of these together

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, sequence: Request, *, front: bool = False) -> None:
        """Queue it; `front` is for one that ran already and was preempted."""
        place = sequence.context.priority, sequence.caller.tenant
        queue = self._queues.setdefault(place, deque())
        self._count(place, sequence, 1)
        if front:
            queue.appendleft(sequence)
            self._queues.move_to_end(place, last=False)
        else:
            queue.append(sequence)

    def in_turn(self) -> Iterator[Request]:
        """Who is next: those of the tenant whose turn it is first, in the highest class that anybody waits in."""
        by_class = sorted(self._queues.items(), key=lambda item: -item[0][0])  # stable: turns stay as they are
        waiting = (sequence for _, queue in by_class for sequence in queue)
        return (sequence for sequence in waiting if not sequence.passed_over)

    def remove(self, sequence: Request, *, served: bool = False) -> bool:
        """Take it out; with `served` its tenant goes to the end of the turn order. False if it is not here."""
        for place, queue in self._queues.items():
            if place[1] == sequence.caller.tenant and sequence in queue:
                queue.remove(sequence)
                self._count(place, sequence, -1)
                if not queue:
                    del self._queues[place], self._demands[place]
                elif served:
                    self._queues.move_to_end(place)
                return True
        return False

    def before(self, priority: int, tenant: str) -> tuple[int, Demand, int]:
        """How many of a tenant wait at a priority, what these demand on average, and how many wait at higher ones."""
        own = len(self._queues.get((priority, tenant), ()))
        total = self._demands.get((priority, tenant), NOTHING)
        higher = sum(len(queue) for (each, _), queue in self._queues.items() if each > priority)
        return own, Demand(total.prompt_rows / max(own, 1), total.tokens / max(own, 1)), higher

    def tenants(self, priority: int) -> set[str]:
        """Those who wait at a priority or at higher ones."""
        return {tenant for each, tenant in self._queues if each >= priority}

    def longest(self, priority: int) -> tuple[str, int]:
        """Who has most requests waiting at a priority or at lower ones, and how many."""
        waiting = Counter[str]()
        for (each, tenant), queue in self._queues.items():
            if each <= priority:
                waiting[tenant] += len(queue)
        return max(waiting.items(), key=lambda item: item[1], default=("", 0))

    def latest(self, priority: int, tenant: str) -> Request | None:
        """The last request of a tenant, at the lowest priority but none above this, that has not run yet."""
        for (_, owner), queue in sorted(self._queues.items(), key=lambda item: item[0][0]):
            if owner == tenant and queue[-1].computed is None and queue[-1].context.priority <= priority:
                return queue[-1]
        return None

    def _count(self, place: tuple[int, str], sequence: Request, sign: int) -> None:
        total, one = self._demands.get(place, NOTHING), sequence.demand
        self._demands[place] = Demand(total.prompt_rows + sign * one.prompt_rows, total.tokens + sign * one.tokens)
