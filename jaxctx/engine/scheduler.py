"""Scheduler: which sequences run, which rows the next step has, and what a step's results change.

Owns the waiting queue and the running set; asks the cache for cached prefixes before any compute and for pages before
any row. It never touches the device: `load_slot` tells it what to prepare, `Batch` what to run. One thread.

Admission reserves the worst case: a sequence that runs can always finish. `reserved` pages are promised to running
sequences; everybody else may only take what is available beyond them (`claim`). When that is not enough, contexts that
are not running are suspended to their token lineage, least recently used first; then running sequences of lower
priority than the head of the queue are preempted; then the head waits, and nobody overtakes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxctx.cache.contexts import ContextCache
from jaxctx.engine.batch import Batch, Part
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.queue import WaitingQueue
from jaxctx.engine.sequence import Sequence
from jaxctx.errors import JaxctxError, ResourceExhausted


class Scheduler:
    """See the module docstring.

    `load_slot` is called before the first step of a sequence that needs it, `refuse` for one that cannot be admitted.
    """

    def __init__(
        self,
        cache: ContextCache,
        config: EngineConfig,
        load_slot: Callable[[Sequence], None],
        refuse: Callable[[Sequence, JaxctxError], None],
    ) -> None:
        self._cache = cache
        self._config = config
        self._load_slot = load_slot
        self._refuse = refuse
        self._free_slots = list(range(config.max_batch - 1, -1, -1))
        self.queue = WaitingQueue()
        self.running: list[Sequence] = []
        self.reserved = 0
        self._followers: dict[Sequence, list[Sequence]] = {}
        self.preemptions = 0
        self.suspensions = 0
        self.tokens_computed = 0
        self.tokens_cached = 0

    # --- arrival and departure -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sequences that do not run yet."""
        return len(self.queue) + sum(map(len, self._followers.values()))

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence, or refuse it: ResourceExhausted (QUEUE_FULL, or NEVER_FITS) with nothing changed."""
        if self.waiting >= self._config.queue_limit:
            raise ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=1.0)
        needed = self._pages_for(sequence.worst_case_tokens)
        if needed > self._config.pages:
            raise ResourceExhausted(
                f"needs {needed} pages in the worst case; the engine has {self._config.pages}", reason="NEVER_FITS"
            )
        context = sequence.context
        sequence.prompt_tokens = context.length
        sequence.pending = context.length if context.suspended else context.buffered_tokens
        self.queue.push(sequence)

    def end(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its context keeps what was settled. In-flight results are ignored."""
        sequence.ended = True
        self._stop(sequence)
        if not self.queue.remove(sequence):
            for followers in self._followers.values():
                if sequence in followers:
                    followers.remove(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Leave the running set: slot, promised pages and surplus pages are free from now on."""
        sequence.epoch += 1
        self._dismiss_followers(sequence)
        self.reserved -= sequence.reserved
        sequence.reserved = 0
        sequence.context.busy = False
        self._cache.touch(sequence.context)
        if sequence.running:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        if sequence.grew:
            context = sequence.context
            surplus = context.working_pages - self._pages_for(context.working_tokens)
            if surplus > 0 and not context.suspended:
                self._cache.release(context, surplus)
            sequence.grew = False

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)

    # --- memory --------------------------------------------------------------------------------------------------

    def claimable(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return self._cache.available() - self.reserved

    def claim(self, pages: int) -> bool:
        """Make `pages` claimable, suspending contexts that do not run; False if that is not enough."""
        while self.claimable() < pages:
            victim = next(self._cache.victims(), None)
            if victim is None:
                return False
            self._cache.suspend(victim)
            self.suspensions += 1
        return True

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (head := next(self.queue.heads(), None)) is not None:
            if not self._free_slots and not self._preempt_for(head):
                return
            head.context.busy = True  # not a victim of its own admission
            self._cache.match(head.context)
            leader = self._leader_of(head)
            if leader is not None:
                self._wait_for(leader, head)
            elif self._reserve(head):
                self._start(head)
            else:
                self._postpone(head)
                if self.running:
                    return
                # Nothing runs and nothing more can be suspended: waiting would not help.
                self._refuse(head, ResourceExhausted("all pages are held by pinned contexts", retry_after_s=1.0))

    def _reserve(self, head: Sequence) -> bool:
        """Promise the head its worst case, if need be at the cost of running work of lower priority."""
        context = head.context
        needed = self._pages_for(head.worst_case_tokens) - context.committed_pages - context.working_pages
        needed = max(needed, 0)
        while not self.claim(needed):
            if not self._preempt_for(head):
                return False
        head.reserved = needed
        self.reserved += needed
        return True

    def _postpone(self, sequence: Sequence) -> None:
        """Leave it in the queue. Matching made it hold pages; they must not be ones that running work was promised."""
        sequence.context.busy = False
        if self.claimable() < 0:
            self._cache.suspend(sequence.context)

    def _leader_of(self, head: Sequence) -> Sequence | None:
        """A running sequence that is computing the very page this one needs next, so that waiting saves the work."""
        context = head.context
        end = context.seq_len + self._config.page_size
        if context.working_tokens or context.length < end:
            return None
        for leader in self.running:
            other = leader.context
            computing = leader.prompt_end >= end > other.seq_len and not other.manual_commit
            if computing and other.identity == context.identity:
                if np.array_equal(other.tokens(0, end), context.tokens(0, end)):
                    return leader
        return None

    def _wait_for(self, leader: Sequence, follower: Sequence) -> None:
        self._postpone(follower)
        self.queue.remove(follower, served=True)
        self._followers.setdefault(leader, []).append(follower)

    def _dismiss_followers(self, leader: Sequence) -> None:
        for follower in reversed(self._followers.pop(leader, [])):
            self.queue.push(follower, front=True)

    def _start(self, sequence: Sequence) -> None:
        self.queue.remove(sequence, served=True)
        context = sequence.context
        sequence.slot = self._free_slots.pop()
        sequence.known = context.length
        sequence.next = context.seq_len
        sequence.prompt_end = context.length
        sequence.decoding = False
        sequence.remaining = sequence.tokens_left
        # The last token is always computed, for its logits; if its KV is already there, without writing it again.
        sequence.read_only = sequence.next == sequence.known
        if sequence.read_only:
            sequence.next -= 1
        self.running.append(sequence)
        if sequence.computed is None:
            sequence.computed = sequence.rows_ready
            self.tokens_cached += sequence.resident
        if sequence.sampler is not None and sequence.sampler.needs_history:
            self._load_slot(sequence)

    def _preempt_for(self, head: Sequence) -> bool:
        """Stop the least important running sequence if it is less important than `head`; it resumes later."""
        victim = min(self.running, key=lambda s: (s.priority, -s.arrival), default=None)
        if victim is None or victim.priority >= head.priority:
            return False
        self._stop(victim)
        self._cache.suspend(victim.context)
        self.queue.push(victim, front=True)
        self.preemptions += 1
        return True

    # --- one step ------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Admit what fits and make the next step: one row of every decoding sequence first, prompt chunks after."""
        self._admit()
        budget = self._config.max_batch_tokens
        parts: list[Part] = []
        row = samples = 0
        # The sort is stable: decoding rows first, each group first come first served.
        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            rows = min(sequence.rows_ready, budget - row)
            if rows <= 0 or sequence.reply.lagging():
                continue
            part = self._take_rows(sequence, row, rows, samples)
            parts.append(part)
            row += rows
            samples += part.sample >= 0
        return Batch(parts, row, samples) if parts else None

    def _take_rows(self, sequence: Sequence, first_row: int, rows: int, sample: int) -> Part:
        position, read_only = sequence.next, sequence.read_only
        if not read_only:
            before = sequence.context.working_pages
            self._cache.grow(sequence.context, position + rows - sequence.context.seq_len)
            taken = sequence.context.working_pages - before
            sequence.grew |= taken > 0
            sequence.reserved -= taken
            self.reserved -= taken
        sequence.next += rows
        sequence.read_only = False
        samples = sequence.next == sequence.known and sequence.remaining > 0
        if samples:
            sequence.remaining -= 1
            sequence.known += sequence.remaining > 0  # the next row's token exists, if only on the device
            sequence.decoding = True
        return Part(sequence, sequence.epoch, first_row, rows, position, read_only, sample if samples else -1)

    def settle(self, batch: Batch) -> list[Part]:
        """Book a finished step into the contexts; returns the parts whose sequences still want the result."""
        live = [part for part in batch.parts if part.epoch == part.sequence.epoch]
        for part in live:
            sequence = part.sequence
            if not part.read_only:
                self._cache.settle(sequence.context, part.rows)
            self.tokens_computed += part.rows
            if not sequence.prefilling and sequence.context.seq_len >= sequence.prompt_end:
                self._dismiss_followers(sequence)
        return live
