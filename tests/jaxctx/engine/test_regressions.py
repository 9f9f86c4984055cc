"""Corners of the engine where something once went wrong, or easily could."""

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import ResourceExhausted, Unavailable
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams, UpdateContextRequest
from tests.echo import VOCAB_SIZE, echo_next
from tests.engines import context_info, on_demand

ME = Caller()
GREEDY = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(pages=128, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)


def oracle(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(echo_next(tokens))
    return tokens[-count:]


async def empty(engine: LocalEngine, **options: object) -> str:
    return (await engine.create(ME, CreateContextRequest(**options))).context_id  # type: ignore[arg-type]


async def filled(engine: LocalEngine, tokens: list[int], **options: object) -> str:
    context_id = await empty(engine, **options)
    await engine.fill(ME, context_id, tokens)
    return context_id


async def greedy(engine: LocalEngine, context_id: str, count: int, caller: Caller = ME, n: int = 1) -> list[int]:
    request = GenerateRequest(context_id=context_id, max_tokens=count, sampling=GREEDY, n=n)
    return [t async for piece in engine.generate(caller, request) for t in piece.token_ids]


async def until(engine: LocalEngine, running: int, waiting: int) -> None:
    for _ in range(500):
        stats = await engine.stats()
        if (stats.running, stats.waiting) == (running, waiting):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(stats)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
async def test_any_number_of_steps_in_flight(make_engine, steps: int) -> None:
    engine = make_engine(replace(CONFIG, steps_in_flight=steps))
    assert await greedy(engine, await filled(engine, [1, 2, 3]), 40) == oracle([1, 2, 3], 40)


@pytest.mark.parametrize("how", ["rewound", "reserved"])
async def test_flushing_a_suspended_empty_context_does_nothing(make_engine, how: str) -> None:
    engine = make_engine(replace(CONFIG, pages=8))
    context_id = await filled(engine, [1] * 40) if how == "rewound" else await empty(engine)
    if how == "reserved":
        await engine.reserve_pages(ME, context_id, 2)
    await filled(engine, [2] * 120)
    assert (await context_info(engine, ME, context_id)).state.value == "suspended"
    if how == "rewound":
        await engine.rewind(ME, context_id, 0)
    assert (await engine.fill(ME, context_id)).computed == 0


async def test_tenants_with_the_same_context_id_do_not_meet(make_engine) -> None:
    engine = make_engine(CONFIG)
    a, b = Caller(tenant="a"), Caller(tenant="b")
    for caller in (a, b):
        await engine.create(caller, CreateContextRequest(context_id="x"))
        await engine.fill(caller, "x", [1, 2, 3])
    task = asyncio.create_task(greedy(engine, "x", 400, a))
    await until(engine, 1, 0)
    assert (await context_info(engine, b, "x")).state.value == "idle"
    await engine.fill(b, "x", [4])
    await engine.close(b, "x")
    assert await task == oracle([1, 2, 3], 400)


@pytest.mark.parametrize("pages", [128, 9])
async def test_a_reader_that_lags_gives_up_its_place_until_it_reads_on(make_engine, pages: int) -> None:
    engine = make_engine(replace(CONFIG, stream_buffer=10, max_batch=1 if pages == 128 else 8, pages=pages))
    slow, fast = await filled(engine, [1] * 5), await filled(engine, [2] * 5)
    stream = engine.generate(ME, GenerateRequest(context_id=slow, max_tokens=100, sampling=GREEDY))
    tokens = list((await anext(stream)).token_ids)
    assert await asyncio.wait_for(greedy(engine, fast, 60), 120) == oracle([2] * 5, 60)
    tokens += [token async for piece in stream for token in piece.token_ids]
    assert tokens == oracle([1] * 5, 100)


async def test_preemption_leaves_a_pinned_context_its_pages(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    low = await filled(engine, [1] * 100, priority=-1, pinned=True)
    first = asyncio.create_task(greedy(engine, low, 100))
    await until(engine, 1, 0)
    high = await empty(engine, priority=5)
    await engine.fill(ME, high, [7] * 5, defer=True)
    second = asyncio.create_task(greedy(engine, high, 100))
    while not second.done():
        assert (await context_info(engine, ME, low)).committed_pages >= 6
        await asyncio.sleep(0.002)
    assert await first == oracle([1] * 100, 100)


async def test_a_call_that_races_a_stop_is_answered(make_engine) -> None:
    engine = make_engine(CONFIG)
    context_id = await filled(engine, [1])
    engine.loop.post(lambda: time.sleep(0.3))
    thread = threading.Thread(target=engine.stop)
    thread.start()
    await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(engine.fill(ME, context_id, [5] * 40), 120)
    thread.join()


@pytest.mark.parametrize("where", ["expire", "end"])
async def test_no_defect_ends_the_step_thread_in_silence(make_engine, monkeypatch, clock, where: str) -> None:
    engine = make_engine(CONFIG)
    make_engine.expected_failures.append(where)
    context_id = await filled(engine, [1])

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    task = asyncio.create_task(greedy(engine, context_id, 1500, Caller(deadline=clock() + 100)))
    await until(engine, 1, 0)
    monkeypatch.setattr(engine.core if where == "expire" else engine.core.scheduler, where, fail)
    clock.offset += 100
    with pytest.raises(Unavailable):
        await asyncio.wait_for(task, 120)
    assert await asyncio.wait_for(engine.failure(), 120)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(engine.list(ME), 120)


async def test_a_failing_reserve_changes_nobody(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=24, pinned_pages_per_tenant=24))
    await filled(engine, [1] * 160, pinned=True)
    await engine.close(ME, await filled(engine, [5] * 64))
    idle = [await filled(engine, [k] * 20) for k in (2, 3)]
    context_id = await empty(engine)
    await engine.fill(ME, context_id, [5] * 64, defer=True)
    before = [await context_info(engine, ME, each) for each in (context_id, *idle)]
    with pytest.raises(ResourceExhausted):
        await engine.reserve_pages(ME, context_id, 15)
    after = [await context_info(engine, ME, each) for each in (context_id, *idle)]
    assert [replace(info, used_at=0.0) for info in after] == [replace(info, used_at=0.0) for info in before]


async def test_a_new_priority_holds_for_a_waiting_request(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    busy = await filled(engine, [9, 9], priority=50)
    a, b = await filled(engine, [1]), await filled(engine, [2])
    order = []

    async def one(context_id: str, count: int) -> None:
        await greedy(engine, context_id, count)
        order.append(context_id)

    tasks = [asyncio.create_task(one(busy, 400))]
    await until(engine, 1, 0)
    for waiting, (context_id, count) in enumerate([(a, 100), (b, 3)], 1):
        tasks.append(asyncio.create_task(one(context_id, count)))
        await until(engine, 1, waiting)
    await engine.update(ME, b, UpdateContextRequest(priority=10))
    await asyncio.gather(*tasks)
    assert order == [busy, b, a]
    assert (await engine.stats()).preemptions == 0


async def test_cancelling_a_fill_keeps_the_pages_reserved_before_it(make_engine) -> None:
    engine = make_engine(CONFIG)
    context_id = await empty(engine)
    await engine.reserve_pages(ME, context_id, 3)
    fill = asyncio.create_task(engine.fill(ME, context_id, [5] * 200))
    await asyncio.sleep(0)
    fill.cancel()
    await asyncio.gather(fill, return_exceptions=True)
    info = await context_info(engine, ME, context_id)
    assert info.committed_pages + info.working_pages >= 3


async def test_plan_does_not_count_what_it_finds_as_available(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=10))
    await engine.close(ME, await filled(engine, [5] * 128))
    plan = await engine.plan(ME, [5] * 128 + [6] * 64)
    assert (plan.resident, plan.pages_needed, plan.pages_available) == (128, 4, 2)


async def test_a_deferred_fill_needs_no_place_in_the_queue(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1, queue_limit=1))
    ids = [await filled(engine, [k]) for k in range(3)]
    tasks = [asyncio.create_task(greedy(engine, ids[0], 300))]
    await until(engine, 1, 0)
    tasks.append(asyncio.create_task(greedy(engine, ids[1], 3)))
    await until(engine, 1, 1)
    assert (await engine.fill(ME, ids[2], [5], defer=True)).context.buffered_tokens == 1
    await asyncio.gather(*tasks)


