"""Watch: what a reader is told, in what order, and what it may miss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context import Context
from jaxctx.cache.context_cache import ContextCache, Identity
from jaxctx.engine.contexts.lifecycle import ContextLifecycle
from jaxctx.engine.contexts.quotas import Quotas
from jaxctx.engine.contexts.watch import EVENTS, Watch
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import JaxctxError, NotFound, Unavailable
from jaxctx.types import (
    Comparison,
    ContextChange,
    ContextEvent,
    CreateContextRequest,
    GenerateRequest,
    Ttl,
    UpdateContextRequest,
)
from tests.engines import SMALL, context_info

IDENTITY = Identity("t", "model")


class WatchedCache:
    """A cache with readers of its changes; a context is described by its version alone."""

    def __init__(self) -> None:
        ids, self.now = iter(range(10**6)), 0.0
        new_id = lambda: f"c{next(ids) * 7919 % 10_007:05}"  # noqa: E731
        self.cache = ContextCache(BlockManager(pages=8, page_size=4), clock=lambda: self.now, new_id=new_id)
        scheduler: Any = SimpleNamespace(budget=SimpleNamespace(), writers={})
        self.lifecycle = ContextLifecycle(self.cache, scheduler, Quotas(SMALL), lambda: self.now)

    @staticmethod
    def describe(context: Context) -> int:
        return context.version

    def create(self, tenant: str = "t", context_id: str | None = None) -> Context:
        context = self.cache.create(IDENTITY, tenant=tenant, context_id=context_id)
        self.note(context, ContextChange.CREATED)
        return context

    def note(self, context: Context, change: ContextChange = ContextChange.CHANGED) -> None:
        self.now += 1
        if change in (ContextChange.CLOSED, ContextChange.EXPIRED):
            self.cache.close(context)
        self.lifecycle.notify_changed(context, change)

    def join(self, tenant: str = "t", **options: Any) -> Watch:
        woken: list[None] = []
        watch = Watch(tenant, self.cache, lambda: self.now, lambda: woken.append(None), **options)
        watch.woken = woken  # type: ignore[attr-defined]
        self.lifecycle.add_watch(watch)
        return watch

    def events(self, watch: Watch) -> list[ContextEvent]:
        return watch.read(self.describe)  # type: ignore[arg-type]

    def read(self, watch: Watch) -> list[tuple[str, str, object]]:
        return [(event.change.value, event.context_id, event.context) for event in self.events(watch)]


@pytest.fixture
def watched() -> WatchedCache:
    return WatchedCache()


def test_first_everything_that_is_there_then_every_change(watched: WatchedCache) -> None:
    a, b = watched.create(), watched.create()
    theirs = watched.create("other")
    watch = watched.join()
    assert watched.read(watch) == [("exists", context.id, 1) for context in sorted((a, b), key=lambda c: c.id)]
    assert watched.read(watch) == []
    watched.note(theirs)
    assert not watch.woken  # type: ignore[attr-defined]
    watched.note(a)
    watched.note(b, ContextChange.SUSPENDED)
    assert watch.woken == [None]  # type: ignore[attr-defined]
    c = watched.create()
    watched.note(theirs, ContextChange.CLOSED)
    events = watched.events(watch)
    assert [(e.change, e.context_id, e.context, e.at.timestamp()) for e in events] == [
        (ContextChange.CHANGED, a.id, 2, 5.0),
        (ContextChange.SUSPENDED, b.id, 2, 6.0),
        (ContextChange.CREATED, c.id, 1, 7.0),
    ]


def test_changes_between_two_reads_become_one_that_tells_the_present(watched: WatchedCache) -> None:
    a, b = watched.create(), watched.create()
    watch = watched.join()
    watched.read(watch)
    for _ in range(10):
        watched.note(a)
    watched.note(b)
    watched.note(a, ContextChange.SUSPENDED)
    watched.note(a)
    c = watched.create()
    watched.note(c)
    assert watched.read(watch) == [("changed", a.id, 13), ("changed", b.id, 2), ("created", c.id, 2)]
    watched.note(a)
    watched.note(a, ContextChange.CLOSED)
    watched.note(b, ContextChange.EXPIRED)
    assert watched.read(watch) == [("closed", a.id, None), ("expired", b.id, None)]


def test_the_end_of_a_context_comes_before_a_new_one_of_its_id(watched: WatchedCache) -> None:
    first = watched.create(context_id="x")
    watch = watched.join()
    watched.read(watch)
    watched.note(first)
    watched.note(first, ContextChange.CLOSED)
    second = watched.create(context_id="x")
    watched.note(second, ContextChange.CLOSED)
    watched.create(context_id="x")
    assert watched.read(watch) == [("closed", "x", None), ("closed", "x", None), ("created", "x", 1)]


def test_a_reader_that_lags_is_told_everything_again(watched: WatchedCache) -> None:
    contexts = [watched.create() for _ in range(6)]
    watch = watched.join(limit=4)
    watched.read(watch)
    for context in contexts[:5]:
        watched.note(context)
    watched.note(contexts[0], ContextChange.CLOSED)
    rest = sorted((context.id, context.version) for context in contexts[1:])
    assert watched.read(watch) == [("reset", "", None), *(("exists", *each) for each in rest)]
    assert watched.read(watch) == []
    watched.note(contexts[1])
    assert watched.read(watch) == [("changed", contexts[1].id, 3)]


def test_a_long_list_comes_in_parts_between_which_nothing_is_lost_or_told_twice(watched: WatchedCache) -> None:
    contexts = sorted((watched.create(context_id=f"{i:04}") for i in range(EVENTS + 10)), key=lambda c: c.id)
    watch = watched.join()
    assert len(watched.read(watch)) == EVENTS
    early, late = contexts[3], contexts[EVENTS + 3]
    watched.note(early)
    watched.note(late)  # not told yet: the listing will
    watched.note(contexts[-1], ContextChange.CLOSED)  # never told
    watched.create(context_id="0000x")
    assert watched.read(watch) == [
        ("changed", early.id, 2),
        ("created", "0000x", 1),
        *(("exists", context.id, context.version) for context in contexts[EVENTS:-1]),
    ]
    assert late.version == 2
    assert watched.read(watch) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_s_picture_is_right_whenever_it_has_read_all(watched: WatchedCache, seed: int) -> None:
    source, contexts, watch = random.Random(seed), [], watched.join(limit=5)
    picture: dict[str, int] = {}
    for _ in range(2000):
        action = source.random()
        if action < 0.2 and len(contexts) < 12:
            taken = {context.id for context in contexts}
            contexts.append(
                watched.create(context_id=source.choice([i for i in map(str, range(20)) if i not in taken]))
            )
        elif action < 0.35 and contexts:
            watched.note(
                contexts.pop(source.randrange(len(contexts))),
                source.choice([ContextChange.CLOSED, ContextChange.EXPIRED]),
            )
        elif action < 0.8 and contexts:
            watched.note(source.choice(contexts))
        else:
            apply(picture, watched.events(watch))
            if source.random() < 0.5:
                while events := watched.events(watch):
                    apply(picture, events)
                assert picture == {context.id: context.version for context in contexts}


def apply(picture: dict[str, int], events: list[ContextEvent]) -> None:
    for event in events:
        version: Any = event.context
        if event.change is ContextChange.RESET:
            picture.clear()
        elif event.context is None:
            picture.pop(event.context_id, None)
        elif event.change is ContextChange.CHANGED:
            assert version > picture[event.context_id], "an older state than the reader knows"
            picture[event.context_id] = version
        else:
            assert event.context_id not in picture, "told twice"
            picture[event.context_id] = version


def test_a_thousand_readers_come_and_go(watched: WatchedCache) -> None:
    context = watched.create()
    watches = [watched.join() for _ in range(1000)]
    for watch in watches:
        watched.read(watch)
    watched.note(context)
    assert all(watched.read(watch) == [("changed", context.id, 2)] for watch in watches)
    for watch in watches:
        watched.lifecycle.remove_watch(watch)
    watched.note(context)
    assert not any(watched.read(watch) for watch in watches)
    assert not any(watched.lifecycle.watches.values())


# --- in an engine -----------------------------------------------------------------------------------------------------

ME, OTHER = Caller("me"), Caller("other")


async def told(events: AsyncIterator[ContextEvent], until: ContextChange, context_id: str) -> list[ContextEvent]:
    """What comes up to and with this."""
    seen: list[ContextEvent] = []
    async with asyncio.timeout(120):
        async for event in events:
            seen.append(event)
            if (event.change, event.context_id) == (until, context_id):
                return seen
    raise AssertionError("the watch ended")


async def test_everything_that_happens_to_a_tenant_s_contexts(make_engine, clock) -> None:
    engine = make_engine(replace(SMALL, pages=16))
    first = await engine.create(ME, CreateContextRequest())
    theirs = await engine.create(OTHER, CreateContextRequest())
    events = engine.watch(ME)
    (exists,) = await told(events, ContextChange.EXISTS, first.context_id)
    assert exists.context == first
    a = (await engine.create(ME, CreateContextRequest(ttl=Ttl(1000)))).context_id
    (created,) = await told(events, ContextChange.CREATED, a)
    version = created.context.version
    calls = [
        engine.fill(ME, a, [1] * 40),
        engine.fill(ME, a, [1] * 3, defer=True),
        engine.fill(ME, a),
        engine.truncate(ME, a, 2),
        engine.reserve_pages(ME, a, 2),
        engine.release_pages(ME, a, 1),
        engine.rewind(ME, a, 20),
        engine.switch_adapter(ME, a, ""),
        engine.update(ME, a, UpdateContextRequest(labels={"k": "v"})),
        engine.update(ME, a, UpdateContextRequest(ttl=Ttl(500))),
        engine.update(ME, a, UpdateContextRequest(pinned=True)),
        engine.update(ME, a, UpdateContextRequest(pinned=False)),
    ]
    for call in calls:
        await call
        now = await context_info(engine, ME, a)
        assert now.version > version
        version = now.version
        last = (await told(events, ContextChange.CHANGED, a))[-1].context
        while last != now:  # of several changes that one call made, an earlier one may have been told alone
            assert last.version < now.version
            last = (await told(events, ContextChange.CHANGED, a))[-1].context
    (b,) = await engine.fork(ME, a)
    assert (await told(events, ContextChange.FORKED, b.context_id))[-1].context == b
    await engine.fill(OTHER, theirs.context_id, [7] * 15 * 16)  # needs their pages
    seen = [event.context_id for event in await told(events, ContextChange.SUSPENDED, b.context_id)]
    assert theirs.context_id not in seen
    await engine.close(ME, b.context_id)
    assert (await told(events, ContextChange.CLOSED, b.context_id))[-1].context is None
    clock.offset += 500
    await told(events, ContextChange.EXPIRED, a)
    await events.aclose()
    await engine.stats()
    assert not any(engine.core.lifecycle.watches.values())


async def test_looking_and_failing_change_no_version(engine: LocalEngine) -> None:
    a = (await engine.create(ME, CreateContextRequest())).context_id
    version = (await engine.fill(ME, a, [1] * 20)).context.version
    for wrong in (engine.truncate(ME, a, 9), engine.rewind(ME, a, 99), engine.commit_pages(ME, a, 1)):
        with pytest.raises(JaxctxError):
            await wrong
    await engine.plan(ME, [1, 2], context_id=a)
    await engine.compare(ME, a, a)
    await engine.inspect(ME, a, True, True, True)
    await engine.fork(ME, a)
    assert (await context_info(engine, ME, a)).version == version


async def test_a_generation_is_watched_and_its_last_event_tells_the_end(engine: LocalEngine) -> None:
    a = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, a, [1] * 20)
    events = engine.watch(ME)
    await told(events, ContextChange.EXISTS, a)
    request = GenerateRequest(context_id=a, max_tokens=50, ignore_eos=True)
    last = [piece async for piece in engine.generate(ME, request)][-1].context
    seen: list[Any] = []
    while not seen or seen[-1] != last:
        seen += [event.context for event in await told(events, ContextChange.CHANGED, a)]
    assert [info.version for info in seen] == sorted({info.version for info in seen})
    assert seen[-1].version >= 50


async def test_readers_that_leave_are_forgotten_and_those_that_stay_end_with_the_engine(make_engine) -> None:
    engine = make_engine(SMALL)
    await engine.create(ME, CreateContextRequest())
    watches = [engine.watch(ME) for _ in range(1000)]
    await asyncio.gather(*(anext(events) for events in watches))
    waiting = [asyncio.ensure_future(anext(events)) for events in watches]
    await engine.stats()
    for task in waiting[:999]:
        task.cancel()
    await asyncio.gather(*waiting[:999], return_exceptions=True)
    await engine.stats()
    assert [len(readers) for readers in engine.core.lifecycle.watches.values()] == [1]
    engine.stop()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting[999], 5)


async def test_compare_in_an_engine(engine: LocalEngine) -> None:
    a = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, a, [1] * 40)
    b = (await engine.fork(ME, a))[0].context_id
    await engine.fill(ME, b, [2, 3])
    assert await engine.compare(ME, a, b) == Comparison(common_tokens=40, shared_pages=2, length_a=40, length_b=42)
    with pytest.raises(NotFound):
        await engine.compare(OTHER, a, b)
