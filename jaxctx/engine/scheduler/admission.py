"""Admission: which waiting requests begin to run, and which contexts and requests give up pages for them.

Admission reserves the worst case, so that a running request can always finish. When pages are short, idle contexts are
suspended to their tokens, least recently used first; then running requests of lower priority than the head of the queue
are preempted; then the head waits, and no other request overtakes it. One exception: a request needs a page that a
running request, its prefix owner, is computing. Then others pass it until the owner has computed its prompt.
"""

from collections.abc import Callable

import numpy as np

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request
from jaxctx.engine.scheduler.active_requests import ActiveRequests
from jaxctx.engine.scheduler.deadlines import DeadlineReview
from jaxctx.engine.scheduler.page_budget import PageBudget
from jaxctx.engine.scheduler.restore import PageRestoration
from jaxctx.errors import ResourceExhausted


class Admission:
    """See the module docstring."""

    def __init__(
        self,
        active: ActiveRequests,
        cache: ContextCache,
        block_manager: BlockManager,
        budget: PageBudget,
        deadlines: DeadlineReview,
        restoration: PageRestoration,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self._active = active
        self._cache = cache
        self._block_manager = block_manager
        self._budget = budget
        self._deadlines = deadlines
        self._restoration = restoration
        self._config = config
        self._clock = clock
        self.requests_admitted = 0  # each counted once, though it may be preempted and start again
        self.queue_seconds = 0.0  # that these waited before
        self._blocked: object = None  # the situation in which the head of the queue could not be admitted
        self._max_running: int | None = None  # requests that can run at once, if fewer than there are slots

    @property
    def usable_slots(self) -> int:
        """Requests that can run at once, as far as known: memory or deadlines may allow fewer than there are slots."""
        if self._max_running is None:
            return self._config.max_batch
        return max(self._max_running, len(self._active.running), 1)

    def admit(self) -> None:
        """Start waiting requests, in turn, until one does not fit."""
        now = self._clock()
        heads = self._active.queue.in_turn()
        while True:
            head = next(heads, None)
            if head is None:
                break
            situation = self._situation(head)
            if situation == self._blocked:
                return
            late_s = self._deadlines.seconds_late(
                head, now, len(self._active.running) + 1, careful=self._deadlines.exceeds_fair_share(head)
            )
            if late_s > 0:
                self._deadlines.refuse(head, now, late_s)
                heads = self._active.queue.in_turn()  # anew: the queue has changed
                continue
            if self._deadlines.would_slow_others(now):
                self._blocked, self._max_running = situation, len(self._active.running)
                return
            head.prefix_owner = self._find_prefix_owner(head)
            if head.prefix_owner is not None:
                continue
            if not self._try_start(head):
                self._blocked = situation
                if self._active.running:
                    self._max_running = len(self._active.running)
                    return
                if any(map(self._is_being_stored, self._cache.context_table)):
                    return  # it gives its pages back
                # No request runs and no more contexts can be suspended: waiting would not help.
                message = "all pages are held by pinned contexts"
                self._active.fail(head, ResourceExhausted(message, reason="OUT_OF_PAGES", retry_after_s=1.0))
            heads = self._active.queue.in_turn()
        if not self._active.queue:
            self._max_running = None

    def _is_being_stored(self, context: Context) -> bool:
        """Whether only a save holds the pages of the context, and waits for no admission itself."""
        return context.saving and not context.suspended and context not in self._active.writers

    def _situation(self, head: Request) -> object:
        """Everything that decides whether the head can be admitted: while it is equal, trying again is useless."""
        running = self._active.running
        backpressured = sum(request.backpressured for request in running)
        return head, self._budget.claimable(), len(running), backpressured, self._active.changes

    def _try_start(self, head: Request) -> bool:
        """Start the head if it gets a slot and pages, preempting another request if needed; False if it must wait."""
        head.context.busy = True  # so that it is not suspended for its own admission
        has_slot = bool(self._active.free_slots) or self._preempt_for(head)
        if not has_slot or not self._reserve(head):
            head.context.busy = False
            return False
        self._active.start(head)
        if head.run_number == 0:
            self.requests_admitted += 1
            self.queue_seconds += self._clock() - head.submitted_at
        if self._max_running is not None and self._max_running < len(self._active.running):
            self._max_running = None  # more can run than was thought
        if not self._restoration.next_page(head):
            self._restoration.begin(head)
        return True

    def _reserve(self, head: Request) -> bool:
        """Attach cached pages to the head's context, and reserve the rest of its worst case. False: neither is done.

        Idle contexts are suspended, and running requests of lower priority preempted, if needed.
        """
        context = head.context
        worst_case = self._block_manager.pages_for(head.worst_case_tokens)
        if head.computed_tokens is None:
            self._cache.commit_full(context)
        while True:
            found = self._cache.peek(context, tokens=head.lookup_end)
            own = 0 if context.suspended else context.committed_pages + context.working_pages
            # Pages for tokens that are computed, and for pages from other tiers, which need pages of their own.
            new = max(worst_case - own - found.device, found.host + found.disk)
            if self._budget.claimable() >= new + found.unheld:
                break
            # Suspending or preempting others may leave found pages unheld: look again.
            claim = self._budget.claim(new + found.unheld)
            self._active.note_suspended(claim.suspended)
            if not claim.granted and not self._preempt_for(head):
                return False
        if head.computed_tokens is None:
            if context.suspended:  # what an earlier run restored is gone
                self._restoration.forget(head)
            if not head.restored_tokens:
                head.pending_tokens = head.prefill_end - context.seq_len
        self._cache.match(context, head.lookup_end)
        head.reserved_pages = new
        return True

    def _preempt_for(self, head: Request) -> bool:
        """Preempt one running request in favour of `head`; False if none may be preempted. It resumes later.

        First a backpressured request: it waits for its reader anyway, and must not make others wait. Otherwise the
        request of the lowest priority, if that is lower than the head's; of equal ones the latest. Its context keeps
        its pages until they are claimed.
        """
        running = self._active.running
        backpressured = [request for request in running if request.backpressured]
        victim = min(backpressured or running, key=lambda each: (each.priority, -each.arrival), default=None)
        if victim is None or not (backpressured or victim.priority < head.priority):
            return False
        self._active.preempt(victim)
        return True

    def _find_prefix_owner(self, head: Request) -> Request | None:
        """A running request that computes the page that the head needs next, if any: waiting saves that work."""
        context = head.context
        if context.working_tokens or context.attention_overrides:
            return None
        candidates = [
            each
            for each in self._active.running
            if each.is_computing_prompt and each.context.identity == context.identity
        ]
        if not candidates:
            return None
        found = self._cache.peek(context, tokens=head.lookup_end)
        end = context.seq_len + (found.device + found.host + found.disk + 1) * self._config.page_size
        if end > head.lookup_end:
            return None
        for candidate in candidates:
            other = candidate.context
            computes_it = candidate.prompt_end >= end > other.seq_len and not other.manual_commit
            same_adapters = _switches_before(other, end) == _switches_before(context, end)
            if computes_it and same_adapters and np.array_equal(other.tokens(0, end), context.tokens(0, end)):
                return candidate
        return None


def _switches_before(context: Context, end: int) -> list[tuple[int, str]]:
    """Where the context goes on with another adapter within its first `end` tokens, and the content of each."""
    return [(switch.start, switch.adapter_revision) for switch in context.adapter_switches if switch.start < end]
