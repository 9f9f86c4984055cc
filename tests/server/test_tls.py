"""TLS of a server: the files, their reload, and who gets in, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from jaxctx_server import tls as tls_module
from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import USAGE, StartError
from jaxctx_server.grpc import server as grpc_server
from jaxctx_server.grpc.server import options
from jaxctx_server.http import limits
from jaxctx_server.http import server as http_server
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.tls import EXPIRED, NOT_RELOADED, TlsFiles, TlsStore
from tests.certificates import Pair, browser, root, write_pair, write_root

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # with a handshake of its own
METHOD = "/test.Service/Count"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Of the server, signed by "servers"."""
    return write_pair(tmp_path / "server", "servers")


@pytest.fixture
def files(pair: Pair) -> TlsFiles:
    return TlsFiles(pair.cert, pair.key)


@pytest.fixture
def mutual_files(pair: Pair, tmp_path: Path) -> TlsFiles:
    """Callers must show a certificate that "callers" signed."""
    return TlsFiles(pair.cert, pair.key, client_ca=write_root(tmp_path / "client-ca.pem", "callers"))


async def looked(store: TlsStore) -> None:
    """What a change takes to be seen."""
    await store.poll()
    await store.poll()


# --- the files --------------------------------------------------------------------------------------------------------


def test_without_files_there_is_no_tls(pair: Pair) -> None:
    assert TlsStore.of(ServeConfig()) is None
    store = TlsStore.of(ServeConfig(tls_cert=pair.cert, tls_key=pair.key))
    assert store is not None
    assert (store.name, store.wants_client_certificates) == ("TLS", False)


def test_with_roots_of_callers_it_is_mutual(mutual_files: TlsFiles) -> None:
    config = ServeConfig(tls_cert=mutual_files.cert, tls_key=mutual_files.key, tls_client_ca=mutual_files.client_ca)
    store = TlsStore.of(config)
    assert store is not None
    assert (store.name, store.wants_client_certificates) == ("mTLS", True)


def _missing(files: TlsFiles) -> None:
    files.cert.unlink()


def _key_missing(files: TlsFiles) -> None:
    files.key.unlink()


def _cert_is_text(files: TlsFiles) -> None:
    files.cert.write_text("my certificate")


def _key_is_text(files: TlsFiles) -> None:
    files.key.write_text("secret-by-mistake")


def _key_of_another(files: TlsFiles) -> None:
    files.key.write_bytes(write_pair(files.key.parent / "other", "servers").key.read_bytes())


def _key_encrypted(files: TlsFiles) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase")))


def _key_of_a_kind_that_grpc_has_not(files: TlsFiles) -> None:
    key = Ed25519PrivateKey.generate()
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _roots_are_text(files: TlsFiles) -> None:
    assert files.client_ca is not None
    files.client_ca.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def _roots_empty(files: TlsFiles) -> None:
    assert files.client_ca is not None
    files.client_ca.write_text("")


def _pipe(files: TlsFiles) -> None:
    files.cert.unlink()
    os.mkfifo(files.cert)


MISTAKES = [
    (_missing, "--tls-cert: {cert}: No such file or directory"),
    (_key_missing, "--tls-key: {key}: No such file or directory"),
    (_cert_is_text, "--tls-cert: {cert}: is no PEM file of certificates"),
    (_key_is_text, "--tls-key: {key}: is no PEM file of a private key"),
    (_key_of_another, "--tls-key: {key}: is not the key of the certificate in {cert}"),
    (_key_encrypted, "--tls-key: {key}: must have no passphrase"),
    (_key_of_a_kind_that_grpc_has_not, "--tls-key: {key}: must be an RSA or elliptic curve key"),
    (_roots_are_text, "--tls-client-ca: {client_ca}: is no PEM file of certificates"),
    (_roots_empty, "--tls-client-ca: {client_ca}: is no PEM file of certificates"),
    (_pipe, "--tls-cert: {cert}: is no regular file, which could be read again"),
]


