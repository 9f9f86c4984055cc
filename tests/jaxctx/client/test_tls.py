"""TLS of both clients: whom they trust, who they are, and what is said about files that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.client.tls import channel_credentials
from tests.certificates import Pair, root, write_pair, write_root


@pytest.fixture
def server_pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "server", "servers")


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    return write_root(tmp_path / "ca.pem", "servers")


@pytest.fixture
def caller(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "caller", "callers")


def secure_server(serve: Any, pair: Pair, *, client_ca: bytes | None = None) -> Any:
    """A fake server with this certificate, which wants one of `client_ca` of its callers."""
    pairs = [(pair.key.read_bytes(), pair.cert.read_bytes())]
    return serve("127.0.0.1:0", grpc.ssl_server_credentials(pairs, client_ca, client_ca is not None))


async def test_a_call_over_tls(either: Any, serve: Any, server_pair: Pair, roots: Path) -> None:
    serving = secure_server(serve, server_pair)
    client = either.client(serving.target, tls=jaxctx.Tls(ca_file=roots), api_key="secret")
    await either(client.create())
    assert serving.fake.metadata["CreateContext"][0]["authorization"] == "Bearer secret"


async def test_a_call_over_mutual_tls(either: Any, serve: Any, server_pair: Pair, roots: Path, caller: Pair) -> None:
    serving = secure_server(serve, server_pair, client_ca=root("callers").cert_pem.bytes())
    tls = jaxctx.Tls(ca_file=str(roots), cert_file=str(caller.cert), key_file=str(caller.key))
    await either(either.client(serving.target, tls=tls).create())
    with pytest.raises(errors.Unavailable):
        await either(either.client(serving.target, tls=jaxctx.Tls(ca_file=roots), timeout_s=20.0).create())


async def test_a_server_that_another_root_signed_is_not_trusted(
    either: Any, serve: Any, server_pair: Pair, tmp_path: Path
) -> None:
    serving = secure_server(serve, server_pair)
    others = write_root(tmp_path / "others.pem", "strangers")
    for tls in (jaxctx.Tls(ca_file=others), jaxctx.Tls()):  # the second trusts the world's roots
        with pytest.raises(errors.Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await either(either.client(serving.target, tls=tls, timeout_s=20.0).create())
    assert "CreateContext" not in serving.fake.metadata


async def test_without_tls_there_is_no_answer(either: Any, serve: Any, server_pair: Pair) -> None:
    serving = secure_server(serve, server_pair)
    with pytest.raises(errors.Unavailable):
        await either(either.client(serving.target, timeout_s=20.0).create())


def test_no_tls_and_credentials_of_grpc() -> None:
    assert channel_credentials(None, None) is None
    credentials = grpc.ssl_channel_credentials()
    assert channel_credentials(None, credentials) is credentials


def test_files_that_are_wrong(either: Any, roots: Path, caller: Pair, tmp_path: Path) -> None:
    text, other = tmp_path / "text", write_pair(tmp_path / "other", "callers")
    text.write_text("secret-by-mistake")
    missing = tmp_path / "missing"
    for tls, field, description in [
        (jaxctx.Tls(ca_file=missing), "tls.ca_file", "missing: No such file"),
        (jaxctx.Tls(ca_file=text), "tls.ca_file", "is no PEM file of certificates"),
        (jaxctx.Tls(roots, caller.cert), "tls.key_file", "must be set"),
        (jaxctx.Tls(roots, key_file=caller.key), "tls.cert_file", "must be set"),
        (jaxctx.Tls(roots, missing, caller.key), "tls.cert_file", "missing: No such file"),
        (jaxctx.Tls(roots, caller.cert, missing), "tls.key_file", "missing: No such file"),
        (jaxctx.Tls(roots, text, caller.key), "tls.cert_file", "must be PEM files of a certificate and its key"),
        (jaxctx.Tls(roots, caller.cert, text), "tls.cert_file", "must be PEM files of a certificate and its key"),
        (jaxctx.Tls(roots, caller.cert, other.key), "tls.cert_file", "must be PEM files of a certificate and its key"),
    ]:
        with pytest.raises(errors.InvalidArgument) as raised:
            either.client("127.0.0.1:1", tls=tls)
        (violation,) = raised.value.violations
        assert violation.field == field
        assert description in violation.description
        assert "secret-by-mistake" not in str(raised.value)


def test_tls_and_credentials_are_one_too_many(either: Any) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        either.client("127.0.0.1:1", tls=jaxctx.Tls(), credentials=grpc.ssl_channel_credentials())
    assert raised.value.violations[0].field == "credentials"
