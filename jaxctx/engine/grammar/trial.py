"""GrammarTrials: compiles a grammar in another process first, because one can crash, or take all time and memory."""

import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxctx.engine.grammar.tenant_threads import stopping_error
from jaxctx.errors import ResourceExhausted

SCRIPT = Path(__file__).with_name("trial_process.py")
TIMEOUT_S = 5.0  # for one grammar
START_TIMEOUT_S = 60.0  # for a process to start and to read the tokenizer
TOO_MUCH = f"takes more than {TIMEOUT_S:.0f} seconds, or too much memory, to prepare"


class GrammarTrials:
    """Processes that try grammars. As many at once as threads call; a process is used again until a grammar ends it."""

    def __init__(self, setup: Callable[[], Mapping[str, Any]], timeout_s: float = TIMEOUT_S) -> None:
        """`setup` makes the first message of a process, see `trial_process`."""
        self._setup = setup
        self._timeout_s = timeout_s
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: set[_Process] = set()
        self._closed = False

    def try_grammar(self, grammar: str) -> str:
        """What is wrong with a grammar of llguidance, empty if nothing. Blocks, for TIMEOUT_S at most.

        Raises ResourceExhausted (QUEUE_FULL) if no process can be started now, and Unavailable (NOT_SERVING) if the
        trials are closed meanwhile.
        """
        process = self._take()
        reply = process.ask({"grammar": grammar}, self._timeout_s)
        if reply is None:
            self._end(process)
            if self._closed:
                raise stopping_error()
            return TOO_MUCH
        self._idle.put(process)
        return str(reply["error"])

    def warm_up(self) -> None:
        """Have a process ready for the first grammar."""
        self._idle.put(self._take())

    def close(self) -> None:
        """End all processes. Whoever waits for one gets an error at once."""
        self._closed = True
        for process in list(self._all):
            self._end(process)

    def _take(self) -> "_Process":
        """A process that is ready."""
        with suppress(queue.Empty):
            while True:
                process = self._idle.get_nowait()
                if process.is_alive():
                    return process
                self._end(process)
        # Not Unavailable: who hears that of an engine takes it for lost, with all that it runs.
        message = "the process that reads output formats could not be started"
        failed = ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=1.0)
        try:
            process = _Process()
        except OSError as error:  # there are too many processes or files, or too little memory
            raise failed from error
        self._all.add(process)
        if self._closed or process.ask(self._setup(), START_TIMEOUT_S) is None:
            self._end(process)
            raise stopping_error() if self._closed else failed
        return process

    def _end(self, process: "_Process") -> None:
        self._all.discard(process)
        process.kill()


class _Process:
    """One process. It is used by one thread at a time."""

    def __init__(self) -> None:
        command: Sequence[str] = [sys.executable, "-P", str(SCRIPT)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The reply to a message; None if there was none in time, or the process ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError):  # it has ended, or was killed
            return None
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        reply = b""
        while not reply.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return None
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                return None
            reply += part
        result: dict[str, Any] = json.loads(reply)
        return result

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it, and wait for its end. A thread that waits for a reply sees it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):  # what could not be sent to it
                self._process.stdin.close()
