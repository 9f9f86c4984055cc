"""Truncate, rewind, reserve, commit and release, at page size 16."""

from __future__ import annotations

import numpy as np
import pytest

from jaxctx.cache import page_control
from jaxctx.cache.context_cache import OutOfPages
from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.errors import FailedPrecondition, OutOfRange

from .builders import IDENTITY, TOKENS, fill, filled, layout, new_cache, resident
from .invariants import check


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


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (1003, (62, 1, 8)),
        (1000, (62, 1, 8)),
        (995, (62, 1, 3)),
        (992, (62, 1, 0)),
        (991, (61, 0, 0)),
        (976, (61, 0, 0)),
        (1, (0, 0, 0)),
        (0, (0, 0, 0)),
    ],
)
def test_take_back_goes_anywhere_without_a_page(to, expected):
    cache = new_cache(pages=63)
    context = filled(cache, TOKENS)
    other = cache.create(IDENTITY)
    cache.append(other, TOKENS[:992])
    assert cache.match(other) == 992
    assert cache.block_manager.available == 0
    cache.append(context, [1, 2, 3])
    page_control.take_back(cache, context, to)
    assert cache.moves() == []
    assert layout(context) == expected
    assert context.tokens().tolist() == [*TOKENS.tolist(), 1, 2, 3][:to]
    check(cache)


def test_take_back_keeps_the_overrides_of_what_is_buffered():
    cache = new_cache()
    context = cache.create(IDENTITY)
    cache.append(context, TOKENS[:32], [b"", b"mask"] * 16)
    cache.grow(context, 32)
    cache.mark_computed(context, 32)
    page_control.take_back(cache, context, 20)
    assert (context.seq_len, context.buffered_tokens) == (16, 4)
    assert sorted(context.attention_overrides) == list(range(1, 20, 2))
    assert cache.match(context) == 0
    page_control.take_back(cache, context, 16)
    cache.append(context, TOKENS[16:32], [b"", b"mask"] * 8)
    assert cache.match(context) == 16, "the pages that were left are found again"


def test_take_back_out_of_range():
    cache = new_cache()
    context = filled(cache, TOKENS)
    for to in (1001, -1):
        with pytest.raises(OutOfRange):
            page_control.take_back(cache, context, to)


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


def test_drafts_by_hand_with_rollback():
    cache = new_cache()
    context = filled(cache, TOKENS, manual_commit=True)
    fill(cache, context, [7] * 5)
    page_control.truncate(cache, context, 3)
    assert context.seq_len == 1002
    assert cache.block_manager.index.cached == 0
    page_control.commit(cache, context, 62)
    assert layout(context) == (62, 1, 10)
