"""Time to live: contexts that end, when, what a use is, and what their writers and owners are told."""

import asyncio
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import NotFound
from jaxctx.types import ContextInfo, CreateContextRequest, GenerateRequest, SamplingParams, Ttl, UpdateContextRequest
from tests.echo import echo_next
from tests.engines import context_info

ME, OTHER = Caller("me"), Caller("other")
CONFIG = EngineConfig(pages=64, max_batch=4, max_batch_tokens=64, max_context_tokens=1024)


async def filled(engine: LocalEngine, tokens: list[int], **options: object) -> str:
    info = await engine.create(ME, CreateContextRequest(**options))  # type: ignore[arg-type]
    await engine.fill(ME, info.context_id, tokens)
    return info.context_id


async def reason(engine: LocalEngine, context_id: str, caller: Caller = ME) -> str:
    with pytest.raises(NotFound) as error:
        await context_info(engine, caller, context_id)
    return error.value.reason


def at(info: ContextInfo) -> float:
    assert info.expiry is not None
    return info.expiry.at.timestamp()


async def test_a_context_ends_at_its_time_and_gives_up_everything(engine: LocalEngine, clock) -> None:
    forever = await filled(engine, [9] * 20)
    context_id = await filled(engine, [1] * 40, ttl=Ttl(100), pinned=True)
    info = await context_info(engine, ME, context_id)
    assert info.expiry is not None
    assert (info.expiry.seconds, info.expiry.sliding) == (100, False)
    assert 99 < at(info) - clock.wall() <= 100
    clock.offset += 99
    assert (await context_info(engine, ME, context_id)).seq_len == 40
    assert [each.context_id for each in await engine.list(ME)] == sorted([forever, context_id])
    clock.offset += 1
    assert await reason(engine, context_id) == "CONTEXT_EXPIRED"
    assert await reason(engine, context_id, OTHER) == "CONTEXT_NOT_FOUND"
    assert [each.context_id for each in await engine.list(ME)] == [forever]
    for call in (engine.fill(ME, context_id, [1]), engine.fork(ME, context_id), engine.close(ME, context_id)):
        with pytest.raises(NotFound, match="expired"):
            await call
    stats = await engine.stats()
    assert (stats.contexts, stats.expired, stats.pages_held) == (1, 1, 2)
    again = await engine.create(ME, CreateContextRequest(context_id=context_id))  # the id is free
    assert again.expiry is None


async def test_it_ends_by_itself_on_an_engine_that_nobody_calls(engine: LocalEngine) -> None:
    await filled(engine, [1] * 40, ttl=Ttl(0.2))
    assert engine.core.lifecycle.expired == 0
    for _ in range(100):
        await asyncio.sleep(0.02)
        if engine.core.lifecycle.expired:
            break
    assert engine.core.lifecycle.expired == 1
    assert len(engine.core.cache.context_table) == 0


@pytest.mark.parametrize("sliding", [True, False])
async def test_uses_and_looks(engine: LocalEngine, clock, sliding: bool) -> None:
    context_id = await filled(engine, [1] * 40, ttl=Ttl(100, sliding))
    other = await filled(engine, [1] * 40)

    async def moved(call: object) -> float:
        before = at(await context_info(engine, ME, context_id))
        clock.offset += 1
        await call  # type: ignore[misc]
        return at(await context_info(engine, ME, context_id)) - before

    async def generate() -> None:
        async for _ in engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=2)):
            pass

    looks = [
        context_info(engine, ME, context_id),
        engine.list(ME),
        engine.inspect(ME, context_id, True, True, True),
        engine.plan(ME, [1], context_id=context_id),
        engine.compare(ME, context_id, other),
        engine.update(ME, context_id, UpdateContextRequest(labels={"a": "b"}, priority=1)),
    ]
    assert [await moved(look) for look in looks] == [0] * len(looks)
    uses = [
        engine.fill(ME, context_id, [1]),
        generate(),
        engine.reserve_pages(ME, context_id, 1),
        engine.release_pages(ME, context_id, 1),
        engine.commit_pages(ME, context_id, 0),
        engine.truncate(ME, context_id, 1),
        engine.rewind(ME, context_id, 3),
        engine.switch_adapter(ME, context_id, ""),
        engine.fork(ME, context_id),
    ]
    for use in uses:
        assert (await moved(use) >= 1) is sliding


