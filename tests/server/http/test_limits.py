"""Limits of connections, over raw sockets: who is slow, many or large is refused in JSON, and others are served."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx_server.http import limits
from jaxctx_server.http import server as http_server
from jaxctx_server.http.server import HttpServer, bind_tcp
from tests.server.harness import eventually
from tests.server.http.client import HttpClient

Connections: TypeAlias = "set[Any]"

HEAD = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY_PATHS = [b"/v1/session", b"/v1/completions"]


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, web: HttpClient, data: bytes = b"") -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
        writer.write(data)
        return cls(reader, writer)

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, Any]:
        """Status, and the JSON of an error of HTTP's own; nothing follows it."""
        async with asyncio.timeout(60):
            told = await self._reader.read()
        self._writer.close()
        head, _, body = told.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head.lower(), told
        assert b"connection: close" in head.lower()
        assert re.search(rb"\r\nx-request-id: [0-9a-f]{16}\r\n", head.lower())
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert error["code"] == "HTTP"
        return int(head.split()[1]), error["message"]

    async def status(self) -> int:
        """Of an answer after which the connection stays."""
        async with asyncio.timeout(60):
            head = await self._reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await self._reader.readexactly(size)
        return int(head.split()[1])

    def close(self) -> None:
        self._writer.close()


async def serves(web: HttpClient) -> None:
    assert (await web("GET", "/v1/models")).status == 200


@pytest.mark.parametrize("coding", [b"gzip", b"chunked\r\ntransfer-encoding: chunked"])
async def test_a_transfer_coding_that_is_not_supported_is_the_clients_mistake(web: HttpClient, coding: bytes) -> None:
    asked = await Connection.to(web, HEAD % BODY_PATHS[0] + b"transfer-encoding: " + coding + b"\r\n\r\n")
    assert (await asked.answer())[0] == 400
    await serves(web)


@pytest.mark.parametrize("data", [b"", b"G", b"GET / HTTP/1.1\r\nhost: loc", HEAD % BODY_PATHS[0]])
async def test_headers_that_do_not_end(web: HttpClient, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.3)
    slow = await Connection.to(web, data)
    await serves(web)
    assert await slow.answer() == (408, "the headers must be there within 0.3 seconds")


async def test_headers_that_come_byte_by_byte(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, the time is that of all of them."""
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.5)
    slow = await Connection.to(web, b"GET / HTTP/1.1\r\n")

    async def trickle() -> None:
        while True:
            slow.send(b"x: y\r\n")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    assert (await slow.answer())[0] == 408
    trickling.cancel()
    await serves(web)


async def test_a_second_request_that_does_not_end(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.5)
    slow = await Connection.to(web, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert await slow.status() == 200
    slow.send(b"GET /v1/mod")
    assert (await slow.answer())[0] == 408


@pytest.mark.parametrize("path", BODY_PATHS)
async def test_a_body_that_does_not_end(web: HttpClient, path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.5)
    slow = await Connection.to(web, HEAD % path + b"content-length: 100\r\n\r\n{")
    await serves(web)
    assert await slow.answer() == (408, "the body must be there within 0.5 seconds")
    await serves(web)


async def test_a_body_behind_an_answer(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on sending one that nobody reads is cut off."""
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.5)
    slow = await Connection.to(web, b"POST /none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n{")
    assert await slow.status() == 404

    async def trickle() -> None:
        while True:
            slow.send(b"x")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(60):
        assert await slow._reader.read() == b""
    trickling.cancel()
    slow.close()


