"""Operations that compute nothing: what each changes, what it refuses, and that a refusal changes nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from jaxctx.cache.context_table import ContextTable
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import PROGRAM_LABELS, Caller
from jaxctx.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    JaxctxError,
    NotFound,
    OutOfRange,
    ResourceExhausted,
)
from jaxctx.types import (
    ContextInfo,
    ContextState,
    CreateContextRequest,
    GenerateRequest,
    PlanResult,
    RetentionUpdate,
    SaveRequest,
    Tier,
    UpdateContextRequest,
)
from tests.engines import SMALL, context_info

ME, OTHER = Caller("me"), Caller("other")
Operation = Callable[[LocalEngine, str], Awaitable[object]]


async def filled(engine: LocalEngine, tokens: int, *, token: int = 1, caller: Caller = ME, **options: object) -> str:
    info = await engine.create(caller, CreateContextRequest(**options))  # type: ignore[arg-type]
    if tokens:
        await engine.fill(caller, info.context_id, [token] * tokens)
    return info.context_id


def layout(info: ContextInfo) -> tuple[int, int, int, int]:
    return info.committed_pages, info.working_pages, info.working_tokens, info.buffered_tokens


async def test_pages_and_tokens_by_hand(engine: LocalEngine) -> None:
    context = await filled(engine, 40, manual_commit=True)
    assert layout(await context_info(engine, ME, context)) == (0, 3, 40, 0)
    assert layout(await engine.commit_pages(ME, context, 2)) == (2, 1, 8, 0)
    assert layout(await engine.reserve_pages(ME, context, 2)) == (2, 3, 8, 0)
    assert layout(await engine.release_pages(ME, context, 2)) == (2, 1, 8, 0)
    assert layout(await engine.truncate(ME, context, 3)) == (2, 1, 5, 0)
    assert layout(await engine.release_pages(ME, context, 1)) == (2, 0, 0, 0), "with the tokens in it"
    assert layout(await engine.rewind(ME, context, 20)) == (1, 1, 4, 0)


WRITES: dict[str, Operation] = {
    "truncate": lambda engine, context: engine.truncate(ME, context, 1),
    "rewind": lambda engine, context: engine.rewind(ME, context, 3),
    "switch adapter": lambda engine, context: engine.switch_adapter(ME, context, ""),
    "reserve": lambda engine, context: engine.reserve_pages(ME, context, 1),
    "commit": lambda engine, context: engine.commit_pages(ME, context, 1),
    "release": lambda engine, context: engine.release_pages(ME, context, 1),
}


async def test_a_context_has_one_writer(engine: LocalEngine) -> None:
    context = await filled(engine, 20)
    pieces = engine.generate(ME, GenerateRequest(context_id=context, max_tokens=900, ignore_eos=True))
    await anext(pieces)
    for name, write in WRITES.items():
        with pytest.raises(Aborted, match="another operation") as error:
            await write(engine, context)
        assert error.value.reason == "CONTEXT_BUSY", name
    assert (await context_info(engine, ME, context)).state is ContextState.BUSY
    (child,) = await engine.fork(ME, context)
    assert child.state is ContextState.IDLE
    assert (await engine.update(ME, context, UpdateContextRequest(labels={"k": "v"}))).labels == {"k": "v"}
    await pieces.aclose()


REFUSED: list[tuple[str, Operation, type[JaxctxError], str]] = [
    ("truncate", lambda engine, c: engine.truncate(ME, c, 9), OutOfRange, ""),
    ("rewind", lambda engine, c: engine.rewind(ME, c, 41), OutOfRange, ""),
    ("switch adapter", lambda engine, c: engine.switch_adapter(ME, c, "nobody"), NotFound, "ADAPTER_NOT_FOUND"),
    ("commit too many", lambda engine, c: engine.commit_pages(ME, c, 2), OutOfRange, ""),
    ("commit", lambda engine, c: engine.commit_pages(ME, c, 1), FailedPrecondition, "PAGE_NOT_FULL"),
    ("release", lambda engine, c: engine.release_pages(ME, c, 2), OutOfRange, ""),
    ("reserve", lambda engine, c: engine.reserve_pages(ME, c, 129), ResourceExhausted, "NEVER_FITS"),
]


@pytest.mark.parametrize(("name", "operation", "kind", "reason"), REFUSED, ids=[each[0] for each in REFUSED])
async def test_what_is_refused_changes_nothing(
    engine: LocalEngine, name: str, operation: Operation, kind: type[JaxctxError], reason: str
) -> None:
    context = await filled(engine, 40)
    before = await context_info(engine, ME, context)
    with pytest.raises(kind) as error:
        await operation(engine, context)
    assert not reason or error.value.reason == reason
    after = await context_info(engine, ME, context)
    assert replace(after, used_at=before.used_at) == before


async def test_pages_that_others_hold_are_waited_for_until_the_deadline(make_engine, clock) -> None:
    engine = make_engine(replace(SMALL, pages=8, max_context_tokens=128))
    pinned = await filled(engine, 64, pinned=True)
    context = await filled(engine, 0)
    with pytest.raises(ResourceExhausted, match="none was taken") as error:
        await engine.reserve_pages(replace(ME, deadline=clock() + 0.3), context, 5)
    assert error.value.reason == "OUT_OF_PAGES"
    assert (await context_info(engine, ME, context)).working_pages == 0
    waiting = asyncio.create_task(engine.reserve_pages(replace(ME, deadline=clock() + 60), context, 5))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engine.close(ME, pinned)
    assert (await waiting).working_pages == 5


async def test_forks_are_all_or_none(engine: LocalEngine) -> None:
    parent, taken = await filled(engine, 20), await filled(engine, 1, context_id="taken")
    with pytest.raises(AlreadyExists):
        await engine.fork(ME, parent, child_ids=["new", taken])
    assert {each.context_id for each in await engine.list(ME)} == {parent, taken}
    children = await engine.fork(ME, parent, child_ids=["a", "b"])
    assert [(child.context_id, child.parent_id, child.forked_at) for child in children] == [
        ("a", parent, 20),
        ("b", parent, 20),
    ]
    assert len(await engine.fork(ME, parent, n=3)) == 3
    assert len(await engine.fork(ME, parent)) == 1


async def test_a_child_of_a_program_s_context_is_its_caller_s(engine: LocalEngine) -> None:
    parent = await filled(engine, 20, labels={**PROGRAM_LABELS, "k": "v"})
    assert await engine.list(ME) == []
    assert [each.context_id for each in await engine.list(ME, include_program_contexts=True)] == [parent]
    (child,) = await engine.fork(ME, parent)
    assert child.labels == {"k": "v"}
    assert [each.context_id for each in await engine.list(ME)] == [child.context_id]


async def test_an_engine_holds_so_many_contexts(make_engine) -> None:
    engine = make_engine(replace(SMALL, max_contexts=2))
    first = await filled(engine, 1)
    await filled(engine, 1, caller=OTHER)
    for call in (engine.create(ME, CreateContextRequest()), engine.fork(ME, first)):
        with pytest.raises(ResourceExhausted) as error:
            await call
        assert error.value.reason == "TOO_MANY_CONTEXTS"


async def test_plans_and_pages_look_at_no_contexts_of_others(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of them, and each look takes time from everybody's steps."""
    context = (await engine.create(ME, CreateContextRequest(pinned=True))).context_id
    await engine.fill(ME, context, [1] * 40)
    for _ in range(3):
        other = (await engine.create(OTHER, CreateContextRequest())).context_id
        await engine.fill(OTHER, other, [1] * 40)

    def refuse(table: ContextTable) -> NoReturn:
        raise AssertionError("all contexts are looked at")

    monkeypatch.setattr(ContextTable, "__iter__", refuse)
    planned = await engine.plan(ME, [2] * 40)
    assert planned.pages_available == engine.core.config.pages - 3
    planned = await engine.plan(ME, [2], context_id=context)
    assert planned.pages_available == engine.core.config.pages - 3
    found = await engine.inspect(ME, context, include_pages=True)
    assert found.pages is not None
    assert [*found.pages.refcounts] == [1, 1, 1]
    monkeypatch.undo()


