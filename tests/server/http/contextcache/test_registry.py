"""What a server knows of kept contexts beside its store is bounded, and each tenant's own."""

from __future__ import annotations

import pytest

from jaxctx.errors import Aborted
from jaxctx_server.http.contextcache.registry import MAX_REMEMBERED, ContextKey, ContextRegistry
from tests.engines import Clock

MINE, OTHERS = ContextKey("alice", "a"), ContextKey("bob", "a")


@pytest.fixture
def registry(clock: Clock) -> ContextRegistry:
    return ContextRegistry(clock.wall)


def test_one_use_at_a_time(registry: ContextRegistry) -> None:
    registry.claim(MINE)
    registry.claim(OTHERS)
    with pytest.raises(Aborted) as raised:
        registry.claim(MINE)
    assert raised.value.reason == "context_busy"
    registry.release(MINE)
    registry.release(MINE)
    registry.claim(MINE)


def test_one_that_is_missing(registry: ContextRegistry, clock: Clock) -> None:
    registry.remember(MINE, clock.wall() + 10)
    assert registry.missing(MINE).reason == "context_not_found"  # deleted elsewhere: it is not over yet
    clock.offset += 11
    assert registry.missing(MINE).reason == "context_expired"
    assert registry.missing(OTHERS).reason == "context_not_found"
    registry.forget(MINE)
    assert registry.missing(MINE).reason == "context_not_found"
    registry.remember(MINE, clock.wall() - 1)
    registry.remember(MINE, None)  # for ever
    assert registry.missing(MINE).reason == "context_not_found"


def test_the_oldest_is_forgotten(registry: ContextRegistry, clock: Clock) -> None:
    keys = [ContextKey("alice", str(number)) for number in range(MAX_REMEMBERED + 1)]
    for key in keys:
        registry.remember(key, clock.wall() - 1)
    assert [registry.missing(key).reason for key in (keys[0], keys[1], keys[-1])] == [
        "context_not_found",
        "context_expired",
        "context_expired",
    ]
