"""Operations on contexts: fork, match, mark_computed, suspend, victims, publish, close. Page size 16."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxctx.cache import page_control
from jaxctx.cache.audit import refcounts
from jaxctx.cache.context_cache import OutOfPages
from jaxctx.cache.overrides import MAX_SWITCHES
from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.errors import FailedPrecondition, NotFound, OutOfRange

from .builders import IDENTITY, TOKENS, fill, filled, layout, new_cache, resident, used, would_find
from .invariants import check


def test_fork_shares_pages_and_copies_the_partial_one():
    cache = new_cache()
    parent = filled(cache, TOKENS, tenant="t")
    parent.labels, parent.priority = {"a": "b"}, 3
    cache.pin(parent, True)
    child = cache.fork(parent)
    assert used(cache) == 63 + 1
    assert child.page_table()[:62].tolist() == parent.page_table()[:62].tolist()
    copies = cache.moves()
    assert copies == [Move(MoveKind.COPY, int(parent.page_table()[62]), int(child.page_table()[62]))]
    assert copies[0].source != copies[0].target
    assert refcounts(parent, cache.context_table) == refcounts(child, cache.context_table) == [2] * 62 + [1]
    assert layout(child) == layout(parent)
    assert child.tokens().tolist() == parent.tokens().tolist()
    assert (child.ancestors[0][0], child.labels, child.priority, child.tenant) == (parent.id, {"a": "b"}, 3, "t")
    assert not child.pinned
    check(cache)


def test_fork_at_a_page_edge_takes_no_page():
    cache = new_cache()
    parent = filled(cache, np.arange(1024))
    cache.fork(parent)
    assert cache.moves() == []
    assert used(cache) == 64


def test_fork_takes_buffered_tokens_and_leaves_reserved_pages():
    cache = new_cache()
    parent = filled(cache, TOKENS)
    cache.append(parent, [5, 6])
    page_control.reserve(cache, parent, 3)
    parent.busy = True
    child = cache.fork(parent)
    assert (child.buffered_tokens, child.working_pages, child.busy) == (2, 1, False)
    check(cache)


def test_fork_copies_every_working_page_with_tokens():
    cache = new_cache()
    parent = filled(cache, np.arange(40), manual_commit=True)
    child = cache.fork(parent)
    copies = cache.moves()
    assert child.manual_commit
    assert [copy.source for copy in copies] == parent.page_table().tolist()
    assert [copy.target for copy in copies] == child.page_table().tolist()
    assert refcounts(child, cache.context_table) == [1, 1, 1]


def test_fork_without_a_page_changes_nothing():
    cache = new_cache(pages=63)
    parent = filled(cache, TOKENS)
    with pytest.raises(OutOfPages):
        cache.fork(parent)
    assert len(cache.context_table) == 1
    check(cache)


def test_parent_and_child_do_not_see_each_other():
    cache = new_cache()
    parent = filled(cache, TOKENS)
    child = cache.fork(parent)
    fill(cache, parent, [1] * 20)
    fill(cache, child, [2] * 20)
    assert parent.tokens(1000).tolist() == [1] * 20
    assert child.tokens(1000).tolist() == [2] * 20
    assert not set(parent.page_table()[62:].tolist()) & set(child.page_table()[62:].tolist())
    pages, before = child.page_table().tolist(), cache.block_manager.available
    cache.close(parent)
    check(cache)
    assert cache.block_manager.available == before + 2, "only what was the parent's own"
    assert child.page_table().tolist() == pages
    cache.close(child)
    assert cache.block_manager.available == cache.block_manager.pool.total


def test_a_second_fill_finds_the_first_ones_pages():
    cache = new_cache()
    a = filled(cache, TOKENS)
    b = cache.create(IDENTITY)
    assert resident(cache, TOKENS) == would_find(cache, b, TOKENS) == 992
    assert fill(cache, b, TOKENS) == (992, 8)
    assert b.page_table()[:62].tolist() == a.page_table()[:62].tolist()
    assert used(cache) == 62 + 2
    cache.close(a)
    cache.close(b)
    assert used(cache) == 0
    assert fill(cache, cache.create(IDENTITY), TOKENS) == (992, 8)


def test_a_match_needs_a_page_boundary_and_may_go_on_from_one():
    cache = new_cache()
    filled(cache, TOKENS)
    context = filled(cache, TOKENS[:8])
    assert fill(cache, context, TOKENS[8:24]) == (0, 16)
    assert would_find(cache, context, TOKENS[24:]) == 0
    context = filled(cache, TOKENS[:16])
    page_control.reserve(cache, context, 2)
    cache.append(context, TOKENS[16:40])
    assert would_find(cache, context, TOKENS[40:48]) == 32
    assert cache.match(context) == 16
    assert layout(context) == (2, 2, 0)
    assert context.page_table()[2:].tolist() == context.working
    assert context.buffered_tokens == 8
    check(cache)


def test_clearing_the_cache_leaves_what_is_held():
    cache = new_cache()
    keeper = filled(cache, TOKENS[:160])
    cache.close(filled(cache, TOKENS))
    assert cache.clear_cached() == 52
    assert resident(cache, TOKENS) == 160
    assert layout(keeper) == (10, 0, 0)
    check(cache)


def test_nothing_is_found_before_it_is_settled():
    cache = new_cache()
    a = cache.create(IDENTITY)
    cache.append(a, TOKENS)
    cache.grow(a, 1000)
    assert resident(cache, TOKENS) == 0
    cache.mark_computed(a, 40)
    assert resident(cache, TOKENS) == 32


@pytest.mark.parametrize("drafts", range(17))
@pytest.mark.parametrize("start", [1000, 1006, 1008])
def test_rejected_drafts_never_reach_a_committed_page(start, drafts):
    cache = new_cache()
    context = filled(cache, np.arange(start))
    accepted = drafts // 2
    cache.grow(context, drafts)
    assert len(context.page_table()) * 16 >= start + drafts
    cache.append(context, [7] * accepted)
    cache.mark_computed(context, accepted)
    assert context.seq_len == start + accepted
    assert resident(cache, [*range(start), *[7] * drafts]) == (start + accepted) // 16 * 16
    check(cache)


def test_suspension_keeps_the_tokens_and_nothing_else():
    cache = new_cache()
    context = filled(cache, TOKENS)
    cache.append(context, [1, 2])
    assert (cache.victims_for(63), cache.victims_for(64)) == ([context], None)
    assert cache.suspend(context) == 63
    assert (context.suspended, layout(context), context.seq_len) == (True, (0, 0, 0), 0)
    assert (context.length, context.buffered_tokens) == (1002, 1002)
    assert context.tokens(998).tolist() == [*TOKENS[998:].tolist(), 1, 2]
    assert context.page_table().tolist() == []
    assert refcounts(context, cache.context_table) == []
    assert cache.block_manager.available == 200
    assert cache.suspend(context) == 0
    check(cache)
    assert cache.match(context) == 992
    assert (layout(context), context.buffered_tokens) == ((62, 0, 0), 10)
    check(cache)


def test_suspension_spares_shared_pages():
    cache = new_cache()
    context = filled(cache, TOKENS)
    fork = cache.fork(context)
    assert cache.suspend(context) == 1
    assert refcounts(fork, cache.context_table) == [1] * 63


def test_what_a_suspended_context_can_do_without_pages():
    cache = new_cache()
    context = filled(cache, TOKENS)
    cache.suspend(context)
    cache.append(context, [1])
    child = cache.fork(context)
    assert (child.suspended, child.length) == (True, 1001)
    page_control.rewind(cache, child, 100)
    assert cache.moves() == []
    assert child.tokens().tolist() == TOKENS[:100].tolist()
    page_control.truncate(cache, child, 50)
    assert child.length == 50
    for operation in (cache.grow, cache.mark_computed):
        with pytest.raises(FailedPrecondition):
            operation(context, 1)
    for operation in (partial(page_control.commit, cache), partial(page_control.release, cache)):
        operation(context, 0)
        with pytest.raises(OutOfRange):
            operation(context, 1)
    assert would_find(cache, context, [2]) == 992
    check(cache)


def test_victims_are_idle_unpinned_and_least_recently_used_first():
    cache = new_cache()
    a, b, c, d, e = (filled(cache, [n] * 20) for n in range(5))
    cache.pin(c, True)
    cache.create(IDENTITY)
    d.busy = True
    assert [*cache.victims()] == [a, b, e]
    cache.touch(a)
    assert a.used_at > e.used_at
    all_ = [*cache.victims()]
    assert all_ == [b, e, a]
    assert [cache.victims_for(pages) for pages in (0, 1, 2, 3, 4, 5, 6)] == [[], [b], [b], [b, e], [b, e], all_, all_]
    assert cache.victims_for(7) is None
    for victim in all_:
        cache.suspend(victim)
    assert [*cache.victims()] == []
    assert [context.suspended for context in (c, d)] == [False, False]
    cache.match(e)
    assert [*cache.victims()] == [e]


def test_victims_for_pages_count_a_shared_page_with_its_last_holder():
    cache = new_cache()
    first = filled(cache, range(64))  # four pages
    second = cache.fork(first)
    fill(cache, second, range(100, 132))  # and two of its own
    third = cache.fork(first)
    assert [*cache.victims()] == [first, second, third]
    assert cache.victims_for(1) == [first, second]
    assert cache.victims_for(2) == [first, second]
    assert cache.victims_for(3) == [first, second, third]
    assert cache.victims_for(6) == [first, second, third]
    assert cache.victims_for(7) is None
    third.busy = True
    assert cache.victims_for(3) is None
    third.busy = False
    assert [cache.suspend(context) for context in (first, second, third)] == [0, 2, 4]


def test_finding_victims_looks_at_no_more_than_it_takes():
    """Of thousands of idle contexts with long page tables the first few are enough."""
    cache = new_cache()
    contexts = [filled(cache, [n] * 160) for n in range(12)]
    looked_at = []

    class Table(dict):
        def __iter__(self):
            for context in super().__iter__():
                looked_at.append(context)
                yield context

    cache.context_table.by_use = Table(cache.context_table.by_use)
    assert cache.victims_for(15) == contexts[:2]
    assert looked_at == contexts[:3]


def test_contexts_without_pages_are_looked_at_once():
    """There may be any number of them. They are victims again when they have pages."""
    cache = new_cache()
    empty = [cache.create(IDENTITY) for _ in range(5)]
    holding = [filled(cache, [n] * 20) for n in range(2)]
    assert cache.victims_for(1) == holding[:1]
    assert [*cache.context_table.by_use] == holding
    first, second, third, fourth, fifth = empty
    fill(cache, first, [7] * 20)
    page_control.reserve(cache, second, 1)
    cache.append(third, [0] * 20)
    assert cache.match(third) == 16
    cache.touch(fourth)
    assert [*cache.context_table.by_use] == [*holding, first, second, third, fourth]
    assert cache.victims_for(99) is None
    assert [*cache.context_table.by_use] == [*holding, first, second, third]
    for context in (fourth, fifth):
        assert cache.suspend(context) == 0
        cache.close(context)
    check(cache)


def test_a_closed_context_is_gone():
    cache = new_cache()
    context = filled(cache, TOKENS, tenant="t", context_id="x")
    cache.close(context)
    operations = [
        lambda: cache.close(context),
        lambda: cache.fork(context),
        lambda: cache.append(context, [1]),
        lambda: cache.match(context),
        lambda: cache.peek(context, [1]),
        lambda: cache.grow(context, 1),
        lambda: cache.mark_computed(context, 0),
        lambda: page_control.truncate(cache, context, 0),
        lambda: page_control.rewind(cache, context, 0),
        lambda: page_control.reserve(cache, context, 0),
        lambda: page_control.commit(cache, context, 0),
        lambda: page_control.release(cache, context, 0),
        lambda: cache.suspend(context),
        lambda: cache.touch(context),
        lambda: cache.get("t", "x"),
    ]
    for operation in operations:
        with pytest.raises(NotFound):
            operation()
    assert used(cache) == 0
    check(cache)
    cache.create(IDENTITY, tenant="t", context_id="x")


def test_what_the_engine_must_not_settle():
    cache = new_cache()
    context = cache.create(IDENTITY)
    cache.append(context, [1] * 20)
    cache.grow(context, 10)
    for tokens in (21, -1):
        with pytest.raises(OutOfRange):
            cache.mark_computed(context, tokens)
    with pytest.raises(FailedPrecondition):
        cache.mark_computed(context, 17)
    assert context.buffered_tokens == 20
    check(cache)


def test_a_very_long_context_can_end():
    cache = new_cache(pages=100_000, page_size=1)
    context = cache.create(IDENTITY)
    cache.append(context, np.arange(100_000))
    cache.grow(context, 100_000)
    cache.mark_computed(context, 100_000)
    cache.close(context)
    assert cache.clear_cached() == 100_000


def test_who_holds_pages_of_a_publication_finds_no_more_of_it_once_it_is_withdrawn():
    cache = new_cache()
    publication = cache.publish(filled(cache, TOKENS), "p", tenant="owner")
    reader = cache.create(replace(IDENTITY, namespace="reader"))
    assert fill(cache, reader, TOKENS[:500]) == (496, 4)
    page_control.rewind(cache, reader, 160)
    assert would_find(cache, reader, TOKENS[160:]) == 992 - 160
    cache.close(publication)
    assert would_find(cache, reader, TOKENS[160:]) == 0
    assert fill(cache, reader, TOKENS[160:]) == (0, 840)
    assert reader.committed_pages == 62
    shared = [node for node in reader.chain() if node in publication.chain()]
    assert shared == publication.chain()[:10], "and it keeps what it holds"
    assert cache.block_manager.pool.total - cache.block_manager.available == 63 + 10 + 53, (
        "the owner's, the ten that both had, and its own"
    )


def test_a_publication_has_the_switches_within_its_pages():
    """A reader finds them by equal switches; a full page with a switch behind it, or another one, is another page."""
    cache = new_cache()
    owner = filled(cache, TOKENS[:20])
    cache.switch_adapter(owner, "it", "content")
    fill(cache, owner, TOKENS[20:40])
    cache.switch_adapter(owner, "", "")
    publication = cache.publish(owner, "p", tenant="owner")
    assert [switch.start for switch in publication.adapter_switches] == [20]
    for revision, found in (("content", 32), ("another", 16), ("", 16)):
        reader = cache.create(replace(IDENTITY, namespace="reader"))
        cache.append(reader, TOKENS[:20])
        cache.switch_adapter(reader, "other name", revision)
        assert would_find(cache, reader, TOKENS[20:40]) == found
        cache.close(reader)


def test_an_empty_context_switches_as_if_it_had_been_created_so():
    """Also with reserved pages, and while it is suspended."""
    cache = new_cache()
    mine = replace(IDENTITY, adapter="content")
    other = cache.create(mine)
    fill(cache, other, TOKENS[:48])
    for suspended in (False, True):
        context = cache.create(IDENTITY)
        page_control.reserve(cache, context, 2)
        if suspended:
            cache.suspend(context)
        cache.switch_adapter(context, "it", "content")
        check(cache)
        assert (context.identity, context.adapter, context.adapter_switches) == (mine, "it", ())
        assert would_find(cache, context, TOKENS[:48]) == 48
        assert fill(cache, context, TOKENS[:48]) == (48, 0)
        cache.close(context)
        check(cache)


def test_more_switches_than_are_allowed_change_nothing():
    cache = new_cache()
    context = cache.create(IDENTITY)
    for number in range(MAX_SWITCHES):
        cache.append(context, [1])
        cache.switch_adapter(context, "", f"content {number}")
    cache.append(context, [1])
    before = context.adapter_spans
    with pytest.raises(FailedPrecondition):
        cache.switch_adapter(context, "", "one more")
    assert context.adapter_spans == before
    cache.switch_adapter(context, "", before[-1].adapter_revision)
    page_control.truncate(cache, context, 1)
    cache.switch_adapter(context, "", "another instead")
    assert [span.adapter_revision for span in context.adapter_spans[-2:]] == ["content 98", "another instead"]
    cache.close(context)
    with pytest.raises(NotFound):
        cache.switch_adapter(context, "", "")


@pytest.mark.parametrize("tokens", [32, 40])
def test_what_was_committed_by_hand_is_again_when_it_comes_back(tokens):
    """Whether there are working tokens behind it or not: of a context that was suspended, and of a stored one."""
    cache = new_cache()
    context = filled(cache, np.arange(tokens), manual_commit=True)
    page_control.commit(cache, context, 2)
    before = layout(context)
    cache.suspend(context)
    cache.clear_cached()
    cache.match(context)
    assert context.buffered_tokens == tokens
    stored = cache.create(IDENTITY, manual_commit=True)
    cache.append(stored, np.arange(tokens) + 7)
    cache.offload(stored, tokens, 2)
    cache.block_manager.drop_offloaded(stored)  # it is computed again
    for each in (context, stored):
        cache.grow(each, tokens)
        cache.mark_computed(each, tokens)
        assert layout(each) == before
        page_control.rewind(cache, each, 16)
        cache.append(each, [1] * 16)
        cache.grow(each, 16)
        cache.mark_computed(each, 16)
        assert each.committed_pages == 1  # what is new commits by hand again
    check(cache)
