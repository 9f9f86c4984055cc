"""The `usage` of a question, and that of a request.

| field | tokens |
|---|---|
| input_tokens | of the input and the question, with those of its choices that were computed |
| input_tokens_details.cached_tokens | of these, those that this question did not compute: the input, at least |
| input_tokens_details.cache_write_tokens | of these, those that this question wrote to the cache for later requests |
| output_tokens | of a text |

A request counts the input once: as computed if it had to be.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxctx_server.http.generation import PromptUsage


@dataclass(frozen=True, slots=True)
class DecisionUsage:
    """Tokens of a question, or of a request."""

    input_tokens: int
    cached_tokens: int
    written_tokens: int
    output_tokens: int = 0

    def json(self) -> dict[str, Any]:
        """As the API has it."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.written_tokens,
            },
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def total_usage(shared: PromptUsage, questions: Iterable[DecisionUsage]) -> DecisionUsage:
    """What a request has cost. `shared`: its input."""
    total = DecisionUsage(shared.prompt_tokens, shared.cached_tokens, shared.written_tokens)
    for each in questions:
        total = DecisionUsage(
            input_tokens=total.input_tokens + each.input_tokens - shared.prompt_tokens,
            cached_tokens=total.cached_tokens + each.cached_tokens - shared.prompt_tokens,
            written_tokens=total.written_tokens + each.written_tokens,
            output_tokens=total.output_tokens + each.output_tokens,
        )
    return total
