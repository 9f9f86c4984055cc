"""The `usage` of an answer.

| field | tokens |
|---|---|
| prompt_tokens | of all prompts; outputs of one prompt have it in common |
| prompt_tokens_details.cached_tokens | of these, those that were not computed |
| prompt_tokens_details.cache_write_tokens | of these, those that this request wrote to the cache for later ones |
| completion_tokens | of all outputs, also of those that `best_of` leaves out |
| completion_tokens_details.reasoning_tokens | of these, thoughts |
"""

from collections.abc import Iterable
from typing import Any

from jaxctx_server.http.generation import PromptUsage


def usage_json(usages: Iterable[PromptUsage], reasoning_tokens: int = 0) -> dict[str, Any]:
    """The `usage` of the prompts of a request."""
    prompt = cached = written = completion = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        cached += usage.cached_tokens
        written += usage.written_tokens
        completion += usage.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
