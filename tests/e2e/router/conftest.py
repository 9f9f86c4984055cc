"""A router that two engines have joined, and callers of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

import jaxctx
from jaxctx_server.cluster import ALONE, Cluster
from tests.e2e.conftest import CONFIG, served
from tests.e2e.program_callers import ProgramCaller
from tests.e2e.router_cluster import (
    RouterCluster,
    program_caller,
    router_of,
)
from tests.engines import Clock


@pytest.fixture
def cluster() -> Cluster:
    return ALONE


@pytest.fixture
async def router_cluster(
    make_engine: Any, echo_served: Any, clock: Clock, keys: Any, cluster: Cluster
) -> AsyncIterator[RouterCluster]:
    """A router that two engines have joined."""
    accepted = None if keys is None else [*keys, cluster.accepted]
    found = RouterCluster(clock, accepted, cluster)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(router_of(found))
        for name in ("a", "b"):  # revisions of their own, or they would share a test's device
            engine, own = make_engine(CONFIG, replace(echo_served, revision=name), whole=False), Cluster(cluster.key)
            address = await stack.enter_async_context(served(engine, CONFIG, clock, accepted, own))
            found.engines[address] = engine
            await found.register(address, own)
        yield found
        for task in found.registrations.values():
            task.cancel()


@pytest.fixture
async def caller(router_cluster: RouterCluster) -> AsyncIterator[ProgramCaller]:
    async with program_caller(router_cluster) as caller:
        yield caller


@pytest.fixture
async def client(router_cluster: RouterCluster) -> AsyncIterator[jaxctx.aio.Client]:
    async with jaxctx.aio.Client(router_cluster.router, timeout_s=30) as client:
        yield client
