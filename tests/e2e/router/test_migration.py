"""Contexts of an engine that leaves its router go on at another engine on the same store, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.interface import PROGRAM_LABELS, Caller
from jaxctx.types import ContextChange, ContextState, CreateContextRequest
from jaxctx_server.cluster import ALONE, Cluster, leave_router
from jaxctx_server.router import migration
from jaxctx_server.router.migration import MIGRATION_TIMEOUT_S, Migrator, MoveResult
from jaxctx_server.router.placement import ContextKey, Placement
from tests.e2e.conftest import CONFIG, served
from tests.e2e.router_cluster import LONG_TEXT, RouterCluster, address_of, router_of, wait_until
from tests.engines import Clock

GREEDY: Any = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def store(tmp_path: Any) -> Callable[[str], str | None]:
    """Where an engine keeps snapshots: all in one place."""
    return lambda name: str(tmp_path)


@pytest.fixture
async def router_cluster(
    make_engine: Any, clock: Clock, store: Callable[[str], str | None]
) -> AsyncIterator[RouterCluster]:
    """A router that two engines of one model have joined."""
    found = RouterCluster(clock, None, ALONE)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(router_of(found))
        for name in ("a", "b"):
            engine, own = make_engine(CONFIG, store=store(name), whole=False, device=name), Cluster()
            address = await stack.enter_async_context(served(engine, CONFIG, clock, None, own))
            await engine.stats()  # of which the next ones need not wait for a step that is still to be compiled
            found.engines[address] = engine
            await found.register(address, own)
        yield found
        for task in found.registrations.values():
            task.cancel()


async def leave(router_cluster: RouterCluster, address: str, leaving_s: float = 30.0) -> None:
    """As an engine does before it drains."""
    port = int(address.rpartition(":")[2])
    await leave_router(router_cluster.router, router_cluster.engine_clusters[address], port, leaving_s)


def other_than(router_cluster: RouterCluster, address: str) -> str:
    (other,) = router_cluster.engines.keys() - {address}
    return other


async def names(router_cluster: RouterCluster) -> list[str]:
    """Of all snapshots that any engine knows of."""
    return [
        each.name
        for engine in router_cluster.engines.values()
        for each in await engine.snapshots(Caller(), "", "", 100)
    ]


def failing(error: Exception) -> Callable[..., Any]:
    async def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


async def test_contexts_go_on_where_they_were(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, clock: Clock
) -> None:
    async with await client.create(LONG_TEXT) as alone:
        told = str(await alone.complete(**GREEDY)) + str(await alone.complete(**GREEDY))
    settings: Any = {"labels": {"a": "b"}, "priority": 7, "pinned": True, "pin_s": 500.0, "ttl_s": 900.0}
    context = await client.create(LONG_TEXT, context_id="mine", salt="s", manual_commit=True, **settings)
    first = await address_of(router_cluster, "mine")
    said = str(await context.complete(**GREEDY))
    sliding = await client.create(ttl_s=50, sliding=True)
    (fork,) = await context.fork()
    empty = await client.create()
    before, tokens = await context.refresh(), await context.tokens()
    await leave(router_cluster, first)
    second = other_than(router_cluster, first)
    for each in (context, sliding, fork, empty):
        assert await address_of(router_cluster, each.id) == second
    assert await names(router_cluster) == []
    assert said + str(await context.complete(**GREEDY)) == told
    assert (await context.tokens())[: len(tokens)] == tokens
    after = await context.refresh()
    kept = ("labels", "priority", "pinned", "salt")
    assert [getattr(after, each) for each in kept] == [getattr(before, each) for each in kept]
    assert before.expiry is not None
    assert before.pinned_until is not None
    assert after.expiry is not None
    assert after.pinned_until is not None
    assert abs(after.expiry.at - before.expiry.at) < timedelta(seconds=1)
    assert abs(after.pinned_until - before.pinned_until) < timedelta(seconds=1)
    slides = (await sliding.refresh()).expiry
    assert slides is not None
    assert (slides.seconds, slides.sliding) == (50, True)
    assert (await fork.refresh()).expiry is not None
    assert (await empty.refresh()).expiry is None
    clock.offset += MIGRATION_TIMEOUT_S + 1
    assert await empty.fill("Something")
    listed = [each.id async for each in client.contexts()]
    assert sorted(listed) == sorted([context.id, fork.id, empty.id])
    await router_cluster.engines[first].drain()


async def test_a_context_that_is_at_work_moves_when_it_is_done(
    router_cluster: RouterCluster, client: jaxctx.aio.Client
) -> None:
    context = await client.create("Tell: ", context_id="mine")
    first = await address_of(router_cluster, "mine")
    telling = asyncio.create_task(context.complete(max_tokens=400, temperature=0, ignore_eos=True))
    await wait_until(lambda: router_cluster.handles[first].forwarded > 0)
    leaving = asyncio.create_task(leave(router_cluster, first))
    await wait_until(lambda: router_cluster.handles[first].draining)
    new = await client.create("Tell: ")  # what is new goes elsewhere
    assert await address_of(router_cluster, new.id) == other_than(router_cluster, first)
    assert not leaving.done()
    assert len((await telling).token_ids) == 400
    await leaving
    assert await address_of(router_cluster, "mine") == other_than(router_cluster, first)
    again = str(await context.complete(**GREEDY))
    await new.complete(max_tokens=400, temperature=0, ignore_eos=True)
    assert again == str(await new.complete(**GREEDY))


@pytest.mark.parametrize("prompt", [LONG_TEXT, None])
async def test_calls_wait_for_a_context_that_moves(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch, prompt: str | None
) -> None:
    """The first fill of an empty one too, which else would have a place chosen for it."""
    context = await client.create(prompt, context_id="mine")
    first, gate, reached = await address_of(router_cluster, "mine"), asyncio.Event(), asyncio.Event()
    save = router_cluster.engines[first].save

    async def slowly(*arguments: Any) -> Any:
        reached.set()
        await gate.wait()
        return await save(*arguments)

    monkeypatch.setattr(router_cluster.engines[first], "save", slowly)
    seen: list[tuple[ContextChange, str]] = []

    async def watch() -> None:
        async for event in client.watch():
            seen.append((event.change, event.context_id))

    watching = asyncio.create_task(watch())
    await wait_until(lambda: bool(seen))
    leaving = asyncio.create_task(leave(router_cluster, first))
    await asyncio.wait_for(reached.wait(), 60)
    filling = asyncio.create_task(context.fill("more", timeout_s=20))
    await asyncio.sleep(0.1)
    assert not filling.done()
    gate.set()
    assert (await filling).context.seq_len == len(await context.tokens())
    await leaving
    assert await address_of(router_cluster, "mine") == other_than(router_cluster, first)
    assert ContextChange.CLOSED not in dict(seen)
    watching.cancel()


async def test_an_engine_that_leaves_waits_for_what_is_on_its_way_to_it(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that this goes on from there. Here both leave, so that it stays where it came last."""
    await client.create(LONG_TEXT, context_id="mine")
    first, gate, reached = await address_of(router_cluster, "mine"), asyncio.Event(), asyncio.Event()
    second = other_than(router_cluster, first)
    take = router_cluster.engines[second].take

    async def slowly(*arguments: Any) -> Any:
        reached.set()
        await gate.wait()
        return await take(*arguments)

    monkeypatch.setattr(router_cluster.engines[second], "take", slowly)
    leaving = asyncio.create_task(leave(router_cluster, first))
    await asyncio.wait_for(reached.wait(), 120)
    leaving_too = asyncio.create_task(leave(router_cluster, second))
    await wait_until(lambda: router_cluster.handles[second].draining)
    await asyncio.sleep(0.25)  # longer than between two looks at its contexts
    assert not leaving_too.done()
    gate.set()
    await asyncio.gather(leaving, leaving_too)
    assert await address_of(router_cluster, "mine") == second


