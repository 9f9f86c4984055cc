"""Programs on a router: their calls run on any engine, and say what the same prompts say alone."""

from __future__ import annotations

import asyncio
import time

import pytest

import jaxctx
from jaxctx import errors
from jaxctx import types as requests
from jaxctx.engine.interface import Caller
from tests.e2e.conftest import CONFIG
from tests.e2e.program_callers import SYSTEM, ProgramCaller, check_forks_of_a_running_call, output_of
from tests.e2e.router_cluster import (
    RouterCluster,
    complete_alone,
    wait_until,
    wait_until_nothing_is_held,
)
from tests.engines import Clock


async def test_a_program_says_what_each_prompt_says_alone(router_cluster: RouterCluster, caller: ProgramCaller) -> None:
    topic = (await caller("CreateVariable", name="topic")).variable.variable_id
    drafts = await caller.call(SYSTEM + "Draft {{topic}}: {{draft}}", topic={"variable_id": topic}, draft=output_of())
    review = await caller.call(
        "Of {{text}}: {{a}} and {{b}}", text={"variable_id": drafts["draft"]}, a=output_of(5), b=output_of(4)
    )
    await caller("SetVariable", variable_id=topic, text="pages")
    text = await caller.get(review["b"])
    address = next(iter(router_cluster.engines))
    draft = await complete_alone(address, SYSTEM + "Draft pages: ", 8)
    assert await caller.get(drafts["draft"]) == draft
    first = await caller.get(review["a"])
    assert first == await complete_alone(address, f"Of {draft}: ", 5)
    assert text
    assert "".join([part.text async for part in caller.read(review["b"])]) == text
    tasks = (await caller("GetGraph")).tasks
    assert {each.engine_id for each in tasks} <= router_cluster.engines.keys()
    await caller("DeleteSession")
    held = [await engine.list(Caller(), include_program_contexts=True) for engine in router_cluster.engines.values()]
    assert all(len(contexts) <= 1 for contexts in held)  # constant prefixes


async def test_eight_latency_calls_sit_four_and_four(router_cluster: RouterCluster, caller: ProgramCaller) -> None:
    ids = [(await caller.call("Say {{o}}" + " " * n, o=output_of(300)))["o"] for n in range(8)]
    reads = [asyncio.create_task(caller.get(each)) for each in ids]
    await wait_until(lambda: sum(len(node.running) for node in router_cluster.handles.values()) == 8)
    assert [len(node.running) for node in router_cluster.handles.values()] == [4, 4]
    assert all(await asyncio.gather(*reads))


async def test_what_a_router_leaves_behind_ends_by_itself(
    router_cluster: RouterCluster, caller: ProgramCaller, clock: Clock
) -> None:
    """A router that is killed closes nothing; its calls' contexts live as long as a call may take, and a while."""
    late = (await caller("CreateVariable", name="late")).variable.variable_id
    ids = await caller.call(
        "First {{a}} then {{late}} and {{b}}", a=output_of(6), late={"variable_id": late}, b=output_of(6)
    )
    waiting = asyncio.create_task(caller.get(ids["b"]))
    await caller.get(ids["a"])
    (held,) = [
        one
        for engine in router_cluster.engines.values()
        for one in await engine.list(Caller(), include_program_contexts=True)
    ]
    assert held.labels == {"jaxctx": "program"}
    assert held.expiry is not None
    assert held.expiry.seconds > 600
    assert held.expiry.sliding
    waiting.cancel()


async def test_a_task_names_its_context_which_can_be_forked(
    router_cluster: RouterCluster, caller: ProgramCaller
) -> None:
    async with jaxctx.aio.Client(router_cluster.router, timeout_s=60) as client:
        await check_forks_of_a_running_call(caller, client)
        (fork, early) = [each async for each in client.contexts()]
        assert fork.engine_id == early.engine_id
        assert fork.engine_id in router_cluster.engines


async def test_native_steps_run_in_the_router(router_cluster: RouterCluster, caller: ProgramCaller) -> None:
    said = await caller.call("Tell: {{o}}", o=output_of(8))
    parameters = [{"name": "a", "variable_id": said["o"]}, {"name": "b", "text": "!"}, {"name": "o", "output": {}}]
    step = await caller("SubmitCall", function="join", parameters=parameters)
    assert await caller.get(step.outputs[0].variable_id) == await caller.get(said["o"]) + "!"
    assert [bool(task.engine_id) for task in (await caller("GetGraph")).tasks] == [True, False]


async def test_a_call_that_is_cancelled_ends_on_its_engine(
    router_cluster: RouterCluster, caller: ProgramCaller
) -> None:
    for engine in router_cluster.engines.values():  # or it may be done too soon
        engine.loop.post_if_running(lambda: time.sleep(0.8))
    output = {"name": "o", **output_of(1400)}
    call = await caller("SubmitCall", template="Tell: {{o}}", parameters=[output])
    reading = asyncio.create_task(caller.get(call.outputs[0].variable_id))
    await wait_until(lambda: any(node.running for node in router_cluster.handles.values()))
    await caller("CancelCall", call_id=call.call_id)
    with pytest.raises(errors.Cancelled):
        await reading
    await wait_until_nothing_is_held(router_cluster)


async def test_a_task_whose_time_is_over_ends_on_its_engine(
    router_cluster: RouterCluster, caller: ProgramCaller
) -> None:
    for engine in router_cluster.engines.values():  # or it would be done too soon
        engine.loop.post_if_running(lambda: time.sleep(0.8))
    call = await caller(
        "SubmitCall",
        template="Tell: {{o}}",
        parameters=[{"name": "o", **output_of(1400)}],
        timeout={"nanos": 500_000_000},
    )
    with pytest.raises(errors.DeadlineExceeded):
        await caller.get(call.outputs[0].variable_id)
    await wait_until_nothing_is_held(router_cluster)


async def test_a_program_waits_for_pages(router_cluster: RouterCluster, caller: ProgramCaller) -> None:
    """Where other tenants have pinned all of them, on every engine."""
    for engine in router_cluster.engines.values():
        for tenant in ("a", "b"):  # each may pin half
            await engine.create(Caller(tenant), requests.CreateContextRequest(context_id="full"))
            await engine.reserve_pages(Caller(tenant), "full", CONFIG.pages // 2)
            await engine.update(Caller(tenant), "full", requests.UpdateContextRequest(pinned=True))
    asking = asyncio.create_task(caller.get((await caller.call("Tell: {{o}}", o=output_of()))["o"]))
    await asyncio.sleep(0.5)
    assert not asking.done()
    for engine in router_cluster.engines.values():
        for tenant in ("a", "b"):
            await engine.close(Caller(tenant), "full")
    assert await asking == await complete_alone(next(iter(router_cluster.engines)), "Tell: ", 8)
