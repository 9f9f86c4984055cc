"""/v1/chat/completions, judged by the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import jaxctx
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
        ([{"role": "user", "content": "x"}] * 1025, "messages"),
    ],
)
async def test_messages_that_are_refused(web: HttpClient, messages: Any, field: str) -> None:
    asked = await web("POST", "/v1/chat/completions", {"messages": messages})
    assert asked.error == (400, "INVALID_FIELD", field)
