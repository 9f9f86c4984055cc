"""Adapters of a router's engines: where they are loaded, where their contexts are made, and where these can go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import RuntimeDeps
from jaxctx.engine.factory import ServedModel, build_engine, open_store
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx_server.cluster import ALONE, Cluster, leave_router
from tests.e2e.conftest import served
from tests.e2e.router_cluster import RouterCluster, address_of, router_of, wait_until
from tests.engines import Clock, on_demand, poison
from tests.jaxctx.cache.invariants import check
from tests.jaxctx.engine.adapters.conftest import adapter_dir, dense, shape, small_served
from tests.jaxctx.engine.adapters.served import CONFIG

__all__ = ["adapter_dir", "dense", "shape", "small_served"]

IDS = list(b"A prompt of 23 letters.")
GREEDY: Any = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def runners(small_served: ServedModel) -> dict[str, ModelRunner]:
    return {name: on_demand(small_served, CONFIG) for name in ("a", "b")}


@pytest.fixture
async def router_cluster(
    runners: dict[str, ModelRunner], small_served: ServedModel, clock: Clock, tmp_path: Path
) -> AsyncIterator[RouterCluster]:
    """A router that two engines of a model with slots for adapters, and one store, have joined."""
    found = RouterCluster(clock, None, ALONE)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(router_of(found))
        for runner in runners.values():
            poison(runner)
            deps, own = RuntimeDeps(clock, clock.wall), Cluster()
            engine = build_engine(small_served, CONFIG, runner, deps, open_store(tmp_path.as_uri(), CONFIG, deps))
            engine.start()
            stack.callback(engine.stop)
            address = await stack.enter_async_context(served(engine, CONFIG, clock, None, own))
            found.engines[address] = engine
            await found.register(address, own)
        yield found
        for task in found.registrations.values():
            task.cancel()
    for engine in found.engines.values():
        assert not engine.loop.failure.done()
        check(engine.core.cache)


async def continued(context: jaxctx.aio.Context) -> list[int]:
    return [token async for piece in context.generate(**GREEDY) for token in piece.token_ids]


async def load(router_cluster: RouterCluster, address: str, name: str, path: str) -> None:
    """Load an adapter on one engine alone; the router then knows of it."""
    await router_cluster.engines[address].load_adapter(Caller(), name, path)
    await wait_until(lambda: name in router_cluster.handles[address].engine.adapter_revisions)


async def test_an_adapter_is_loaded_on_all_engines_and_unloaded_from_them(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, dense: Any, adapter_dir: Path
) -> None:
    info = await client.load_adapter("sql", "a1")
    for handle in await client.engines():
        assert dict(handle.adapters) == {"sql": info.revision}
    expected = dense.greedy(adapter_dir / "a1", IDS, 12)
    assert expected != dense.greedy(None, IDS, 12)
    for address in (router_cluster.router, *router_cluster.engines):
        async with jaxctx.aio.Client(address, timeout_s=30) as caller:
            assert await continued(await caller.create(tokens=IDS, adapter="sql")) == expected
    await client.unload_adapter("sql")
    with pytest.raises(errors.NotFound) as raised:
        await client.create(adapter="sql")
    assert raised.value.reason == "ADAPTER_NOT_FOUND"


async def test_a_context_is_made_and_goes_on_where_its_adapter_is(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, dense: Any, adapter_dir: Path
) -> None:
    """On one engine at first. When that leaves, on the other, which has the same contents under other names."""
    here, there = router_cluster.engines
    await load(router_cluster, here, "sql", "a1")
    contexts = [await client.create(tokens=IDS, adapter="sql", salt=salt) for salt in "abcd"]
    assert {await address_of(router_cluster, context.id) for context in contexts} == {here}
    expected = dense.greedy(adapter_dir / "a1", IDS, 24)
    assert await continued(contexts[0]) == expected[:12]
    await load(router_cluster, here, "fr", "a2")
    with pytest.raises(errors.NotFound) as raised:
        await contexts[3].switch_adapter("other")
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    await contexts[3].switch_adapter("fr")
    await contexts[3].fill(tokens=IDS[:5])

    await load(router_cluster, there, "second", "a2")
    await load(router_cluster, there, "other", "a1")
    await contexts[2].fill(tokens=IDS[:2])
    await contexts[2].switch_adapter("second")  # of this name on the other engine alone
    assert await address_of(router_cluster, contexts[2].id) == there
    before = [adapter_dir / "a1"] * (len(IDS) + 2)
    assert await continued(contexts[2]) == dense.greedy_switching(before, adapter_dir / "a2", IDS + IDS[:2], 12)
    port = int(here.rpartition(":")[2])
    await leave_router(router_cluster.router, router_cluster.engine_clusters[here], port, 30.0)
    assert await address_of(router_cluster, contexts[0].id) == there
    assert await continued(contexts[0]) == expected[12:]
    assert await continued(contexts[1]) == expected[:12]
    spans = [(span.start, span.adapter) for span in (await contexts[3].refresh()).adapter_spans]
    assert spans == [(0, "other"), (len(IDS), "second")]
    adapters = [adapter_dir / "a1"] * len(IDS) + [adapter_dir / "a2"] * 5
    switched = dense.greedy_switching(adapters, adapter_dir / "a2", IDS + IDS[:5], 12)
    assert await continued(contexts[3]) == switched
