"""Starting and stopping the servers that a run compares."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 30.0


class StartError(Exception):
    """A server ended, or was not ready in time. The message holds the end of what it printed."""


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def our_command(model: str | None, port: int, options: str) -> list[str]:
    """`jaxctx-serve` of the environment that runs this."""
    serve = Path(sys.executable).with_name("jaxctx-serve")
    return [
        str(serve),
        *([model] if model else []),
        "--grpc-port",
        str(port),
        "--http-port",
        "0",
        "--compile-all",  # what is measured is not beside a compilation
        *shlex.split(options),
    ]


def peer_command(template: str, port: int) -> list[str]:
    """A command line in which `{port}` stands for the port to listen on."""
    if "{port}" not in template:
        raise ValueError("the peer's command has no {port}")
    return shlex.split(template.replace("{port}", str(port)))


class Server:
    """A server's process group. One that idles still polls, and takes cores and caches from the one being measured."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._group = process.pid

    def pause(self) -> None:
        """Stop it where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)


@contextlib.contextmanager
def running(name: str, command: Sequence[str], ready: Callable[[], bool], timeout_s: float) -> Iterator[Server]:
    """Run a server in a process group of its own until the block ends. StartError if it does not become ready."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

        def end(reason: str) -> StartError:
            output.seek(0)
            tail = output.read().decode(errors="replace").splitlines()[-20:]
            return StartError("\n".join([f"{name} {reason}; the last it printed:", *tail]))

        try:
            deadline = time.monotonic() + timeout_s
            while not ready():
                if process.poll() is not None:
                    raise end(f"ended with status {process.returncode}")
                if time.monotonic() > deadline:
                    raise end(f"was not ready within {timeout_s:.0f} s")
                time.sleep(0.5)
            yield Server(process)
        finally:
            Server(process).resume()
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # its children too
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            return
