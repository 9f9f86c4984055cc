"""Servers that are processes.

A `Server` is the command as a user starts it. A `PreparedServer` starts sooner: it is forked from a process that has
imported all that a server needs. Imports are half of the seconds that a start takes, and a test that kills a thousand
engines has little time for each.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.readme import ROOT

COMMAND = str(Path(sys.executable).with_name("jaxctx-serve"))
ECHO = (sys.executable, "-m", "tests.serve_echo")  # jaxctx-serve with the echo model
PAIRS = (sys.executable, "-m", "tests.serve_pairs")  # the same with tokens of one and two characters
OBEDIENT = (sys.executable, "-m", "tests.serve_obedient")  # the same with a model that does what it is asked
# Steps of one size and passes of one size: compiling is most of what starting a server takes.
SMALL = ("--max-batch", "4", "--max-batch-tokens", "4", "--kv-tokens", "4096", "--max-context-tokens", "1024")
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["jaxctx_server.cli", "jaxctx_server.engine_builder.build"])


def environment() -> dict[str, str]:
    """That of a user, without what is set for tests of meshes, but compiled as fast as this session compiles."""
    variables = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    level = [flag for flag in os.environ["XLA_FLAGS"].split() if "optimization_level" in flag]
    return variables | {"XLA_FLAGS": " ".join(level)}


class Server:
    """A server process and where it listens."""

    def __init__(
        self, *arguments: str, cache: Path, command: Sequence[str] = (COMMAND,), stderr: Any = subprocess.PIPE
    ) -> None:
        command = [*command, *arguments, "--grpc-port", "0", "--http-port", "0", "--compile-cache", str(cache)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(), cwd=ROOT
        )
        assert self.process.stdout is not None
        self.banner = ""
        for line in self.process.stdout:
            self.banner += line
            if line.startswith("ready"):
                break
        found = re.search(r"gRPC +(\S+:\d+)", self.banner)
        assert found, f"{self.banner}{self.end()[1]}"
        self.address = found[1]
        http = re.search(r"HTTP +(https?://\S+:\d+)", self.banner)
        assert http, self.banner
        self.http_url = http[1]  # without a path

    def end(self) -> tuple[int, str]:
        """Exit status and standard error, once it has ended by itself."""
        _, err = self.process.communicate(timeout=600)
        return self.process.returncode, err

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


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
        given = [*arguments, "--grpc-port", "0", "--http-port", "0", "--compile-cache", str(cache)]
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
