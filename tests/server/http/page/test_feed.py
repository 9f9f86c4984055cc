"""The contexts of one open page: changes that become one, limits, and which pages are read."""

from __future__ import annotations

import pytest

from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import CONTEXT_STATE_IDLE, Context
from jaxctx_server.http.page.feed import (
    MAX_PAGE_REQUESTS,
    MAX_PAGES_AT_ONCE,
    MAX_REREADS,
    ContextChanges,
    ContextFeed,
)

EXISTS, CREATED, CHANGED = pb.CONTEXT_CHANGE_EXISTS, pb.CONTEXT_CHANGE_CREATED, pb.CONTEXT_CHANGE_CHANGED


def change(context_id: str, kind: int = CHANGED, *, pages: int = 1, used_at: int = 0) -> pb.WatchContextsResponse:
    context = Context(context_id=context_id, committed_pages=pages, state=CONTEXT_STATE_IDLE)
    context.used_at.FromSeconds(used_at)
    return pb.WatchContextsResponse(change=kind, context_id=context_id, context=context)  # type: ignore[arg-type]


def closed(context_id: str) -> pb.WatchContextsResponse:
    return pb.WatchContextsResponse(change=pb.CONTEXT_CHANGE_CLOSED, context_id=context_id)


@pytest.fixture
def feed() -> ContextFeed:
    """One of three contexts, of which the page knows "a"."""
    feed = ContextFeed(limit=3)
    feed.apply(change("a", EXISTS))
    feed.take_changes()
    feed.take_page_requests()
    return feed


def taken(feed: ContextFeed) -> tuple[list[str], list[str]]:
    changes = feed.take_changes()
    assert changes is not None
    return [context.context_id for context in changes.changed], changes.removed


def test_the_first_changes_begin_anew() -> None:
    """What the page may have of an earlier connection is forgotten, also when there is nothing now."""
    assert ContextFeed().take_changes() == ContextChanges(reset=True, changed=[], removed=[], left_out=False)


def test_without_changes_there_is_nothing(feed: ContextFeed) -> None:
    assert feed.take_changes() is None


def test_changes_of_one_context_become_one(feed: ContextFeed) -> None:
    for pages in range(2, 50):
        feed.apply(change("a", pages=pages))
    changes = feed.take_changes()
    assert changes is not None
    assert [context.committed_pages for context in changes.changed] == [49]


def test_a_context_that_came_and_went_is_never_sent(feed: ContextFeed) -> None:
    feed.apply(change("b", CREATED))
    feed.apply(closed("b"))
    assert feed.take_changes() is None


def test_a_context_that_was_sent_is_removed(feed: ContextFeed) -> None:
    feed.apply(change("a"))
    feed.apply(closed("a"))
    assert taken(feed) == ([], ["a"])


def test_an_id_that_is_used_again_is_a_change(feed: ContextFeed) -> None:
    feed.apply(closed("a"))
    feed.apply(change("a", CREATED))
    assert taken(feed) == (["a"], [])


def test_after_lost_changes_all_begins_anew(feed: ContextFeed) -> None:
    feed.apply(pb.WatchContextsResponse(change=pb.CONTEXT_CHANGE_RESET))
    feed.apply(change("z", EXISTS))
    changes = feed.take_changes()
    assert changes is not None
    assert changes.reset
    assert [context.context_id for context in changes.changed] == ["z"]
    assert set(feed.contexts) == {"z"}


def test_the_contexts_used_last_are_kept(feed: ContextFeed) -> None:
    for i, name in enumerate("bcde", 1):
        feed.apply(change(name, CREATED, used_at=i))
    changes = feed.take_changes()
    assert changes is not None
    assert [context.context_id for context in changes.changed] == ["c", "d", "e"]
    assert (changes.removed, changes.left_out) == (["a"], True)
    feed.apply(change("a", used_at=9))
    assert taken(feed) == (["a"], ["c"])


def test_a_reader_that_never_takes_costs_no_more_memory() -> None:
    feed = ContextFeed(limit=10)
    for i in range(2000):
        feed.apply(change(f"c{i}", CREATED, used_at=i))
        if i % 3 == 0:
            feed.apply(closed(f"c{i}"))
    assert len(feed.contexts) <= 20
    sizes = [len(each) for each in (feed.changed, feed.removed, feed.sent, feed.unread, feed.uncertain)]
    assert max(sizes) <= 20


def test_pages_are_read_when_they_change(feed: ContextFeed) -> None:
    feed.apply(change("a", pages=1, used_at=5))
    assert feed.take_page_requests() == []
    feed.apply(change("a", pages=2, used_at=6))
    assert feed.take_page_requests() == ["a"]
    assert feed.take_page_requests() == []


@pytest.mark.parametrize("other", [change("b", CREATED), closed("b")])
def test_when_a_context_comes_or_goes_others_are_read_again(feed: ContextFeed, other: pb.WatchContextsResponse) -> None:
    """Its pages may be theirs too."""
    feed.apply(change("b", CREATED))
    feed.take_page_requests()
    feed.apply(closed("b"))
    feed.apply(other)
    assert "a" in feed.take_page_requests()


def test_a_turn_reads_few_contexts() -> None:
    feed = ContextFeed()
    for i in range(100):
        feed.apply(change(f"c{i}", EXISTS))
    first = feed.take_page_requests()
    assert len(first) == MAX_PAGE_REQUESTS
    while feed.unread or feed.uncertain:
        assert len(feed.take_page_requests()) <= MAX_PAGE_REQUESTS
    feed.apply(closed("c7"))  # whose pages any of the others may have
    assert len(feed.take_page_requests()) == MAX_REREADS


def test_a_turn_reads_few_pages_but_one_context_however_long() -> None:
    feed = ContextFeed()
    feed.apply(change("a", EXISTS, pages=3 * MAX_PAGES_AT_ONCE))
    feed.apply(change("b", EXISTS, pages=MAX_PAGES_AT_ONCE))
    assert feed.take_page_requests() == ["a"]
    assert feed.take_page_requests() == ["b"]
