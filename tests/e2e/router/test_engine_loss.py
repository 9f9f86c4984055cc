"""Engines that leave, are cut off, or have not come: what callers of a router learn, and what goes on elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

import jaxctx
from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import authorization_metadata
from jaxctx.rpc import METHODS
from jaxctx.v1 import context_service_pb2
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceStub
from jaxctx_server.cluster import ALONE, Cluster
from tests.connection_forwarder import ConnectionForwarder
from tests.e2e.conftest import CONFIG, served
from tests.e2e.program_callers import ProgramCaller, output_of
from tests.e2e.router_cluster import (
    CLUSTER_KEY,
    USERS,
    RouterCluster,
    add_load,
    address_of,
    create_on,
    error_of,
    program_caller,
    record_watches,
    router_of,
    wait_until,
)
from tests.engines import Clock
from tests.server.harness import method_of


async def test_an_engine_that_leaves_in_the_middle_of_an_output(
    router_cluster: RouterCluster, caller: ProgramCaller
) -> None:
    """Its part is kept, and the rest comes from the other; what was there is not said twice."""
    ids = await caller.call("Tell: {{story}}", story=output_of(400))
    parts: list[str] = []

    async def read() -> None:
        async for part in caller.read(ids["story"]):
            parts.append(part.text)

    reading = asyncio.create_task(read())
    await wait_until(lambda: len(parts) > 3)
    (busy,) = [address for address, node in router_cluster.handles.items() if node.running]
    router_cluster.leave(busy)
    await wait_until(lambda: busy not in router_cluster.handles)
    before = "".join(parts)
    await reading
    text = await caller.get(ids["story"])
    assert "".join(parts) == text
    assert text.startswith(before)
    (task,) = (await caller("GetGraph")).tasks
    assert task.engine_id in router_cluster.engines.keys() - {busy}


async def test_an_engine_that_is_cut_off_and_comes_back(router_cluster: RouterCluster, caller: ProgramCaller) -> None:
    cut_off, other = router_cluster.engines
    forwarder = ConnectionForwarder(int(cut_off.rpartition(":")[2]))
    port = await forwarder.begin()
    incarnation = router_cluster.programs.dispatcher.engines.handles[cut_off].engine._headers[-1][1]
    router_cluster.leave(cut_off)
    router_cluster.leave(other)
    await wait_until(lambda: not router_cluster.handles)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        registered = EngineServiceStub(channel).Register(RegisterRequest(port=port, incarnation=incarnation))
        epoch = (await registered.read()).epoch
        ids = await caller.call("Tell: {{story}}", story=output_of(1000))
        reading = asyncio.create_task(caller.get(ids["story"]))
        await wait_until(lambda: any(node.running for node in router_cluster.handles.values()))
        forwarder.open.clear()
        await wait_until(lambda: not router_cluster.handles)
        assert not reading.done()
        forwarder.open.set()
        await wait_until(lambda: bool(router_cluster.handles))
        (node,) = router_cluster.handles.values()
        assert node.epoch > epoch
        assert await asyncio.wait_for(reading, 120)
        registered.cancel()


async def test_before_any_engine_has_come(clock: Clock) -> None:
    router_cluster = RouterCluster(clock, None, ALONE)
    async with router_of(router_cluster), program_caller(router_cluster) as caller:
        with pytest.raises(errors.Unavailable) as error:
            await caller.call("Say {{o}}", o=output_of())
        assert error.value.reason == "ENGINE_LOST"


async def test_whoever_fills_an_engine_does_not_make_it_look_lost(
    make_engine: Any, echo_served: Any, clock: Clock
) -> None:
    own, router_cluster = (
        Cluster(CLUSTER_KEY),
        RouterCluster(clock, [*USERS, Cluster(CLUSTER_KEY).accepted], Cluster(CLUSTER_KEY)),
    )
    engine = make_engine(CONFIG, replace(echo_served, revision="a"), whole=False)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(router_of(router_cluster))
        address = await stack.enter_async_context(served(engine, CONFIG, clock, router_cluster.keys, own, max_calls=2))
        await router_cluster.register(address, own)
        separate = [("grpc.use_local_subchannel_pool", 1)]  # a connection has no more streams than the server calls
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=separate)) for _ in range(2)
        ]
        everything, alice = context_service_pb2.WatchContextsRequest(), authorization_metadata("alice")
        begun = record_watches(engine)
        watches = [ContextServiceStub(channels[0]).WatchContexts(everything, metadata=alice) for _ in range(2)]
        await wait_until(lambda: len(begun) == 2)
        listing = context_service_pb2.ListContextsRequest()
        refusal = ContextServiceStub(channels[1]).ListContexts(listing, metadata=alice, timeout=20)
        assert (await error_of(refusal)).reason == "QUEUE_FULL"
        epoch = router_cluster.handles[address].epoch
        before = router_cluster.handles[address].stats
        await wait_until(lambda: router_cluster.handles[address].stats is not before)
        assert router_cluster.handles[address].epoch == epoch
        for each in watches:
            each.cancel()
        router_cluster.leave(address)


async def test_a_closed_context_is_not_found_whatever_became_of_its_engine(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    await (await client.create(context_id="mine")).close()
    for address in router_cluster.engines:
        router_cluster.leave(address)
        await wait_until(lambda address=address: address not in router_cluster.handles)  # type: ignore[misc]
        await router_cluster.register(address)
    with pytest.raises(errors.NotFound):
        await client.context("mine")


async def test_without_engines(clock: Clock) -> None:
    router_cluster = RouterCluster(clock, None, ALONE)
    async with router_of(router_cluster), grpc.aio.insecure_channel(router_cluster.router) as channel:
        for rpc, fields in (
            ("CreateContext", {}),
            ("CreateContext", {"context_id": "c"}),
            ("GetContext", {"context_id": "c"}),
            ("Generate", {"context_id": "c"}),
            ("ListContexts", {}),
            ("Plan", {"text": "x"}),
            ("ListModels", {}),
            ("Tokenize", {"text": "x"}),
            ("GetSnapshot", {"name": "s"}),
        ):
            call = method_of(channel, rpc)(GetMessageClass(METHODS[rpc].input_type)(**fields), timeout=10)
            error = await error_of(call)
            assert (rpc, error.reason) == (rpc, "ENGINE_LOST")
            assert (rpc, error.message) == (rpc, "no engine has come yet")
            assert error.retry_after_s


async def test_there_are_no_models_only_where_no_engine_is(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    """What a client is told is never that there are no models: they are unknown until an engine is there."""
    assert len(await client.models()) == 1
    for address in router_cluster.engines:
        router_cluster.leave(address)
    await wait_until(lambda: not router_cluster.handles)
    for asking in (client.models(), client.tokenize("x"), client.create()):
        with pytest.raises(errors.Unavailable) as error:
            await asking
        assert (error.value.reason, error.value.message) == ("ENGINE_LOST", "no engine is there now")
        assert error.value.retry_after_s
    empty = RouterCluster(router_cluster.clock, None, ALONE)
    async with router_of(empty), jaxctx.aio.Client(empty.router, timeout_s=30) as early:
        for asking in (early.models(), early.model()):
            with pytest.raises(errors.Unavailable) as error:
                await asking
            assert (error.value.reason, error.value.message) == ("ENGINE_LOST", "no engine has come yet")
            assert error.value.retry_after_s


async def test_the_contexts_of_a_lost_engine(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    first, second = router_cluster.engines
    await add_load(router_cluster, second)
    lost = await client.create("Hello there", context_id="lost")
    assert await address_of(router_cluster, "lost") == first
    kept = await client.context(await create_on(router_cluster, second, context_id="kept"))
    router_cluster.leave(first)
    await wait_until(lambda: first not in router_cluster.handles)
    with pytest.raises(errors.Unavailable) as error:
        await lost.fill("!", timeout_s=10)
    assert error.value.reason == "ENGINE_LOST"
    assert [each.id async for each in client.contexts()] == ["kept"]
    assert await kept.fill("Hello")
    again = await client.create("Hello there", context_id="lost")
    assert len(await again.tokens()) > 5
    await router_cluster.register(first)  # what it has is there again
    assert [each.id async for each in client.contexts()] == ["kept", "lost"]
    await again.fill("!")
    held = await router_cluster.engines[second].inspect(Caller(), "lost")
    assert held.context.seq_len == len(await again.tokens())


async def test_an_output_of_a_lost_engine_ends(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    context = await client.create("Tell: ")
    pieces = context.generate(max_tokens=1400, ignore_eos=True)
    await anext(pieces)
    router_cluster.leave(await address_of(router_cluster, context.id))
    with pytest.raises(errors.Unavailable) as error:
        async for _ in pieces:
            pass
    assert error.value.reason == "ENGINE_LOST"


async def test_what_an_engine_may_have_that_is_cut_off_is_not_found_nor_free(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    cut_off, other = router_cluster.engines
    await create_on(router_cluster, cut_off, context_id="there")
    incarnation = router_cluster.handles[cut_off].engine._headers[-1][1]
    forwarder = ConnectionForwarder(int(cut_off.rpartition(":")[2]))
    port = await forwarder.begin()
    router_cluster.leave(cut_off)
    await wait_until(lambda: cut_off not in router_cluster.handles)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        registered = EngineServiceStub(channel).Register(RegisterRequest(port=port, incarnation=incarnation))
        await registered.read()
        forwarder.open.clear()
        await wait_until(lambda: router_cluster.handles.keys() == {other})
        for call in (client.context("there", timeout_s=10), client.create(context_id="there", timeout_s=10)):
            with pytest.raises(errors.Unavailable) as error:
                await call
            assert error.value.reason == "ENGINE_LOST"
        assert await client.create("Hello")  # of an id that nobody can have
        forwarder.open.set()
        await wait_until(lambda: len(router_cluster.handles) == 2)
        assert await client.context("there")
        registered.cancel()
        await wait_until(lambda: router_cluster.handles.keys() == {other})
        with pytest.raises(errors.Unavailable):
            await client.context("there", timeout_s=10)
