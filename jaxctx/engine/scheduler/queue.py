"""WaitingQueue: requests that wait to be admitted, and their order.

Higher priorities go first. Tenants of equal priority take turns; within one tenant, first come, first served. The
head of the queue is never skipped for its size: a large request waits for its pages, and small ones behind it cannot
starve it. Only requests that could not continue, or would repeat work, are passed over (`Request.is_passed_over`).
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from jaxctx.engine.core.request import NO_DEMAND, Request
from jaxctx.engine.scheduler.forecast import Demand

QueueKey = tuple[int, str]  # priority and tenant


class WaitingQueue:
    """See the module docstring."""

    def __init__(self) -> None:
        # By priority and tenant; those of one priority in the order of their turns.
        self._queues: OrderedDict[QueueKey, deque[Request]] = OrderedDict()
        self._demands: dict[QueueKey, Demand] = {}  # the sum of each of these queues

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, request: Request, *, front: bool = False) -> None:
        """Queue a request; `front` is for one that ran already and was preempted."""
        key = request.priority, request.tenant
        queue = self._queues.setdefault(key, deque())
        self._add_demand(key, request, 1)
        if front:
            queue.appendleft(request)
            self._queues.move_to_end(key, last=False)
        else:
            queue.append(request)

    def in_turn(self) -> Iterator[Request]:
        """Requests that may be admitted, in order: by priority, highest first, then by the turns of the tenants."""
        by_priority = sorted(self._queues.items(), key=lambda item: -item[0][0])  # stable: turns stay as they are
        for _, queue in by_priority:
            for request in queue:
                if not request.is_passed_over:
                    yield request

    def remove(self, request: Request, *, served: bool = False) -> bool:
        """Take a request out; False if it is not here. With `served` its tenant goes to the end of the turn order."""
        for key, queue in self._queues.items():  # not by its key: its priority may have changed since
            if key[1] == request.tenant and request in queue:
                queue.remove(request)
                self._add_demand(key, request, -1)
                if not queue:
                    del self._queues[key], self._demands[key]
                elif served:
                    self._queues.move_to_end(key)
                return True
        return False

    def ahead_of(self, priority: int, tenant: str) -> tuple[int, Demand, int]:
        """The requests that a new request would wait for.

        Returns how many requests of its tenant wait at its priority, the average demand of these, and how many requests
        wait at higher priorities.
        """
        own = len(self._queues.get((priority, tenant), ()))
        total = self._demands.get((priority, tenant), NO_DEMAND)
        higher = sum(len(queue) for (each, _), queue in self._queues.items() if each > priority)
        return own, Demand(total.prompt_rows / max(own, 1), total.tokens / max(own, 1)), higher

    def tenants(self, priority: int) -> set[str]:
        """Tenants with a request at this priority or above."""
        return {tenant for each, tenant in self._queues if each >= priority}

    def longest(self, priority: int) -> tuple[str, int]:
        """The tenant with most requests at this priority or below, and how many it has."""
        waiting = Counter[str]()
        for (each, tenant), queue in self._queues.items():
            if each <= priority:
                waiting[tenant] += len(queue)
        return max(waiting.items(), key=lambda item: item[1], default=("", 0))

    def latest(self, priority: int, tenant: str) -> Request | None:
        """A tenant's last request that never ran, of its lowest priority but none above this one."""
        for (_, owner), queue in sorted(self._queues.items(), key=lambda item: item[0][0]):
            last = queue[-1]
            if owner == tenant and last.never_ran and last.priority <= priority:
                return last
        return None

    def _add_demand(self, key: QueueKey, request: Request, sign: int) -> None:
        total, one = self._demands.get(key, NO_DEMAND), request.demand
        self._demands[key] = Demand(total.prompt_rows + sign * one.prompt_rows, total.tokens + sign * one.tokens)
