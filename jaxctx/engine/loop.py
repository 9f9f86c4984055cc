"""StepLoop: the core on its own thread, with an inbox.

    asyncio doors ──commands──▶ inbox ─▶ step thread (core) ─▶ device
         ▲                        ▲            │                  │
         └───────outbox───────────┼────────────┘                  │
                                  └──landed steps── fetch thread ◀┘

The step thread is the only one that touches the core. It never waits for the device: a second thread does, and posts
what landed to the same inbox as the commands, so a fork is answered while a step runs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jaxctx.engine.core import EngineCore, Flight
from jaxctx.engine.device import Device
from jaxctx.engine.mail import Outbox, Promise
from jaxctx.engine.sequence import Reply, Sequence
from jaxctx.errors import Unavailable

log = logging.getLogger("jaxctx.engine")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Landed:
    """A step whose output is on the host, or the error it ended with."""

    flight: Flight
    output: Any  # as the flight's, in numpy
    error: Exception | None = None


class StepLoop:
    """See the module docstring. `start` before use, `stop` at the end."""

    def __init__(self, core: EngineCore, device: Device, steps_in_flight: int) -> None:
        self.core = core
        core.transfers.on_arrival = self._arrived
        self.outbox = Outbox()
        self._device = device
        self._steps_in_flight = steps_in_flight
        self._inbox: queue.SimpleQueue[Callable[[], object] | Landed] = queue.SimpleQueue()
        self._flown: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._flying = 0
        self._stopping = False
        self._posting = threading.Lock()  # so that nothing is posted behind the last look into the inbox
        self.failure: Future[str] = Future()  # set when an error was met that cannot be recovered from
        self._threads = [
            threading.Thread(target=self._run, name="jaxctx-step", daemon=True),
            threading.Thread(target=self._fetch, name="jaxctx-fetch", daemon=True),
        ]

    @property
    def alive(self) -> bool:
        """Whether commands are still taken."""
        return not self._stopping

    def start(self) -> None:
        """Start the threads. The device is compiled already."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End running work with Unavailable and join the threads. For an orderly end, `drain` first."""
        if not self._threads[0].is_alive():
            return
        self._inbox.put(self._stop)
        for thread in self._threads:
            thread.join()
        self.core.transfers.close()

    def _stop(self) -> None:
        with self._posting:
            self._stopping = True
        self.core.fail_all(Unavailable("the server is stopping", retry_after_s=1.0))
        self._flown.put(None)

    def _run(self) -> None:
        with self._device.count_compilations():
            while not self._stopping:
                try:
                    self._turn()
                except Exception:
                    self._break("the step thread met an error")
            while not self._inbox.empty():  # what came behind the stop is refused, not forgotten
                self._take(self._inbox.get())
            self.outbox.flush()

    def _turn(self) -> None:
        """Send a step if there is room, then take what arrives; waits only when there is nothing to send."""
        works = not self.failure.done()
        timeout = self.core.expire() if works else None
        room = works and self._flying < self._steps_in_flight
        more = room and (self._dispatch() or self.core.scheduler.restored)
        if works:
            self.core.carry_out()
        self.outbox.flush()
        try:
            message = self._inbox.get(block=not more, timeout=timeout)
            while True:
                self._take(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _dispatch(self) -> bool:
        try:
            flight = self.core.dispatch()
        except Exception:
            self._break("a step could not be sent")
            return False
        if flight is not None:
            self._flying += 1
            self._flown.put(flight)
        return flight is not None

    def _take(self, message: Callable[[], object] | Landed) -> None:
        if not isinstance(message, Landed):
            try:
                message()
            except Exception:
                self._break("a command failed halfway")
            return
        self._flying -= 1
        if message.output is None:
            log.error("a step failed on the device", exc_info=message.error)
            self._break("a step failed on the device")
            return
        try:
            self.core.settle(message.flight, message.output)
        except Exception:
            self._break("a step's results could not be booked")

    def _break(self, what: str) -> None:
        """The device's arrays or the books are in doubt: end everything, take nothing more."""
        log.critical("engine stopped: %s", what, exc_info=True)
        if not self.failure.done():
            self.failure.set_result(what)
        self.core.fail_all(Unavailable(f"the engine stopped: {what}", reason="ENGINE_FAILED"))

    def _arrived(self) -> None:
        with suppress(Unavailable):
            self.post(lambda: None)

    def _fetch(self) -> None:
        while (flight := self._flown.get()) is not None:
            try:
                self._inbox.put(Landed(flight, jax.tree.map(np.asarray, flight.output)))
            except Exception as error:
                self._inbox.put(Landed(flight, None, error))

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function` on the step thread and wait for its result."""
        promise = Promise(asyncio.get_running_loop(), self.outbox)

        def command() -> None:
            try:
                self.raise_if_unavailable()
                self.core.lives.reap()
                promise.done(function(*args))
            except Exception as error:
                promise.failed(error)

        self.post(command)
        return await promise.future  # type: ignore[no-any-return]

    async def work(self, submit: Callable[[Reply], Sequence | None]) -> Any:
        """Run `submit` on the step thread and wait until the sequence that it submits is done; the reply's result.

        Cancelling ends the sequence.
        """
        promise = Promise(asyncio.get_running_loop(), self.outbox)
        submitted: list[Sequence | None] = [None]

        def command() -> None:
            try:
                self.raise_if_unavailable()
                self.core.lives.reap()
                submitted[0] = submit(promise)
            except Exception as error:
                promise.failed(error)

        self.post(command)
        try:
            return await promise.future
        except asyncio.CancelledError:
            with suppress(Unavailable):
                self.post(lambda: self.core.end(submitted[0]) if submitted[0] else None)
            raise

    def post(self, command: Callable[[], object]) -> None:
        """Run `command` on the step thread, after all posted before it. It must not raise."""
        with self._posting:
            if self._stopping:
                raise Unavailable("the server has stopped", retry_after_s=1.0)
            self._inbox.put(command)

    def raise_if_unavailable(self) -> None:
        """Refuse what would get no answer any more."""
        if self._stopping:
            raise Unavailable("the server has stopped", retry_after_s=1.0)
        if self.failure.done():
            raise Unavailable("the engine stopped after an internal error", reason="ENGINE_FAILED")
