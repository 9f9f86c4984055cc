"""StepLoop: the engine core on its own thread, with an inbox of commands.

    event loops ──commands──▶ inbox ─▶ step thread (core) ─▶ device
         ▲                      ▲            │                  │
         └──callback queue──────┼────────────┘                  │
                                └──results─── fetch thread ◀────┘

The step thread is the only one that touches the core. It never waits for the device: the fetch thread does, and posts
the results of a step to the same inbox as the commands. So a fork is answered while a step runs.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from jaxctx.engine.core.engine_core import EngineCore, StepArrays
from jaxctx.engine.core.output_stream import CallbackQueue, ResultFuture
from jaxctx.engine.core.request import Request
from jaxctx.engine.drafting.draft_model import DraftRound
from jaxctx.engine.scheduler.scheduler_output import Batch
from jaxctx.errors import Unavailable

log = logging.getLogger("jaxctx.engine")
P = ParamSpec("P")
T = TypeVar("T")
RESTART_S = 10.0  # time in which a process that stopped may have been restarted
FAILED_COMMAND = "a command failed halfway"


class StepLoop:
    """See the module docstring. `start` before use, `stop` at the end."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        core.on_arrival(self.wake)
        core.on_masks(self.post_if_running)
        self.callbacks = CallbackQueue()
        self.failure: Future[str] = Future()  # set after an error from which the engine cannot recover
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False
        self._posting = threading.Lock()  # so that nothing is posted after the inbox was read for the last time
        self._step_thread = threading.Thread(target=self._run, name="jaxctx-step", daemon=True)
        self._fetch_thread = ThreadPoolExecutor(1, "jaxctx-fetch")

    def start(self) -> None:
        """Start the threads. The device is compiled already."""
        self._step_thread.start()

    def stop(self) -> None:
        """End running work with Unavailable and join the threads. For an orderly end, drain first."""
        if not self._step_thread.is_alive():
            return
        self._inbox.put(self._begin_stop)
        self._step_thread.join()
        self._fetch_thread.shutdown()
        self.core.close()

    # Commands, from any thread.

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on the step thread and wait for its result."""
        return await self.submit_request(lambda reply: function(*args, **kwargs))

    async def submit_request(self, submit: Callable[[ResultFuture], Request | T]) -> T:
        """Run `submit` on the step thread with a new reply, and wait for the result.

        If `submit` returns a request, the result is the one that the request gives to its reply; otherwise it is what
        `submit` returns. Raises what `submit` raises, or the error that the request ends with. Cancelling ends the
        request.
        """
        command = _SubmitCommand(self, submit)
        self.post(command.run)
        try:
            result: T = await command.reply.future
            return result
        except asyncio.CancelledError:
            self.post_if_running(command.cancel)
            raise

    def post(self, command: Callable[[], object]) -> None:
        """Run `command` on the step thread, after all commands that were posted before. It must not raise.

        Raises Unavailable once the step thread has stopped.
        """
        with self._posting:
            self._raise_if_stopped()
            self._inbox.put(command)

    def post_if_running(self, command: Callable[[], object]) -> None:
        """`post`, or nothing if the step thread has stopped."""
        with suppress(Unavailable):
            self.post(command)

    def wake(self) -> None:
        """Let the core look for work again, after a change that it did not make itself."""
        self.post_if_running(_do_nothing)

    def raise_if_unavailable(self) -> None:
        """Raises Unavailable if the engine has stopped or failed. Called on the step thread."""
        self._raise_if_stopped()
        if self.failure.done():
            message = "the engine stopped after an internal error"
            raise Unavailable(message, reason="ENGINE_FAILED", retry_after_s=RESTART_S)

    def _raise_if_stopped(self) -> None:
        if self._stopping:
            raise engine_stopped()

    # The step thread.

    def _begin_stop(self) -> None:
        with self._posting:
            self._stopping = True
        self.core.fail_all(Unavailable("the server is stopping", reason="NOT_SERVING", retry_after_s=1.0))

    def _run(self) -> None:
        with self.core.count_compilations():
            while not self._stopping:
                self._run_or_fail("the step thread met an error", self._turn)
            while not self._inbox.empty():  # commands that came after the stop are refused, not forgotten
                self._run_or_fail(FAILED_COMMAND, self._inbox.get())
            self.callbacks.flush()

    def _turn(self) -> None:
        """Send a step if one may be in flight, then take what arrives; wait only if there is nothing to send."""
        timeout: float | None = None
        send_more = False
        if not self.failure.done():
            timeout = self.core.expire()
            if self.core.can_dispatch():
                send_more = self._dispatch() or self.core.may_dispatch_again()
        if not self.failure.done():
            self.core.carry_out_moves()
        self.callbacks.flush()
        with suppress(queue.Empty):
            self._run_or_fail(FAILED_COMMAND, self._inbox.get(block=not send_more, timeout=timeout))
            while True:
                self._run_or_fail(FAILED_COMMAND, self._inbox.get_nowait())

    def _dispatch(self) -> bool:
        """Send a step, or guesses for one, if there are any; their results come through the inbox."""
        step = self._run_or_fail("a step could not be sent", self.core.dispatch)
        if step is not None:
            batch, arrays = step
            fetched = self._fetch_thread.submit(jax.tree.map, np.asarray, arrays)
            fetched.add_done_callback(lambda done: self._inbox.put(partial(self._process_output, batch, done)))
        return self._dispatch_drafts() or step is not None

    def _dispatch_drafts(self) -> bool:
        """Send the steps of the draft model that guess tokens for the next step, if they are wanted."""
        drafts = self._run_or_fail("guesses could not be sent", self.core.dispatch_drafts)
        if drafts is None:
            return False
        round_, arrays = drafts
        fetched = self._fetch_thread.submit(jax.tree.map, np.asarray, arrays)
        fetched.add_done_callback(lambda done: self._inbox.put(partial(self._process_drafts, round_, done)))
        return True

    def _process_output(self, batch: Batch, fetched: Future[StepArrays]) -> None:
        """Process a step whose output has been fetched to numpy, or fail with the error that the step ended with."""
        arrays = self._run_or_fail("a step failed on the device", fetched.result)
        if arrays is not None:
            self._run_or_fail("a step's results could not be processed", self.core.process_output, batch, arrays)

    def _process_drafts(self, round_: DraftRound, fetched: Future[Sequence[Any]]) -> None:
        """Process guesses that have been fetched to numpy, or fail with the error that their steps ended with."""
        arrays = self._run_or_fail("guesses failed on the device", fetched.result)
        if arrays is not None:
            self._run_or_fail("guesses could not be processed", self.core.process_drafts, round_, arrays)

    def _run_or_fail(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `function`. If it raises, the engine fails, with `what` as the reason; every request ends."""
        try:
            return function(*args, **kwargs)
        except Exception:  # the device's arrays or the engine's state may be wrong: end everything, accept no more
            log.critical("engine stopped: %s", what, exc_info=True)
            if not self.failure.done():
                self.failure.set_result(what)
            error = Unavailable(f"the engine stopped: {what}", reason="ENGINE_FAILED", retry_after_s=RESTART_S)
            self.core.fail_all(error)
            return None


class _SubmitCommand:
    """One call of `StepLoop.submit_request`: a command for the step thread, and the reply for its result."""

    def __init__(self, loop: StepLoop, submit: Callable[[ResultFuture], object]) -> None:
        self.reply = ResultFuture(asyncio.get_running_loop(), loop.callbacks)
        self._loop = loop
        self._submit = submit
        self._request: Request | None = None

    def run(self) -> None:
        """On the step thread: submit; the reply gets the result or the error."""
        try:
            self._loop.raise_if_unavailable()
            self._loop.core.expire_contexts()
            result = self._submit(self.reply)
            if isinstance(result, Request):
                self._request = result
            else:
                self.reply.set_result(result)
        except Exception as error:
            self.reply.set_error(error)

    def cancel(self) -> None:
        """On the step thread: end the request, if one was submitted."""
        if self._request is not None:
            self._loop.core.end(self._request)


def engine_stopped() -> Unavailable:
    """The error of calls that an engine does not take any more."""
    return Unavailable("the server has stopped", reason="NOT_SERVING", retry_after_s=1.0)


def _do_nothing() -> None:
    pass
