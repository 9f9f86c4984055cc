"""The official client of the OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

import jaxctx
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left, openai_client


@pytest.fixture
async def api(web: HttpClient, client: jaxctx.aio.Client) -> AsyncIterator[openai.AsyncOpenAI]:
    """And whatever was asked, no context is left."""
    async with openai_client(web) as api:
        yield api
    await no_context_left(client)
