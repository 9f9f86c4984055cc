"""A router of two fake engines."""

from collections.abc import AsyncIterator

import pytest

from jaxctx.model.text import ModelText
from tests.server.router.fake_router import FakeRouter


@pytest.fixture
async def empty_router(text: ModelText) -> AsyncIterator[FakeRouter]:
    """A router that no engine has registered with."""
    router = FakeRouter(text)
    yield router
    await router.stop()


@pytest.fixture
async def router(empty_router: FakeRouter) -> FakeRouter:
    """A router of the engines "a" and "b"."""
    empty_router.add_engine("a")
    empty_router.add_engine("b")
    return empty_router