async def test_a_plan_is_what_a_fill_then_finds(engine: LocalEngine) -> None:
    await filled(engine, 100)
    planned = await engine.plan(ME, [1] * 120)
    assert planned == PlanResult(
        tokens=120, resident=96, restored=0, computed=24, pages_needed=2, pages_available=128, host=0, disk=0
    )
    context = await filled(engine, 0)
    found = await engine.fill(ME, context, [1] * 120)
    assert (found.resident, found.restored, found.computed) == (96, 0, 24)
    # In a context: behind its own pages, with what it has buffered. The last token is always computed.
    await engine.fill(ME, context, [1] * 6, defer=True)
    planned = await engine.plan(ME, [1, 2], context_id=context)
    assert (planned.tokens, planned.resident, planned.computed, planned.pages_needed) == (8, 0, 8, 0)
    # A prompt that is cached to its end.
    planned = await engine.plan(ME, [1] * 96)
    assert (planned.resident, planned.computed, planned.pages_needed) == (95, 1, 0)
    planned = await engine.plan(ME, [1] * 96, salt="another")
    assert (planned.resident, planned.computed, planned.pages_needed) == (0, 96, 6)
    planned = await engine.plan(ME, [])
    assert (planned.tokens, planned.computed, planned.pages_needed) == (0, 0, 0)


