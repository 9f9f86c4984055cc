"""Watch: what a reader is told, in what order, and what it may miss."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxctx.cache.context import Context
from jaxctx.cache.contexts import ContextCache, Identity
from jaxctx.engine.answers import Change, ContextEvent
from jaxctx.engine.watch import EVENTS, Watch, Watchers

IDENTITY = Identity("t", "model")


class Room:
    """A cache with watchers; a context is described by its version alone."""

    def __init__(self) -> None:
        ids, self.now = iter(range(10**6)), 0.0
        self.cache = ContextCache(
            pages=8, page_size=4, clock=lambda: self.now, new_id=lambda: f"c{next(ids) * 7919 % 10_007:05}"
        )
        self.watchers = Watchers(self.cache, lambda: self.now)

    @staticmethod
    def describe(context: Context) -> int:
        return context.version

    def create(self, tenant: str = "t", context_id: str | None = None) -> Context:
        context = self.cache.create(IDENTITY, tenant=tenant, context_id=context_id)
        self.note(context, Change.CREATED)
        return context

    def note(self, context: Context, change: Change = Change.CHANGED) -> None:
        self.now += 1
        context.version += 1
        if change in (Change.CLOSED, Change.EXPIRED):
            self.cache.close(context)
        self.watchers.note(context, change)

    def join(self, tenant: str = "t", **options: Any) -> Watch:
        woken: list[None] = []
        watch = Watch(tenant, lambda: woken.append(None), **options)
        watch.woken = woken  # type: ignore[attr-defined]
        self.watchers.join(watch)
        return watch

    def events(self, watch: Watch) -> list[ContextEvent]:
        return self.watchers.read(watch, self.describe)  # type: ignore[arg-type]

    def read(self, watch: Watch) -> list[tuple[str, str, object]]:
        return [(event.change.value, event.context_id, event.context) for event in self.events(watch)]


@pytest.fixture
def room() -> Room:
    return Room()


def test_first_everything_that_is_there_then_every_change(room: Room) -> None:
    a, b = room.create(), room.create()
    theirs = room.create("other")
    watch = room.join()
    assert room.read(watch) == [("exists", context.id, 1) for context in sorted((a, b), key=lambda c: c.id)]
    assert room.read(watch) == []
    room.note(theirs)
    assert not watch.woken  # type: ignore[attr-defined]
    room.note(a)
    room.note(b, Change.SUSPENDED)
    assert watch.woken == [None]  # type: ignore[attr-defined]
    c = room.create()
    room.note(theirs, Change.CLOSED)
    events = room.events(watch)
    assert [(e.change, e.context_id, e.context, e.at) for e in events] == [
        (Change.CHANGED, a.id, 2, 5.0),
        (Change.SUSPENDED, b.id, 2, 6.0),
        (Change.CREATED, c.id, 1, 7.0),
    ]


def test_changes_between_two_reads_become_one_that_tells_the_present(room: Room) -> None:
    a, b = room.create(), room.create()
    watch = room.join()
    room.read(watch)
    for _ in range(10):
        room.note(a)
    room.note(b)
    room.note(a, Change.SUSPENDED)
    room.note(a)
    c = room.create()
    room.note(c)
    assert room.read(watch) == [("changed", a.id, 13), ("changed", b.id, 2), ("created", c.id, 2)]
    room.note(a)
    room.note(a, Change.CLOSED)
    room.note(b, Change.EXPIRED)
    assert room.read(watch) == [("closed", a.id, None), ("expired", b.id, None)]


def test_the_end_of_a_context_comes_before_a_new_one_of_its_id(room: Room) -> None:
    first = room.create(context_id="x")
    watch = room.join()
    room.read(watch)
    room.note(first)
    room.note(first, Change.CLOSED)
    second = room.create(context_id="x")
    room.note(second, Change.CLOSED)
    room.create(context_id="x")
    assert room.read(watch) == [("closed", "x", None), ("closed", "x", None), ("created", "x", 1)]


def test_a_reader_that_lags_is_told_everything_again(room: Room) -> None:
    contexts = [room.create() for _ in range(6)]
    watch = room.join(limit=4)
    room.read(watch)
    for context in contexts[:5]:
        room.note(context)
    room.note(contexts[0], Change.CLOSED)
    rest = sorted((context.id, context.version) for context in contexts[1:])
    assert room.read(watch) == [("reset", "", None), *(("exists", *each) for each in rest)]
    assert room.read(watch) == []
    room.note(contexts[1])
    assert room.read(watch) == [("changed", contexts[1].id, 3)]


def test_a_long_list_comes_in_parts_between_which_nothing_is_lost_or_told_twice(room: Room) -> None:
    contexts = sorted((room.create(context_id=f"{i:04}") for i in range(EVENTS + 10)), key=lambda c: c.id)
    watch = room.join()
    assert len(room.read(watch)) == EVENTS
    early, late = contexts[3], contexts[EVENTS + 3]
    room.note(early)
    room.note(late)  # not told yet: the listing will
    room.note(contexts[-1], Change.CLOSED)  # never told
    room.create(context_id="0000x")
    assert room.read(watch) == [
        ("changed", early.id, 2),
        ("created", "0000x", 1),
        *(("exists", context.id, context.version) for context in contexts[EVENTS:-1]),
    ]
    assert late.version == 2
    assert room.read(watch) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_s_picture_is_right_whenever_it_has_read_all(room: Room, seed: int) -> None:
    source, contexts, watch = random.Random(seed), [], room.join(limit=5)
    picture: dict[str, int] = {}
    for _ in range(2000):
        action = source.random()
        if action < 0.2 and len(contexts) < 12:
            taken = {context.id for context in contexts}
            contexts.append(room.create(context_id=source.choice([i for i in map(str, range(20)) if i not in taken])))
        elif action < 0.35 and contexts:
            room.note(contexts.pop(source.randrange(len(contexts))), source.choice([Change.CLOSED, Change.EXPIRED]))
        elif action < 0.8 and contexts:
            room.note(source.choice(contexts))
        else:
            apply(picture, room.events(watch))
            if source.random() < 0.5:
                while events := room.events(watch):
                    apply(picture, events)
                assert picture == {context.id: context.version for context in contexts}


def apply(picture: dict[str, int], events: list[ContextEvent]) -> None:
    for event in events:
        version: Any = event.context
        if event.change is Change.RESET:
            picture.clear()
        elif event.context is None:
            picture.pop(event.context_id, None)
        elif event.change is Change.CHANGED:
            assert version > picture[event.context_id], "an older state than the reader knows"
            picture[event.context_id] = version
        else:
            assert event.context_id not in picture, "told twice"
            picture[event.context_id] = version


def test_a_thousand_readers_come_and_go(room: Room) -> None:
    context = room.create()
    watches = [room.join() for _ in range(1000)]
    for watch in watches:
        room.read(watch)
    room.note(context)
    assert all(room.read(watch) == [("changed", context.id, 2)] for watch in watches)
    for watch in watches:
        room.watchers.leave(watch)
        room.watchers.leave(watch)
    assert not room.watchers._readers
