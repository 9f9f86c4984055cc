"""Who runs when: queue bounds, deadlines, cancellation, priorities, preemption, fairness, slow readers, drain."""

import asyncio
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import Cancelled, DeadlineExceeded, JaxctxError, NotFound, ResourceExhausted, Unavailable
from jaxctx.types import (
    ContextState,
    CreateContextRequest,
    ForwardOutputParams,
    ForwardRequest,
    GenerateRequest,
    SamplingParams,
)
from tests.echo import echo_next
from tests.engines import context_info, tokens_of

ME = Caller()
GREEDY = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(pages=128, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)


def oracle(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(echo_next(tokens))
    return tokens[-count:]


async def filled(engine: LocalEngine, tokens: list[int], caller: Caller = ME, **options: object) -> str:
    info = await engine.create(caller, CreateContextRequest(**options))  # type: ignore[arg-type]
    await engine.fill(caller, info.context_id, tokens)
    return info.context_id


async def greedy(engine: LocalEngine, context_id: str, count: int, caller: Caller = ME) -> list[int]:
    request = GenerateRequest(context_id=context_id, max_tokens=count, sampling=GREEDY)
    return [t async for piece in engine.generate(caller, request) for t in piece.token_ids]


async def until(engine: LocalEngine, running: int, waiting: int) -> None:
    for _ in range(500):
        stats = await engine.stats()
        if (stats.running, stats.waiting) == (running, waiting):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"running {stats.running}, waiting {stats.waiting}")


async def test_the_queue_is_bounded_and_refuses_at_once(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1, queue_limit=2))
    ids = [await filled(engine, [i, 1, 2]) for i in range(4)]
    tasks = [asyncio.create_task(greedy(engine, ids[0], 400))]
    await until(engine, 1, 0)
    tasks += [asyncio.create_task(greedy(engine, context_id, 3)) for context_id in ids[1:3]]
    await until(engine, 1, 2)
    with pytest.raises(ResourceExhausted) as error:
        await greedy(engine, ids[3], 3)
    assert error.value.reason == "QUEUE_FULL"
    assert error.value.retry_after_s
    before = await context_info(engine, ME, ids[3])
    with pytest.raises(ResourceExhausted):
        await engine.fill(ME, ids[3], [9])
    assert await context_info(engine, ME, ids[3]) == replace(
        before, used_at=(await context_info(engine, ME, ids[3])).used_at
    )
    results = await asyncio.gather(*tasks)
    assert results == [oracle([i, 1, 2], n) for i, n in ((0, 400), (1, 3), (2, 3))]


async def test_what_can_never_fit_fails_at_once(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=4))
    context_id = await filled(engine, [1] * 10)
    with pytest.raises(ResourceExhausted) as error:
        await greedy(engine, context_id, 60)
    assert error.value.reason == "NEVER_FITS"
    assert await greedy(engine, context_id, 55) == oracle([1] * 10, 55)


async def test_worst_case_is_reserved_so_running_work_always_finishes(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=10))
    prompts = [[k] * 17 for k in range(8)]
    ids = [await filled(engine, prompt) for prompt in prompts[:4]]
    results = await asyncio.gather(*[greedy(engine, context_id, 50) for context_id in ids])
    assert results == [oracle(prompt, 50) for prompt in prompts[:4]]
    assert (await engine.stats()).preemptions == 0


async def test_pinned_contexts_can_starve_the_rest_but_hang_nobody(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=8, pinned_pages_per_tenant=8))
    await filled(engine, [1] * 100, pinned=True)
    other = await engine.create(ME, CreateContextRequest())
    with pytest.raises(ResourceExhausted):
        await engine.fill(ME, other.context_id, [2] * 50)


@pytest.mark.parametrize("phase", ["waiting", "running"])
async def test_a_deadline_ends_the_request_and_keeps_what_was_computed(make_engine, clock, phase: str) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    context_id = await filled(engine, [1, 2, 3])
    busy = await filled(engine, [9, 9])
    task = None
    if phase == "waiting":
        task = asyncio.create_task(greedy(engine, busy, 600))
        await until(engine, 1, 0)
    request = GenerateRequest(context_id=context_id, max_tokens=1000, sampling=GREEDY)
    tokens: list[int] = []
    with pytest.raises(DeadlineExceeded):
        async for piece in engine.generate(Caller(deadline=clock() + 0.1), request):
            tokens += piece.token_ids
    assert tokens == oracle([1, 2, 3], len(tokens)) if phase == "running" else not tokens
    assert await tokens_of(engine, context_id) == [1, 2, 3, *tokens]
    if task:
        assert await task == oracle([9, 9], 600)
    assert await greedy(engine, context_id, 3) == oracle([1, 2, 3, *tokens], 3)


