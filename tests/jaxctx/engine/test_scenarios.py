"""Scenarios of the page semantics, on the engine: layout, fork, isolation, reuse, races, truncate, rewind."""

import asyncio
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import Aborted, AlreadyExists, FailedPrecondition, NotFound, OutOfRange, ResourceExhausted
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from tests.echo import echo_next
from tests.engines import context_info, pages_of, tokens_of

ME = Caller()
CONFIG = EngineConfig(pages=256, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)
THOUSAND = [(3 * i + i // 7) % 256 for i in range(1000)]


@pytest.fixture
def engine(make_engine) -> LocalEngine:
    return make_engine(CONFIG)


async def filled(engine: LocalEngine, tokens: list[int], **options: object) -> str:
    info = await engine.create(ME, CreateContextRequest(**options))  # type: ignore[arg-type]
    await engine.fill(ME, info.context_id, tokens)
    return info.context_id


async def held(engine: LocalEngine) -> int:
    return (await engine.stats()).pages_held


async def greedy(engine: LocalEngine, context_id: str, count: int) -> list[int]:
    request = GenerateRequest(context_id=context_id, max_tokens=count, sampling=SamplingParams(temperature=0.0))
    return [t async for piece in engine.generate(ME, request) for t in piece.token_ids]


def oracle(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(echo_next(tokens))
    return tokens[-count:]


@pytest.mark.parametrize(("tokens", "layout"), [(1000, (62, 1, 8)), (1024, (64, 0, 0))])
async def test_the_layout_of_committed_pages_and_working_tokens(
    engine: LocalEngine, tokens: int, layout: tuple[int, int, int]
) -> None:
    context_id = await filled(engine, (THOUSAND * 2)[:tokens])
    info = await context_info(engine, ME, context_id)
    assert (info.committed_pages, info.working_pages, info.working_tokens) == layout
    assert info.seq_len == tokens
    assert await held(engine) == layout[0] + layout[1]


async def test_fork_shares_pages_and_copies_the_tail(engine: LocalEngine) -> None:
    parent = await filled(engine, THOUSAND)
    before = await held(engine)
    (child,) = await engine.fork(ME, parent)
    assert await held(engine) == before + 1
    mine, theirs = await pages_of(engine, parent), await pages_of(engine, child.context_id)
    assert mine.page_ids[:62] == theirs.page_ids[:62]
    assert list(mine.refcounts) == [2] * 62 + [1]
    assert mine.page_ids[62] != theirs.page_ids[62]
    assert child.parent_id == parent


async def test_fork_at_a_page_edge_allocates_nothing(engine: LocalEngine) -> None:
    parent = await filled(engine, (THOUSAND * 2)[:1024])
    before = await held(engine)
    await engine.fork(ME, parent, n=3)
    assert await held(engine) == before


async def test_a_fork_is_isolated_and_outlives_its_parent(engine: LocalEngine) -> None:
    parent = await filled(engine, THOUSAND)
    (child,) = await engine.fork(ME, parent)
    await asyncio.gather(engine.fill(ME, parent, [1] * 10), engine.fill(ME, child.context_id, [2] * 10))
    before = await held(engine)
    await engine.close(ME, parent)
    assert await held(engine) == before - 2  # its committed page 63 is cached, its working page free
    assert await greedy(engine, child.context_id, 20) == oracle(THOUSAND + [2] * 10, 20)
    await engine.close(ME, child.context_id)
    assert await held(engine) == 0


async def test_what_is_cached_is_reused_and_not_computed(engine: LocalEngine) -> None:
    first = await filled(engine, THOUSAND)
    second = await engine.create(ME, CreateContextRequest())
    result = await engine.fill(ME, second.context_id, THOUSAND)
    assert (result.resident, result.computed) == (992, 8)
    one, two = await pages_of(engine, first), await pages_of(engine, second.context_id)
    assert one.page_ids[:62] == two.page_ids[:62]
    assert await held(engine) == 62 + 2
    await engine.close(ME, first)
    await engine.close(ME, second.context_id)
    plan = await engine.plan(ME, THOUSAND)
    assert (plan.resident, plan.computed, plan.pages_needed) == (992, 8, 1)
    third = await engine.create(ME, CreateContextRequest())
    assert (await engine.fill(ME, third.context_id, THOUSAND)).resident == 992
    assert await greedy(engine, third.context_id, 5) == oracle(THOUSAND, 5)


async def test_the_last_token_is_computed_even_if_its_page_is_cached(engine: LocalEngine) -> None:
    tokens = THOUSAND[:64]
    await filled(engine, tokens)
    again = await engine.create(ME, CreateContextRequest())
    result = await engine.fill(ME, again.context_id, tokens)
    assert (result.resident, result.computed) == (63, 1)
    assert await held(engine) == 4
    assert await greedy(engine, again.context_id, 5) == oracle(tokens, 5)


@pytest.mark.parametrize("deferred", [False, True])
async def test_a_commit_race_leaves_one_copy(engine: LocalEngine, deferred: bool) -> None:
    # Deferred tokens make the second context unable to wait for the first: its first page differs in what is buffered.
    a, b = [(await engine.create(ME, CreateContextRequest())).context_id for _ in range(2)]
    if deferred:
        await engine.fill(ME, b, THOUSAND[:5])  # a working page: nothing can be matched, so all is computed twice
    await asyncio.gather(engine.fill(ME, a, THOUSAND), engine.fill(ME, b, THOUSAND[5 if deferred else 0 :]))
    one, two = await pages_of(engine, a), await pages_of(engine, b)
    assert one.page_ids[:62] == two.page_ids[:62]
    assert list(one.refcounts) == [2] * 62 + [1]
    assert await held(engine) == 62 + 2
    results = await asyncio.gather(greedy(engine, a, 10), greedy(engine, b, 10))
    assert results[0] == results[1] == oracle(THOUSAND, 10)


async def test_other_salt_or_tenant_shares_nothing(engine: LocalEngine) -> None:
    await filled(engine, THOUSAND)
    salted = await engine.create(ME, CreateContextRequest(salt="x"))
    assert (await engine.fill(ME, salted.context_id, THOUSAND)).resident == 0
    other = Caller(tenant="other")
    assert (await engine.plan(other, THOUSAND)).resident == 0


async def test_errors_of_a_commit(engine: LocalEngine) -> None:
    context_id = await filled(engine, THOUSAND[:40], manual_commit=True)
    info = await context_info(engine, ME, context_id)
    assert (info.committed_pages, info.working_pages, info.working_tokens) == (0, 3, 40)
    with pytest.raises(FailedPrecondition):
        await engine.commit_pages(ME, context_id, 3)
    with pytest.raises(OutOfRange):
        await engine.commit_pages(ME, context_id, 4)
    assert await engine.commit_pages(ME, context_id, 0) == await context_info(engine, ME, context_id)
    info = await engine.commit_pages(ME, context_id, 2)
    assert (info.committed_pages, info.working_pages, info.working_tokens) == (2, 1, 8)
    assert await greedy(engine, context_id, 20) == oracle(THOUSAND[:40], 20)


async def test_truncate(engine: LocalEngine) -> None:
    context_id = await filled(engine, THOUSAND)
    with pytest.raises(OutOfRange):
        await engine.truncate(ME, context_id, 9)
    info = await engine.truncate(ME, context_id, 8)
    assert (info.seq_len, info.working_pages, info.working_tokens) == (992, 1, 0)
    await engine.fill(ME, context_id, THOUSAND[992:])
    assert await greedy(engine, context_id, 10) == oracle(THOUSAND, 10)


async def test_rewind_needs_no_forward_pass(engine: LocalEngine) -> None:
    context_id = await filled(engine, THOUSAND)
    (fork,) = await engine.fork(ME, context_id)
    computed = (await engine.stats()).tokens_computed
    info = await engine.rewind(ME, context_id, 980)
    assert (info.committed_pages, info.working_tokens, info.seq_len) == (61, 4, 980)
    assert (await engine.stats()).tokens_computed == computed
    both = await asyncio.gather(greedy(engine, context_id, 20), greedy(engine, fork.context_id, 20))
    assert both == [oracle(THOUSAND[:980], 20), oracle(THOUSAND, 20)]
    with pytest.raises(OutOfRange):
        await engine.rewind(ME, context_id, 5000)


async def test_reserve_and_release(make_engine, clock) -> None:
    engine = make_engine(replace(CONFIG, pages=64, max_context_tokens=1024, pinned_pages_per_tenant=64))
    pinned = await filled(engine, THOUSAND[: 54 * 16], pinned=True)
    other = await engine.create(ME, CreateContextRequest())
    stats = await engine.stats()
    assert stats.pages_free == 10
    with pytest.raises(ResourceExhausted):
        await engine.reserve_pages(Caller(deadline=clock() + 0.2), other.context_id, 11)
    with pytest.raises(ResourceExhausted) as error:
        await engine.reserve_pages(ME, other.context_id, 65)
    assert error.value.reason == "NEVER_FITS"
    assert (await engine.reserve_pages(ME, other.context_id, 10)).working_pages == 10
    with pytest.raises(OutOfRange):
        await engine.release_pages(ME, other.context_id, 11)
    assert (await engine.release_pages(ME, other.context_id, 4)).working_pages == 6
    stats = await engine.stats()
    assert (stats.pages_free, stats.pages_held) == (4, 60)
    assert stats.pages_free + stats.pages_cached + stats.pages_held == stats.pages_total
    await engine.fill(ME, other.context_id, [1] * 20)
    assert (
        await context_info(engine, ME, other.context_id)
    ).working_pages == 5  # reserved pages are used first and kept
    assert await greedy(engine, pinned, 3) == oracle(THOUSAND[: 54 * 16], 3)


async def test_more_contexts_than_the_pool_holds(make_engine) -> None:
    engine = make_engine(replace(CONFIG, pages=64, max_context_tokens=1024))
    prompts = [[(i * 31 + k) % 256 for i in range(400)] for k in range(6)]
    ids = [await filled(engine, prompt) for prompt in prompts]
    assert (await engine.stats()).suspensions > 0
    for context_id, prompt in zip(ids, prompts, strict=True):
        assert await greedy(engine, context_id, 8) == oracle(prompt, 8)
    info = await context_info(engine, ME, ids[0])
    assert info.seq_len + info.buffered_tokens in (0, 408)


async def test_a_second_writer_is_aborted_and_readers_are_not(engine: LocalEngine) -> None:
    context_id = await filled(engine, THOUSAND)
    stream = engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=100))
    await anext(stream)
    for operation in (
        engine.fill(ME, context_id, [1]),
        engine.truncate(ME, context_id, 1),
        engine.rewind(ME, context_id, 1),
        greedy(engine, context_id, 1),
    ):
        with pytest.raises(Aborted):
            await operation
    assert (await context_info(engine, ME, context_id)).state.value == "busy"
    (fork,) = await engine.fork(ME, context_id)
    tokens = await tokens_of(engine, fork.context_id)
    assert tokens[:1000] == THOUSAND
    await stream.aclose()
    assert await greedy(engine, fork.context_id, 5) == oracle(tokens, 5)


async def test_forks_are_all_or_none(engine: LocalEngine) -> None:
    context_id = await filled(engine, THOUSAND)
    await engine.create(ME, CreateContextRequest(context_id="taken"))
    before = await held(engine)
    with pytest.raises(AlreadyExists):
        await engine.fork(ME, context_id, ["free", "mine", "taken"])
    assert await held(engine) == before
    with pytest.raises(NotFound):
        await context_info(engine, ME, "mine")
    with pytest.raises(AlreadyExists):
        await engine.create(ME, CreateContextRequest(context_id="taken"))
    listed = await engine.list(ME, limit=10)
    assert {info.context_id for info in listed} == {context_id, "taken"}
