"""Ids of responses, how long they are kept, and quotas that are full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.v1.snapshot_pb2 import Snapshot
from jaxctx_server.http.app import make_app
from jaxctx_server.http.openai.responses.record import (
    Conversation,
    StoredConversation,
    creation_time,
    new_response_id,
    output_item_ids,
    response_of_item,
    state_document,
)
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.http.stored import StoredState
from jaxctx_server.service.snapshot_quota import LocalSnapshotQuota, UnknownSnapshotQuota
from jaxctx_server.services import Backend
from tests.e2e.conftest import CONFIG
from tests.engines import Clock
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left, openai_client
from tests.server.http.scripted import scripted_server

GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "extra_body": {"ignore_eos": True}}
TTL_S = 100.0


def test_an_id_tells_when_it_was_made() -> None:
    made = {new_response_id(1_700_000_000) for _ in range(100)}
    assert len(made) == 100
    assert {creation_time(each) for each in made} == {1_700_000_000}


@pytest.mark.parametrize("text", ["", "resp_", "resp_1", "conv_" + "0" * 40, "resp_" + "x" * 40, "resp_" + "0" * 41])
def test_what_is_no_such_id(text: str) -> None:
    assert creation_time(text) is None


def test_an_item_of_an_output_says_whose_it_is() -> None:
    response_id = new_response_id(1_700_000_000)
    make_id = output_item_ids(response_id)
    made = [make_id(prefix) for prefix in ("rs", "msg", "fc", "fc")]
    assert len(set(made)) == 4
    assert [each.partition("_")[0] for each in made] == ["rs", "msg", "fc", "fc"]
    assert {response_of_item(each) for each in made} == {response_id}
    for other in (
        "",
        "msg",
        "msg_" + "0" * 32,
        made[0] + "0",
        made[0].upper(),
        made[0].removeprefix("rs"),
        response_id,
    ):
        assert response_of_item(other) is None


def test_the_input_is_what_stands_before_the_output() -> None:
    items: list[dict[str, Any]] = [{"id": "1"}, {"id": "2"}, {"id": "3"}]
    conversation = Conversation(instructions="Be brief.", tools=("{}",), items=items)
    document = state_document({"id": "resp_1"}, conversation, "fake", output_count=1)
    stored = StoredConversation(StoredState(Snapshot(), document), conversation)
    assert (stored.resource, stored.output_count) == ({"id": "resp_1"}, 1)
    assert stored.input_items == items[:2]
    assert document["instructions"] == "Be brief."
    assert document["tools"] == ["{}"]


@pytest.fixture
async def kept_for_a_while(backend: Backend, clock: Clock) -> AsyncIterator[HttpClient]:
    """A server that keeps responses for `TTL_S` seconds of the test's clock."""
    app = make_app(backend, response_ttl_s=TTL_S, wall_time=clock.wall)
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    yield HttpClient(server.port)
    await server.close()


async def test_a_response_expires_and_the_error_says_so(
    kept_for_a_while: HttpClient, clock: Clock, client: jaxctx.aio.Client
) -> None:
    async with openai_client(kept_for_a_while) as api:
        first = await api.responses.create(input="One", **GREEDY)
        conversation = await api.conversations.create()
        await api.responses.create(input="One", conversation=conversation.id, **GREEDY)
        clock.offset += TTL_S / 2
        second = await api.responses.create(input="Two", previous_response_id=first.id, **GREEDY)
        clock.offset += TTL_S / 2 + 1
        with pytest.raises(openai.NotFoundError, match="has expired: responses are kept for 100 seconds"):
            await api.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match=r"previous_response_id: .* has expired"):
            await api.responses.create(input="Three", previous_response_id=first.id, **GREEDY)
        with pytest.raises(openai.NotFoundError, match="there is no"):
            await api.responses.retrieve(new_response_id(int(clock.wall())))
        third = await api.responses.create(input="Three", previous_response_id=second.id, **GREEDY)
        assert second.usage is not None
        assert third.usage is not None
        assert third.usage.input_tokens_details.cached_tokens >= second.usage.total_tokens - 1
        compared = await api.responses.create(
            input="Three", prompt_cache_options={"comparison_response_id": first.id}, **GREEDY
        )
        assert compared.prompt_cache_diagnostics is not None
        assert compared.prompt_cache_diagnostics.type == "comparison_response_not_found"
        assert (await api.conversations.retrieve(conversation.id)).id == conversation.id
    await no_context_left(client)


