"""Stored responses: read, deleted, listed; their tenants; and the tokens of an input."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import jaxctx
from jaxctx_server.auth import Key
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import openai_client

GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "extra_body": {"ignore_eos": True}}


async def test_a_response_is_read_as_it_was_answered(api: openai.AsyncOpenAI) -> None:
    response = await api.responses.create(input="One", metadata={"a": "b"}, **GREEDY)
    assert (await api.responses.retrieve(response.id)).to_dict() == response.to_dict()


async def test_a_response_that_is_deleted(api: openai.AsyncOpenAI) -> None:
    response = await api.responses.create(input="One", **GREEDY)
    await api.responses.delete(response.id)
    for asked in (api.responses.retrieve, api.responses.delete, api.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await asked(response.id)


async def test_the_items_of_the_input(api: openai.AsyncOpenAI) -> None:
    first = await api.responses.create(input="One", **GREEDY)
    second = await api.responses.create(input="Two", previous_response_id=first.id, **GREEDY)
    listed = await api.responses.input_items.list(second.id, order="asc")
    items: Any = listed.data
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "One"),
        ("assistant", first.output_text),
        ("user", "Two"),
    ]
    latest: Any = (await api.responses.input_items.list(second.id, limit=1)).data
    assert latest[0].content[0].text == "Two"
    everything = [item async for item in api.responses.input_items.list(second.id, limit=1, order="asc")]
    assert everything == items


async def test_a_response_cannot_be_cancelled_when_it_is_complete(api: openai.AsyncOpenAI) -> None:
    response = await api.responses.create(input="One", **GREEDY)
    with pytest.raises(openai.BadRequestError):
        await api.responses.cancel(response.id)


async def test_the_tokens_of_an_input(api: openai.AsyncOpenAI) -> None:
    counted = await api.responses.input_tokens.count(input="One", model="echo", instructions="Be brief.")
    response = await api.responses.create(input="One", instructions="Be brief.", **GREEDY)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1000", "order=up", "after=none", "before=none"])
async def test_a_page_that_is_none(api: openai.AsyncOpenAI, web: HttpClient, query: str) -> None:
    response = await api.responses.create(input="One", **GREEDY)
    answer = await web("GET", f"/v1/responses/{response.id}/input_items?{query}")
    assert answer.error == (400, "INVALID_FIELD", query.partition("=")[0])


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_what_is_not_yours_does_not_exist(self, web: HttpClient) -> None:
        async with openai_client(web, "alice") as alice, openai_client(web, "bob") as bob:
            response = await alice.responses.create(input="One", **GREEDY)
            conversation = await alice.conversations.create()
            paths = [f"/v1/responses/{response.id}", f"/v1/conversations/{conversation.id}"]
            for path in paths:
                assert (await web("GET", path, key="alice")).status == 200
                others = await web("GET", path, key="bob")
                nobodys = path[:-32] + "0" * 32
                unknown = await web("GET", nobodys, key="bob")
                assert others.status == unknown.status == 404
                # Whole ids: a last part of zeros may begin one digit early, after an id that has a zero there.
                name, other_name = path.rpartition("/")[2], nobodys.rpartition("/")[2]
                assert others.text.replace(name, "ID") == unknown.text.replace(other_name, "ID")
                assert (await web("DELETE", path, key="bob")).status == 404
            with pytest.raises(openai.NotFoundError):
                await bob.responses.create(input="Two", previous_response_id=response.id, **GREEDY)
            again = await alice.responses.create(input="Two", previous_response_id=response.id, **GREEDY)
            assert again.status == "incomplete"


FOREIGN_DOCUMENTS = [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"resource": {}, "output_count": 0, "items": [1]}']


@pytest.mark.parametrize("document", FOREIGN_DOCUMENTS)
async def test_a_snapshot_that_is_no_response(
    api: openai.AsyncOpenAI, web: HttpClient, client: jaxctx.aio.Client, document: bytes
) -> None:
    """A caller can save any snapshot under the name of a response: it is none, and no defect."""
    async with await client.create(text="x") as context:
        for name in ("resp_mine", "msg_mine"):
            await context.save(name, attachment=document)
    asked = await web("GET", "/v1/responses/resp_mine")
    assert asked.error == (404, "SNAPSHOT_NOT_FOUND", "response_id")
    continued = await web("POST", "/v1/responses", {"input": "x", "previous_response_id": "resp_mine"})
    assert continued.error == (404, "SNAPSHOT_NOT_FOUND", "previous_response_id")
    body = {"input": "x", "max_output_tokens": 1, "prompt_cache_options": {"comparison_response_id": "msg_mine"}}
    compared = await web("POST", "/v1/responses", body)
    assert compared.json["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    message = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    told = await web("POST", "/v1/messages", {**message, "diagnostics": {"previous_message_id": "msg_mine"}})
    assert told.json["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


@pytest.mark.parametrize("name", ["resp_%00", "resp_" + "x" * 500, "resp_%F0%9F%98%80"])
async def test_an_id_that_no_response_can_have(web: HttpClient, name: str) -> None:
    assert (await web("GET", f"/v1/responses/{name}")).error == (404, "SNAPSHOT_NOT_FOUND", "response_id")
