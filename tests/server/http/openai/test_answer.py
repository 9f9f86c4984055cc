"""Answers: they end with the client, an error on the way ends a stream, and many come at once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from tests.e2e.conftest import CONFIG
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, completed_alone, no_context_left, openai_client


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"stream": True},
        {"stream": True, "n": 4},
        {"stream": True, "prompt": ["Tell: "] * 20},
        {"prompt": ["Tell: "] * 20, "n": 2},
        {"stream": True, "echo": True, "logprobs": 5},
    ],
)
async def test_a_request_ends_with_who_made_it(
    web: HttpClient, client: jaxctx.aio.Client, asked: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": "Tell: ", "max_tokens": 1400, **asked, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    if asked.get("stream"):
        await reader.readuntil(b"data: ")
    async with asyncio.timeout(120):
        while not (found := [each async for each in client.contexts()]):
            await asyncio.sleep(0.005)
    expiry = (await found[0].refresh()).expiry
    assert expiry is not None  # if the gateway dies, nobody closes it
    assert (expiry.seconds, expiry.sliding) == (60.0, True)
    writer.close()
    await no_context_left(client)
    assert (await client.stats()).running == 0


async def test_an_error_on_the_way(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    """A stream that has begun ends with it, and not as if it were whole."""
    texts = []
    with pytest.raises(openai.APIError, match=r"cancelled|closed"):
        async for part in await api.completions.create(prompt="Tell: ", max_tokens=1400, stream=True, **GREEDY):
            if not texts:
                (context,) = [each async for each in client.contexts()]
                await context.close()
            texts.append(part.choices[0].text)
    assert texts


async def test_a_client_that_stops_waiting(web: HttpClient, client: jaxctx.aio.Client) -> None:
    async with openai_client(web) as api:
        with pytest.raises(openai.APITimeoutError):
            await api.completions.create(prompt="Tell: ", max_tokens=1400, timeout=0.01, **GREEDY)
        stream = await api.completions.create(prompt="Tell: ", max_tokens=1400, stream=True, **GREEDY)
        await anext(aiter(stream))
        await stream.close()
        await no_context_left(client)


async def test_many_streams_at_once(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    expected = [await completed_alone(client, 30, f"{number}: ") for number in range(24)]

    async def text_of(number: int) -> str:
        stream = await api.completions.create(prompt=f"{number}: ", max_tokens=30, stream=True, **GREEDY)
        return "".join([each.choices[0].text async for each in stream])

    assert await asyncio.gather(*map(text_of, range(24))) == expected


async def test_a_model_that_is_not_served(api: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    for streams in (False, True):
        for asked in (
            api.completions.create(model="other", prompt="x", stream=streams),
            api.chat.completions.create(model="other", messages=messages, stream=streams),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                await asked
            assert (refused.value.code, refused.value.param) == ("MODEL_NOT_FOUND", "model")


class TestAFullServer:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return replace(CONFIG, queue_limit=2, max_batch=1)

    async def test_says_so(self, api: openai.AsyncOpenAI) -> None:
        asked = [api.completions.create(prompt="x", max_tokens=50, **GREEDY) for _ in range(12)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in found if isinstance(each, openai.RateLimitError)]
        assert refused
        assert len(refused) < 12
        assert all(isinstance(each, openai.RateLimitError) or not isinstance(each, BaseException) for each in found)