@pytest.mark.parametrize(("spoil", "message"), MISTAKES, ids=[spoil.__name__ for spoil, _ in MISTAKES])
def test_files_that_are_wrong(mutual_files: TlsFiles, spoil: Callable[[TlsFiles], None], message: str) -> None:
    spoil(mutual_files)
    with pytest.raises(StartError) as raised:
        TlsStore(mutual_files)
    files = mutual_files
    assert str(raised.value) == message.format(cert=files.cert, key=files.key, client_ca=files.client_ca)
    assert raised.value.exit_status == USAGE


def test_roots_of_the_cluster_are_checked_too(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--cluster-ca: .*missing: No such file"):
        TlsStore(TlsFiles(pair.cert, pair.key, cluster_ca=tmp_path / "missing"))


def test_a_certificate_that_has_expired_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = write_pair(tmp_path / "old", "servers", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    TlsStore(TlsFiles(pair.cert, pair.key))
    (record,) = caplog.records
    assert (record.levelname, record.__dict__["reason"]) == ("WARNING", EXPIRED)
    assert f"--tls-cert: {pair.cert}: expired at 2020-01-01" in record.getMessage()


def test_a_certificate_that_is_valid_is_none(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    TlsStore(files)
    assert caplog.records == []


def test_no_key_in_what_is_shown(files: TlsFiles) -> None:
    shown = repr(tls_module.read_identity(files))
    assert "PRIVATE" not in shown
    assert files.key.read_text().splitlines()[1] not in shown


# --- gRPC -------------------------------------------------------------------------------------------------------------


async def _count(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(10_000):
        yield str(number).encode()
        await asyncio.sleep(0.001)


@asynccontextmanager
async def grpc_target(store: TlsStore) -> AsyncIterator[str]:
    """The address of a gRPC server that counts."""
    server = grpc.aio.server(options=options(max_calls=100))
    handler = grpc.unary_stream_rpc_method_handler(_count)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Count": handler}),))
    port = server.add_secure_port("127.0.0.1:0", store.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def grpc_channel(target: str, signer: str, pair: Pair | None = None) -> grpc.aio.Channel:
    """A channel that trusts this root and shows this certificate."""
    key, chain = (None, None) if pair is None else (pair.key.read_bytes(), pair.cert.read_bytes())
    credentials = grpc.ssl_channel_credentials(root(signer).cert_pem.bytes(), key, chain)
    return grpc.aio.secure_channel(target, credentials, OWN_CONNECTION)


async def grpc_accepts(target: str, signer: str, pair: Pair | None = None) -> bool:
    """Whether a new connection gets an answer."""
    async with grpc_channel(target, signer, pair) as channel:
        return await _answers(channel)


async def _answers(channel: grpc.aio.Channel) -> bool:
    call = channel.unary_stream(METHOD)(b"", timeout=20)
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError:
        answer = None
    code = None if answer == b"0" else await call.code()
    assert code in (None, grpc.StatusCode.UNAVAILABLE)
    call.cancel()
    return code is None


async def test_grpc_of_tls(files: TlsFiles) -> None:
    async with grpc_target(TlsStore(files)) as target:
        assert await grpc_accepts(target, "servers")
        assert not await grpc_accepts(target, "strangers"), "the client trusts another root"
        async with grpc.aio.insecure_channel(target, OWN_CONNECTION) as channel:
            assert not await _answers(channel), "plain text"


async def test_grpc_of_mutual_tls(mutual_files: TlsFiles, tmp_path: Path) -> None:
    caller, stranger = write_pair(tmp_path / "caller", "callers"), write_pair(tmp_path / "stranger", "strangers")
    async with grpc_target(TlsStore(mutual_files)) as target:
        assert await grpc_accepts(target, "servers", caller)
        assert not await grpc_accepts(target, "servers"), "no certificate"
        assert not await grpc_accepts(target, "servers", stranger), "a certificate of another root"


async def test_grpc_goes_on_over_a_reload_and_new_connections_see_it(mutual_files: TlsFiles, tmp_path: Path) -> None:
    caller, successor = write_pair(tmp_path / "caller", "callers"), write_pair(tmp_path / "new", "new callers")
    assert mutual_files.client_ca is not None
    store = TlsStore(mutual_files)
    async with grpc_target(store) as target, grpc_channel(target, "servers", caller) as channel:
        stream = channel.unary_stream(METHOD)(b"")
        assert await stream.read() == b"0"
        write_pair(mutual_files.cert.parent, "new servers")
        write_root(mutual_files.client_ca, "new callers")
        assert await grpc_accepts(target, "servers", caller), "nobody has looked yet"
        await looked(store)
        assert await grpc_accepts(target, "new servers", successor)
        assert not await grpc_accepts(target, "servers", successor), "the old certificate is gone"
        assert not await grpc_accepts(target, "new servers", caller), "the old root of callers is gone"
        seen = [await stream.read() for _ in range(3)]
        assert seen == [b"1", b"2", b"3"], "the stream that was open goes on"
        stream.cancel()


# --- reload -----------------------------------------------------------------------------------------------------------


async def test_credentials_of_the_cluster_are_the_same_object_until_they_change(pair: Pair, tmp_path: Path) -> None:
    store = TlsStore(TlsFiles(pair.cert, pair.key, cluster_ca=write_root(tmp_path / "cluster-ca.pem", "servers")))
    before = store.cluster_credentials()
    assert store.cluster_credentials() is before
    write_pair(pair.cert.parent, "new servers")
    await looked(store)
    assert store.cluster_credentials() is not before


@pytest.mark.parametrize(
    "spoil", [_missing, _cert_is_text, _key_is_text, _key_of_another, _key_encrypted, _roots_empty]
)
async def test_files_that_become_wrong_leave_the_old_ones_and_are_logged_once(
    mutual_files: TlsFiles, spoil: Callable[[TlsFiles], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caller, store = write_pair(tmp_path / "caller", "callers"), TlsStore(mutual_files)
    async with grpc_target(store) as target:
        spoil(mutual_files)
        with caplog.at_level(logging.INFO, "jaxctx"):
            for _ in range(3):
                await looked(store)
        (record,) = caplog.records
        assert (record.levelname, record.__dict__["reason"]) == ("ERROR", NOT_RELOADED)
        assert "secret-by-mistake" not in record.getMessage()
        assert await grpc_accepts(target, "servers", caller)
        write_pair(mutual_files.cert.parent, "new servers")
        write_root(tmp_path / "client-ca.pem", "callers")
        await looked(store)
        assert await grpc_accepts(target, "new servers", caller), "what is right again is taken"


async def test_what_is_being_written_is_not_taken(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    """A certificate without its key, which comes a moment later, is no mistake to report."""
    store = TlsStore(files)
    await looked(store)
    old_key = files.key.read_bytes()
    write_pair(files.cert.parent, "new servers")
    new_key = files.key.read_bytes()
    files.key.write_bytes(old_key)
    with caplog.at_level(logging.INFO, "jaxctx"):
        await store.poll()
        files.key.write_bytes(new_key)
        await store.poll()
        assert caplog.records == [], "the files are not yet as they were seen before"
        await store.poll()
    (record,) = caplog.records
    assert "read again" in record.getMessage()


async def test_files_that_do_not_change_are_not_read_again(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    store = TlsStore(files)
    with caplog.at_level(logging.INFO, "jaxctx"):
        await looked(store)
        await looked(store)
        assert caplog.records == []
        await store.reload()
    assert "read again" in caplog.text, "but they are on request"


async def test_it_looks_again_and_again_whatever_fails(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_module, "POLL_S", 0.01)
    read, failures = tls_module._read, []

    def broken(files: TlsFiles) -> Any:
        failures.append(1)
        monkeypatch.setattr(tls_module, "_read", read)
        raise MemoryError

    monkeypatch.setattr(tls_module, "_read", broken)
    store = TlsStore(files)
    watching = asyncio.create_task(store.watch())
    async with grpc_target(store) as target, asyncio.timeout(60):
        store.request_reload()
        while not failures:
            await asyncio.sleep(0.01)
        write_pair(files.cert.parent, "new servers")
        while not await grpc_accepts(target, "new servers"):
            await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()
    assert any(record.__dict__.get("reason") == NOT_RELOADED for record in caplog.records)


async def test_grpc_ends_a_handshake_that_does_not_go_on(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_TIMEOUT_MS", 300)
    async with grpc_target(TlsStore(files)) as target:
        reader, writer = await asyncio.open_connection(*target.split(":"))
        async with asyncio.timeout(60):  # gRPC's own limit is two minutes
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        assert await grpc_accepts(target, "servers")


# --- HTTP -------------------------------------------------------------------------------------------------------------


class Numbers:
    """An application that answers with numbers, for as long as somebody reads."""

    def __init__(self) -> None:
        self.sent = -1

    async def answer(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self._lines())

    async def _lines(self) -> AsyncIterator[str]:
        while True:
            self.sent += 1
            yield f"number {self.sent}\n"
            await asyncio.sleep(0.001)


@asynccontextmanager
async def https_port(store: TlsStore, numbers: Numbers | None = None) -> AsyncIterator[int]:
    """The port of a server of that application."""
    app = Starlette(routes=[Route("/", (numbers or Numbers()).answer)])
    server = HttpServer(app, bind_tcp("127.0.0.1", 0), store.ssl_context())
    await server.start()
    try:
        yield server.port
    finally:
        await server.close(0)


class Https:
    """A connection with an answer that goes on. The context None: plain text."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int, context: ssl.SSLContext | None) -> Https:
        """Connect and ask. Raises OSError if the server does not answer."""
        name = None if context is None else "localhost"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        first = await reader.readline()
        if first != b"HTTP/1.1 200 OK\r\n":
            writer.close()
            raise ConnectionError(repr(first))
        return cls(reader, writer)

    async def number(self) -> int:
        """The next number of the answer."""
        while True:
            line = await self._reader.readline()
            assert line, "the connection has ended"
            if line.startswith(b"number "):
                return int(line.removeprefix(b"number "))

    def close(self) -> None:
        self._writer.close()


async def https_accepts(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether a new connection gets an answer."""
    try:
        connection = await Https.open(port, context)
    except OSError:  # ssl.SSLError is one
        return False
    connection.close()
    return True


async def test_https(files: TlsFiles) -> None:
    async with https_port(TlsStore(files)) as port:
        assert await https_accepts(port, browser("servers"))
        assert not await https_accepts(port, browser("strangers"))
        assert not await https_accepts(port, None), "plain text"


async def test_roots_with_comments_in_other_letters(mutual_files: TlsFiles, tmp_path: Path) -> None:
    """As bundles of roots have them, with the names of those who issued them."""
    assert mutual_files.client_ca is not None
    roots = mutual_files.client_ca.read_bytes()
    mutual_files.client_ca.write_bytes("# Issuer: Főtanúsítvány\n".encode() + roots)
    caller, store = write_pair(tmp_path / "caller", "callers"), TlsStore(mutual_files)
    async with https_port(store) as port:
        assert await https_accepts(port, browser("servers", caller))
    async with grpc_target(store) as target:
        assert await grpc_accepts(target, "servers", caller)


async def test_https_without_a_server_name(files: TlsFiles) -> None:
    """As clients do that connect to an IP address."""
    async with https_port(TlsStore(files)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=browser("servers"))
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@pytest.mark.parametrize(
    ("version", "accepted"), [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)], ids=str
)
async def test_https_refuses_old_versions_of_tls(files: TlsFiles, version: ssl.TLSVersion, accepted: bool) -> None:
    context = browser("servers")
    context.set_ciphers("ALL:@SECLEVEL=0")  # without which OpenSSL does not even try TLS 1.1
    with pytest.warns(DeprecationWarning, match="TLSv1_1") if not accepted else nullcontext():
        context.minimum_version = context.maximum_version = version
    async with https_port(TlsStore(files)) as port:
        assert await https_accepts(port, context) is accepted


async def test_https_of_mutual_tls(mutual_files: TlsFiles, tmp_path: Path) -> None:
    caller, stranger = write_pair(tmp_path / "caller", "callers"), write_pair(tmp_path / "stranger", "strangers")
    async with https_port(TlsStore(mutual_files)) as port:
        assert await https_accepts(port, browser("servers", caller))
        assert not await https_accepts(port, browser("servers")), "no certificate"
        assert not await https_accepts(port, browser("servers", stranger)), "a certificate of another root"


async def _https_reload(files: TlsFiles, folder: Path) -> None:
    caller, successor = write_pair(folder / "caller", "callers"), write_pair(folder / "new", "new callers")
    assert files.client_ca is not None
    store, numbers = TlsStore(files), Numbers()
    async with https_port(store, numbers) as port:
        connection = await Https.open(port, browser("servers", caller))
        assert await connection.number() == 0
        write_pair(files.cert.parent, "new servers")
        write_root(files.client_ca, "new callers")
        await looked(store)
        sent_before = numbers.sent
        while await connection.number() <= sent_before:
            pass
        connection.close()
        assert await https_accepts(port, browser("new servers", successor))
        assert not await https_accepts(port, browser("servers", successor)), "the old certificate is gone"
        assert not await https_accepts(port, browser("new servers", caller)), "the old root of callers is gone"


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_https_goes_on_over_a_reload_and_new_connections_see_it(
    mutual_files: TlsFiles, tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """uvloop is what servers run on; it has TLS of its own."""
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(_https_reload(mutual_files, tmp_path))


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """An event loop of either kind: uvloop, on which servers run, has TLS of its own."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def test_a_slow_request_is_refused_and_its_connection_ended(
    runner: asyncio.Runner, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.3)

    async def ask_slowly() -> None:
        async with https_port(TlsStore(files)) as port:
            connected = await asyncio.open_connection("127.0.0.1", port, ssl=browser("servers"))
            reader, writer = connected
            writer.write(b"GET / HTTP/1.1\r\n")
            async with asyncio.timeout(60):
                answer = await reader.read()  # to its end
            writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"type":"timeout_error"' in answer

    runner.run(ask_slowly())


def test_a_handshake_that_does_not_go_on(
    runner: asyncio.Runner, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def stall() -> None:
        async with https_port(TlsStore(files)) as port:
            for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                async with asyncio.timeout(30):
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
                writer.close()
            assert await https_accepts(port, browser("servers"))

    runner.run(stall())


async def test_a_session_from_before_a_reload_lets_nobody_in(mutual_files: TlsFiles, tmp_path: Path) -> None:
    """A client that resumes a session shows no certificate again."""
    caller, store = write_pair(tmp_path / "caller", "callers"), TlsStore(mutual_files)
    assert mutual_files.client_ca is not None
    context = browser("servers", caller)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose session is known right after the handshake
    async with https_port(store) as port:
        first = await asyncio.to_thread(handshake, port, context, None)
        again = await asyncio.to_thread(handshake, port, context, first.session)
        assert again.resumed
        write_root(mutual_files.client_ca, "new callers")
        await looked(store)
        with pytest.raises(OSError, match=r"(?i)alert|reset|eof"):
            await asyncio.to_thread(handshake, port, context, again.session)


class Handshake(NamedTuple):
    session: ssl.SSLSession
    resumed: bool


def handshake(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> Handshake:
    """Connect, with a session to resume, and read something."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as secure,
    ):
        secure.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert secure.recv(4)
        assert secure.session is not None
        return Handshake(secure.session, bool(secure.session_reused))
