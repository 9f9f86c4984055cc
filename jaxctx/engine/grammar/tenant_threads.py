"""TenantThreads: a few threads for work whose size a client chooses."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from jaxctx.errors import ResourceExhausted, Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task:
    function: Callable[[], Any]
    future: Future[Any]


class TenantThreads:
    """Runs functions on a few threads, those of one tenant one after the other, so that no tenant takes all threads."""

    def __init__(self, threads: int, name: str, max_waiting: int | None = None) -> None:
        """`max_waiting`: functions of one tenant that may wait; None: any number."""
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = Lock()
        self._waiting: dict[str, deque[_Task]] = {}  # by each tenant that has a function at the pool
        self._closed = False

    def submit(self, tenant: str, function: Callable[[], T]) -> Future[T]:
        """Run `function` after all earlier ones of the tenant. A future that is cancelled before is left out.

        Raises ResourceExhausted (QUEUE_FULL) if too many of the tenant wait, and Unavailable (NOT_SERVING) after
        `close`.
        """
        task = _Task(function, Future())
        with self._lock:
            waiting = self._waiting.get(tenant)
            if self._closed:
                raise stopping_error()
            if waiting is None:
                self._waiting[tenant] = deque()
                self._pool.submit(self._run, tenant, task)
            elif self._is_full(waiting):
                message = f"{len(waiting)} output formats of yours wait to be read"
                raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=1.0)
            else:
                waiting.append(task)
        return task.future

    def _is_full(self, waiting: deque[_Task]) -> bool:
        """Whether so many functions of a tenant wait that no other may. Those that were cancelled do not count."""
        if self._max_waiting is None or len(waiting) < self._max_waiting:
            return False
        left = [task for task in waiting if not task.future.cancelled()]
        waiting.clear()
        waiting += left
        return len(waiting) >= self._max_waiting

    def close(self) -> None:
        """End what waits with Unavailable (NOT_SERVING), and take nothing more. What runs runs to its end."""
        left: list[_Task] = []
        with self._lock:
            self._closed = True
            for waiting in self._waiting.values():
                left += waiting
                waiting.clear()
        for task in left:  # without the lock: who waits for a future may be called here
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(stopping_error())
        self._pool.shutdown(wait=False)

    def _run(self, tenant: str, task: _Task) -> None:
        if task.future.set_running_or_notify_cancel():
            try:
                task.future.set_result(task.function())
            except BaseException as error:  # a panic of a Rust library is not even an Exception
                task.future.set_exception(error)
        with self._lock:
            waiting = self._waiting[tenant]
            if waiting:
                self._pool.submit(self._run, tenant, waiting.popleft())
            else:
                del self._waiting[tenant]


def stopping_error() -> Unavailable:
    """The error of work that comes too late."""
    return Unavailable("the server is stopping", reason="NOT_SERVING", retry_after_s=1.0)