async def test_cancelling_frees_pages_and_reservations_within_a_step(engine: LocalEngine) -> None:
    context_id = await filled(engine, [1] * 20)
    neighbour = await filled(engine, [2] * 20)
    other = asyncio.create_task(greedy(engine, neighbour, 200))
    stream = engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=900, sampling=GREEDY))
    await anext(stream)
    assert (await engine.stats()).pages_reserved > 40
    await stream.aclose()
    stats = await engine.stats()  # the very next thing that the step thread does
    assert (stats.running, stats.waiting) == (1, 0)
    assert stats.pages_reserved < 20  # only the neighbour's
    info = await context_info(engine, ME, context_id)
    assert info.working_pages == -(-info.working_tokens // 16)
    assert await other == oracle([2] * 20, 200)


async def test_a_cancelled_fill_leaves_its_tokens_buffered(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    busy = await filled(engine, [9, 9])
    task = asyncio.create_task(greedy(engine, busy, 300))
    await until(engine, 1, 0)
    info = await engine.create(ME, CreateContextRequest())
    fill = asyncio.create_task(engine.fill(ME, info.context_id, [5] * 40))
    await until(engine, 1, 1)
    fill.cancel()
    await until(engine, 1, 0)
    after = await context_info(engine, ME, info.context_id)
    assert (after.seq_len, after.buffered_tokens, after.state.value) == (0, 40, "idle")
    await task
    assert await greedy(engine, info.context_id, 5) == oracle([5] * 40, 5)


async def test_closing_a_context_cancels_its_writer(engine: LocalEngine) -> None:
    context_id = await filled(engine, [1] * 20)
    stream = engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=900, sampling=GREEDY))
    await anext(stream)
    await engine.close(ME, context_id)
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass
    with pytest.raises(NotFound):
        await context_info(engine, ME, context_id)
    assert (await engine.stats()).pages_held == 0


@pytest.mark.parametrize("read", [0, 1, 5])
async def test_leaving_a_request_for_many_outputs_closes_its_forks(engine: LocalEngine, read: int) -> None:
    context_id = await filled(engine, [1] * 20)
    stream = engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=200, n=4, sampling=GREEDY))
    task = asyncio.create_task(anext(stream))
    if read:
        await task
        for _ in range(read - 1):
            await anext(stream)
    else:
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await stream.aclose()
    await until(engine, 0, 0)
    assert [info.context_id for info in await engine.list(ME)] == [context_id]


async def test_forks_of_outputs_that_were_read_to_their_end_stay(engine: LocalEngine) -> None:
    context_id = await filled(engine, [1] * 20)
    stream = engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=4, n=2, sampling=GREEDY))
    forks: list[str] = []
    while len(forks) < 2:
        piece = await anext(stream)
        if piece.finish is not None:
            forks.append(piece.context_id)
    await stream.aclose()
    for fork in forks:
        assert await tokens_of(engine, fork) == [1] * 20 + oracle([1] * 20, 4)


async def test_a_fork_whose_output_was_read_stays_when_another_output_fails(make_engine) -> None:
    engine = make_engine(replace(CONFIG, stream_buffer=2))  # no output gets far ahead of the reader
    context_id = await filled(engine, [1] * 20)
    request = GenerateRequest(context_id=context_id, max_tokens=60, n=2, sampling=SamplingParams(seed=5))
    drawn: dict[int, list[int]] = {0: [], 1: []}
    async for piece in engine.generate(ME, request):
        drawn[piece.index] += piece.token_ids
    stop = next(token for token in drawn[0] if token not in drawn[1])
    read: list[int] = []
    ended = ""
    with pytest.raises(Cancelled):
        async for piece in engine.generate(ME, replace(request, max_tokens=900, stop_token_ids=(stop,))):
            if piece.index == 0:
                read += piece.token_ids
            if piece.finish is not None:
                ended = piece.context_id
                (running,) = [info.context_id for info in await engine.list(ME) if info.state is ContextState.BUSY]
                await engine.close(ME, running)
    assert await tokens_of(engine, ended) == [1] * 20 + read