async def test_ttl_can_be_extended_shortened_and_taken_away(engine: LocalEngine, clock) -> None:
    context_id = await filled(engine, [1] * 4, ttl=Ttl(10))
    info = await engine.update(ME, context_id, UpdateContextRequest(ttl=Ttl(1000, True)))
    assert (info.expiry.seconds, info.expiry.sliding) == (1000, True)  # type: ignore[union-attr]
    clock.offset += 500
    assert (await engine.update(ME, context_id, UpdateContextRequest(labels={}))).expiry == info.expiry
    assert (await engine.update(ME, context_id, UpdateContextRequest(ttl=Ttl(None)))).expiry is None
    clock.offset += 5000
    assert (await context_info(engine, ME, context_id)).seq_len == 4
    await engine.update(ME, context_id, UpdateContextRequest(ttl=Ttl(5)))
    clock.offset += 5
    assert await reason(engine, context_id) == "CONTEXT_EXPIRED"


async def test_forks_live_as_long_from_their_birth(engine: LocalEngine, clock) -> None:
    parent = await filled(engine, [1] * 40, ttl=Ttl(100))
    await engine.fill(ME, parent, [5], defer=True)
    clock.offset += 60
    (child,) = await engine.fork(ME, parent)
    assert (child.expiry.seconds, child.expiry.sliding, child.forked_at) == (100, False, 41)  # type: ignore[union-attr]
    clock.offset += 60
    assert await reason(engine, parent) == "CONTEXT_EXPIRED"
    assert (await context_info(engine, ME, child.context_id)).parent_id == parent
    clock.offset += 40
    assert await reason(engine, child.context_id) == "CONTEXT_EXPIRED"


async def test_a_writer_ends_with_its_context_and_its_neighbour_does_not_notice(make_engine, clock) -> None:
    engine = make_engine(CONFIG)
    ending = await filled(engine, [1] * 20, ttl=Ttl(1000))
    neighbour = await filled(engine, [2, 3])
    greedy = SamplingParams(temperature=0.0)

    async def generate(context_id: str, count: int, tokens: list[int]) -> list[int]:
        request = GenerateRequest(context_id=context_id, max_tokens=count, sampling=greedy)
        async for piece in engine.generate(ME, request):
            tokens += piece.token_ids
        return tokens

    seen: list[int] = []
    task, other = asyncio.create_task(generate(ending, 900, seen)), asyncio.create_task(generate(neighbour, 200, []))
    while len(seen) < 3:
        await asyncio.sleep(0.002)
    clock.offset += 1000
    with pytest.raises(NotFound) as error:
        await task
    assert error.value.reason == "CONTEXT_EXPIRED"
    tokens = [2, 3]
    for _ in range(200):
        tokens.append(echo_next(tokens))
    assert await other == tokens[2:]
    assert (await engine.stats()).pages_reserved == 0


async def test_a_writer_keeps_a_sliding_context_alive(make_engine, clock) -> None:
    engine = make_engine(replace(CONFIG, max_batch=1))
    running, waiting = [await filled(engine, [k] * 20, ttl=Ttl(100, True)) for k in (1, 2)]
    fixed = await filled(engine, [3] * 20, ttl=Ttl(100))

    async def generate(context_id: str, count: int) -> int:
        request = GenerateRequest(context_id=context_id, max_tokens=count, ignore_eos=True)
        return sum([len(piece.token_ids) async for piece in engine.generate(ME, request)])

    tasks = [asyncio.create_task(generate(running, 400)), asyncio.create_task(generate(waiting, 5))]
    while (await engine.stats()).waiting == 0:
        await asyncio.sleep(0.002)
    clock.offset += 150
    assert await reason(engine, fixed) == "CONTEXT_EXPIRED"
    assert at(await context_info(engine, ME, waiting)) > clock.wall()
    assert await asyncio.gather(*tasks) == [400, 5]
    clock.offset += 100
    assert await reason(engine, running) == "CONTEXT_EXPIRED"


async def test_many_lifetimes_cost_little_and_leave_nothing(engine: LocalEngine, clock) -> None:
    ids = [(await engine.create(ME, CreateContextRequest(ttl=Ttl(10 + k % 7)))).context_id for k in range(300)]
    clock.offset += 13
    left = {each.context_id for each in await engine.list(ME, limit=1000)}
    assert left == {context_id for k, context_id in enumerate(ids) if k % 7 > 3}
    clock.offset += 10
    assert await engine.list(ME) == []
    assert (await engine.stats()).expired == 300
    assert engine.core.cache.lifetimes.next is None
