"""StepLoop: the core on its own thread, with an inbox.

    asyncio doors ──commands──▶ inbox ─▶ step thread (core) ─▶ device
         ▲                        ▲            │                  │
         └───────outbox───────────┼────────────┘                  │
                                  └──landed steps── fetch thread ◀┘

The step thread is the only one that touches the core. It never waits for the device: a second thread does, and posts
what landed to the same inbox as the commands, so a fork is answered while a step runs.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from jaxctx.engine.core.engine_core import EngineCore, StepArrays
from jaxctx.engine.core.output_stream import CallbackQueue, ResultFuture
from jaxctx.engine.core.request import Request
from jaxctx.engine.runner.batch import Batch
from jaxctx.errors import Unavailable

log = logging.getLogger("jaxctx.engine")
P = ParamSpec("P")
T = TypeVar("T")
RESTART_S = 10.0  # in which a process that stopped may be there again
HALFWAY = "a command failed halfway"


class StepLoop:
    """See the module docstring. `start` before use, `stop` at the end."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        core.transfers.on_arrival = self.wake
        self.outbox = CallbackQueue()
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False
        self._posting = threading.Lock()  # so that nothing is posted behind the last look into the inbox
        self.failure: Future[str] = Future()  # set when an error was met that cannot be recovered from
        self._stepping = threading.Thread(target=self._run, name="jaxctx-step", daemon=True)
        self._fetching = ThreadPoolExecutor(1, "jaxctx-fetch")

    def start(self) -> None:
        """Start the threads. The device is compiled already."""
        self._stepping.start()

    def stop(self) -> None:
        """End running work with Unavailable and join the threads. For an orderly end, drain first."""
        if not self._stepping.is_alive():
            return
        self._inbox.put(self._stop)
        self._stepping.join()
        self._fetching.shutdown()
        self.core.transfers.close()

    def _stop(self) -> None:
        with self._posting:
            self._stopping = True
        self.core.fail_all(Unavailable("the server is stopping", reason="NOT_SERVING", retry_after_s=1.0))

    def _run(self) -> None:
        with self.core.runner.count_compilations():
            while not self._stopping:
                self._try("the step thread met an error", self._turn)
            while not self._inbox.empty():  # what came behind the stop is refused, not forgotten
                self._try(HALFWAY, self._inbox.get())
            self.outbox.flush()

    def _turn(self) -> None:
        """Send a step if there is room, then take what arrives; waits only when there is nothing to send."""
        works = not self.failure.done()
        timeout = self.core.expire() if works else None
        room = works and self.core.scheduler.num_in_flight < self.core.config.steps_in_flight
        more = room and (self._dispatch() or self.core.scheduler.restored)
        if works:
            self.core.carry_out()
        self.outbox.flush()
        with suppress(queue.Empty):
            self._try(HALFWAY, self._inbox.get(block=not more, timeout=timeout))
            while True:
                self._try(HALFWAY, self._inbox.get_nowait())

    def _dispatch(self) -> bool:
        flight = self._try("a step could not be sent", self.core.dispatch)
        if flight is not None:
            batch, output = flight
            landing = self._fetching.submit(jax.tree.map, np.asarray, output)
            landing.add_done_callback(lambda landed: self._inbox.put(partial(self._landed, batch, landed)))
        return flight is not None

    def _try(self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `work` returns. If it raises, that is what happened to the engine, which is at its end."""
        try:
            return work(*args, **kwargs)
        except Exception:  # the device's arrays or the books are in doubt: end everything, take nothing more
            log.critical("engine stopped: %s", what, exc_info=True)
            if not self.failure.done():
                self.failure.set_result(what)
            failed = Unavailable(f"the engine stopped: {what}", reason="ENGINE_FAILED", retry_after_s=RESTART_S)
            self.core.fail_all(failed)
            return None

    def _landed(self, batch: Batch, landed: Future[StepArrays]) -> None:
        """A step's output, in numpy, is on the host; or it is the error that the step ended with."""
        output = self._try("a step failed on the device", landed.result)
        if output is not None:
            self._try("a step's results could not be booked", self.core.process_output, batch, output)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on the step thread and wait for its result."""
        return await self.work(lambda promise: function(*args, **kwargs))

    async def work(self, submit: Callable[[ResultFuture], Request | T]) -> T:
        """Run `submit` on the step thread and wait for what it returns, or for what a sequence tells its promise.

        Cancelling ends the sequence.
        """
        promise = ResultFuture(asyncio.get_running_loop(), self.outbox)
        made: object = None

        def command() -> None:
            nonlocal made
            try:
                self._raise_if_stopped()
                if self.failure.done():
                    message = "the engine stopped after an internal error"
                    raise Unavailable(message, reason="ENGINE_FAILED", retry_after_s=RESTART_S)
                self.core.lifecycle.expire()
                made = submit(promise)
                if not isinstance(made, Request):
                    promise.done(made)
            except Exception as error:
                promise.failed(error)

        self.post(command)
        try:
            result: T = await promise.future
            return result
        except asyncio.CancelledError:
            self.tell(lambda: self.core.end(made) if isinstance(made, Request) else None)
            raise

    def post(self, command: Callable[[], object]) -> None:
        """Run `command` on the step thread, after all posted before it. It must not raise."""
        with self._posting:
            self._raise_if_stopped()
            self._inbox.put(command)

    def tell(self, command: Callable[[], object]) -> None:
        """`post`, if there still is a step thread."""
        with suppress(Unavailable):
            self.post(command)

    def wake(self) -> None:
        """Something has changed that the core does not know of: look again."""
        self.tell(lambda: None)

    def _raise_if_stopped(self) -> None:
        if self._stopping:
            raise Unavailable("the server has stopped", reason="NOT_SERVING", retry_after_s=1.0)