async def test_higher_priority_preempts_and_the_preempted_resumes_exactly(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=2, pages=24))
    low = [await filled(engine, [k] * 20, priority=-1) for k in (1, 2)]
    sampling = SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1)

    async def penalised(context_id: str) -> list[int]:
        request = GenerateRequest(context_id=context_id, max_tokens=60, sampling=sampling)
        return [t async for piece in engine.generate(ME, request) for t in piece.token_ids]

    alone = await penalised((await engine.fork(ME, low[0]))[0].context_id)
    tasks = [asyncio.create_task(penalised(context_id)) for context_id in low]
    await until(engine, 2, 0)
    high = await engine.create(ME, CreateContextRequest(priority=5))
    await engine.fill(ME, high.context_id, [7] * 200)
    assert await greedy(engine, high.context_id, 10) == oracle([7] * 200, 10)
    results = await asyncio.gather(*tasks)
    assert (await engine.stats()).preemptions > 0
    assert results[0] == alone  # penalties' counts survived


async def test_a_preempted_pass_tells_every_output_once(make_engine) -> None:
    """What it had told is computed anew, as others took its pages."""
    engine = make_engine(replace(CONFIG, max_batch=1, pages=24))
    low = await filled(engine, [9], priority=-1)
    outputs = [ForwardOutputParams(index=index, top=1) for index in range(150)]  # steps tell 16 at most
    request = ForwardRequest(context_id=low, tokens=[7] * 150, outputs=outputs)
    passing = asyncio.create_task(engine.forward(ME, request))
    for k in range(3):
        await engine.close(ME, await filled(engine, [k] * 320, priority=5))
    told = (await passing).outputs
    assert (await engine.stats()).preemptions > 0
    assert [output.index for output in told] == [*range(150)]


