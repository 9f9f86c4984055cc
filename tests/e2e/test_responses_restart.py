"""Responses and conversations survive SIGKILL of the real server; what was not to be stored is gone."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import jaxctx
from tests.e2e.server_processes import ECHO, SMALL, Server

GREEDY: Any = {"model": "", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
LONG: Any = GREEDY | {"max_output_tokens": 200}
STORY = "Tell a story of a page that is shared by many, and of one that is not. " * 3
WAYS = ("Go on.", "Stop here, please, and begin another one.")
Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, compile_cache: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(*more: str) -> Server:
        store = ("--store", str(tmp_path / "snapshots"))
        servers.append(Server(*SMALL, *store, *more, cache=compile_cache, command=ECHO))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


def killed(server: Server) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.communicate()


@asynccontextmanager
async def api_of(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    found = re.search(r"http://\S+:(\d+)", server.banner)
    assert found, server.banner
    url = f"http://127.0.0.1:{found[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as api:
        yield api


def cached_tokens(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


async def continued(api: openai.AsyncOpenAI, response_id: str) -> list[Any]:
    """Responses that continue one, in different ways."""
    return [await api.responses.create(input=way, previous_response_id=response_id, **GREEDY) for way in WAYS]


async def test_every_response_can_be_continued_after_a_kill(start: Start) -> None:
    server = start()
    async with api_of(server) as api:
        first = await api.responses.create(input=STORY, instructions="Be brief.", metadata={"a": "b"}, **GREEDY)
        second = await api.responses.create(input="And then?", previous_response_id=first.id, **GREEDY)
        forgotten = await api.responses.create(input="Not to be kept.", store=False, **GREEDY)
        conversation = await api.conversations.create(metadata={"topic": "pages"})
        in_it = await api.responses.create(input="One", conversation=conversation.id, **GREEDY)
        before = {response.id: await continued(api, response.id) for response in (first, second)}
    killed(server)

    server = start()
    async with api_of(server) as api:
        for response in (first, second, in_it):
            assert (await api.responses.retrieve(response.id)).to_dict() == response.to_dict()
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(forgotten.id)
        for response in (first, second):
            assert response.usage is not None
            after = await continued(api, response.id)
            assert [each.output_text for each in after] == [each.output_text for each in before[response.id]]
            assert all(cached_tokens(each) >= response.usage.total_tokens - 1 for each in after)
        found = await api.conversations.retrieve(conversation.id)
        assert found.metadata == {"topic": "pages"}
        more = await api.responses.create(input="Two", conversation=conversation.id, **GREEDY)
        assert in_it.usage is not None
        assert cached_tokens(more) >= in_it.usage.total_tokens - 1
        items: Any = [item async for item in api.conversations.items.list(conversation.id, order="asc")]
        texts = [item.content[0].text for item in items]
        assert texts == ["One", in_it.output_text, "Two", more.output_text]
        listed: Any = (await api.responses.input_items.list(second.id, order="asc")).data
        assert [item.role for item in listed] == ["user", "assistant", "user"]
    async with jaxctx.aio.Client(server.address, timeout_s=60) as client:
        names = [each.name async for each in client.snapshots()]
    assert forgotten.id not in names


@pytest.mark.slow
async def test_a_kill_during_a_response_leaves_nothing_of_it(start: Start) -> None:
    server = start()
    async with api_of(server) as api:
        first = await api.responses.create(input=STORY, **GREEDY)
        stream = await api.responses.create(input="More.", previous_response_id=first.id, stream=True, **LONG)
        started: Any = await anext(aiter(stream))
        assert started.type == "response.created"
        killed(server)
        with pytest.raises((openai.APIError, httpx2.HTTPError)):
            async for _ in stream:
                pass
    server = start()
    async with jaxctx.aio.Client(server.address, timeout_s=60) as client:
        assert [each.name async for each in client.snapshots()] == [first.id]
    async with api_of(server) as api:
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(started.response.id)
        again = await api.responses.create(input="More.", previous_response_id=first.id, **GREEDY)
        assert first.usage is not None
        assert cached_tokens(again) >= first.usage.total_tokens - 1


@pytest.mark.campaign
async def test_kills_at_any_time_lose_nothing_that_was_acknowledged(start: Start) -> None:
    acknowledged: list[Any] = []
    for pause_s in (0.05, 0.3):
        server = start()
        async with api_of(server) as api:

            async def respond(api: openai.AsyncOpenAI = api) -> None:
                while True:
                    previous = acknowledged[-1].id if acknowledged else None
                    options: Any = {} if previous is None else {"previous_response_id": previous}
                    acknowledged.append(await api.responses.create(input="Go on.", **options, **GREEDY))

            responding = asyncio.create_task(respond())
            known = len(acknowledged)
            while len(acknowledged) == known:
                assert not responding.done(), responding.exception()
                await asyncio.sleep(0.005)
            await asyncio.sleep(pause_s)
            killed(server)
            with pytest.raises(openai.APIError):
                await responding
        server = start()
        async with api_of(server) as api:
            for response in acknowledged:
                assert (await api.responses.retrieve(response.id)).to_dict() == response.to_dict()
            for response in acknowledged[-3:]:
                for each in await continued(api, response.id):
                    assert cached_tokens(each) >= response.usage.total_tokens - 1
        killed(server)


@pytest.mark.slow
async def test_a_response_in_the_background_ends_before_the_server_does(start: Start) -> None:
    server = start()
    async with api_of(server) as api:
        begun = await api.responses.create(input=STORY, background=True, **LONG)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.communicate)
    assert server.process.returncode == 0
    server = start()
    async with api_of(server) as api:
        ended = await api.responses.retrieve(begun.id)
        assert ended.usage is not None
        assert (ended.status, ended.usage.output_tokens) == ("incomplete", 200)
        more = await api.responses.create(input="More.", previous_response_id=begun.id, **GREEDY)
        assert cached_tokens(more) >= ended.usage.total_tokens - 1


@pytest.mark.campaign
async def test_a_kill_during_a_response_in_the_background_is_told(start: Start) -> None:
    server = start()
    async with api_of(server) as api:
        begun = await api.responses.create(input=STORY, background=True, **LONG)
    killed(server)
    server = start()
    async with api_of(server) as api:
        async with asyncio.timeout(120):
            while (lost := await api.responses.retrieve(begun.id)).status == "in_progress":
                await asyncio.sleep(0.5)
        assert lost.error is not None
        assert (lost.status, lost.error.code, lost.output) == ("failed", "server_error", [])
        assert (await api.responses.cancel(begun.id)).status == "failed"
        await api.responses.delete(begun.id)
