"""scripts/gateway_limits.py, by raw sockets: who is slow, many or large is refused in JSON, and others are served."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from tests.e2e.test_rest_gateway import Web, served

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HEAD = b"POST /v1/session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GET = b"GET /v1/session HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("gateway_limits")


@pytest.fixture(params=["rest_gateway", "openai_gateway"])
async def web(request: Any, address: str, limits: Any) -> AsyncIterator[Web]:
    async with served(importlib.import_module(request.param), address) as web:
        yield web


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, web: Web, data: bytes = b"") -> Connection:
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


async def serves(web: Web) -> None:
    assert (await web("GET", "/v1/models")).status == 200


@pytest.mark.parametrize("data", [b"", b"G", b"GET / HTTP/1.1\r\nhost: loc", HEAD])
async def test_headers_that_do_not_end(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", 0.3)
    slow = await Connection.to(web, data)
    await serves(web)
    assert await slow.answer() == (408, "the headers must be there within 0.3 seconds")


async def test_headers_that_come_byte_by_byte(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, the time is that of all of them."""
    monkeypatch.setattr(limits, "HEADERS_S", 0.5)
    slow = await Connection.to(web, b"GET / HTTP/1.1\r\n")

    async def trickle() -> None:
        while True:
            slow.send(b"x: y\r\n")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    assert (await slow.answer())[0] == 408
    trickling.cancel()
    await serves(web)


async def test_a_second_request_that_does_not_end(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", 0.5)
    slow = await Connection.to(web, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert await slow.status() == 200
    slow.send(b"GET /v1/mod")
    assert (await slow.answer())[0] == 408


async def test_a_body_that_does_not_end(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    path = b"/v1/completions" if await is_openai(web) else b"/v1/session"
    slow = await Connection.to(web, HEAD.replace(b"/v1/session", path) + b"content-length: 100\r\n\r\n{")
    await serves(web)
    assert await slow.answer() == (408, "the body must be there within 0.5 seconds")
    await serves(web)


async def is_openai(web: Web) -> bool:
    return (await web("GET", "/v1/session")).status == 404


async def test_a_body_behind_an_answer(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on sending one that nobody reads is cut off."""
    monkeypatch.setattr(limits, "BODY_S", 0.5)
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


async def test_a_slow_answer_is_waited_for(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are of requests."""
    if not await is_openai(web):
        pytest.skip("the other gateway tests it")
    for name in ("HEADERS_S", "BODY_S"):
        monkeypatch.setattr(limits, name, 0.2)
    asked = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    for streams in (False, True):
        answer = await web("POST", "/v1/completions", {**asked, "stream": streams})
        assert answer.status == 200
        assert answer.text.count('"length"') == 1


@pytest.mark.parametrize("size", [17 << 10, 40 << 10, 1 << 20])
async def test_large_headers(web: Web, limits: Any, size: int) -> None:
    """At once or not, ended or not."""
    long = b"x-long: " + b"x" * size
    for end in (b"", b"\r\n\r\n"):
        large = await Connection.to(web, b"GET / HTTP/1.1\r\nhost: localhost\r\n" + long + end)
        if size > limits.MAX_HEADER_BYTES + limits.SLICE or not end:
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
async def test_what_is_no_http(web: Web, data: bytes) -> None:
    wrong = await Connection.to(web, data)
    assert (await wrong.answer())[0] in (400, 505)
    await serves(web)


async def test_too_many_connections(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_connections_that_are_served_stay(web: Web, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not await is_openai(web):
        pytest.skip("the other gateway tests it")
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 3)
    asked = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    answers = [asyncio.create_task(web("POST", "/v1/completions", asked)) for _ in range(2)]
    await asyncio.sleep(0.2)
    idle = [await Connection.to(web) for _ in range(10)]
    assert [(await each).status for each in answers] == [200, 200]
    for each in idle:
        each.close()


class TestJson:
    def test_what_stands_in_texts_is_text(self, limits: Any) -> None:
        said = {"a": '[{"' * 1000 + "," * 1000 + "\\" * 999, "\\": [1, 2]}
        assert limits.loaded(json.dumps(said).encode(), most_values=4, most_parts=5) == said

    @pytest.mark.parametrize(
        "data",
        [
            b"[" * 1_000_000,
            b"[" + b"0," * 2_000_000 + b"0]",
            b"[" + b"[]," * 2_000_000 + b"0]",
            b"[" + b"{}," * 2_000_000 + b"0]",
            b"[" + b'"",' * 2_000_000 + b"0]",
            b'{"a":' * 1_000_000,
            b'{"a":"b","a":"b",' * 300_000,
            b'"' * 5_000_000,
            b'"\\"' * 2_000_000,
        ],
    )
    def test_too_much(self, limits: Any, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits.json, "loads", None)
        with pytest.raises(InvalidArgument, match="must have up to"):
            limits.loaded(data, most_values=1000, most_parts=1000)

    def test_just_enough(self, limits: Any) -> None:
        data = b"[" + b"0," * 999 + b"0]"
        assert limits.loaded(data, most_values=1000, most_parts=1) == [0] * 1000
        with pytest.raises(InvalidArgument):
            limits.loaded(data, most_values=999, most_parts=1)
        data = b"[" + b'"",' * 999 + b"0]"
        assert len(limits.loaded(data, most_values=1000, most_parts=1000)) == 1000
        with pytest.raises(InvalidArgument):
            limits.loaded(data, most_values=1000, most_parts=999)


def test_the_gateways_can_be_run() -> None:
    """As their first lines say."""
    for name in ("rest_gateway.py", "openai_gateway.py"):
        script = SCRIPTS / name
        assert script.stat().st_mode & 0o111
        assert script.read_text("utf-8").startswith("#!")