async def test_tenants_take_turns(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    order: list[str] = []

    async def one(tenant: str, context_id: str) -> None:
        await greedy(engine, context_id, 2, Caller(tenant=tenant))
        order.append(tenant)

    busy = await filled(engine, [9])
    ids = [(tenant, await filled(engine, [3], Caller(tenant=tenant))) for tenant in "aaaab"]
    first = asyncio.create_task(greedy(engine, busy, 200))
    await until(engine, 1, 0)
    tasks = [asyncio.create_task(one(tenant, context_id)) for tenant, context_id in ids]
    await until(engine, 1, 5)
    await asyncio.gather(first, *tasks)
    assert order.index("b") <= 1


async def test_equal_prompts_at_once_are_computed_once(make_engine) -> None:
    engine = make_engine(CONFIG)
    prompt = [i % 251 for i in range(600)]
    ids = [(await engine.create(ME, CreateContextRequest())).context_id for _ in range(6)]
    results = await asyncio.gather(*[engine.fill(ME, context_id, [*prompt, k]) for k, context_id in enumerate(ids)])
    assert sum(result.computed for result in results) < 700
    assert all(result.resident + result.computed == 601 for result in results)


async def test_a_slow_reader_pauses_its_own_sequence_only(make_engine) -> None:
    engine = make_engine(replace(CONFIG, stream_buffer=10))
    slow, fast = await filled(engine, [1] * 5), await filled(engine, [2] * 5)
    stream = engine.generate(ME, GenerateRequest(context_id=slow, max_tokens=100, sampling=GREEDY))
    tokens = list((await anext(stream)).token_ids)
    assert await greedy(engine, fast, 150) == oracle([2] * 5, 150)
    assert (await context_info(engine, ME, slow)).seq_len < 5 + 20
    tokens += [t async for piece in stream for t in piece.token_ids]
    assert tokens == oracle([1] * 5, 100)


async def test_drain_refuses_new_work_and_finishes_the_rest(engine: LocalEngine) -> None:
    context_id = await filled(engine, [1] * 5)
    task = asyncio.create_task(greedy(engine, context_id, 100))
    await until(engine, 1, 0)
    drain = asyncio.create_task(engine.drain())
    while not (await engine.stats()).draining:
        await asyncio.sleep(0.001)
    with pytest.raises(Unavailable) as error:
        await engine.create(ME, CreateContextRequest())
    assert error.value.reason == "DRAINING"
    assert await task == oracle([1] * 5, 100)
    await drain


async def test_stop_ends_running_requests_with_a_typed_error(engine: LocalEngine) -> None:
    context_id = await filled(engine, [1] * 5)
    task = asyncio.create_task(greedy(engine, context_id, 1000))
    await until(engine, 1, 0)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(Unavailable):
        await task
    with pytest.raises(Unavailable):
        await context_info(engine, ME, context_id)


async def test_two_hundred_streams(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=512, max_batch=32))
    prompts = [[k % 256, k // 256, 3] * (1 + k % 5) for k in range(200)]

    async def one(prompt: list[int]) -> list[int]:
        context_id = await filled(engine, prompt)
        try:
            return await greedy(engine, context_id, 20)
        finally:
            await engine.close(ME, context_id)

    results = await asyncio.gather(*[one(prompt) for prompt in prompts])
    assert results == [oracle(prompt, 20) for prompt in prompts]
    stats = await engine.stats()
    assert (stats.pages_held, stats.contexts) == (0, 0)


async def test_a_defect_in_one_request_hurts_only_that_one(engine: LocalEngine, monkeypatch) -> None:
    broken, healthy = await filled(engine, [1] * 5), await filled(engine, [2] * 5)
    from jaxctx.engine.core.output import Output

    push = Output.push

    def fail(self: Output, step: object, row: int) -> object:
        if self.request.context_id == broken and self.tokens == 3:
            raise RuntimeError("a defect")
        return push(self, step, row)

    monkeypatch.setattr(Output, "push", fail)
    results = await asyncio.gather(greedy(engine, broken, 30), greedy(engine, healthy, 30), return_exceptions=True)
    assert isinstance(results[0], JaxctxError)
    assert "defect" not in str(results[0])
    assert results[1] == oracle([2] * 5, 30)


@pytest.mark.parametrize("where", ["dispatch", "device", "process_output"])
async def test_an_engine_that_fails_ends_everything_with_typed_errors(make_engine, monkeypatch, where: str) -> None:
    engine = make_engine(CONFIG)
    make_engine.expected_failures.append(where)
    running, idle = await filled(engine, [1] * 5), await filled(engine, [2] * 5)
    failure = asyncio.create_task(engine.failure())

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    if where == "device":  # its output is an array that nobody can read
        unreadable = type("Unreadable", (), {"__array__": fail})()
        monkeypatch.setattr(engine.core.runner, "run", lambda *_, **__: (None, unreadable))
    else:
        monkeypatch.setattr(engine.core, where, fail)
    with pytest.raises(Unavailable) as error:
        await greedy(engine, running, 30)
    assert error.value.reason == "ENGINE_FAILED"
    assert "defect" not in str(error.value)
    assert "step" in await failure
    with pytest.raises(Unavailable):
        await context_info(engine, ME, idle)


async def test_stats_tell_what_every_part_counts(engine: LocalEngine, monkeypatch) -> None:
    core = engine.core
    counted = replace(
        core.scheduler.stats(),
        tokens_restored=1,
        suspensions=3,
        tokens_cached=5,
        tokens_queried=6,
        requests_admitted=7,
        queue_seconds=8.5,
        step_seconds=9.5,
    )
    monkeypatch.setattr(core.scheduler, "stats", lambda: counted)
    core.lifecycle.expired, core.tokens_generated, core.prompt_tokens = 2, 4, 10
    stats = await engine.stats()
    assert (stats.tokens_restored, stats.expired, stats.suspensions) == (1, 2, 3)
    assert (stats.tokens_generated, stats.tokens_cached, stats.tokens_queried, stats.prompt_tokens) == (4, 5, 6, 10)
    assert (stats.requests_admitted, stats.queue_seconds, stats.step_seconds) == (7, 8.5, 9.5)


async def test_appended_tokens_count_as_prompt_once_they_are_accepted(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=4))
    context_id = await filled(engine, [1, 2, 3])
    await engine.fill(ME, context_id, [4, 5], defer=True)
    await engine.fill(ME, context_id)  # appends nothing
    await greedy(engine, context_id, 4)
    stats = await engine.stats()
    assert (stats.prompt_tokens, stats.tokens_generated) == (5, 4)
    with pytest.raises(ResourceExhausted):
        await engine.fill(ME, context_id, [9] * 60)
    assert (await engine.stats()).prompt_tokens == 5
