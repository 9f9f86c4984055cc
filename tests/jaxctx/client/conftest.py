"""A fake server for each test, and both clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from tests.jaxctx.client.either_client import EitherClient
from tests.jaxctx.client.fake_server import FakeServer, FakeService


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Starts fake servers, which stop after the test."""
    running: list[FakeServer] = []

    def start(address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> FakeServer:
        running.append(FakeServer(address, credentials))
        return running[-1]

    yield start
    for each in running:
        each.server.stop(None).wait()


@pytest.fixture(params=["blocking", "aio"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[EitherClient]:
    """The blocking client and, in a test of its own, the asyncio client; their connections close after it."""
    each = EitherClient(request.param)
    yield each
    for client in each.open:
        await each(client.close())


@pytest.fixture
def serving(serve: Callable[..., FakeServer]) -> FakeServer:
    """A fake server that runs."""
    return serve()


@pytest.fixture
def fake(serving: FakeServer) -> FakeService:
    """The state of that server."""
    return serving.fake


@pytest.fixture
async def client(either: EitherClient, serving: FakeServer) -> Any:
    """A client that is connected to it."""
    return either.client(serving.target, timeout_s=20.0)
