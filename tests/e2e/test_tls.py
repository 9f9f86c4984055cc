"""TLS of the command: a router, which needs no model, with its certificates, and the signal to read them again."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxctx
from jaxctx import errors
from jaxctx_server.errors import USAGE
from jaxctx_server.tls import NOT_RELOADED
from tests.certificates import Pair, write_pair, write_root
from tests.e2e.server_processes import COMMAND, Server, environment
from tests.readme import ROOT


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "server", "servers")


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    return write_root(tmp_path / "ca.pem", "servers")


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """Where standard error goes."""
    return tmp_path / "logged"


@pytest.fixture
def router(pair: Pair, trust: Path, logged: Path, tmp_path: Path) -> Iterator[Server]:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    flags = {
        "--role": "router",
        "--tls-cert": pair.cert,
        "--tls-key": pair.key,
        "--tls-client-ca": trust,
        "--cluster-ca": trust,
        "--cluster-key": secret,
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    with logged.open("w") as stderr:
        router = Server(*arguments, cache=tmp_path / "compiled", stderr=stderr)
    yield router
    router.kill()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_certificates_are_wanted_and_read_again_on_a_hangup(
    router: Server, pair: Pair, trust: Path, logged: Path
) -> None:
    assert f"{router.address} (mTLS)" in router.banner
    key = "0123456789abcdef" * 4
    with jaxctx.Client(router.address, tls=jaxctx.Tls(trust, pair.cert, pair.key), api_key=key) as client:
        assert client.engines() == []
        with (
            jaxctx.Client(router.address, tls=jaxctx.Tls(trust), api_key=key, timeout_s=20.0) as other,
            pytest.raises(errors.Unavailable),
        ):
            other.engines()
        assert "read again" not in logged.read_text()
        router.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the certificates were read again" in logged.read_text())
        pair.key.write_text("broken")
        router.process.send_signal(signal.SIGHUP)
        eventually(lambda: NOT_RELOADED in logged.read_text())
        assert client.engines() == []
    router.process.send_signal(signal.SIGTERM)
    assert router.end()[0] == 0


def test_a_file_that_is_wrong_is_a_mistake_in_one_line(pair: Pair) -> None:
    pair.key.write_text("broken")
    command = [COMMAND, "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300, check=False
    )
    assert ended.returncode == USAGE
    assert ended.stderr == f"jaxctx-serve: --tls-key: {pair.key}: is no PEM file of a private key\n"
