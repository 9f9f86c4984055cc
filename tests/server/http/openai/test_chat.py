"""/v1/chat/completions, judged by the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx_server.chat_input import MAX_MESSAGES
from jaxctx_server.http.openai.chat import parse_chat
from jaxctx_server.http.openai.fields import EFFORTS
from jaxctx_server.http.openai.responses.request import read_fields
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, completed_alone


async def test_a_chat(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who shares pages?"}]
    expected = await completed_alone(client, 20, messages=messages)
    answer = await api.chat.completions.create(messages=messages, max_tokens=20, **GREEDY)
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", expected)
    messages[1]["content"] = [{"type": "text", "text": "Who shares "}, {"type": "text", "text": "pages?"}]
    stream = await api.chat.completions.create(messages=messages, max_completion_tokens=20, stream=True, **GREEDY)
    parts = [each.choices[0] async for each in stream]
    assert [each.delta.role for each in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert "".join(each.delta.content or "" for each in parts) == expected
    assert [each.finish_reason for each in parts if each.finish_reason] == ["length"]


async def prompt_of(client: jaxctx.aio.Client, messages: Any, **options: Any) -> list[int]:
    return list((await client.apply_chat_template(messages, **options)).tokens)


@pytest.mark.parametrize("streams", [False, True])
async def test_ids_of_tokens_tell_the_prompt(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, streams: bool) -> None:
    """What roles and options make of it."""
    user: Any = {"role": "user", "content": "x"}
    answer: Any = {"role": "assistant", "content": "So far"}

    async def asked_prompt(messages: Any, **fields: Any) -> list[int]:
        body = {"ignore_eos": True, "return_token_ids": True, **fields}
        asked: Any = {**GREEDY, "extra_body": body, "messages": messages, "max_tokens": 6}
        if not streams:
            whole = await api.chat.completions.create(**asked)
            assert len((whole.choices[0].model_extra or {})["token_ids"]) == 6
            return list((whole.model_extra or {})["prompt_token_ids"])
        parts = [each async for each in await api.chat.completions.create(stream=True, **asked)]
        ids = [token for each in parts for token in (each.choices[0].model_extra or {})["token_ids"]]
        assert len(ids) == 6
        assert not any("prompt_token_ids" in (each.model_extra or {}) for each in parts[1:])
        return list((parts[0].model_extra or {})["prompt_token_ids"])

    developer, system = ({"role": role, "content": "Be brief."} for role in ("developer", "system"))
    assert await asked_prompt([developer, user]) == await prompt_of(client, [system, user])
    opened = await prompt_of(client, [user, answer], add_generation_prompt=True)
    assert await asked_prompt([user, answer]) == opened
    assert await asked_prompt([user], add_generation_prompt=False) == await prompt_of(
        client, [user], add_generation_prompt=False
    )
    continued = await prompt_of(client, [user, answer], chat_options={"continue_final_message": True})
    assert await asked_prompt([user, answer], continue_final_message=True) == continued
    assert len(continued) < len(opened)


async def test_several_answers(api: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 3, "max_tokens": 20}
    whole = await api.chat.completions.create(**asked)
    texts = [""] * 3
    async for part in await api.chat.completions.create(stream=True, **asked):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [each.message.content for each in whole.choices]
    assert len(set(texts)) == 3


async def test_only_filling(api: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Who shares pages? " * 20}]
    empty = await api.chat.completions.create(messages=messages, max_completion_tokens=0, **GREEDY)
    assert (empty.choices[0].message.content, empty.choices[0].finish_reason) == ("", "length")
    assert empty.usage is not None
    assert empty.usage.completion_tokens == 0
    stream = await api.chat.completions.create(messages=messages, max_tokens=0, stream=True, **GREEDY)
    (part,) = [each async for each in stream]
    assert (part.choices[0].delta.role, part.choices[0].finish_reason) == ("assistant", "length")
    after = (await api.chat.completions.create(messages=messages, max_tokens=1, **GREEDY)).usage
    assert after is not None
    assert after.prompt_tokens_details is not None
    assert after.prompt_tokens_details.cached_tokens == after.prompt_tokens // 16 * 16


def test_the_effort_of_thinking_is_a_variable_of_the_template() -> None:
    messages = [{"role": "user", "content": "x"}]
    for fields, expected in (
        ({}, ""),
        ({"reasoning_effort": "none"}, '{"reasoning_effort":"none","enable_thinking":false}'),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            '{"reasoning_effort":"high","enable_thinking":false}',
        ),
        ({"reasoning_effort": "max"}, '{"reasoning_effort":"max","enable_thinking":true}'),
    ):
        asked = parse_chat(json.dumps({"messages": messages, **fields}).encode())
        assert asked.messages.template_arguments == expected


@pytest.mark.parametrize("effort", EFFORTS)
def test_chat_and_responses_take_the_same_efforts(effort: str) -> None:
    assert parse_chat(json.dumps({"messages": [], "reasoning_effort": effort}).encode()).messages.template_arguments
    assert read_fields({"input": "x", "reasoning": {"effort": effort}}).effort == effort


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority", "fast", "scale"])
@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_what_changes_no_answer(tier: str, verbosity: str) -> None:
    asked = {"messages": [], "service_tier": tier, "verbosity": verbosity, "prompt_cache_retention": "24h"}
    assert parse_chat(json.dumps(asked).encode()).shared.unknown_fields == ()


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        (["hello"], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": 1, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "name": "x" * 257}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "messages"),
    ],
)
async def test_messages_that_are_refused(web: HttpClient, messages: Any, field: str) -> None:
    asked = await web("POST", "/v1/chat/completions", {"messages": messages})
    assert asked.error == (400, "INVALID_FIELD", field)
