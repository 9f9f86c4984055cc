"""Which engine gets a new context, and when it is made anew on another one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import jaxctx
from jaxctx import errors
from jaxctx_server.router import planning
from tests.e2e.router_cluster import (
    LONG_TEXT,
    RouterCluster,
    add_load,
    address_of,
    create_on,
)


async def test_new_contexts_go_where_most_of_their_prompt_is_cached(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    """Also where that engine has more to do; and with no prefix anywhere where there is least to do."""
    addresses = list(router_cluster.engines)
    for address, prompt in zip(addresses, (LONG_TEXT, "Another thing altogether. " * 6), strict=True):
        home = await client.context(await create_on(router_cluster, address))
        await home.fill(prompt)
        for busy in addresses:
            router_cluster.handles[busy].forwarded += 3
            assert (await client.plan(prompt + "?")).resident >= 64
            async with await client.create(labels={"a": "b"}) as context:
                assert (await context.fill(prompt + "!")).resident >= 64
                assert await address_of(router_cluster, context.id) == address
                assert (await context.refresh()).labels == {"a": "b"}
            router_cluster.handles[busy].forwarded -= 3
    for busy, free in (addresses, addresses[::-1]):
        router_cluster.handles[busy].forwarded += 3
        async with await client.create("Nothing like it") as context:
            assert await address_of(router_cluster, context.id) == free
        router_cluster.handles[busy].forwarded -= 3


async def test_only_an_empty_context_moves(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    first, second = router_cluster.engines
    home = await client.context(await create_on(router_cluster, second))
    await home.fill(LONG_TEXT)
    await add_load(router_cluster, second)
    context = await client.create(context_id="mine")
    assert await address_of(router_cluster, "mine") == first
    await context.update(priority=3)
    await context.fill(LONG_TEXT)
    assert await address_of(router_cluster, "mine") == first
    assert (await context.refresh()).priority == 3


async def test_a_fill_that_is_cancelled_leaves_one_context(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    _, second = router_cluster.engines
    await (await client.context(await create_on(router_cluster, second))).fill(LONG_TEXT)
    await add_load(router_cluster, second)
    for n in range(12):
        context = await client.create(context_id=f"mine{n}")
        filling = asyncio.create_task(context.fill(LONG_TEXT))
        await asyncio.sleep(n / 1000)
        filling.cancel()
        with suppress(asyncio.CancelledError):
            await filling
        with suppress(errors.Aborted):
            await context.fill(" and more")
        await address_of(router_cluster, context.id)


async def test_an_engine_that_does_not_answer_delays_no_first_fill(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "PLAN_TIMEOUT_S", 0.05)
    context = await client.create(context_id="mine")
    (other,) = set(router_cluster.engines) - {await address_of(router_cluster, "mine")}
    never = asyncio.Event()
    monkeypatch.setattr(router_cluster.engines[other], "plan", lambda *_, **__: never.wait())
    async with asyncio.timeout(5):
        assert (await context.fill(LONG_TEXT)).computed
