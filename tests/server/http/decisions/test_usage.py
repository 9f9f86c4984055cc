"""What a request has cost: its input once, and what each question computed."""

from __future__ import annotations

from jaxctx_server.http.decisions.usage import DecisionUsage, total_usage
from jaxctx_server.http.generation import PromptUsage


def test_a_request_counts_the_input_once() -> None:
    shared = PromptUsage(prompt_tokens=100, computed_tokens=36, page_size=16)
    questions = [DecisionUsage(120, 100, 12), DecisionUsage(130, 110, 18, output_tokens=5)]
    total = total_usage(shared, questions)
    assert total == DecisionUsage(150, 74, 32 + 12 + 18, 5)
    assert total.input_tokens - total.cached_tokens == 36 + 20 + 20


def test_it_has_the_fields_of_the_api() -> None:
    assert DecisionUsage(120, 100, 12, 3).json() == {
        "input_tokens": 120,
        "input_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 12},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 123,
    }
