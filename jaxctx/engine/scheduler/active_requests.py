"""ActiveRequests: the requests that have not ended, whether they wait or run, and the events of their changes.

    add ──▶ waiting ──start──▶ running ──end, fail, finish──▶ gone
              ▲                   │
              └──────preempt──────┘

The parts of the scheduler share one such object. It collects their decisions as data (`take_events`,
`take_slots_to_load`) until the scheduler returns them. Called on the step thread.
"""

import math
from collections.abc import Iterable, Sequence

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.page_control import release
from jaxctx.engine.contexts.info import context_info
from jaxctx.engine.core.request import NO_SLOT, Request
from jaxctx.engine.scheduler.queue import WaitingQueue
from jaxctx.engine.scheduler.scheduler_output import (
    ContextSuspended,
    RequestFailed,
    RequestFinished,
    SchedulerEvent,
)
from jaxctx.errors import JaxctxError
from jaxctx.lifetime import DeadlineQueue


class ActiveRequests:
    """See the module docstring."""

    def __init__(self, cache: ContextCache, block_manager: BlockManager, slots: int, model_id: str) -> None:
        self.writers: dict[Context, Request] = {}  # all requests that have not ended, by context
        self.queue = WaitingQueue()
        self.running: list[Request] = []
        # Looked at in every turn of the step thread, where thousands of requests may wait.
        self.deadlines: DeadlineQueue[Request] = DeadlineQueue()
        """When the requests' callers give up, by the clock of deadlines."""
        self.reviews: DeadlineQueue[Request] = DeadlineQueue()
        """When waiting requests are to be checked again: their `start_by`."""
        self.free_slots = list(range(slots - 1, -1, -1))
        self.changes = 0  # grows with every change after which another request may be admitted
        self.preemptions = 0
        self._cache = cache
        self._block_manager = block_manager
        self._model_id = model_id
        self._events: list[SchedulerEvent] = []
        self._slots_to_load: list[Request] = []

    @property
    def waiting(self) -> int:
        """Requests that do not run now."""
        return len(self.writers) - len(self.running)

    def tenants(self, tenant: str, priority: int) -> set[str]:
        """This tenant, the tenants with requests that wait at `priority` or above, and those with running ones."""
        return {tenant, *self.queue.tenants(priority), *(request.tenant for request in self.running)}

    def add(self, request: Request) -> None:
        """Add a new request, which waits."""
        self.writers[request.context] = request
        self.deadlines.set(request, request.caller.deadline)
        self._wait(request)
        self.note_change()

    def start(self, request: Request) -> None:
        """Give a waiting request a slot. It runs from now on; first it restores pages."""
        self.queue.remove(request, served=True)
        self.reviews.set(request, None)
        request.slot = self.free_slots.pop()
        request.restoring = True
        request.dispatch_end = request.next_position = request.prompt_end = 0
        self.running.append(request)

    def preempt(self, request: Request) -> None:
        """Let a running request wait again, before all others of its tenant and priority."""
        self._stop(request)
        self._wait(request, front=True)
        self.preemptions += 1

    def end(self, request: Request) -> None:
        """End a request that waits or runs. Its context keeps what was computed. Results in flight are ignored."""
        request.ended = True
        del self.writers[request.context]
        self.deadlines.set(request, None)
        self.reviews.set(request, None)
        self._stop(request)
        self.queue.remove(request)

    def review_at(self, request: Request, start_by: float) -> None:
        """Set the time at which a waiting request is checked again; infinite: never."""
        request.start_by = start_by
        self.reviews.set(request, None if math.isinf(start_by) else start_by)

    def fail(self, request: Request, error: JaxctxError) -> None:
        """End a request with an error for its caller."""
        self.end(request)
        self._events.append(RequestFailed(request, error))

    def finish(self, request: Request) -> None:
        """End a request that has nothing left to compute."""
        self.end(request)
        info = context_info(request.context, model_id=self._model_id, has_writer=False)
        self._events.append(RequestFinished(request, info))

    def note_suspended(self, contexts: Iterable[Context]) -> None:
        """Note that contexts were suspended for a request."""
        self._events += map(ContextSuspended, contexts)

    def note_slot_to_load(self, request: Request) -> None:
        """Note that the request's slot on the device must be loaded before its next step."""
        self._slots_to_load.append(request)

    def note_change(self) -> None:
        """Note a change that may let the head of the queue be admitted, and that admission does not see itself."""
        self.changes += 1

    def take_events(self) -> Sequence[SchedulerEvent]:
        """The events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def take_slots_to_load(self) -> Sequence[Request]:
        """Running requests noted since the last call. A preempted one is noted again when it runs again."""
        if not self._slots_to_load:
            return ()
        requests, self._slots_to_load = self._slots_to_load, []
        return [request for request in requests if request.runs]

    def _wait(self, request: Request, front: bool = False) -> None:
        """Let a request wait; `front`: before all others of its tenant and priority."""
        self.queue.push(request, front=front)
        self.review_at(request, request.start_by)

    def _stop(self, request: Request) -> None:
        """End the present run: free the slot, the promised pages and the taken pages that have no tokens."""
        request.run_number += 1
        request.reserved_pages = 0
        context = request.context
        context.busy = False
        self._cache.touch(context)
        if request.runs:
            self.running.remove(request)
            self.free_slots.append(request.slot)
            request.slot = NO_SLOT
        if not context.suspended:
            surplus = context.working_pages - self._block_manager.pages_for(context.working_tokens)
            release(self._cache, context, min(surplus, request.taken_pages))
        request.taken_pages = 0
        self.note_change()
