"""A server of a fake engine, without connections."""

from collections.abc import AsyncIterator

import pytest

from jaxctx.model.text import ModelText
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.validate import Limits
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def lifecycle(engine: FakeEngine, text: ModelText, limits: Limits) -> AsyncIterator[ServerLifecycle]:
    """Of a server of that engine, which is ready. Its clock stands still."""
    lifecycle = ServerLifecycle()
    lifecycle.set_ready(ServingState.of(engine, text, limits, lambda: 1000.0))
    yield lifecycle
    lifecycle.stop()


@pytest.fixture
async def router_lifecycle(limits: Limits) -> AsyncIterator[ServerLifecycle]:
    """Of a router without engines, which is ready."""
    lifecycle = ServerLifecycle()
    lifecycle.set_ready(ServingState.router(limits, lambda: 1000.0))
    yield lifecycle
    lifecycle.stop()
