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
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jaxctx.cache.contexts import Context, ContextCache
from jaxctx.cache.control import release
from jaxctx.cache.memory import Ready
from jaxctx.cache.tiers import Item
from jaxctx.engine.batch import Batch, Part
from jaxctx.engine.budget import PageBudget
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.drafts import LEAST, SURE, share
from jaxctx.engine.sequence import Sequence, WaitingQueue
from jaxctx.engine.step import StepShape
from jaxctx.errors import JaxctxError, ResourceExhausted

ALONE = 16  # pages that move at once where no step would be held up


@dataclass(eq=False)
class Scheduler:
    """See the module docstring."""

    cache: ContextCache
    config: EngineConfig
    smallest_step: StepShape
    largest_pass: StepShape
    load_slot: Callable[[Sequence], None]  # called before the first step of a sequence that needs it
    fail: Callable[[Sequence, JaxctxError], None]  # ends one that cannot go on, and tells its caller why
    finish: Callable[[Sequence], None]  # for one that has nothing left to compute once it was restored
    ready: Ready  # whether the data of a host slot has arrived

    def __post_init__(self) -> None:
        self.writers: dict[Context, Sequence] = {}  # who has not ended, by context
        self.queue = WaitingQueue()
        self.running: list[Sequence] = []
        self.budget = PageBudget(self.cache, self.running)
        self.restored = False  # pages came back just now, or their sequence has ended: there may be more to do at once
        self.flying = 0  # steps that were made and are not settled
        self._may_restore = 0  # pages beside the last one of them
        self._free_slots = list(range(self.config.max_batch - 1, -1, -1))
        self._unusual_next = False  # whose turn it is, where there are both
        self._blocked: object = None  # in which the head of the queue could not be admitted
        self.preemptions = self.tokens_computed = self.tokens_cached = self.tokens_restored = 0
        self.tokens_drafted = self.tokens_accepted = 0

    @property
    def waiting(self) -> int:
        """Sequences that do not run now."""
        return len(self.writers) - len(self.running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence, or refuse it: ResourceExhausted (QUEUE_FULL, or NEVER_FITS) with nothing changed."""
        if self.waiting >= self.config.queue_limit:
            raise ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=1.0)
        needed = self.cache.memory.pages_for(sequence.worst_case_tokens)
        if needed > self.config.pages:
            message = f"needs {needed} pages in the worst case; the engine has {self.config.pages}"
            raise ResourceExhausted(message, reason="NEVER_FITS")
        self.writers[sequence.context] = sequence
        self.queue.push(sequence)
        self.reconsider()

    def end(self, sequence: Sequence) -> None:
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

    def _stop(self, sequence: Sequence) -> None:
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
            surplus = context.working_pages - self.cache.memory.pages_for(context.working_tokens)
            release(self.cache, context, min(surplus, sequence.taken))
        sequence.taken = 0
        self.reconsider()

    def _admit(self) -> None:
        heads = self.queue.in_turn()
        while (head := next(heads, None)) is not None:
            lagging = sum(sequence.reply.lagging() for sequence in self.running)
            situation = (head, self.budget.claimable(), len(self.running), lagging)
            if situation == self._blocked:
                return
            head.leader = self._leader_of(head)
            if head.leader is not None:
                continue
            head.context.busy = True  # not a victim of its own admission
            if (self._free_slots or self._preempt_for(head)) and self._reserve(head):
                self.queue.remove(head, served=True)
                head.slot = self._free_slots.pop()
                head.restoring = True
                head.known = head.next = head.prompt_end = 0
                self.running.append(head)
                if not self._ahead(head):
                    self._begin(head)
            else:
                head.context.busy = False
                self._blocked = situation
                if self.running:
                    return
                # Nothing runs and nothing more can be suspended: waiting would not help.
                self.fail(head, ResourceExhausted("all pages are held by pinned contexts", retry_after_s=1.0))
            heads = self.queue.in_turn()  # anew: the queue is another

    def _reserve(self, head: Sequence) -> bool:
        """Take hold of cached pages, and promise the head its worst case beyond them; or change nothing.

        If need be at the cost of contexts that do not run and of running sequences that are less important.
        """
        context = head.context
        worst = self.cache.memory.pages_for(head.worst_case_tokens)
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

    def _leader_of(self, head: Sequence) -> Sequence | None:
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
            context, before, available = sequence.context, sequence.context.seq_len, self.cache.memory.available
            gained = self.cache.restore(context, min(pages, sequence.reserved), self.ready, sequence.match_to)
            self.restored |= gained > 0
            sequence.reserved -= min(available - self.cache.memory.available, sequence.reserved)
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
        return not (self.flying or any(s.rows_ready and not s.reply.lagging() for s in self.running))

    def _ahead(self, sequence: Sequence) -> Seq[Item]:
        """Where its next page is, if it is somewhere."""
        next_page = min(sequence.match_to, sequence.context.seq_len + self.config.page_size)
        return self.cache.memory.ahead(sequence.context, next_page)

    def _begin(self, sequence: Sequence) -> None:
        """What is still without KV now is computed."""
        sequence.restoring = False
        context = sequence.context
        held = context.committed_pages + context.working_pages
        sequence.reserved = max(self.cache.memory.pages_for(sequence.worst_case_tokens) - held, 0)
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

    def _preempt_for(self, head: Sequence) -> bool:
        """Stop one running sequence in favour of `head`; False if none may be stopped. It resumes later.

        One whose reader lags waits for its reader anyway, in the queue too, and may not make others wait for that. Else
        it is the least important one, if it is less important than `head`. Its context keeps its pages until they are
        claimed.
        """
        lagging = [sequence for sequence in self.running if sequence.reply.lagging()]
        victim = min(lagging or self.running, key=lambda s: (s.context.priority, -s.arrival), default=None)
        if victim is None or not (lagging or victim.context.priority < head.context.priority):
            return False
        self._stop(victim)
        self.queue.push(victim, front=True)
        self.preemptions += 1
        return True

    def next_batch(self) -> Batch | None:
        """Admit what fits and make the next step: one row of every decoding sequence first, prompt chunks after.

        Unusual rows have steps of their own, which take turns with the others.
        """
        self._admit()
        self._restore()
        self._unusual_next = not self._unusual_next
        batch = (self._unusual_batch() if self._unusual_next else None) or self._usual_batch() or self._unusual_batch()
        if batch is not None:
            self.flying += 1
            self._may_restore = self.config.moving_pages
        return batch

    def _unusual_batch(self) -> Batch | None:
        for sequence in self.running:
            rows = sequence.next_rows(self.largest_pass.rows, unusual=True)
            if rows and not sequence.reply.lagging():
                stop = sequence.next + rows
                outputs = [index for index in sequence.passing.outputs if sequence.next <= index < stop]
                if len(outputs) > self.largest_pass.samples:
                    del outputs[self.largest_pass.samples :]
                    rows = outputs[-1] + 1 - sequence.next
                return Batch([self._take_rows(sequence, 0, rows, 0, outputs)], rows, max(len(outputs), 1))
        return None

    def _usual_batch(self) -> Batch | None:
        budget = self.config.max_batch_tokens
        parts: list[Part] = []
        row = samples = 0
        drafts = self._draft()
        if drafts and self.flying:  # what is guessed must follow the tokens that are still on the device
            return None
        # The sort is stable: decoding rows first, each group first come first served.
        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            rows = sequence.next_rows(budget - row)
            if not rows or sequence.reply.lagging():
                continue
            part = self._take_rows(sequence, row, rows, samples, drafts=drafts.get(sequence, ()))
            parts.append(part)
            row += part.rows
            samples += len(part.asked)
        return Batch(parts, row) if parts else None

    def _draft(self) -> Mapping[Sequence, Seq[int]]:
        """Guesses for the rows that would pad the next step, if all of its sequences are decoding."""
        ready = [s for s in self.running if s.next_rows(1) and not s.reply.lagging()]
        spare = self.config.padding(len(ready))
        if not spare or not all(s.decoding for s in ready):
            return {}
        most, least = min(spare, self.config.draft_tokens), SURE if len(ready) == self.smallest_step.rows else LEAST
        guesses = [s.lookup.guess(s.context, min(most, s.remaining - 1), least) if s.lookup else [] for s in ready]
        return {sequence: guess for sequence, guess in zip(ready, share(guesses, spare), strict=True) if guess}

    def judge(self, part: Part, accepted: int) -> None:
        """Of a part that was settled, so many drafts were right: its sequence goes on behind them."""
        sequence = part.sequence
        self.tokens_drafted += len(part.drafts)
        self.tokens_accepted += accepted
        self.tokens_computed += accepted
        if sequence.lookup is not None:
            sequence.lookup.judge(sequence.context, accepted)
        sequence.known = sequence.context.length
        sequence.next, sequence.remaining = sequence.known - 1, sequence.tokens_left

    def _take_rows(
        self, sequence: Sequence, first_row: int, rows: int, place: int, asked: Seq[int] = (), drafts: Seq[int] = ()
    ) -> Part:
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
        return Part(sequence, sequence.epoch, first_row, rows, position, asked, place, drafts)

    def settle(self, batch: Batch) -> list[Part]:
        """Book a finished step into the contexts; returns the parts whose sequences still want the result."""
        self.flying -= 1
        live = [part for part in batch.parts if part.epoch == part.sequence.epoch]
        for part in live:
            context, rows = part.sequence.context, part.rows - len(part.drafts)
            hold = part.sequence.passing.keep_working
            self.cache.settle(context, part.position + rows - context.seq_len, hold=hold)  # none, if it had its KV
            self.tokens_computed += rows
        return live
