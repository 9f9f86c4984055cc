"""The official Anthropic client against a server process: a black box.

What each answer means in detail is tested beside the code, in tests/server/http/anthropic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

import jaxctx
from tests.e2e.server_processes import Server

pytestmark = pytest.mark.slow
USER: Any = [{"role": "user", "content": "Write a function."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
}
TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}


@pytest.fixture
def claude(long_model: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=long_model.http_url, api_key="none", max_retries=0, timeout=300) as client:
        yield client
    with jaxctx.Client(long_model.address) as client:
        deadline = time.monotonic() + 10
        while list(client.contexts()):  # of a request that was given up
            assert time.monotonic() < deadline, "a context is left"
            time.sleep(0.05)


def test_streamed_and_not_are_one(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "long", "messages": USER, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_call_and_its_result(claude: anthropic.Anthropic) -> None:
    # Greedy, as a drawn token may be the one that ends an answer, which is then empty.
    fields: Any = {"model": "long", "max_tokens": 300, "tools": [TOOL], "extra_body": {"temperature": 0}}
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with claude.messages.stream(**fields, messages=USER, tool_choice=choice) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert set(call.input) == {"city", "days"}  # type: ignore[arg-type]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**fields | {"max_tokens": 4}, messages=history).content


def test_the_cache_and_counting(claude: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief. " * 60, "cache_control": {"type": "ephemeral"}}]
    fields: Any = {"model": "long", "messages": USER, "system": system}
    counted = claude.messages.count_tokens(**fields).input_tokens
    claude.messages.create(**fields, max_tokens=1)
    usage = claude.messages.create(**fields, max_tokens=1).usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_creation_input_tokens is not None
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted
    assert usage.cache_read_input_tokens > counted - 32


def test_errors_have_their_classes(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="long", messages=USER, max_tokens=1, stop_sequences=["x"] * 99)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="none", messages=USER, max_tokens=1)


def test_a_client_that_gives_up(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "long", "messages": USER, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=0.5).messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        assert next(iter(stream)).type == "message_start"


def test_models(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == ["long"]
