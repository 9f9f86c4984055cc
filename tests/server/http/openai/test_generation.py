"""The calls of a request: they end with its client, and an error on the way ends a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

import jaxctx
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, no_context_left


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"stream": True, "n": 4}])
async def test_a_request_ends_with_who_made_it(
    web: HttpClient, client: jaxctx.aio.Client, asked: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": "Tell: ", "max_tokens": 1400, **asked, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    if asked:
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
