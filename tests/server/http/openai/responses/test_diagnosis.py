"""Why tokens of an earlier response were not reused, by the types of the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

STORY = "Tell a story of a page that is shared by many, and of one that is not. " * 3
GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "extra_body": {"ignore_eos": True}}


async def compared(api: openai.AsyncOpenAI, response_id: str, **fields: Any) -> Any:
    """What a response says of another."""
    options: Any = {"comparison_response_id": response_id}
    response = await api.responses.create(prompt_cache_options=options, **fields, **GREEDY)
    return response.prompt_cache_diagnostics


async def test_a_hit(api: openai.AsyncOpenAI) -> None:
    first = await api.responses.create(input=STORY, **GREEDY)
    found = await compared(api, first.id, input="More.", previous_response_id=first.id)
    assert found.type == "cache_hit"


async def test_a_miss_and_what_it_cost(api: openai.AsyncOpenAI) -> None:
    first = await api.responses.create(input=STORY, instructions="Be brief.", **GREEDY)
    found = await compared(api, first.id, input=STORY, instructions="Be verbose.")
    assert (found.type, found.reason) == ("cache_miss", "input_changed")
    assert first.usage is not None
    assert 0 < found.comparison_reusable_tokens < first.usage.input_tokens
    assert found.cache_missed_tokens > first.usage.input_tokens // 2


@pytest.mark.parametrize("response_id", ["resp_none", "none", "", "conv_none"])
async def test_a_response_that_is_not_there(api: openai.AsyncOpenAI, response_id: str) -> None:
    assert (await compared(api, response_id, input="x")).type == "comparison_response_not_found"


async def test_nothing_is_said_unasked(api: openai.AsyncOpenAI) -> None:
    first = await api.responses.create(input=STORY, **GREEDY)
    second = await api.responses.create(input="More.", previous_response_id=first.id, **GREEDY)
    assert second.prompt_cache_diagnostics is None