async def test_an_id_that_is_asked_for_again_meanwhile_is_not_free(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is filled then is in the context afterwards."""
    context = await client.create(LONG_TEXT, context_id="mine")
    first, gate, reached = await address_of(router_cluster, "mine"), asyncio.Event(), asyncio.Event()
    second = router_cluster.engines[other_than(router_cluster, first)]
    take = second.take

    async def slowly(*arguments: Any) -> Any:
        reached.set()
        await gate.wait()
        return await take(*arguments)

    monkeypatch.setattr(second, "take", slowly)
    leaving = asyncio.create_task(leave(router_cluster, first))
    await asyncio.wait_for(reached.wait(), 120)

    async def get_or_create() -> None:
        with pytest.raises(errors.AlreadyExists):
            await client.create(context_id="mine")
        await context.fill("more")

    filling = asyncio.create_task(get_or_create())
    await wait_until(lambda: bool(router_cluster.programs.working))  # the call that creates it is at the router
    gate.set()
    await filling
    await leaving
    assert await address_of(router_cluster, "mine") == other_than(router_cluster, first)
    assert "more" in await client.detokenize(await context.tokens())


async def test_a_move_that_meets_a_defect_is_not_the_end_of_its_context(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = await client.create(LONG_TEXT, context_id="mine")
    monkeypatch.setattr(Migrator, "migrate", failing(ZeroDivisionError("a defect")))
    await leave(router_cluster, await address_of(router_cluster, "mine"))
    assert (await context.fill("more")).context.context_id == "mine"


@pytest.mark.parametrize("what", ["save", "take", "update"])
async def test_what_fails_leaves_one_context_where_it_was(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, clock: Clock, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    context = await client.create(LONG_TEXT, context_id="mine")
    first = await address_of(router_cluster, "mine")
    second = router_cluster.engines[other_than(router_cluster, first)]
    broken = router_cluster.engines[first] if what == "save" else second
    monkeypatch.setattr(broken, what, failing(errors.ResourceExhausted("it fails", reason="PIN_BUDGET")))
    await leave(router_cluster, first)
    assert await names(router_cluster) == []
    assert (await context.fill("more")).context.context_id == "mine"
    assert await router_cluster.engines[first].inspect(Caller(), "mine")
    with pytest.raises(errors.NotFound):
        await second.inspect(Caller(), "mine")
    assert [each.id async for each in client.contexts()] == ["mine"]
    await router_cluster.engines[first].drain()
    with pytest.raises(errors.Unavailable) as error:
        await context.fill("more", timeout_s=10)
    assert error.value.reason == "DRAINING"


async def test_an_old_context_that_could_not_be_closed_is_not_asked_again(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = await client.create(LONG_TEXT, context_id="mine")
    first = await address_of(router_cluster, "mine")
    monkeypatch.setattr(router_cluster.engines[first], "close", failing(errors.Unavailable("it fails")))
    await leave(router_cluster, first)
    filled = await context.fill("more")
    assert [each.id async for each in client.contexts()] == ["mine"]
    held = await router_cluster.engines[other_than(router_cluster, first)].inspect(Caller(), "mine")
    assert held.context.seq_len == filled.context.seq_len
    monkeypatch.undo()


async def test_a_router_that_ends_between_loses_nothing(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the context has been taken, and the old one is still there."""
    await client.create(LONG_TEXT, context_id="mine")
    first = await address_of(router_cluster, "mine")
    second, reached = router_cluster.engines[other_than(router_cluster, first)], asyncio.Event()

    async def never(*_: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(second, "update", never)
    leaving = asyncio.create_task(leave(router_cluster, first))
    await asyncio.wait_for(reached.wait(), 120)
    for task in router_cluster.registrations.values():
        task.cancel()
    router_cluster.lifecycle.stop()
    await router_cluster.server.stop(None)
    await leaving
    again = RouterCluster(clock, None, ALONE, engine_clusters=router_cluster.engine_clusters)
    async with router_of(again), jaxctx.aio.Client(again.router, timeout_s=10) as client:
        for address in router_cluster.engines:
            await again.register(address)
        assert [each.id async for each in client.contexts()] == ["mine"]
        clock.offset += MIGRATION_TIMEOUT_S + 1
        assert await (await client.context("mine")).fill("more")
        assert await address_of(router_cluster, "mine") == first
        assert await names(router_cluster) == []
        for task in again.registrations.values():
            task.cancel()


async def test_a_router_that_is_new_moves_what_it_has_not_heard_of(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the list is, and of whatever tenants, who have not called since."""
    monkeypatch.setattr(migration, "MAX_LISTED", 2)
    ids = [(await client.create(LONG_TEXT)).id for _ in range(3)]
    owners = [Caller(tenant) for tenant in ("alice", "bob", "carol")]
    for owner in owners:
        await next(iter(router_cluster.engines.values())).create(owner, CreateContextRequest(context_id="mine"))
    for task in router_cluster.registrations.values():
        task.cancel()
    router_cluster.lifecycle.stop()
    await router_cluster.server.stop(None)
    again, (first, second) = (
        RouterCluster(clock, None, ALONE, engine_clusters=router_cluster.engine_clusters),
        router_cluster.engines,
    )
    async with router_of(again):
        for address in router_cluster.engines:
            await again.register(address)
        await leave(again, first)
        assert sorted(
            [each.context_id for each in await router_cluster.engines[second].list(Caller(), "", 100)]
        ) == sorted(ids)
        for owner in owners:
            assert await router_cluster.engines[second].inspect(owner, "mine")
        for task in again.registrations.values():
            task.cancel()


async def test_contexts_that_ended_by_themselves_take_no_time(
    router_cluster: RouterCluster, client: jaxctx.aio.Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router remembers many more of these than there are others, where contexts have a time to live."""
    migrate, migrated = Migrator.migrate, list[str]()

    async def spied(self: Migrator, placement: Placement, key: ContextKey, **options: Any) -> MoveResult:
        migrated.append(key.context_id)
        return await migrate(self, placement, key, **options)

    monkeypatch.setattr(Migrator, "migrate", spied)
    context = await client.create(LONG_TEXT, context_id="mine")
    first = await address_of(router_cluster, "mine")
    for fork in await context.fork(3):
        await fork.update(ttl_s=5)
    clock.offset += 6
    assert [each.id async for each in client.contexts()] == ["mine"]
    await leave(router_cluster, first)
    assert migrated == ["mine"]
    assert await address_of(router_cluster, "mine") == other_than(router_cluster, first)


async def test_a_context_that_moved_tells_its_new_engine(
    router_cluster: RouterCluster, client: jaxctx.aio.Client
) -> None:
    context = await client.create(LONG_TEXT, context_id="mine")
    first = context.engine_id
    assert first == await address_of(router_cluster, "mine")
    await leave(router_cluster, first)
    second = other_than(router_cluster, first)
    assert (await context.refresh()).engine_id == second
    assert context.engine_id == second
    assert (await context.complete(**GREEDY)).context.engine_id == second
    assert [each.engine_id async for each in client.contexts()] == [second]


async def test_contexts_of_programs_stay(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    """Their programs know where they are, and make them anew elsewhere."""
    context = await client.create(LONG_TEXT, context_id="mine", labels=PROGRAM_LABELS)
    first = await address_of(router_cluster, "mine")
    await leave(router_cluster, first)
    assert await address_of(router_cluster, "mine") == first
    await context.close()


async def test_the_last_engine_has_nowhere_to_move_to(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    context = await client.create(LONG_TEXT, context_id="mine")
    first = await address_of(router_cluster, "mine")
    second = other_than(router_cluster, first)
    router_cluster.leave(second)
    await wait_until(lambda: second not in router_cluster.handles)
    await leave(router_cluster, first)
    assert (await context.fill("more")).context.state is ContextState.IDLE
    assert await client.create("More")
    await leave(router_cluster, second)  # of which the router does not know


async def test_a_leave_that_takes_too_long_ends(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    context = await client.create("Tell: ", context_id="mine")
    pieces = context.generate(max_tokens=1400, ignore_eos=True)
    await anext(pieces)
    first = await address_of(router_cluster, "mine")
    async with asyncio.timeout(120):
        await leave(router_cluster, first, 0.3)
    pieces.close()
    with suppress(errors.Aborted):
        await context.fill("more")
    assert await address_of(router_cluster, "mine") == first


class TestWithoutOneStore:
    @pytest.fixture(params=["none", "each its own"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Any) -> Callable[[str], str | None]:
        return lambda name: None if request.param == "none" else f"{tmp_path}/{name}"

    async def test_contexts_stay(self, router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
        context = await client.create(LONG_TEXT, context_id="mine")
        first = await address_of(router_cluster, "mine")
        await leave(router_cluster, first)
        assert await address_of(router_cluster, "mine") == first
        assert await names(router_cluster) == []
        assert await context.fill("more")
