"""Items that an input names by their ids, as the Vercel AI SDK does: found, gone, and other tenants'."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxctx_server.auth import Key
from jaxctx_server.http.app import make_app
from jaxctx_server.http.openai.responses import references
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.service.snapshots import LocalSnapshotService
from jaxctx_server.services import Backend
from tests.engines import Clock
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import openai_client
from tests.server.http.scripted import scripted_server

GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "extra_body": {"ignore_eos": True}}


def said(text: str) -> Any:
    return {"role": "user", "content": text}


def reference(item_id: str) -> Any:
    return {"type": "item_reference", "id": item_id}


def ids_of(response: Any) -> list[str]:
    return [item.id for item in response.output]


class TestFound:
    async def test_an_answer_is_found_by_its_id(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input=[said("One")], **GREEDY)
        (item_id,) = ids_of(first)
        whole: Any = [said("One"), *[item.to_dict() for item in first.output], said("Two")]
        expected = await api.responses.create(input=whole, **GREEDY)
        for named in (reference(item_id), {"id": item_id}, {"id": item_id, "type": None}):
            response = await api.responses.create(input=[said("One"), named, said("Two")], **GREEDY)
            assert response.output_text == expected.output_text
            items: Any = (await api.responses.input_items.list(response.id, order="asc")).data
            assert [item.content[0].text for item in items] == ["One", first.output_text, "Two"]
            assert items[1].id == item_id

    async def test_all_of_a_conversation_is_found_by_its_last_answer(
        self, api: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which alone is read, as it has what was before."""
        history: list[Any] = []
        for text in ("One", "Two", "Three"):
            history.append(said(text))
            answer = await api.responses.create(input=history, **GREEDY)
            history += map(reference, ids_of(answer))
        read: list[str] = []
        get_snapshot = LocalSnapshotService.get_snapshot

        async def noted(service: Any, caller: Any, request: Any) -> Any:
            read.append(request.name)
            return await get_snapshot(service, caller, request)

        monkeypatch.setattr(LocalSnapshotService, "get_snapshot", noted)
        last = await api.responses.create(input=[*history, said("Four")], **GREEDY)
        assert read == [answer.id]
        listed = await api.responses.input_items.list(last.id)
        assert len(listed.data) == 7

    @pytest.mark.parametrize("continues", ["previous_response_id", "conversation"])
    async def test_what_is_continued_is_not_repeated(
        self, api: openai.AsyncOpenAI, web: HttpClient, continues: str
    ) -> None:
        """As where a client sends the whole history beside what it continues."""
        mine: Any = {"id": "mine", "type": "message", "role": "user", "content": "One"}
        if continues == "conversation":
            base = (await api.conversations.create(items=[mine])).id
        else:
            base = (await api.responses.create(input=[mine], **GREEDY)).id
        alone = await web("POST", "/v1/responses", {"model": "echo", "input": [reference("mine")], continues: base})
        assert alone.error == (400, "INVALID_FIELD", "input")
        named: Any = await api.responses.create(input=[reference("mine"), said("Two")], **GREEDY, **{continues: base})
        items: Any = (await api.responses.input_items.list(named.id, order="asc")).data
        assert [item.content[0].text for item in items if item.role == "user"] == ["One", "Two"]

    async def test_an_item_that_is_named_often_stands_there_once(self, api: openai.AsyncOpenAI) -> None:
        """So that a small request does not become a large one."""
        first = await api.responses.create(input="One", **GREEDY)
        named = list(map(reference, ids_of(first)))
        own: Any = {"id": "own", "type": "message", "role": "user", "content": "Two"}
        repeated = [*named * 1000, own, reference("own"), *named]
        second = await api.responses.create(input=repeated, **GREEDY)
        items: Any = (await api.responses.input_items.list(second.id, order="asc")).data
        assert [item.id for item in items] == [*ids_of(first), "own"]

    async def test_calls_and_thoughts(self) -> None:
        call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
        async with (
            scripted_server("<think>Hm.</think>", call, reasoning="think") as scripted,
            openai_client(scripted.web) as api,
        ):
            first = await api.responses.create(model="fake", input=[said("?")], tools=tools)
            assert [item.type for item in first.output] == ["reasoning", "function_call"]
            assert len(set(ids_of(first))) == 2
            made: Any = first.output[1]
            output: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "4"}
            history = [said("?"), *map(reference, ids_of(first)), output]
            second = await api.responses.create(model="fake", input=history, tools=tools)
            items: Any = (await api.responses.input_items.list(second.id, order="asc")).data
        assert [item.type for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
        assert items[2].arguments == "{}"

    async def test_tokens_are_counted_too(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input=[said("One")], **GREEDY)
        history = [said("One"), *map(reference, ids_of(first)), said("Two")]
        counted = await api.responses.input_tokens.count(input=history, model="echo")
        second = await api.responses.create(input=history, **GREEDY)
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens


class TestGone:
    async def test_what_is_not_stored(self, api: openai.AsyncOpenAI, web: HttpClient) -> None:
        unstored = await api.responses.create(input="One", store=False, **GREEDY)
        deleted = await api.responses.create(input="One", **GREEDY)
        await api.responses.delete(deleted.id)
        other = await api.responses.create(input="One", **GREEDY)
        (item_id,) = ids_of(other)
        for named in (*ids_of(unstored), *ids_of(deleted), "msg_none", f"{item_id[:-1]}7", "x" * 128):
            for continued in ({}, {"previous_response_id": other.id}):
                body = {"model": "echo", "input": [said("One"), reference(named)], **continued}
                for more in ({}, {"stream": True}, {"background": True}):
                    answer = await web("POST", "/v1/responses", body | more)
                    assert answer.error == (404, "SNAPSHOT_NOT_FOUND", "input[1].id")
        counted = await web("POST", "/v1/responses/input_tokens", {"model": "echo", "input": [reference("msg_none")]})
        assert counted.error == (404, "SNAPSHOT_NOT_FOUND", "input[0].id")

    async def test_what_has_expired_says_so(self, backend: Backend, clock: Clock) -> None:
        app = make_app(backend, response_ttl_s=100.0, wall_time=clock.wall)
        server = HttpServer(app, bind_tcp("127.0.0.1", 0))
        await server.start()
        async with openai_client(HttpClient(server.port)) as api:
            first = await api.responses.create(input="One", **GREEDY)
            clock.offset += 101
            with pytest.raises(openai.NotFoundError, match=r"input\[0\].id: .* has expired"):
                await api.responses.create(input=list(map(reference, ids_of(first))), **GREEDY)
        await server.close()

    async def test_too_many_responses(
        self, api: openai.AsyncOpenAI, web: HttpClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(references, "MAX_READ", 2)
        apart = [await api.responses.create(input="One", **GREEDY) for _ in range(3)]
        named = [reference(item_id) for response in apart for item_id in ids_of(response)]
        assert (await web("POST", "/v1/responses", {"model": "echo", "input": named[1:]})).status == 200
        answer = await web("POST", "/v1/responses", {"model": "echo", "input": named})
        assert answer.error == (400, "INVALID_FIELD", "input")

    @pytest.mark.parametrize("item", [{"type": "item_reference"}, {"type": "item_reference", "id": ""}, {"id": 5}])
    async def test_what_names_nothing(self, web: HttpClient, item: Any) -> None:
        answer = await web("POST", "/v1/responses", {"model": "echo", "input": [item]})
        assert answer.error == (400, "INVALID_FIELD", "input[0].id")

    async def test_what_is_added_to_a_conversation_is_sent(self, web: HttpClient, api: openai.AsyncOpenAI) -> None:
        conversation = await api.conversations.create()
        path = f"/v1/conversations/{conversation.id}/items"
        answer = await web("POST", path, {"items": [reference("msg_none")]})
        assert answer.error == (400, "INVALID_FIELD", "items[0].type")


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_what_is_not_yours_does_not_exist(self, web: HttpClient) -> None:
        async with openai_client(web, "alice") as alice:
            first = await alice.responses.create(input="One", **GREEDY)
            (item_id,) = ids_of(first)
            body = {"model": "echo", "input": [reference(item_id)]}
            assert (await web("POST", "/v1/responses", body, key="alice")).status == 200
            unknown = f"msg_{'0' * 44}"
            others = await web("POST", "/v1/responses", body, key="bob")
            nobodys = await web("POST", "/v1/responses", body | {"input": [reference(unknown)]}, key="bob")
            assert others.status == nobodys.status == 404
            assert others.text.replace(item_id, "ID") == nobodys.text.replace(unknown, "ID")
