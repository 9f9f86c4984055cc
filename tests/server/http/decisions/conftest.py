"""Requests of decisions, and whatever was asked, no context and no page is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

import jaxctx
from jaxctx.engine.engine import LocalEngine
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient, http_server
from tests.server.http.openai.harness import no_context_left, openai_client


async def nothing_is_held(engine: LocalEngine) -> None:
    async with asyncio.timeout(120):
        while True:
            stats = await engine.stats()
            if (stats.pages_held, stats.pages_reserved, stats.running, stats.waiting) == (0, 0, 0, 0):
                return
            await asyncio.sleep(0.01)


@pytest.fixture
async def web(backend: Backend, engine: LocalEngine, client: jaxctx.aio.Client) -> AsyncIterator[HttpClient]:
    async with http_server(backend) as web:
        yield web
        await no_context_left(client)
        await nothing_is_held(engine)


@pytest.fixture
async def api(web: HttpClient) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(web) as api:
        yield api