async def test_a_conversation_is_kept_from_its_last_use(backend: Backend, clock: Clock) -> None:
    app = make_app(backend, conversation_ttl_s=TTL_S, wall_time=clock.wall)
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    async with openai_client(HttpClient(server.port)) as api:
        used, unused = [await api.conversations.create() for _ in range(2)]
        for text in ("One", "Two"):
            clock.offset += TTL_S * 0.6
            await api.responses.create(input=text, conversation=used.id, **GREEDY)
        assert len((await api.conversations.items.list(used.id)).data) == 4
        with pytest.raises(openai.NotFoundError):
            await api.conversations.retrieve(unused.id)
        clock.offset += TTL_S + 1
        with pytest.raises(openai.NotFoundError):
            await api.conversations.retrieve(used.id)
    await server.close()


class TestQuotas:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return replace(CONFIG, max_snapshots_per_tenant=2)

    async def test_a_response_that_cannot_be_kept(self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
        kept = [(await api.responses.create(input="One", **GREEDY)).id for _ in range(2)]
        ways: list[Any] = [{}, {"stream": True}, {"background": True}]
        for fields in ways:
            with pytest.raises(openai.RateLimitError) as raised:
                await api.responses.create(input="One", **fields, **GREEDY)
            assert raised.value.code == "QUOTA"
            assert "retry-after" not in raised.value.response.headers  # responses are kept for days
        assert sorted([each.name async for each in client.snapshots()]) == sorted(kept)
        await api.responses.create(input="One", store=False, **GREEDY)
        await api.responses.delete(kept[0])
        await api.responses.create(input="One", **GREEDY)

    async def test_nothing_is_computed_for_what_cannot_be_kept(self) -> None:
        async with scripted_server("a") as scripted:
            for stream in (False, True):
                scripted.engine.is_full = True
                answer = await scripted.web("POST", "/v1/responses", {"model": "fake", "input": "x", "stream": stream})
                assert answer.error == (429, "QUOTA", None)
            assert scripted.engine.requests == []
            assert scripted.engine.contexts == {}

    async def test_the_last_place_may_be_had_in_the_background(self, api: openai.AsyncOpenAI) -> None:
        """What is stored when it begins is replaced at its end."""
        await api.responses.create(input="One", **GREEDY)
        response = await api.responses.create(input="One", background=True, **GREEDY)
        async with asyncio.timeout(120):
            while response.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                response = await api.responses.retrieve(response.id)
        assert response.status == "incomplete"

    async def test_a_stream_that_cannot_be_kept_fails(
        self, api: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where another one takes the last place meanwhile, and behind a router, which knows of no quotas."""
        for _ in range(2):
            await api.responses.create(input="One", **GREEDY)
        monkeypatch.setattr(LocalSnapshotQuota, "check", UnknownSnapshotQuota.check)
        kinds: list[str] = []
        with pytest.raises(openai.APIError):
            async for event in await api.responses.create(input="One", stream=True, **GREEDY):
                kinds.append(event.type)
        assert kinds[-1] == "response.failed"
        assert "response.completed" not in kinds

    async def test_a_conversation_and_its_response_are_kept_together_or_not(
        self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client
    ) -> None:
        conversation = await api.conversations.create()
        with pytest.raises(openai.RateLimitError):
            await api.responses.create(input="One", conversation=conversation.id, **GREEDY)
        assert [each.name async for each in client.snapshots()] == [conversation.id]
        assert (await api.conversations.items.list(conversation.id)).data == []
