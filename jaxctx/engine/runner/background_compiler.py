"""`BackgroundCompiler`: compiles the steps that a start left, while the engine serves with larger ones."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress

from jaxctx.engine.runner.model_runner import ModelRunner

log = logging.getLogger("jaxctx.engine")
NICENESS = 10  # of the thread that compiles: steps of requests go first where processors are few


class BackgroundCompiler:
    """Compiles what `ModelRunner.compile_needed` left, on a thread of its own, from `start` until `stop`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="jaxctx-compile-later")

    def start(self) -> None:
        """Start the thread; it ends when nothing is left."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no further compilation, and wait for the one under way, which nothing can interrupt."""
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of this kind
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        began, compiled = time.monotonic(), 0
        while self._runner.functions_left and not self._stopping:
            try:
                self._runner.compile_next()
                compiled += 1
            except Exception:
                log.exception("a step could not be compiled: batches that would fit it are padded to larger ones")
        if compiled:
            log.info("%d smaller steps were compiled after the start, in %.0f s", compiled, time.monotonic() - began)
