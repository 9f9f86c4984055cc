"""A client that leaves, whatever its request waits for: its pages are free at once, and no context is left."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.types import EngineStats
from tests.e2e.conftest import CONFIG
from tests.e2e.gated_store import Gate
from tests.engines import MakeEngine
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left

LONG = "Tell a story of a page that is shared by many. " * 25  # 1175 tokens
COMPLETION: dict[str, Any] = {"model": "echo", "prompt": LONG, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
FORMAT = {"guided_regex": "[xyz]{250}"}


@pytest.fixture
def engine_config() -> EngineConfig:
    return replace(CONFIG, max_batch_tokens=8)  # a long prompt takes many steps


class Leaver:
    """A request whose client can leave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def leave(self) -> None:
        assert not self._reader.at_eof()
        self._writer.close()
        await self._writer.wait_closed()


async def send(web: HttpClient, path: str, body: dict[str, Any], headers: str = "") -> Leaver:
    """Send a request, and read no answer."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return Leaver(reader, writer)


async def until(engine: LocalEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """Wait until the engine's load is as wanted."""
    async with asyncio.timeout(60):
        while not holds(stats := await engine.stats()):
            await asyncio.sleep(0.002)
    return stats


async def nothing_left(engine: LocalEngine, client: jaxctx.aio.Client) -> None:
    """No context, no page that somebody holds, no request."""
    await no_context_left(client)
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held, stats.pages_reserved) == (0, 0, 0, 0)


STREAMS = pytest.mark.parametrize("stream", [False, True])


class TestInTheQueue:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return replace(CONFIG, max_batch=1)

    @STREAMS
    async def test_it_waits_no_more(
        self, web: HttpClient, client: jaxctx.aio.Client, engine: LocalEngine, stream: bool
    ) -> None:
        first = await send(web, "/v1/completions", {**COMPLETION, "prompt": "a", "max_tokens": 1500})
        await until(engine, lambda stats: stats.running == 1)
        second = await send(web, "/v1/completions", {**COMPLETION, "stream": stream})
        await until(engine, lambda stats: stats.waiting == 1)
        await second.leave()
        after = await until(engine, lambda stats: stats.waiting == 0)
        assert after.running == 1  # the other one goes on
        await until(engine, lambda stats: stats.contexts == 1)
        await first.leave()
        await nothing_left(engine, client)


@STREAMS
@pytest.mark.parametrize("further", [{}, {"n": 3}, {"echo": True, "logprobs": 2}], ids=["one", "several", "scored"])
async def test_while_the_prompt_is_computed(
    web: HttpClient,
    client: jaxctx.aio.Client,
    engine: LocalEngine,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    further: dict[str, Any],
) -> None:
    dispatch = engine.core.dispatch

    def slow_dispatch() -> Any:
        time.sleep(0.01)  # so that the whole prompt takes more than a second
        return dispatch()

    monkeypatch.setattr(engine.core, "dispatch", slow_dispatch)
    before = (await engine.stats()).tokens_computed
    leaver = await send(web, "/v1/completions", {**COMPLETION, "stream": stream, **further})
    await until(engine, lambda stats: stats.tokens_computed > before)
    await leaver.leave()
    await nothing_left(engine, client)
    stats = await engine.stats()
    assert 0 < stats.tokens_computed - before < 1175
    assert stats.tokens_generated == 0


@STREAMS
@pytest.mark.parametrize("further", [{}, {"n": 3}], ids=["one", "several"])
@pytest.mark.parametrize("what", ["compile", "prepare"])
async def test_while_a_format_is_read(
    web: HttpClient,
    client: jaxctx.aio.Client,
    engine: LocalEngine,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    further: dict[str, Any],
    stream: bool,
) -> None:
    gate, reached = threading.Event(), threading.Event()
    name = f"_{what}"
    inner = getattr(engine.grammars, name)

    def held_up(*arguments: Any) -> Any:
        reached.set()
        assert gate.wait(60)
        return inner(*arguments)

    monkeypatch.setattr(engine.grammars, name, held_up)
    leaver = await send(web, "/v1/completions", {**COMPLETION, "prompt": "a", **FORMAT, "stream": stream, **further})
    assert await asyncio.to_thread(reached.wait, 60)
    await leaver.leave()
    await nothing_left(engine, client)  # though the thread still works
    gate.set()
    again = await web("POST", "/v1/completions", {**COMPLETION, "prompt": "a", **FORMAT, **further})
    assert [len(choice["text"]) for choice in again.json["choices"]] == [250] * further.get("n", 1)


@pytest.mark.parametrize("further", [{}, {"n": 3}], ids=["one", "several"])
async def test_while_an_output_with_a_format_comes(
    web: HttpClient, client: jaxctx.aio.Client, engine: LocalEngine, further: dict[str, Any]
) -> None:
    leaver = await send(web, "/v1/completions", {**COMPLETION, "prompt": "a", **FORMAT, **further})
    await until(engine, lambda stats: stats.tokens_generated > 9)
    await leaver.leave()
    await nothing_left(engine, client)


class TestWhileAContextIsRestored:
    @pytest.fixture
    def engine(self, make_engine: MakeEngine, engine_config: EngineConfig, tmp_path: Path) -> LocalEngine:
        return make_engine(engine_config, store=str(tmp_path))

    @pytest.fixture
    async def gate(self) -> AsyncIterator[Gate]:
        gate = Gate()
        yield gate
        gate.open()

    @STREAMS
    async def test_the_kept_context_stays_as_it_was(
        self,
        web: HttpClient,
        client: jaxctx.aio.Client,
        engine: LocalEngine,
        gate: Gate,
        monkeypatch: pytest.MonkeyPatch,
        stream: bool,
    ) -> None:
        body = {**COMPLETION, "max_tokens": 4}
        made = await web("POST", "/v1/context", body, headers={"x-session-id": "mine"})
        assert made.status == 200
        await no_context_left(client)
        before = (await web("GET", "/v1/context/mine")).json
        assert before["durable"]
        with monkeypatch.context() as patched:
            patched.setattr(engine.store, "open", gate.before(engine.store.open))
            leaver = await send(web, "/v1/completions", {**body, "stream": stream}, "x-session-id: mine\r\n")
            await gate.reached()
            await leaver.leave()
            gate.open()
        await nothing_left(engine, client)
        after = (await web("GET", "/v1/context/mine")).json
        assert {**after, "remaining_s": 0} == {**before, "remaining_s": 0}
        async with asyncio.timeout(60):  # until the claim has ended
            while (again := await web("POST", "/v1/completions", body, headers={"x-session-id": "mine"})).status == 409:
                await asyncio.sleep(0.01)
        assert again.json["choices"][0]["text"] == made.json["choices"][0]["text"]
