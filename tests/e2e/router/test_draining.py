"""A router or an engine that drains: running work is finished, new work refused or sent elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx_server.router.planning import Planner
from tests.e2e.program_callers import ProgramCaller, output_of
from tests.e2e.router_cluster import (
    LONG_TEXT,
    RouterCluster,
    add_load,
    address_of,
    wait_until,
)


async def test_a_router_that_drains_finishes_calls_of_programs(
    router_cluster: RouterCluster, caller: ProgramCaller
) -> None:
    reading = asyncio.create_task(caller.get((await caller.call("Tell: {{story}}", story=output_of(300)))["story"]))
    await wait_until(lambda: any(node.running for node in router_cluster.handles.values()))
    chain = await caller.call("Of {{x}}: {{o}}", x={"text": "a"}, o=output_of(30))
    following = asyncio.create_task(caller.get(chain["o"]))
    await wait_until(lambda: sum(len(node.running) for node in router_cluster.handles.values()) == 2)
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    await asyncio.sleep(0)
    with pytest.raises(errors.Unavailable) as error:
        await caller.call("Say {{o}}", o=output_of())
    assert error.value.reason == "DRAINING"
    await asyncio.wait_for(draining, 120)
    assert (await asyncio.wait_for(reading, 1), await asyncio.wait_for(following, 1)) != ("", "")


async def test_a_task_that_waits_to_try_again_is_waited_for(
    router_cluster: RouterCluster, caller: ProgramCaller
) -> None:
    """Of an engine that had no place for it: it is neither running nor waiting for an engine then."""
    programs, refusals = router_cluster.programs, [1, 2]
    run = programs.dispatcher._run

    async def refusing(task: Any, node: Any) -> None:
        if refusals:
            refusals.pop()
            raise errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.3)
        await run(task, node)

    programs.dispatcher._run = refusing
    reading = asyncio.create_task(caller.get((await caller.call("Say {{o}}", o=output_of()))["o"]))
    await wait_until(lambda: len(refusals) == 1)
    await asyncio.wait_for(router_cluster.lifecycle.drain(), 120)
    assert refusals == []
    assert await asyncio.wait_for(reading, 5)


async def test_a_drain_waits_for_a_fill_that_is_being_placed(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()

    async def slowly(*_: Any) -> dict[Any, Any]:
        await gate.wait()
        return {}

    monkeypatch.setattr(Planner, "plans", slowly)
    context = await client.create()
    filling = asyncio.create_task(context.fill(LONG_TEXT))
    await wait_until(lambda: bool(router_cluster.programs.working))
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    await wait_until(lambda: router_cluster.programs.draining)
    await asyncio.sleep(0.1)
    assert not draining.done()
    gate.set()
    assert (await filling).context.seq_len > 0
    await draining


async def test_a_router_that_drains_finishes_outputs(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    context = await client.create("Tell: ")
    telling = asyncio.create_task(context.complete(max_tokens=300, ignore_eos=True))
    await wait_until(lambda: any(node.forwarded for node in router_cluster.handles.values()))
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    for call in (client.create(timeout_s=10), context.fill("!", timeout_s=10), context.save("s", timeout_s=10)):
        with pytest.raises(errors.Unavailable) as error:
            await call
        assert error.value.reason == "DRAINING"
    assert (await context.refresh()).context_id == context.id
    await asyncio.wait_for(draining, 120)
    assert len((await asyncio.wait_for(telling, 1)).token_ids) == 300
    await context.close()


async def test_an_engine_drains(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    """What is new goes elsewhere, at once; what is there says so, and can be read and closed."""
    first, second = router_cluster.engines
    await add_load(router_cluster, second)
    there = await client.create("Hello there", context_id="there")
    await there.save("s")
    assert await address_of(router_cluster, "there") == first
    await router_cluster.engines[first].drain()
    for _ in range(2):
        other = await client.create("Hello there")
        assert await address_of(router_cluster, other.id) == second
    for call in (there.fill("!", timeout_s=10), client.open("s", timeout_s=10)):
        with pytest.raises(errors.Unavailable) as error:
            await call
        assert error.value.reason == "DRAINING"
    assert await there.tokens()
    await there.close()
