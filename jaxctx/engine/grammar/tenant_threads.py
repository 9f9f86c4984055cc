"""TenantThreads: a few threads for work whose size a client chooses."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from jaxctx.errors import ResourceExhausted

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

        Raises ResourceExhausted (QUEUE_FULL) if too many of the tenant wait. After `close` the future is cancelled.
        """
        task = _Task(function, Future())
        with self._lock:
            waiting = self._waiting.get(tenant)
            if self._closed:
                task.future.cancel()
            elif waiting is None:
                self._waiting[tenant] = deque()
                self._pool.submit(self._run, tenant, task)
            elif self._max_waiting is not None and len(waiting) >= self._max_waiting:
                message = f"{len(waiting)} output formats of yours wait to be read"
                raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=1.0)
            else:
                waiting.append(task)
        return task.future

    def close(self) -> None:
        """Cancel what waits, and take nothing more. What runs runs to its end."""
        with self._lock:
            self._closed = True
            for waiting in self._waiting.values():
                for task in waiting:
                    task.future.cancel()
                waiting.clear()
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
