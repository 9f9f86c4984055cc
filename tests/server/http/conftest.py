"""An HTTP server in front of a whole server: engine on the echo model, gRPC on a free port."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.e2e.conftest import address, client, engine, engine_config, keys, two_tenants
from tests.engines import make_engine
from tests.server.http.client import HttpClient, http_server

__all__ = ["address", "client", "engine", "engine_config", "keys", "make_engine", "two_tenants"]


@pytest.fixture
async def web(address: str) -> AsyncIterator[HttpClient]:
    async with http_server(address) as web:
        yield web


@pytest.fixture
async def session(web: HttpClient) -> str:
    """A session of its own."""
    return str((await web("POST", "/v1/session", {"ttl": "60s"})).json["session"]["session_id"])
