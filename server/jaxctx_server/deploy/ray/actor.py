"""The Ray actor: one process of an engine on the actor's node, which ends with it."""

import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

LAST_LINE_CHARACTERS = 200
OUTPUT_TIMEOUT_S = 1.0  # for the last lines of a process that has ended
# Asks the kernel to kill the engine when its actor is killed (PR_SET_PDEATHSIG), and becomes the engine. Otherwise two
# engines would be on one device.
EXEC_BOUND_TO_PARENT = (
    "import ctypes, os, sys; libc = ctypes.CDLL(None); "
    "hasattr(libc, 'prctl') and libc.prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


class EngineState(NamedTuple):
    """The state of an actor's process."""

    node_id: str
    address: str  # where it listens; empty until it is ready
    exit_status: int | None  # None while it runs
    last_line: str  # of its output


class EngineActor:
    """One engine. Ray calls its methods from afar."""

    def __init__(self, command: Sequence[str], arguments: Sequence[str], is_loopback: bool) -> None:
        """Start the engine. An empty `command` stands for `jaxctx-serve` of the Python that runs the actor."""
        import ray

        self._node_id: str = ray.get_runtime_context().get_node_id()
        host = "127.0.0.1" if is_loopback else ray.util.get_node_ip_address()
        command = command or (sys.executable, "-m", "jaxctx_server.cli")
        self._process = subprocess.Popen(
            [sys.executable, "-c", EXEC_BOUND_TO_PARENT, *command, *arguments, "--host", host, "--grpc-port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._address = ""
        self._last_line = ""
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def state(self) -> EngineState:
        """How the engine is."""
        exit_status = self._process.poll()
        if exit_status is not None:
            self._reader.join(OUTPUT_TIMEOUT_S)
        return EngineState(self._node_id, self._address, exit_status, self._last_line)

    def drain(self) -> None:
        """Let the engine finish its work, and end."""
        self._process.terminate()

    def _read_output(self) -> None:
        """Copy the output into Ray's log of this actor, and find the address in the banner."""
        address = ""
        for line in self._process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            self._last_line = line.strip()[:LAST_LINE_CHARACTERS] or self._last_line
            if found := re.search(r"gRPC +(\S+:\d+)", line):
                address = found[1]
            if line.startswith("ready"):
                self._address = address
