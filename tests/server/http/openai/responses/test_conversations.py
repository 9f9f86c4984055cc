"""Conversations: items, responses that add theirs, and changes at the same time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx_server.http import stored
from tests.server.http.openai.harness import no_context_left

GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "extra_body": {"ignore_eos": True}}


def said(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


async def texts(api: openai.AsyncOpenAI, conversation_id: str) -> list[str]:
    """The texts of all items."""
    items: Any = [item async for item in api.conversations.items.list(conversation_id, order="asc", limit=2)]
    return [item.content[0].text for item in items]


async def test_an_empty_conversation_grows_by_responses(api: openai.AsyncOpenAI) -> None:
    conversation = await api.conversations.create(metadata={"topic": "pages"})
    assert await texts(api, conversation.id) == []
    first = await api.responses.create(input="One", conversation=conversation.id, **GREEDY)
    second = await api.responses.create(input="Two", conversation={"id": conversation.id}, **GREEDY)
    assert second.conversation is not None
    assert second.conversation.id == conversation.id
    assert await texts(api, conversation.id) == ["One", first.output_text, "Two", second.output_text]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    found = await api.conversations.retrieve(conversation.id)
    assert (found.object, found.metadata) == ("conversation", {"topic": "pages"})


async def test_it_is_the_same_as_responses_that_continue_each_other(api: openai.AsyncOpenAI) -> None:
    conversation = await api.conversations.create(items=[said("One")])
    in_it = await api.responses.create(input="Two", conversation=conversation.id, **GREEDY)
    alone = await api.responses.create(input=[said("One"), said("Two")], **GREEDY)
    assert in_it.output_text == alone.output_text


async def test_items(api: openai.AsyncOpenAI) -> None:
    conversation = await api.conversations.create(items=[said("One")])
    added: Any = await api.conversations.items.create(conversation.id, items=[said("answer", "assistant"), said("Two")])
    assert [item.content[0].text for item in added.data] == ["answer", "Two"]
    assert await texts(api, conversation.id) == ["One", "answer", "Two"]
    item = await api.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)
    assert item == added.data[0]
    await api.conversations.items.delete(added.data[0].id, conversation_id=conversation.id)
    assert await texts(api, conversation.id) == ["One", "Two"]
    with pytest.raises(openai.NotFoundError):
        await api.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)
    with pytest.raises(openai.BadRequestError):
        await api.conversations.items.create(conversation.id, items=[])


async def test_notes(api: openai.AsyncOpenAI) -> None:
    conversation = await api.conversations.create(items=[said("One")])
    await api.conversations.update(conversation.id, metadata={"a": "b"})
    assert (await api.conversations.retrieve(conversation.id)).metadata == {"a": "b"}
    assert await texts(api, conversation.id) == ["One"]


async def test_a_conversation_that_is_deleted(api: openai.AsyncOpenAI) -> None:
    conversation = await api.conversations.create(items=[said("One")])
    response = await api.responses.create(input="Two", conversation=conversation.id, **GREEDY)
    assert (await api.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await api.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        await api.responses.create(input="Three", conversation=conversation.id, **GREEDY)
    assert (await api.responses.retrieve(response.id)).output_text == response.output_text


async def test_of_two_responses_at_once_one_is_added(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    conversation = await api.conversations.create(items=[said("One")])
    asked = [api.responses.create(input=text, conversation=conversation.id, **GREEDY) for text in ("Two", "Three")]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, openai.ConflictError)]
    added: Any = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert (len(added), len(refused)) == (1, 1)
    assert (await texts(api, conversation.id))[-1] == added[0].output_text
    await no_context_left(client)


async def test_more_than_can_be_kept(
    api: openai.AsyncOpenAI, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by its name, and the conversation is as it was."""
    conversation = await api.conversations.create()
    await api.responses.create(input="One", conversation=conversation.id, **GREEDY)
    before = (await api.conversations.items.list(conversation.id)).to_dict()
    document_bytes = len(json.dumps(before))
    for limit in (document_bytes // 2, document_bytes * 2):  # too small for the input; for the response, not for that
        monkeypatch.setattr(stored, "MAX_DOCUMENT_BYTES", limit)
        with pytest.raises(openai.BadRequestError) as raised:
            await api.responses.create(input="Two", conversation=conversation.id, **GREEDY)
        assert raised.value.param == "input"
        assert (await api.conversations.items.list(conversation.id)).to_dict() == before
    monkeypatch.setattr(stored, "MAX_DOCUMENT_BYTES", document_bytes)
    with pytest.raises(openai.BadRequestError) as raised:
        await api.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "user", "content": "x" * document_bytes}]
        )
    assert raised.value.param == "items"
