"""The scenarios of contexts that need no model, at page size 16. Identity (6) is in test_prefix.py."""

from __future__ import annotations

import numpy as np
import pytest

from jaxctx.cache import page_control
from jaxctx.cache.audit import refcounts
from jaxctx.cache.context_cache import OutOfPages
from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.errors import FailedPrecondition, OutOfRange

from .filling import IDENTITY, TOKENS, fill, filled, layout, new_cache, resident, used, would_find
from .recount import check

# --- 1: layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"), [(1000, (62, 1, 8)), (1024, (64, 0, 0)), (0, (0, 0, 0)), (1, (0, 1, 1))]
)
def test_layout(count, expected):
    cache = new_cache()
    context = filled(cache, np.arange(count))
    assert layout(context) == expected
    assert (context.seq_len, context.buffered_tokens, context.length) == (count, 0, count)
    assert used(cache) == len(context.page_table()) == expected[0] + expected[1]
    assert context.tokens().tolist() == list(range(count))


def test_page_ids_are_one_run_of_the_pool():
    context = filled(new_cache(), TOKENS)
    assert context.page_table().tolist() == list(range(1, 64))
    assert context.page_table().dtype == np.int32
    context.page_table()[0] = 9  # of a copy
    assert context.page_table()[0] == 1


# --- 2: fork ---------------------------------------------------------------------------------------------------------


def test_fork_shares_pages_and_copies_the_partial_one():
    cache = new_cache()
    parent = filled(cache, TOKENS, tenant="t")
    parent.labels, parent.priority, parent.pinned = {"a": "b"}, 3, True
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


# --- 3: isolation and lifetime ---------------------------------------------------------------------------------------


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


# --- 4: reuse before compute -----------------------------------------------------------------------------------------


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


# --- 5: commit race --------------------------------------------------------------------------------------------------


def test_equal_pages_computed_twice_are_merged():
    cache = new_cache()
    a, b = cache.create(IDENTITY), cache.create(IDENTITY)
    for context in (a, b):
        cache.append(context, TOKENS)
        assert cache.match(context) == 0
        cache.grow(context, 1000)
    own = b.page_table().tolist()
    assert used(cache) == 126
    assert cache.mark_computed(a, 1000) == 0
    assert cache.mark_computed(b, 500) == 31
    assert cache.mark_computed(b, 500) == 31
    assert b.page_table().tolist() == [*a.page_table()[:62].tolist(), own[62]]
    assert refcounts(a, cache.context_table) == [2] * 62 + [1]
    assert used(cache) == 64
    check(cache)


def test_nothing_is_found_before_it_is_settled():
    cache = new_cache()
    a = cache.create(IDENTITY)
    cache.append(a, TOKENS)
    cache.grow(a, 1000)
    assert resident(cache, TOKENS) == 0
    cache.mark_computed(a, 40)
    assert resident(cache, TOKENS) == 32


# --- 7: commit by hand -----------------------------------------------------------------------------------------------


def test_commit_errors():
    cache = new_cache()
    context = filled(cache, np.arange(40), manual_commit=True)
    assert layout(context) == (0, 3, 40)
    with pytest.raises(FailedPrecondition) as error:
        page_control.commit(cache, context, 3)
    assert error.value.reason == "PAGE_NOT_FULL"
    for pages in (4, -1):
        with pytest.raises(OutOfRange):
            page_control.commit(cache, context, pages)
    page_control.commit(cache, context, 0)
    assert layout(context) == (0, 3, 40)
    table = context.page_table().tolist()
    page_control.commit(cache, context, 2)
    assert layout(context) == (2, 1, 8)
    assert context.page_table().tolist() == table
    assert resident(cache, np.arange(40)) == 32
    check(cache)


# --- 8: truncate -----------------------------------------------------------------------------------------------------


def test_truncate_reaches_into_working_pages_only():
    cache = new_cache()
    context = filled(cache, TOKENS)
    for tokens in (9, -1):
        with pytest.raises(OutOfRange):
            page_control.truncate(cache, context, tokens)
    assert context.seq_len == 1000
    page_control.truncate(cache, context, 8)
    assert (context.seq_len, layout(context)) == (992, (62, 1, 0))
    page = context.working[0]
    assert fill(cache, context, TOKENS[992:]) == (0, 8)
    assert layout(context) == (62, 1, 8)
    assert context.working == [page]


def test_truncate_drops_buffered_tokens_first():
    cache = new_cache()
    context = filled(cache, TOKENS)
    cache.append(context, [1, 2, 3])
    page_control.truncate(cache, context, 2)
    assert (context.seq_len, context.buffered_tokens) == (1000, 1)
    page_control.truncate(cache, context, 5)
    assert (context.seq_len, context.buffered_tokens) == (996, 0)


# --- 9: rewind -------------------------------------------------------------------------------------------------------


