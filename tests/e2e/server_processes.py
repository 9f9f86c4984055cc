"""Engines as processes that begin quickly: forked from one process that has imported all that a server needs.

Imports are half of the seconds that a start takes: a test that kills a thousand engines has little time for each.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["jaxctx_server.cli", "jaxctx_server.engine_builder"])


def serve(arguments: Sequence[str], banner: Path, log: Path) -> None:
    """What the process does: `jaxctx-serve` with these arguments, its output in files."""
    for stream, path in ((1, banner), (2, log)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)

    from jaxctx_server import cli

    sys.exit(cli.main(arguments))


class PreparedServer:
    """A server process and where it listens, once it is ready."""

    def __init__(self, *arguments: str, cache: Path, folder: Path) -> None:
        self._banner = folder / f"{time.monotonic_ns()}"
        given = [*arguments, "--grpc-port", "0", "--compile-cache", str(cache)]
        self.process = FORKSERVER.Process(target=serve, args=(given, self._banner, folder / "log"), daemon=True)
        self.process.start()
        deadline = time.monotonic() + 300
        while not (self._banner.exists() and "ready in" in self._banner.read_text()):
            assert self.process.is_alive(), (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = re.search(r"gRPC +(\S+:\d+)", self._banner.read_text())
        assert found
        self.address = found[1]
        self._banner.unlink()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once, and wait until it has ended."""
        if self.process.is_alive():
            self.send_signal(signal.SIGKILL)
        self.process.join()
