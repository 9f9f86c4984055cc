"""The usage of an answer: all prompts together."""

from __future__ import annotations

from jaxctx_server.http.generation import PromptUsage
from jaxctx_server.http.openai.usage import usage_json


def test_prompts_are_counted_together() -> None:
    first = PromptUsage(prompt_tokens=40, computed_tokens=8, completion_tokens=5, page_size=16)
    second = PromptUsage(prompt_tokens=20, computed_tokens=20, completion_tokens=7, page_size=16)
    assert usage_json([first, second], 3) == {
        "prompt_tokens": 60,
        "completion_tokens": 12,
        "total_tokens": 72,
        "prompt_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
