"""The context cache, and whatever was asked of it, no live context is left."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import jaxctx
from jaxctx_server.services import Backend
from tests.engines import Clock
from tests.server.http.client import HttpClient, http_server
from tests.server.http.openai.harness import no_context_left


@pytest.fixture
async def web(backend: Backend, clock: Clock) -> AsyncIterator[HttpClient]:
    """A server with the clock of its engine."""
    async with http_server(backend, wall_time=clock.wall) as web:
        yield web


@pytest.fixture
async def kept(web: HttpClient, client: jaxctx.aio.Client) -> AsyncIterator[HttpClient]:
    yield web
    await no_context_left(client)
