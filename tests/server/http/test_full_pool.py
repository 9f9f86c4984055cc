"""A pool that is too small: what cannot begin is refused at once, and what has begun ends as if it were alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from tests.e2e.conftest import CONFIG
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left

PROMPT = "a" * 100
MESSAGES = [{"role": "user", "content": PROMPT}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 500}),
    "several outputs": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 500, "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 500}),
    "context": ("/v1/context", {"prompt": PROMPT, "max_tokens": 500}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 500}),
    "messages": ("/v1/messages", {"model": "echo", "messages": MESSAGES, "max_tokens": 500}),
}


@pytest.fixture
def engine_config() -> EngineConfig:
    return replace(CONFIG, pages=40)  # of 16 tokens


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", CALLS)
async def test_of_pages_that_are_pinned(web: HttpClient, client: jaxctx.aio.Client, name: str, stream: bool) -> None:
    path, body = CALLS[name]
    pinned = [await client.create(tokens=[number] * 100, pinned=True) for number in (70, 71)]
    answer = await web("POST", path, {**body, "stream": stream})
    error = answer.json["error"]
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert (error["code"], error["type"]) == ("OUT_OF_PAGES", "rate_limit_error")
    for each in pinned:
        await each.close()
    await no_context_left(client)
    assert (await web("POST", path, {**body, "stream": stream})).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CALLS)
async def test_what_never_fits_need_not_be_tried_again(
    web: HttpClient, client: jaxctx.aio.Client, name: str, stream: bool
) -> None:
    """Clients try again by themselves what has the status 429."""
    path, body = CALLS[name]
    much = {field: 1000 for field in ("max_tokens", "max_output_tokens") if field in body}
    answer = await web("POST", path, {**body, **much, "stream": stream})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (400, "NEVER_FITS", "invalid_request_error")
    assert "retry-after" not in answer.headers
    await no_context_left(client)


async def test_many_that_do_not_fit_together(web: HttpClient, client: jaxctx.aio.Client) -> None:
    def body(number: int) -> dict[str, Any]:
        further: dict[str, Any] = {"n": 2} if number % 3 == 0 else {}
        if number % 4 == 0:
            further["guided_regex"] = "[xyz]{100}"
        prompt = chr(65 + number) * 50
        return {"prompt": prompt, "max_tokens": 120, "ignore_eos": True, "temperature": 0, **further}

    together = await asyncio.gather(*(web("POST", "/v1/completions", body(number)) for number in range(12)))
    for number, answer in enumerate(together):
        alone = await web("POST", "/v1/completions", {**body(number), "cache_salt": "alone"})
        assert (answer.status, alone.status) == (200, 200), (number, answer.text, alone.text)
        assert answer.json["choices"] == alone.json["choices"]
        for choice in answer.json["choices"]:
            assert choice["finish_reason"] == ("stop" if number % 4 == 0 else "length")
    await no_context_left(client)
