"""A whole server: engine on the echo model, HTTP on a free port, and gRPC where a test asks for a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from jaxctx_server.services import Backend
from tests.e2e.conftest import address, backend, client, engine, engine_config, keys, two_tenants
from tests.engines import make_engine
from tests.server.http.client import HttpClient, http_server

__all__ = ["address", "backend", "client", "engine", "engine_config", "keys", "make_engine", "two_tenants"]


@pytest.fixture
async def web(backend: Backend) -> AsyncIterator[HttpClient]:
    async with http_server(backend) as web:
        yield web


@pytest.fixture
async def session(web: HttpClient) -> str:
    """A session of its own."""
    return str((await web("POST", "/v1/session", {"ttl": "60s"})).json["session"]["session_id"])
