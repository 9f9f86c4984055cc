"""What tests of the OpenAI API share: the official client, and what contexts give for the same prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

import jaxctx
from tests.server.http.client import HttpClient

PROMPT = "Tell a story of a page that is shared by many, and of one that is not. " * 2
EXACT = {"temperature": 0, "ignore_eos": True}
GREEDY: Any = {"model": "echo", "temperature": 0, "extra_body": {"ignore_eos": True}}


def openai_client(web: HttpClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{web.port}/v1", api_key=key, max_retries=0, timeout=120)


async def no_context_left(client: jaxctx.aio.Client) -> None:
    async with asyncio.timeout(120):
        while [each.id async for each in client.contexts()]:
            await asyncio.sleep(0.01)


async def completed_alone(client: jaxctx.aio.Client, tokens: int, text: str | None = None, **content: Any) -> str:
    """What a context gives."""
    async with await client.create(text, salt="alone", **content) as context:
        return str(await context.complete(max_tokens=tokens, **EXACT))