async def test_a_drain_lets_a_request_for_many_outputs_finish(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    context_id = await empty(engine)
    await engine.fill(ME, context_id, [1] * 1000, defer=True)
    task = asyncio.create_task(greedy(engine, context_id, 5, n=2))
    await until(engine, 1, 0)
    await engine.drain()
    assert len(await task) == 10


async def test_contexts_whose_ids_nobody_learned_are_closed(make_engine) -> None:
    engine = make_engine(CONFIG)
    context_id = await filled(engine, [1] * 20)
    for call in (engine.fork(ME, context_id, n=3), engine.create(ME, CreateContextRequest())):
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [info.context_id for info in await engine.list(ME)] == [context_id]


async def test_any_number_of_stop_ids_waits_for_min_tokens(make_engine) -> None:
    engine = make_engine(CONFIG)
    context_id = await filled(engine, [1])
    stops = range(VOCAB_SIZE - 5)
    request = GenerateRequest(context_id=context_id, max_tokens=9, min_tokens=4, stop_token_ids=stops)
    tokens = [token async for piece in engine.generate(ME, request) for token in piece.token_ids]
    assert [token in stops for token in tokens[:4]] == [False] * 4


async def test_who_waits_for_a_restore_that_computes_nothing_comes_next(make_engine) -> None:
    """The restore ends in a turn of its own, after the admission of that turn, and no step follows to wake anybody."""
    engine = make_engine(
        EngineConfig(pages=24, max_batch=1, max_batch_tokens=64, max_context_tokens=384, host_pages=64)
    )
    for pages in (18, 19, 20):
        restored, other = await filled(engine, [pages] * 16 * pages), await filled(engine, [7] * 330)
        await engine.close(ME, other)
        context = engine.core.cache.get(ME.tenant, restored)
        assert context.suspended
        waiting = await empty(engine)
        resuming = engine.loop.submit_request(partial(engine.core.resume, ME, context))
        work = asyncio.gather(resuming, engine.fill(ME, waiting, [8, 9]))
        result, _ = await asyncio.wait_for(work, 120)
        assert result.restored == 16 * (pages - 3), "the first three stayed where they were"
        for each in (restored, waiting):
            await engine.close(ME, each)


async def test_pages_that_come_back_beside_reserved_ones_are_promised_too(make_engine) -> None:
    """Reserved working pages hold none of what other tiers have: that takes pages of its own, none of a neighbour."""
    engine = make_engine(replace(CONFIG, pages=32, host_pages=64))
    old, tokens = await filled(engine, prompt := [5] * 60 + [6] * 68), prompt
    flood = await filled(engine, [7] * 16 * 32)
    await engine.close(ME, flood)
    await engine.reserve_pages(ME, old, 10)
    layout = await context_info(engine, ME, old)
    assert (layout.committed_pages, layout.working_pages, layout.buffered_tokens) == (0, 10, 128)
    other = await filled(engine, [1, 2, 3])
    request = GenerateRequest(context_id=other, max_tokens=300, sampling=GREEDY)
    stream = engine.generate(ME, request)
    got = [*(await anext(stream)).token_ids]
    flush = asyncio.create_task(engine.fill(ME, old))
    got += [token async for piece in stream for token in piece.token_ids]
    assert got == oracle([1, 2, 3], 300)
    result = await flush
    assert (result.restored, result.computed) == (127, 1)
    assert await greedy(engine, old, 20) == oracle(tokens, 20)


class Told:
    """The reply of a request, without threads."""

    def __init__(self) -> None:
        self.result: Any = None

    def add_piece(self, piece: object) -> None:
        pass

    def set_result(self, result: object) -> None:
        self.result = result

    def set_error(self, error: Exception) -> None:
        raise error

    def backpressured(self) -> bool:
        return False


def test_who_has_restored_all_that_was_promised_begins_once(echo_served) -> None:
    """Even if a tier has more by then: a second beginning would dispatch rows again that are under way."""
    config = EngineConfig(
        pages=40, page_size=4, max_batch=4, max_batch_tokens=8, max_context_tokens=512,
        host_pages=2, moving_pages=1, draft_tokens=0,
    )  # fmt: skip
    identity = Identity(namespace="", model_revision="", kv_dtype="")
    core = EngineCore(config, on_demand(echo_served, config), echo_served.text, identity, "echo", RuntimeDeps())
    flights: list[Any] = []

    def turn() -> None:
        if flight := core.dispatch():
            flights.append(flight)
        if len(flights) == config.steps_in_flight or not flight:
            batch, output = flights.pop(0)
            core.process_output(batch, jax.tree.map(np.asarray, output))

    def fill(context_id: str, tokens: list[int], *, defer: bool = False) -> Told:
        told = Told()
        core.fill(ME, context_id, np.array(tokens, np.int32), defer, told)
        return told

    def filled(tokens: list[int], **options: bool) -> str:
        context_id = core.contexts.create(ME, CreateContextRequest(**options)).id
        told = fill(context_id, tokens)
        while told.result is None:
            turn()
        return context_id

    tokens = list(range(10, 26))
    manual = filled(tokens, manual_commit=True)
    core.contexts.close(ME, filled(tokens))
    core.cache.block_manager.evict(core.cache.block_manager.index.cached)  # host memory keeps the first two pages
    busy = filled([1, 2, 3])
    request = GenerateRequest(context_id=busy, max_tokens=60, sampling=GREEDY, ignore_eos=True)
    core.generate(ME, request, busy, 0, Told())
    turn()
    late = core.contexts.create(ME, CreateContextRequest()).id
    fill(late, tokens, defer=True)
    core.contexts.reserve_pages(ME, late, 6)
    told, context = fill(late, []), core.cache.get(ME.tenant, late)
    while context.seq_len < 8:
        turn()
    core.contexts.commit_pages(ME, manual, 3)
    while told.result is None:
        turn()
    assert (told.result.restored, told.result.computed) == (8, 8)
    assert (context.seq_len, context.committed_pages) == (16, 4)