def test_rewind_copies_one_partial_page():
    cache = new_cache()
    context = filled(cache, TOKENS)
    fork = cache.fork(context)
    pages, forked = context.page_table().tolist(), fork.page_table().tolist()
    cache.moves()
    page_control.rewind(cache, context, 980)
    copies = cache.moves()
    assert layout(context) == (61, 1, 4)
    assert copies == [Move(MoveKind.COPY, pages[61], context.working[0])]
    assert context.page_table().tolist() == [*pages[:61], context.working[0]]
    assert (layout(fork), fork.page_table().tolist()) == ((62, 1, 8), forked)
    assert context.tokens().tolist() == TOKENS[:980].tolist()
    check(cache)


@pytest.mark.parametrize(
    ("to", "expected", "copies"),
    [
        (1003, (62, 1, 8), 0),
        (1001, (62, 1, 8), 0),
        (1000, (62, 1, 8), 0),
        (995, (62, 1, 3), 0),
        (992, (62, 1, 0), 0),
        (991, (61, 1, 15), 1),
        (976, (61, 0, 0), 0),
        (1, (0, 1, 1), 1),
        (0, (0, 0, 0), 0),
    ],
)
def test_rewind_goes_anywhere(to, expected, copies):
    cache = new_cache()
    context = filled(cache, TOKENS)
    cache.append(context, [1, 2, 3])
    page_control.rewind(cache, context, to)
    assert len(cache.moves()) == copies
    assert layout(context) == expected
    assert context.tokens().tolist() == [*TOKENS.tolist(), 1, 2, 3][:to]
    check(cache)
    fill(cache, context, TOKENS)
    assert context.tokens().tolist() == ([*TOKENS.tolist(), 1, 2, 3][:to] + TOKENS.tolist())


def test_rewind_keeps_what_it_leaves_in_the_cache():
    cache = new_cache()
    context = filled(cache, TOKENS)
    page_control.rewind(cache, context, 100)
    assert resident(cache, TOKENS) == 992
    assert cache.block_manager.index.cached == 56


def test_rewind_out_of_range():
    cache = new_cache()
    context = filled(cache, TOKENS)
    for to in (1001, -1):
        with pytest.raises(OutOfRange):
            page_control.rewind(cache, context, to)


def test_rewind_in_a_full_pool():
    cache = new_cache(pages=64)
    context = filled(cache, np.arange(1024))
    fork = cache.fork(context)
    with pytest.raises(OutOfPages):
        page_control.rewind(cache, context, 1000)
    assert layout(context) == (64, 0, 0)
    check(cache)
    page_control.rewind(cache, context, 992)
    cache.close(fork)
    assert cache.clear_cached() == 2
    blocker = cache.create(IDENTITY)
    page_control.reserve(cache, blocker, 2)
    page = int(context.page_table()[61])
    cache.moves()
    page_control.rewind(cache, context, 980)
    assert cache.moves() == [], "the partial page itself is all there is: it stays where it is"
    assert (layout(context), context.working) == ((61, 1, 4), [page])
    assert resident(cache, np.arange(1024)) == 61 * 16
    check(cache)


# --- 10: reserve and release -----------------------------------------------------------------------------------------


def test_reserve_and_release():
    cache = new_cache(pages=73)
    context = filled(cache, TOKENS)
    for pages in (11, 74):
        with pytest.raises(OutOfPages):
            page_control.reserve(cache, context, pages)
    assert cache.block_manager.pool.free == 10
    page_control.reserve(cache, context, 10)
    assert layout(context) == (62, 11, 8)
    assert context.page_table().tolist() == list(range(1, 74))
    for pages in (12, -1):
        with pytest.raises(OutOfRange):
            page_control.release(cache, context, pages)
    page_control.release(cache, context, 10)
    assert (layout(context), cache.block_manager.pool.free) == ((62, 1, 8), 10)
    cache.append(context, [1, 2])
    page_control.release(cache, context, 0)
    assert context.length == 1002
    page_control.release(cache, context, 1)
    assert (layout(context), context.length) == ((62, 0, 0), 992), "with the tokens in it, and those behind them"
    check(cache)


def test_reserve_evicts_what_is_cached_oldest_first():
    cache = new_cache(pages=10)
    cache.close(filled(cache, [1] * 64))
    cache.close(filled(cache, [2] * 64))
    context = cache.create(IDENTITY)
    page_control.reserve(cache, context, 4)
    assert resident(cache, [1] * 64) == 32
    assert resident(cache, [2] * 64) == 64
    check(cache)


def test_a_reservation_brings_a_suspended_context_back():
    cache = new_cache(pages=70)
    context = filled(cache, TOKENS)
    cache.suspend(context)
    with pytest.raises(OutOfPages):
        page_control.reserve(cache, context, 9)
    assert context.suspended
    page_control.reserve(cache, context, 8)
    assert (layout(context), context.buffered_tokens, context.suspended) == ((62, 8, 0), 8, False)
    check(cache)


# --- 11: speculation -------------------------------------------------------------------------------------------------


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


def test_drafts_by_hand_with_rollback():
    cache = new_cache()
    context = filled(cache, TOKENS, manual_commit=True)
    fill(cache, context, [7] * 5)
    page_control.truncate(cache, context, 3)
    assert context.seq_len == 1002
    assert cache.block_manager.index.cached == 0
    page_control.commit(cache, context, 62)
    assert layout(context) == (62, 1, 10)