async def test_a_plan_counts_what_its_tenant_keeps_and_nobody_else(engine: LocalEngine) -> None:
    pinned = await filled(engine, 64, pinned=True)
    await filled(engine, 64, token=2)
    await filled(engine, 64, token=3, caller=OTHER, pinned=True)
    assert (await engine.plan(ME, [9])).pages_available == 128 - 4
    assert (await engine.plan(ME, [9], context_id=pinned)).pages_available == 128 - 4
    await engine.update(ME, pinned, UpdateContextRequest(pinned=False))
    assert (await engine.plan(ME, [9])).pages_available == 128


async def test_where_the_pages_of_a_context_are(make_engine) -> None:
    engine = make_engine(replace(SMALL, pages=8, max_context_tokens=128, host_pages=2))
    context = await filled(engine, 60)

    async def tiers() -> list[Tier]:
        pages = (await engine.inspect(ME, context, True)).pages
        assert pages is not None
        return list(pages.tiers)

    assert await tiers() == [Tier.DEVICE] * 4
    await engine.close(ME, await filled(engine, 120, token=2))
    assert (await context_info(engine, ME, context)).state is ContextState.SUSPENDED
    found = await tiers()
    assert len(found) == 4
    assert found.count(Tier.HOST) <= 2
    assert found[-1] in (Tier.HOST, Tier.LINEAGE)
    await engine.fill(ME, context, [7])
    assert await tiers() == [Tier.DEVICE] * 4


async def test_a_rewind_into_a_page_takes_the_page_that_it_frees(make_engine) -> None:
    """Where its context holds all pages, and where others would have to be suspended."""
    engine = make_engine(replace(SMALL, pages=4, max_context_tokens=64))
    context = await filled(engine, 64)
    assert layout(await engine.rewind(ME, context, 63)) == (3, 1, 15, 0)
    await engine.close(ME, context)
    idle, context = await filled(engine, 16, token=2), await filled(engine, 48)
    await engine.rewind(ME, context, 47)
    assert (await context_info(engine, ME, idle)).state is not ContextState.SUSPENDED
    (fork,) = await engine.fork(ME, context, n=1)  # which holds the pages that a rewind would free
    await engine.rewind(ME, context, 31)
    assert (await context_info(engine, ME, idle)).state is ContextState.SUSPENDED
    assert (await engine.rewind(ME, fork.context_id, 32)).seq_len == 32


async def test_tenants_that_have_contexts_are_listed_in_order(engine: LocalEngine) -> None:
    """Nobody sees those under which the engine files what it holds for snapshots and publications."""
    made = {tenant: await filled(engine, 40, caller=Caller(tenant)) for tenant in ("c", "a", "", "b")}
    await engine.save(Caller("a"), SaveRequest(context_id=made["a"], name="n"))
    await engine.publish(Caller("b"), made["b"], RetentionUpdate())
    assert await engine.tenants("", 10) == ["a", "b", "c"]
    assert await engine.tenants("a", 1) == ["b"]
    await engine.close(Caller("a"), made["a"])
    assert await engine.tenants("", 10) == ["b", "c"]
