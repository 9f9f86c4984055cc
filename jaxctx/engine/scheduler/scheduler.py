"""Scheduler: which sequences run, which rows the next step has, and what a step's results change.

Owns the waiting queue and the running set; asks the cache for cached prefixes before any compute and for pages before
any row. It never touches the device: `load_slot` tells it what to prepare, `Batch` what to run. One thread.

A sequence that was admitted first takes back what other tiers hold, some pages a step beside the rows of others; then
its rows begin with what is left to compute.

Admission reserves the worst case: a sequence that runs can always finish. When pages are short, contexts that do not
run are suspended to their token lineage, least recently used first; then running sequences of lower priority than the
head of the queue are preempted; then the head waits, and nobody overtakes it. A sequence that would compute a page
which a running one, its leader, is computing already lets others pass until that one has computed its prompt.

    queue ──admit──▶ running ──▶ done
      ▲                │
      └────preempt─────┘

Who cannot end by its deadline takes no steps from those who can (`deadlines` judges that by what steps took): it is
refused when it comes, or when it would be admitted, or ended while it runs if others are there to gain by it. Nor are
so many admitted at once that steps get too long for most of those that run. A full queue is shared: the tenant that
has most in it gives up its latest request for one of a tenant that has fewer.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxctx.cache.block_manager import Ready
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.page_control import release
from jaxctx.cache.tiers import TierEntry
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request, WaitingQueue
from jaxctx.engine.runner.batch import Batch, ScheduledRequest
from jaxctx.engine.runner.step import StepShape
from jaxctx.engine.scheduler.drafts import MIN_NGRAM, MIN_NGRAM_ALONE, share_spare_rows
from jaxctx.engine.scheduler.forecast import START_MARGIN, Demand, Forecast, Queue
from jaxctx.engine.scheduler.page_budget import PageBudget
from jaxctx.errors import JaxctxError, ResourceExhausted

ALONE = 16  # pages that move at once where no step would be held up
FAR_S = 12 * 3600.0  # a deadline that is farther away is none: what comes by gRPC always has one
USUAL = 0.5  # of outputs so many are at most as long as what is expected of those to come
CERTAIN_ENOUGH = 0.1  # and as what is expected of those that run, before one is given up
# Steps between two running outputs that are given up: a disturbance that passes must not cost all of them.
PATIENCE = 8
RETRY_S = 0.5, 60.0  # after how long one that came too late may be told to come again, at least and at most


@dataclass(eq=False)
class Scheduler:
    """See the module docstring."""

    cache: ContextCache
    config: EngineConfig
    smallest_step: StepShape
    largest_pass: StepShape
    load_slot: Callable[[Request], None]  # called before the first step of a sequence that needs it
    fail: Callable[[Request, JaxctxError], None]  # ends one that cannot go on, and tells its caller why
    finish: Callable[[Request], None]  # for one that has nothing left to compute once it was restored
    ready: Ready  # whether the data of a host slot has arrived
    clock: Callable[[], float]  # of deadlines

    def __post_init__(self) -> None:
        self.writers: dict[Context, Request] = {}  # who has not ended, by context
        self.queue = WaitingQueue()
        self.running: list[Request] = []
        self.budget = PageBudget(self.cache, self.running)
        self.restored = False  # pages came back just now, or their sequence has ended: there may be more to do at once
        self.num_in_flight = 0  # steps that were made and are not settled
        self._may_restore = 0  # pages beside the last one of them
        self._free_slots = list(range(self.config.max_batch - 1, -1, -1))
        self._unusual_next = False  # whose turn it is, where there are both
        self._blocked: object = None  # in which the head of the queue could not be admitted
        self.preemptions = self.tokens_computed = self.tokens_cached = self.tokens_restored = 0
        self.tokens_drafted = self.tokens_accepted = 0
        self.forecast = Forecast()
        self._sent: deque[float] = deque()  # when each step in flight was made
        self._settled = 0.0  # when the last one was settled
        self._accepted = 0  # drafts, which no step that was settled has counted as tokens yet
        self._most: int | None = None  # sequences for which there is room, where not all slots can be used
        self._steps_to_review = PATIENCE  # until it is looked whether one of the running ones is to be given up

    @property
    def waiting(self) -> int:
        """Sequences that do not run now."""
        return len(self.writers) - len(self.running)

    def submit(self, sequence: Request) -> None:
        """Queue a sequence, or refuse it with nothing changed: ResourceExhausted (NEVER_FITS, DEADLINE_UNREACHABLE, or
        QUEUE_FULL).
        """
        needed = self.cache.block_manager.pages_for(sequence.worst_case_tokens)
        if needed > self.config.pages:
            message = f"needs {needed} pages in the worst case; the engine has {self.config.pages}"
            raise ResourceExhausted(message, reason="NEVER_FITS")
        self._expect(sequence)
        if self.waiting >= self.config.queue_limit:
            self._make_place(sequence)
        self.writers[sequence.context] = sequence
        self.queue.push(sequence)
        self.reconsider()

    def _make_place(self, sequence: Request) -> None:
        """In a full queue. Raises QUEUE_FULL unless another tenant has more requests in it, and one to give up."""
        full = ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=1.0)
        priority, tenant = sequence.context.priority, sequence.caller.tenant
        greedy, most = self.queue.longest(priority)
        own = sum(writer.slot < 0 and writer.caller.tenant == tenant for writer in self.writers.values())
        victim = self.queue.latest(priority, greedy) if greedy != tenant and most > own + 1 else None
        if victim is None:
            raise full
        self.fail(victim, full)

    def _expect(self, sequence: Request) -> None:
        """What it will take. Raises DEADLINE_UNREACHABLE if it cannot end in time behind those that wait."""
        now, deadline, context = self.clock(), sequence.caller.deadline, sequence.context
        rows = sequence.wanted - (0 if context.suspended else context.seq_len)
        sequence.demand = Demand(rows, self._tokens_to_come(sequence, now, USUAL))
        if deadline is None or not 0 < deadline - now < FAR_S:
            return
        queue = self._queue_before(sequence, now)
        late_s = self.forecast.shortfall_s(now, deadline - now, sequence.demand, queue)
        if late_s > 0 and rows > self.config.page_size:  # some of it may be cached: only now it is worth a look
            found = self.cache.peek(context, tokens=sequence.match_to)
            rows = max(rows - (found.device + found.host + found.disk) * self.config.page_size, 1)
            sequence.demand = Demand(rows, sequence.demand.tokens)
            late_s = self.forecast.shortfall_s(now, deadline - now, sequence.demand, queue)
        if late_s > 0:
            raise _unreachable(deadline - now, late_s)
        self._set_start_by(sequence, now)

    def _set_start_by(self, sequence: Request, now: float) -> None:
        """While it waits: until when it need not be asked whether it is too late."""
        if sequence.caller.deadline is not None:
            service = self.forecast.service_s(now, sequence.demand, len(self.running) or 1)
            # Never without a pause: estimates change with every step.
            sequence.start_by = max(sequence.caller.deadline - (service.low if service else 0.0), now + 0.05)

    def _tokens_to_come(self, sequence: Request, now: float, quantile: float) -> float:
        """That so large a part of outputs like this one still have at most; 0 for a fill and for what is not known."""
        output = sequence.output
        if output is None or sequence.certain_length:
            return sequence.tokens_left
        tenant = sequence.caller.tenant
        length = self.forecast.lengths.expect(now, tenant, output.max_tokens, quantile, done=output.tokens)
        return max(length or 0.0, output.request.min_tokens, output.tokens) - output.tokens

    def _queue_before(self, sequence: Request, now: float) -> Queue:
        """What it finds if it is queued now."""
        priority, tenant = sequence.context.priority, sequence.caller.tenant
        slots = self.config.max_batch if self._most is None else max(self._most, len(self.running), 1)
        own, mean, higher = self.queue.before(priority, tenant)
        if any(each.context.priority < priority for each in self.running):  # it may have the place of one of these
            return Queue(slots, slots, (), own + higher, mean)
        runs = [each for each in self.running if each.caller.tenant == tenant]
        tenants = {tenant, *self.queue.tenants(priority), *(each.caller.tenant for each in self.running)}
        share_spare_rows = max(len(runs) + slots - len(self.running), slots // len(tenants), 1)
        crowded = len(runs) + own >= slots // len(tenants)
        running = sorted(self._tokens_to_come(each, now, USUAL) for each in self.running)
        rows = sum(max(each.prompt_end - each.next, 0) for each in self.running)
        return Queue(slots, share_spare_rows, running, own + higher * share_spare_rows // slots, mean, rows, crowded)

    def _crowded(self, head: Request) -> bool:
        """Of one that may be admitted: whether its tenant has others there for all of its share of the slots."""
        tenant, priority = head.caller.tenant, head.context.priority
        tenants = {tenant, *self.queue.tenants(priority), *(each.caller.tenant for each in self.running)}
        own = self.queue.before(priority, tenant)[0] + sum(each.caller.tenant == tenant for each in self.running)
        return own > max(self.config.max_batch // len(tenants), 1)

    def finished(self, sequence: Request) -> None:
        """Its output has ended by itself: outputs like it may have about as many tokens."""
        output = sequence.output
        if output is not None and not sequence.certain_length:
            tenant = sequence.caller.tenant
            self.forecast.lengths.observe(self.clock(), tenant, output.max_tokens, output.tokens)

    def review(self, now: float) -> None:
        """Refuse those that wait, and end those that run, that can no longer be in time and take steps from others."""
        late = [s for s in self.writers.values() if s.slot < 0 and s.start_by <= now]
        for sequence in late:
            if not self._refuse_if_late(sequence, now, max(len(self.running), 1)):
                self._set_start_by(sequence, now)
        if self._steps_to_review <= 0:
            self._end_hopeless(now)

    def _refuse_if_late(self, sequence: Request, now: float, decoding: int, *, careful: bool = False) -> bool:
        """One that waits, if it would be too late even among so few; `careful`: if it may well be."""
        deadline = sequence.caller.deadline
        if deadline is None or not 0 < deadline - now < FAR_S or (sequence.appended and sequence.computed is not None):
            return False  # part of what was appended is computed: that cannot be taken back
        demand = sequence.demand
        if sequence.output is not None:
            rows = demand.prompt_rows if sequence.computed is None else 0.0
            demand = Demand(rows, self._tokens_to_come(sequence, now, USUAL))
        service = self.forecast.service_s(now, demand, decoding)
        if service is None:
            return False
        late_s = (service.high * START_MARGIN if careful else service.low) - (deadline - now)
        if late_s > 0:
            self.fail(sequence, _unreachable(deadline - now, late_s))
        return late_s > 0

    def _end_hopeless(self, now: float) -> None:
        """Of running outputs that will be too late, end the one farthest from it: others may be in time then."""
        if len(self.running) < 2 and not self.queue:
            return  # nobody gains by it
        late: tuple[float, Request | None] = 1.0, None
        for sequence in self.running:
            if sequence.output is not None and sequence.caller.deadline is not None and sequence.rows_ready:
                lateness = self._lateness(sequence, now, len(self.running))
                late = (lateness, sequence) if lateness > late[0] else late
        lateness, worst = late
        if worst is not None and worst.caller.deadline is not None and worst.caller.deadline > now:
            self._steps_to_review = PATIENCE
            left_s = worst.caller.deadline - now
            self.fail(worst, _unreachable(left_s, left_s * (lateness - 1)))

    def _lateness(self, sequence: Request, now: float, decoding: int) -> float:
        """Of one that runs: see `Forecast.hopeless`."""
        left_s = math.inf if sequence.caller.deadline is None else sequence.caller.deadline - now
        if left_s > FAR_S:
            return 0.0
        rows = max(sequence.prompt_end - sequence.next, 0)
        tokens = self._tokens_to_come(sequence, now, CERTAIN_ENOUGH)
        made = sequence.output.tokens if sequence.output is not None else 0
        done = made / max(made + tokens, 1)
        return self.forecast.hopeless(now, left_s, Demand(rows, tokens), decoding, done)

    def _would_slow_others(self, now: float) -> bool:
        """Whether one more makes steps so long that most of the running ones, which would be in time, are not."""
        before, count = len(self.running), len(self.running) + 1
        tokens = self.forecast.costs.token_s(now, before), self.forecast.costs.token_s(now, count)
        if not before or None in tokens or tokens[0] == tokens[1]:
            return False
        harmed = sum(self._lateness(s, now, before) <= 1 < self._lateness(s, now, count) for s in self.running)
        return harmed > before / 2

    def end(self, sequence: Request) -> None:
        """Take a sequence out, wherever it is; its context keeps what was settled. In-flight results are ignored."""
        sequence.ended = True
        del self.writers[sequence.context]
        self._stop(sequence)
        self.queue.remove(sequence)

    def reprioritise(self, context: Context) -> None:
        """Its priority has changed: if its writer waits, that moves to its new class."""
        writer = self.writers.get(context)
        if writer is not None and self.queue.remove(writer):
            self.queue.push(writer)
        self.reconsider()

    def reconsider(self) -> None:
        """Something changed that may let the head of the queue in, beyond what `_admit` looks at by itself."""
        self._blocked = None

    def _stop(self, sequence: Request) -> None:
        """Do not run: slot, promised pages and pages taken in vain are free from now on."""
        sequence.epoch += 1
        sequence.reserved = 0
        context = sequence.context
        context.busy = False
        self.cache.touch(context)
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        if not context.suspended:
            surplus = context.working_pages - self.cache.block_manager.pages_for(context.working_tokens)
            release(self.cache, context, min(surplus, sequence.taken))
        sequence.taken = 0
        self.reconsider()

    def _admit(self) -> None:
        heads = self.queue.in_turn()
        now = self.clock()
        while (head := next(heads, None)) is not None:
            lagging = sum(sequence.reply.backpressured() for sequence in self.running)
            situation = (head, self.budget.claimable(), len(self.running), lagging)
            if situation == self._blocked:
                return
            if self._refuse_if_late(head, now, len(self.running) + 1, careful=self._crowded(head)):
                heads = self.queue.in_turn()
                continue
            if self._would_slow_others(now):
                self._blocked, self._most = situation, len(self.running)
                return
            head.prefix_owner = self._leader_of(head)
            if head.prefix_owner is not None:
                continue
            head.context.busy = True  # not a victim of its own admission
            if (self._free_slots or self._preempt_for(head)) and self._reserve(head):
                self.queue.remove(head, served=True)
                head.slot = self._free_slots.pop()
                head.restoring = True
                head.known = head.next = head.prompt_end = 0
                self.running.append(head)
                if self._most is not None and self._most < len(self.running):
                    self._most = None
                if not self._ahead(head):
                    self._begin(head)
            else:
                head.context.busy = False
                self._blocked = situation
                if self.running:
                    self._most = len(self.running)
                    return
                # Nothing runs and nothing more can be suspended: waiting would not help.
                pinned = "all pages are held by pinned contexts"
                self.fail(head, ResourceExhausted(pinned, reason="OUT_OF_PAGES", retry_after_s=1.0))
            heads = self.queue.in_turn()  # anew: the queue is another
        if not self.queue:
            self._most = None

    def _reserve(self, head: Request) -> bool:
        """Take hold of cached pages, and promise the head its worst case beyond them; or change nothing.

        If need be at the cost of contexts that do not run and of running sequences that are less important.
        """
        context = head.context
        worst = self.cache.block_manager.pages_for(head.worst_case_tokens)
        if head.computed is None:
            self.cache.commit_full(context)
        while True:
            found = self.cache.peek(context, tokens=head.match_to)
            own = 0 if context.suspended else context.committed_pages + context.working_pages
            # For what is computed, and for what comes back from other tiers: working pages do not serve for that.
            new = max(worst - own - found.device, found.host + found.disk)
            if self.budget.claimable() >= new + found.unheld:
                break
            # Suspending others may leave found pages unheld: look again.
            if not self.budget.claim(new + found.unheld) and not self._preempt_for(head):
                return False
        if head.computed is None:
            head.pending = head.wanted - context.seq_len
        self.cache.match(context, head.match_to)
        head.reserved = new
        return True

    def _leader_of(self, head: Request) -> Request | None:
        """A running sequence that is computing the very page this one needs next, so that waiting saves the work."""
        context, size = head.context, self.config.page_size
        if context.working_tokens or context.marks:
            return None
        leaders = [s for s in self.running if s.leads and s.context.identity == context.identity]
        if not leaders:
            return None
        found = self.cache.peek(context, tokens=head.match_to)
        end = context.seq_len + (found.device + found.host + found.disk + 1) * size
        if end > head.match_to:
            return None
        for leader in leaders:
            other = leader.context
            computing = leader.prompt_end >= end > other.seq_len and not other.manual_commit
            if computing and np.array_equal(other.tokens(0, end), context.tokens(0, end)):
                return leader
        return None

    def _restore(self) -> None:
        """Bring pages back for those that wait for them; who has all that there is begins its rows."""
        pages = ALONE if self._alone else self._may_restore
        self.restored = False
        for sequence in [s for s in self.running if s.restoring]:
            context, before, available = sequence.context, sequence.context.seq_len, self.cache.block_manager.available
            gained = self.cache.restore(context, min(pages, sequence.reserved), self.ready, sequence.match_to)
            self.restored |= gained > 0
            sequence.reserved -= min(available - self.cache.block_manager.available, sequence.reserved)
            self._may_restore -= gained
            if sequence.computed is None:
                sequence.restored += context.seq_len - before
                self.tokens_restored += context.seq_len - before
            if pages and gained == pages:
                pages = 0  # and there may be more
                continue
            pages -= gained
            ahead = self._ahead(sequence)
            if not ahead or not sequence.reserved:  # what came to other tiers since has no pages promised
                self._begin(sequence)
            elif ahead[0].host < self.config.host_pages:  # else it is on its way from a store
                pages = 0  # nobody overtakes it: what it fetched from disk would be given up again before it is used

    @property
    def moving_pages(self) -> int:
        """Pages that one context may move between tiers before the next step, whose rows others may wait for."""
        return ALONE if self._alone else self.config.moving_pages

    @property
    def _alone(self) -> bool:
        """Whether no step is under way, and none can be made."""
        return not (self.num_in_flight or any(s.rows_ready and not s.reply.backpressured() for s in self.running))

    def _ahead(self, sequence: Request) -> Sequence[TierEntry]:
        """Where its next page is, if it is somewhere."""
        next_page = min(sequence.match_to, sequence.context.seq_len + self.config.page_size)
        return self.cache.block_manager.lookup_tiers(sequence.context, next_page)

    def _begin(self, sequence: Request) -> None:
        """What is still without KV now is computed."""
        sequence.restoring = False
        context = sequence.context
        held = context.committed_pages + context.working_pages
        sequence.reserved = max(self.cache.block_manager.pages_for(sequence.worst_case_tokens) - held, 0)
        sequence.next = context.seq_len
        sequence.known = sequence.prompt_end = max(sequence.wanted, context.seq_len)
        sequence.remaining = sequence.tokens_left
        # The last token is always computed, for its logits; if its KV is already there, without writing it again.
        if sequence.next == sequence.known and sequence.compute_to is None:
            sequence.next -= 1
            if sequence.computed is None and sequence.restored:  # it came back last, and does not count twice
                sequence.restored -= 1
                self.tokens_restored -= 1
        sequence.unusual = {*sequence.passing.outputs, *sequence.context.marks}
        if sequence.computed is None:
            sequence.computed = sequence.rows_ready
            self.tokens_cached += sequence.resident
        if sequence.output is not None and sequence.output.sampler.needs_history:
            self.load_slot(sequence)
        if not sequence.rows_ready:
            self.restored = True
            self.finish(sequence)

    def _preempt_for(self, head: Request) -> bool:
        """Stop one running sequence in favour of `head`; False if none may be stopped. It resumes later.

        One whose reader lags waits for its reader anyway, in the queue too, and may not make others wait for that. Else
        it is the least important one, if it is less important than `head`. Its context keeps its pages until they are
        claimed.
        """
        lagging = [sequence for sequence in self.running if sequence.reply.backpressured()]
        victim = min(lagging or self.running, key=lambda s: (s.context.priority, -s.arrival), default=None)
        if victim is None or not (lagging or victim.context.priority < head.context.priority):
            return False
        self._stop(victim)
        self.queue.push(victim, front=True)
        self.preemptions += 1
        return True

    def schedule(self) -> Batch | None:
        """Admit what fits and make the next step: one row of every decoding sequence first, prompt chunks after.

        Unusual rows have steps of their own, which take turns with the others.
        """
        self._admit()
        self._restore()
        self._unusual_next = not self._unusual_next
        batch = (self._unusual_batch() if self._unusual_next else None) or self._usual_batch() or self._unusual_batch()
        if batch is not None:
            self.num_in_flight += 1
            self._sent.append(self.clock())
            self._may_restore = self.config.moving_pages
        return batch

    def _unusual_batch(self) -> Batch | None:
        for sequence in self.running:
            rows = sequence.next_rows(self.largest_pass.rows, unusual=True)
            if rows and not sequence.reply.backpressured():
                stop = sequence.next + rows
                outputs = [index for index in sequence.passing.outputs if sequence.next <= index < stop]
                if len(outputs) > self.largest_pass.samples:
                    del outputs[self.largest_pass.samples :]
                    rows = outputs[-1] + 1 - sequence.next
                return Batch([self._take_rows(sequence, 0, rows, 0, outputs)], rows, max(len(outputs), 1))
        return None

    def _usual_batch(self) -> Batch | None:
        budget = self.config.max_batch_tokens
        parts: list[ScheduledRequest] = []
        row = samples = 0
        drafts = self._draft()
        if drafts and self.num_in_flight:  # what is guessed must follow the tokens that are still on the device
            return None
        # The sort is stable: decoding rows first, each group first come first served.
        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            rows = sequence.next_rows(budget - row)
            if not rows or sequence.reply.backpressured():
                continue
            part = self._take_rows(sequence, row, rows, samples, drafts=drafts.get(sequence, ()))
            parts.append(part)
            row += part.rows
            samples += len(part.asked)
        return Batch(parts, row) if parts else None

    def _draft(self) -> Mapping[Request, Sequence[int]]:
        """Guesses for the rows that would pad the next step, if all of its sequences are decoding."""
        ready = [s for s in self.running if s.next_rows(1) and not s.reply.backpressured()]
        spare = self.config.padding(len(ready))
        if not spare or not all(s.decoding for s in ready):
            return {}
        most, least = (
            min(spare, self.config.draft_tokens),
            MIN_NGRAM_ALONE if len(ready) == self.smallest_step.rows else MIN_NGRAM,
        )
        guesses = [s.lookup.guess(s.context, min(most, s.remaining - 1), least) if s.lookup else [] for s in ready]
        return {
            sequence: guess for sequence, guess in zip(ready, share_spare_rows(guesses, spare), strict=True) if guess
        }

    def update_acceptance(self, part: ScheduledRequest, accepted: int) -> None:
        """Of a part that was settled, so many drafts were right: its sequence goes on behind them."""
        sequence = part.sequence
        self.tokens_drafted += len(part.drafts)
        self.tokens_accepted += accepted
        self._accepted += accepted
        self.tokens_computed += accepted
        if sequence.lookup is not None:
            sequence.lookup.update_acceptance(sequence.context, accepted)
        sequence.known = sequence.context.length
        sequence.next, sequence.remaining = sequence.known - 1, sequence.tokens_left

    def _take_rows(
        self,
        sequence: Request,
        first_row: int,
        rows: int,
        place: int,
        asked: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> ScheduledRequest:
        position = sequence.next
        rows += len(drafts)
        sequence.known += len(drafts)
        sequence.remaining -= len(drafts)
        before = sequence.context.working_pages
        self.cache.grow(sequence.context, position + rows - sequence.context.seq_len)
        taken = sequence.context.working_pages - before
        sequence.taken += taken
        sequence.reserved -= taken
        sequence.next += rows
        if sequence.next == sequence.known and sequence.remaining > 0:
            asked = range(sequence.next - 1 - len(drafts), sequence.next)
            sequence.remaining -= 1
            # The next row's token exists, if only on the device; behind drafts it is not known which one it is.
            sequence.known += sequence.remaining > 0 and not drafts
        return ScheduledRequest(sequence, sequence.epoch, first_row, rows, position, asked, place, drafts)

    def process_output(self, batch: Batch) -> list[ScheduledRequest]:
        """Book a finished step into the contexts; returns the parts whose sequences still want the result."""
        self.num_in_flight -= 1
        self._measure(batch)
        live = [part for part in batch.parts if part.epoch == part.sequence.epoch]
        for part in live:
            context, rows = part.sequence.context, part.rows - len(part.drafts)
            hold = part.sequence.passing.keep_working
            self.cache.mark_computed(
                context, part.position + rows - context.seq_len, hold=hold
            )  # none, if it had its KV
            self.tokens_computed += rows
        return live

    def _measure(self, batch: Batch) -> None:
        """A step is done: what it took, from when it was made or the one before it was done."""
        now = self.clock()
        seconds = now - max(self._sent.popleft(), self._settled)
        self._settled = now
        self._steps_to_review -= 1
        decoding = rows = 0
        for part in batch.parts:
            if len(part.asked) and part.rows - len(part.drafts) == 1 and part.sequence.output is not None:
                decoding += 1
                rows += part.rows
        tokens, self._accepted = decoding + self._accepted, 0
        self.forecast.costs.observe(now, seconds, decoding=decoding, tokens=tokens, prompt_rows=batch.rows - rows)


def _unreachable(left_s: float, late_s: float) -> ResourceExhausted:
    message = f"cannot end by its deadline, which is in {left_s:.1f} s: it would be about {late_s:.1f} s late"
    retry_after_s = min(max(late_s, RETRY_S[0]), RETRY_S[1])
    return ResourceExhausted(message, reason="DEADLINE_UNREACHABLE", retry_after_s=retry_after_s)
