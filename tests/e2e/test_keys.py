"""Keys of a real server that change while it runs, and the signal for it, which ends no server."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxctx
from jaxctx import errors
from tests.e2e.server_processes import ECHO, SMALL, Server, environment
from tests.readme import ROOT
from tests.server.key_files import key_line, replace_file

HANGUP = 1 << (signal.SIGHUP - 1)  # its bit in the kernel's sets of signals
BROKEN = "KEYS_NOT_RELOADED"


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """Where standard error goes."""
    return tmp_path / "logged"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(key_line("alice") + key_line("bob"))
    return path


@pytest.fixture
def server(compile_cache: Path, file: Path, logged: Path) -> Iterator[Server]:
    with logged.open("w") as stderr:
        server = Server(*SMALL, "--keys", str(file), cache=compile_cache, command=ECHO, stderr=stderr)
    yield server
    server.kill()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("signalled", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_a_revoked_keys_streams_end_and_its_next_call_is_refused(
    server: Server, file: Path, logged: Path, signalled: bool
) -> None:
    with (
        jaxctx.Client(server.address, api_key="alice-key") as alice,
        jaxctx.Client(server.address, api_key="bob-key") as bob,
    ):
        mine, theirs = alice.create("hello"), bob.create("hello")
        watch, pieces = iter(alice.watch()), iter(theirs.generate(max_tokens=5, temperature=0))
        next(watch)
        next(pieces)
        replace_file(file, key_line("bob") + key_line("carol"))
        if signalled:
            server.process.send_signal(signal.SIGHUP)
        with pytest.raises(errors.Unauthenticated, match="revoked"):
            for _ in watch:
                pass
        for call in (mine.refresh, mine.tokens, alice.create):
            with pytest.raises(errors.Unauthenticated, match="unknown key"):
                call()
        list(pieces)
        with jaxctx.Client(server.address, api_key="carol-key") as carol:
            carol.create("hello")
        file.unlink()
        if signalled:
            server.process.send_signal(signal.SIGHUP)
        eventually(lambda: BROKEN in logged.read_text())
        theirs.refresh()
    lines = [json.loads(each) for each in logged.read_text().splitlines() if each.startswith("{")]
    (read,) = (each for each in lines if each.get("revoked"))
    assert (read["revoked"], read["added"]) == (["alice"], ["carol"])
    (broken,) = (each for each in lines if each.get("reason") == BROKEN)
    assert broken["level"] == "error"
    assert str(file) in broken["message"]
    assert not re.search("[0-9a-f]{64}|alice-key", logged.read_text())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads another process's signals on Linux")
@pytest.mark.parametrize(
    "role", ["both", pytest.param("router", marks=pytest.mark.slow), pytest.param("engine", marks=pytest.mark.slow)]
)
def test_the_signal_ends_no_server_whatever_it_does(role: str, compile_cache: Path, logged: Path) -> None:
    """From when the process ignores it, which is what it does first, until it serves, and while it does."""
    arguments = [*SMALL, "--role", role, *(["--router", "127.0.0.1:9"] if role == "engine" else [])]
    command = [*ECHO, *arguments, "--grpc-port", "0", "--http-port", "0", "--compile-cache", str(compile_cache)]
    with logged.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(), cwd=ROOT
        )
    assert process.stdout is not None
    serves, times = threading.Event(), 0

    def signal_it() -> None:
        nonlocal times
        while not serves.wait(0.02):
            sets = re.findall(r"Sig(?:Ign|Cgt):\s*([0-9a-f]+)", Path(f"/proc/{process.pid}/status").read_text())
            if any(int(each, 16) & HANGUP for each in sets):
                os.kill(process.pid, signal.SIGHUP)
                times += 1

    signalling = threading.Thread(target=signal_it)
    signalling.start()
    try:
        banner = iter(process.stdout.readline, "")
        assert any(each.startswith("ready") for each in banner), logged.read_text()
        assert times > 5, "it was signalled while it loaded"
        serves.set()
        signalling.join()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0
        assert "there is no keys file to read again" in logged.read_text()
    finally:
        serves.set()
        signalling.join()
        process.kill()
        process.communicate()