@pytest.mark.parametrize("path", BODY_PATHS)
async def test_a_body_of_a_request_that_came_too_early(
    web: HttpClient, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the request before it was answered: its time begins when that is done."""
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.5)
    early = HEAD % path + b"content-length: 100\r\n\r\n{"
    slow = await Connection.to(web, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" + early)
    assert await slow.status() == 200
    assert await slow.answer() == (408, "the body must be there within 0.5 seconds")


async def test_headers_of_a_request_that_came_too_early(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.5)
    slow = await Connection.to(web, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HT")
    assert await slow.status() == 200
    assert (await slow.answer())[0] == 408


async def test_a_slow_answer_is_waited_for(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are of requests."""
    for name in ("HEADERS_TIMEOUT_S", "BODY_TIMEOUT_S"):
        monkeypatch.setattr(limits, name, 0.2)
    asked = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    for streams in (False, True):
        answer = await web("POST", "/v1/completions", {**asked, "stream": streams})
        assert answer.status == 200
        assert answer.text.count('"length"') == 1


@pytest.mark.parametrize("size", [17 << 10, 40 << 10, 1 << 20])
async def test_large_headers(web: HttpClient, size: int) -> None:
    """At once or not, ended or not."""
    long = b"x-long: " + b"x" * size
    for end in (b"", b"\r\n\r\n"):
        large = await Connection.to(web, b"GET / HTTP/1.1\r\nhost: localhost\r\n" + long + end)
        if size > limits.MAX_HEADER_BYTES + limits.HEADER_SLICE_BYTES or not end:
            assert await large.answer() == (431, f"the headers must have up to {limits.MAX_HEADER_BYTES} bytes")
        else:
            large.close()
    many = b"".join(b"x-%d: y\r\n" % each for each in range(size // 8))
    large = await Connection.to(web, b"GET / HTTP/1.1\r\nhost: localhost\r\n" + many)
    assert (await large.answer())[0] == 431
    await serves(web)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"a: b\r\n\r\n"]
)
async def test_what_is_no_http(web: HttpClient, data: bytes) -> None:
    wrong = await Connection.to(web, data)
    assert (await wrong.answer())[0] in (400, 505)
    await serves(web)


async def test_too_many_connections(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest that asks for nothing goes, so that others are served all the same."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 20)
    idle = [await Connection.to(web, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n") for _ in range(60)]
    await serves(web)
    refused = [await each.answer() for each in idle[:41]]
    assert {status for status, _ in refused} == {503}
    assert refused[0][1] == "there are 20 connections already"
    for each in idle[41:]:  # the others go on
        each.send(b"\r\n")
        assert await each.status() == 200
        each.close()


async def test_connections_that_are_served_stay(
    web: HttpClient, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 3)
    asked = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    answers = [asyncio.create_task(web("POST", "/v1/completions", asked)) for _ in range(2)]
    async with asyncio.timeout(60):
        while (await engine.stats()).running < 2:
            await asyncio.sleep(0.002)
    idle = [await Connection.to(web) for _ in range(10)]
    assert [(await each).status for each in answers] == [200, 200]
    for each in idle:
        each.close()


async def test_an_old_connection_ends_with_its_next_answer(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody stays whose certificate is not accepted any more."""
    asked = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    old = await Connection.to(web, asked)
    assert await old.status() == 200
    monkeypatch.setattr(limits, "MAX_AGE_S", 0.0)
    old.send(asked)
    async with asyncio.timeout(60):
        answer = await old._reader.read()  # to the end of the connection
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert answer.endswith(b"}")
    old.close()


# --- clients that do not read -----------------------------------------------------------------------------------------


class Unread:
    """An application with answers that are larger than what the system holds for a client that does not read."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        try:
            await self.answer(send, is_stream=scope["path"] == "/stream")
        finally:
            self.ended.set()

    async def answer(self, send: Any, *, is_stream: bool) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000 if is_stream else 1):
            await send({"type": "http.response.body", "body": bytes(16 << 20), "more_body": is_stream})


@asynccontextmanager
async def unread_answer(path: str, headers: str = "") -> AsyncIterator[tuple[Unread, Connections, socket.socket]]:
    """The application, the connections of its server, and a client that has asked and does not read."""
    app = Unread()
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode())
            yield app, server._server.server_state.connections, client
    finally:
        await server.close()


@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
async def test_an_answer_that_nobody_reads_does_not_hold_its_connection(
    headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr(limits, "STALLED_S", 0.2)
    async with unread_answer("/", headers) as (app, connections, _):
        await asyncio.wait_for(app.ended.wait(), 60)
        await eventually(lambda: not connections)


async def test_a_stream_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALLED_S", 0.2)
    async with unread_answer("/stream") as (app, connections, _):
        await asyncio.wait_for(app.ended.wait(), 60)
        assert not connections


async def test_a_slow_reader_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a little each time gets all of it."""
    monkeypatch.setattr(limits, "STALLED_S", 0.5)
    async with unread_answer("/", "connection: close\r\n") as (_, connections, client):
        read = 0
        while part := await asyncio.to_thread(client.recv, 1 << 18):
            read += len(part)
            await asyncio.sleep(0.02)
        assert read > 16 << 20
        await eventually(lambda: not connections)


async def test_who_does_not_read_has_one_request_at_work() -> None:
    """Further ones wait in the connection, and hold no place among the calls."""
    async with unread_answer("/") as (app, _, client):
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4)
        await asyncio.wait_for(app.ended.wait(), 60)
        await asyncio.sleep(0.1)
        assert app.requests == 1
        read = 0
        while read < 5 * (16 << 20):
            part = await asyncio.to_thread(client.recv, 1 << 20)
            assert part, "the connection has ended"
            read += len(part)
        assert app.requests == 5


async def test_an_answer_that_nobody_reads_makes_place_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 1)
    async with unread_answer("/", "connection: close\r\n") as (app, connections, client):
        await asyncio.wait_for(app.ended.wait(), 60)
        (unread,) = connections
        with socket.create_connection(client.getpeername()) as other:
            await eventually(lambda: unread not in connections)
            assert connections
            other.sendall(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await asyncio.to_thread(other.recv, 12)) == b"HTTP/1.1 200"


# --- what comes behind a request before that is answered -------------------------------------------------------------


class Waiting:
    """An application that answers nothing, and waits until its client is gone."""

    def __init__(self) -> None:
        self.begun, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


@asynccontextmanager
async def waiting_answer() -> AsyncIterator[tuple[Waiting, Connections, socket.socket]]:
    """The application, the connections of its server, and a client that has asked."""
    app = Waiting()
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await asyncio.wait_for(app.begun.wait(), 60)
            yield app, server._server.server_state.connections, client
    finally:
        await server.close()


@pytest.mark.parametrize("early", [b"", b"\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_who_leaves_is_noticed_also_behind_an_early_request(early: bytes) -> None:
    async with waiting_answer() as (app, connections, client):
        (connection,) = connections
        client.sendall(early)
        await eventually(lambda: connection.conn.trailing_data[0] == early)
        client.close()
        await asyncio.wait_for(app.left.wait(), 60)


async def test_of_what_comes_early_not_all_is_read() -> None:
    async with waiting_answer() as (_, connections, client):
        (connection,) = connections
        client.setblocking(False)
        sent = 0
        with pytest.raises(BlockingIOError):
            while sent < 1 << 30:
                sent += client.send(bytes(1 << 20))
                await asyncio.sleep(0.01)
        assert limits.MAX_EARLY_BYTES < len(connection.conn.trailing_data[0]) < 1 << 20
