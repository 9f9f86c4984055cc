"""What an answer costs: the same in every API, as a whole and as a stream, and the sums are right."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.server.http.client import Answer, HttpClient

PAGE = 16  # tokens
EXACT: dict[str, Any] = {"model": "echo", "temperature": 0, "ignore_eos": True, "max_tokens": 5}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Cost(NamedTuple):
    """Tokens of an answer."""

    prompt: int
    output: int
    cached: int
    written: int


def cost_of(usage: dict[str, Any]) -> Cost:
    """The same numbers by the names of each API."""
    if "cache_read_input_tokens" in usage:
        cached, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return Cost(usage["input_tokens"] + cached + written, usage["output_tokens"], cached, written)
    prompt, output = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    details = usage[f"{prompt}_tokens_details"]
    cost = Cost(
        usage[f"{prompt}_tokens"],
        usage[f"{output}_tokens"],
        details["cached_tokens"],
        details["cache_write_tokens"],
    )
    assert usage["total_tokens"] == cost.prompt + cost.output
    assert usage[f"{output}_tokens_details"] == {"reasoning_tokens": 0}
    return cost


def usages_of(answer: Answer) -> list[dict[str, Any]]:
    """Each usage that an answer tells, in their order."""
    assert answer.status == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json["usage"]]
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    told = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    return [usage for usage in told if usage]


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
@pytest.mark.parametrize(
    ("further", "outputs", "finds_pages"),
    [
        ({}, 1, True),
        ({"n": 3}, 3, True),
        ({"best_of": 3}, 3, True),  # all that were generated
        ({"max_tokens": 0, "n": 2}, 0, True),
        ({"echo": True}, 1, True),
        ({"echo": True, "logprobs": 1, "n": 2}, 2, False),  # a prompt that is scored is computed anew
    ],
    ids=lambda value: "+".join(value) or "one" if isinstance(value, dict) else str(value),
)
async def test_of_a_completion(
    web: HttpClient, length: int, further: dict[str, Any], outputs: int, finds_pages: bool
) -> None:
    prompt = list(range(40, 40 + length))
    ways: list[dict[str, Any]] = [{}] if "best_of" in further else [{}, WITH_USAGE]
    for number, way in enumerate(ways):
        body = {**EXACT, **further, **way, "prompt": prompt, "cache_salt": f"way {number}"}
        for attempt in range(2):
            usages = usages_of(await web("POST", "/v1/completions", body))
            cost = cost_of(usages[-1])
            assert (cost.prompt, cost.output) == (length, 5 * outputs)
            whole = length // PAGE * PAGE
            # The last token is always computed, for what comes behind it.
            cached = min(whole, length - 1) if attempt and finds_pages else 0
            assert (cost.cached, cost.written) == (cached, whole - cached)
            costs = [cost_of(each) for each in usages]
            assert [each.output for each in costs] == sorted(each.output for each in costs)
            assert {(each.prompt, each.cached, each.written) for each in costs} == {cost[:1] + cost[2:]}


async def test_of_several_prompts(web: HttpClient) -> None:
    """The first prompt is found by the third."""
    prompts = [[number + 40] * (PAGE + 9) for number in range(2)]
    await web("POST", "/v1/completions", {**EXACT, "prompt": prompts[0]})
    for way in ({}, WITH_USAGE):
        body = {**EXACT, **way, "prompt": prompts, "n": 2}
        usages = usages_of(await web("POST", "/v1/completions", body))
        cached = PAGE if way == {} else 2 * PAGE
        assert cost_of(usages[-1]) == Cost(2 * (PAGE + 9), 20, cached, 2 * PAGE - cached)


@pytest.mark.parametrize("length", [30, 55])  # 55: with what the template adds, the tokens of three pages
async def test_all_apis_tell_the_same(web: HttpClient, length: int) -> None:
    text = ("abcdefgh" * 7)[:length]
    messages = [{"role": "user", "content": text}]
    chat = {**EXACT, "messages": messages}
    response = {"model": "echo", "input": text, "temperature": 0, "max_output_tokens": 5}
    message = {"model": "echo", "messages": messages, "temperature": 0, "max_tokens": 5}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, **WITH_USAGE}),
        ("/v1/context", chat),
        ("/v1/context", {**chat, **WITH_USAGE}),
        ("/v1/responses", response),
        ("/v1/responses", {**response, "store": False}),
        ("/v1/responses", {**response, "stream": True}),
        ("/v1/messages", message),
        ("/v1/messages", {**message, "stream": True}),
    ]
    first, *others = [cost_of(usages_of(await web("POST", path, body))[-1]) for path, body in calls]
    assert len(set(others)) == 1
    assert (first.prompt, first.output, first.cached) == (others[0].prompt, 5, 0)
    assert others[0].output == 5
    assert others[0].cached == min(others[0].prompt // PAGE * PAGE, others[0].prompt - 1)
