"""A watch of the contexts on all engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import ContextChange
from tests.e2e.router_cluster import (
    LONG_TEXT,
    RouterCluster,
    add_load,
    address_of,
    create_on,
    record_watches,
    wait_until,
)


async def test_a_watch_sees_all_engines(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    first, second = router_cluster.engines
    await create_on(router_cluster, first, context_id="a")
    await create_on(router_cluster, second, context_id="b")
    seen: list[tuple[ContextChange, str]] = []

    async def watch() -> None:
        async for event in client.watch():
            seen.append((event.change, event.context_id))

    watching = asyncio.create_task(watch())
    await wait_until(lambda: len(seen) == 2)
    assert sorted(each for _, each in seen) == ["a", "b"]
    await create_on(router_cluster, second, context_id="c")
    await wait_until(lambda: (ContextChange.CREATED, "c") in seen)
    router_cluster.leave(second)
    await wait_until(lambda: ContextChange.RESET in dict(seen))
    await wait_until(lambda: seen[-1] == (ContextChange.EXISTS, "a"))
    await router_cluster.register(second)
    await wait_until(
        lambda: sorted(seen[-3:], key=lambda each: each[1])[1:]
        == [(ContextChange.EXISTS, "b"), (ContextChange.EXISTS, "c")]
    )

    # One that the router made, and remembers on an earlier life of its engine, is told of too.
    mine = await client.create(context_id="mine")
    await wait_until(lambda: (ContextChange.CREATED, "mine") in seen)
    home = await address_of(router_cluster, "mine")
    router_cluster.leave(home)
    await wait_until(lambda: seen[-1][0] is ContextChange.EXISTS and "mine" not in {each for _, each in seen[-3:]})
    await router_cluster.register(home)
    await wait_until(lambda: (ContextChange.EXISTS, "mine") in seen[-4:])
    await mine.close()
    await wait_until(lambda: seen[-1] == (ContextChange.CLOSED, "mine"))
    assert not watching.done()
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    with pytest.raises(errors.Unavailable) as error:
        await asyncio.wait_for(watching, 5)
    assert error.value.reason == "DRAINING"
    await draining


async def test_a_watch_begins_anew_where_an_engine_ended_it(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = router_cluster.engines
    watched, begun, ended = router_cluster.engines[first].watch, asyncio.Event(), asyncio.Event()
    seen: list[tuple[ContextChange, str]] = []

    async def ending(caller: Caller, include_program_contexts: bool) -> AsyncIterator[Any]:
        begun.set()
        async for event in watched(caller, include_program_contexts):
            yield event
            if not ended.is_set():
                ended.set()
                raise errors.ResourceExhausted("too many calls at once", reason="QUEUE_FULL")

    async def watch() -> None:
        async for event in client.watch():
            seen.append((event.change, event.context_id))

    monkeypatch.setattr(router_cluster.engines[first], "watch", ending)
    watching = asyncio.create_task(watch())
    await asyncio.wait_for(begun.wait(), 60)
    await create_on(router_cluster, first, context_id="a")
    await ended.wait()
    await wait_until(lambda: seen[-2:] == [(ContextChange.RESET, ""), (ContextChange.EXISTS, "a")])
    watching.cancel()


async def test_a_context_that_moves_is_not_closed_for_who_watches(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    _, second = router_cluster.engines
    await (await client.context(await create_on(router_cluster, second))).fill(LONG_TEXT)
    await add_load(router_cluster, second)
    seen: list[ContextChange] = []

    async def watch() -> None:
        async for event in client.watch():
            if event.context_id == "mine":
                seen.append(event.change)

    begun = [record_watches(engine) for engine in router_cluster.engines.values()]
    watching = asyncio.create_task(watch())
    await wait_until(lambda: all(begun))
    context = await client.create(context_id="mine")
    await wait_until(lambda: seen == [ContextChange.CREATED])
    await context.fill(LONG_TEXT)
    assert await address_of(router_cluster, "mine") == second
    await context.close()
    await wait_until(lambda: ContextChange.CLOSED in seen)
    assert set(seen[:-1]) <= {ContextChange.CREATED, ContextChange.CHANGED}
    watching.cancel()
