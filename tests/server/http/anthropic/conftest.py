"""The official client of the Anthropic API."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest

import jaxctx
from tests.server.http.anthropic.harness import anthropic_client
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left


@pytest.fixture
async def claude(web: HttpClient, client: jaxctx.aio.Client) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """And whatever was asked, no context is left."""
    async with anthropic_client(web) as claude:
        yield claude
    await no_context_left(client)
