"""`BackgroundStartup`: does what a start left, compiles smaller steps and takes memory for pages, beside requests."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from jaxctx.engine.runner.model_runner import ModelRunner

log = logging.getLogger("jaxctx.engine")
NICENESS = 10  # of the thread: steps of requests go first where processors are few


class BackgroundStartup:
    """Compiles what `ModelRunner.compile_needed` left, and takes memory, on a thread of its own, until `stop`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="jaxctx-start-later")

    def start(self) -> None:
        """Start the thread; it ends when nothing is left."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more, and wait for the compilation under way, which nothing can interrupt."""
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of this kind
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._compile_steps()
        if not self._stopping:
            self._take_memory()

    def _compile_steps(self) -> None:
        began, compiled = time.monotonic(), 0
        while self._runner.functions_left and not self._stopping:
            try:
                self._runner.compile_next()
                compiled += 1
            except Exception:
                log.exception("a step could not be compiled: batches that would fit it are padded to larger ones")
        if compiled:
            log.info("%d smaller steps were compiled after the start, in %.0f s", compiled, time.monotonic() - began)

    def _take_memory(self) -> None:
        for _ in self._runner.take_memory():
            if self._stopping:
                return
