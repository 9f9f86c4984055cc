"""Pages between pool, index, tiers and contexts: merging, growth, eviction and fetching."""

from __future__ import annotations

import pytest

from jaxctx.cache.audit import refcounts
from jaxctx.cache.context_cache import OutOfPages
from jaxctx.cache.tiers import MoveKind
from jaxctx.errors import DataLoss

from .builders import IDENTITY, TOKENS, filled, layout, new_cache, resident, used
from .invariants import check


def test_pages_on_disk_are_fetched_ahead_but_never_drive_off_half_of_the_host():
    cache = new_cache(pages=70, host=8, disk=100)
    context = filled(cache, TOKENS)
    cache.suspend(context)
    cache.close(filled(cache, [3] * 1100))  # needs every page
    cache.match(context)
    assert cache.restore(context, 8, lambda slot: True) == 8, "the first ones left last, and are on the host"
    cache.moves()
    assert cache.restore(context, 3, lambda slot: False) == 0
    assert [move.kind for move in cache.moves()].count(MoveKind.FETCH) == 3
    assert cache.restore(context, 99, lambda slot: False) == 0
    assert [move.kind for move in cache.moves()].count(MoveKind.FETCH) == 1, "4 in all, of 8 slots"
    check(cache)


def test_growing_takes_all_pages_or_none():
    cache = new_cache(pages=4)
    cache.close(filled(cache, [1] * 32))
    context = filled(cache, [2] * 16)
    with pytest.raises(OutOfPages):
        cache.grow(context, 49)
    assert resident(cache, [1] * 32) == 32, "nothing was evicted for it"
    cache.grow(context, 48)
    assert layout(context) == (1, 3, 0)
    cache.grow(context, 10)
    assert layout(context) == (1, 3, 0)
    check(cache)


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


def test_a_suspended_context_survives_the_eviction_of_its_pages():
    cache = new_cache(pages=64)
    context = filled(cache, TOKENS)
    cache.suspend(context)
    cache.close(filled(cache, [3] * 600))
    assert cache.match(context) == 26 * 16, "38 of its pages were taken, from the end"
    assert context.tokens().tolist() == TOKENS.tolist()
    cache.grow(context, context.buffered_tokens)
    cache.mark_computed(context, context.buffered_tokens)
    assert layout(context) == (62, 1, 8)
    check(cache)


def test_allocation_evicts_no_more_than_it_needs():
    cache = new_cache(pages=10)
    manager = cache.block_manager
    cache.close(filled(cache, TOKENS[:128]))
    assert (manager.pool.free, manager.index.cached, manager.available) == (2, 8, 10)
    pages = manager.allocate(4)
    assert (manager.pool.free, manager.index.cached, manager.available) == (0, 6, 6)
    manager.pool.release(pages)
    with pytest.raises(OutOfPages):
        manager.allocate(11)
    assert (manager.pool.free, manager.index.cached) == (4, 6), "a refusal evicts nothing"


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (1000, 63)])
def test_pages_for(tokens, pages):
    assert new_cache().block_manager.pages_for(tokens) == pages


def test_lookup_of_tiers_goes_on_with_offloaded_pages():
    cache = new_cache(host=100)
    context = filled(cache, TOKENS[:40])
    cache.suspend(context)
    entries = cache.block_manager.lookup_tiers(context, 40)
    assert [type(entry).__name__ for entry in entries] == ["PageNode", "PageNode", "OffloadedPage"]
    assert entries[-1].tokens == 8
    assert cache.block_manager.lookup_index(context, 40) == entries[:2]
    assert cache.block_manager.lookup_tiers(context, 31) == entries[:1]
    cache.match(context)
    assert cache.restore(context, 9, lambda slot: True) == 1
    assert layout(context) == (2, 1, 8)
    check(cache)


def test_lost_data_ends_the_path():
    def lost(slot):
        raise DataLoss("it cannot be read")

    cache = new_cache(host=100)
    context = filled(cache, TOKENS[:40])
    cache.suspend(context)
    cache.match(context)
    assert cache.restore(context, 9, lost) == 0
    assert (layout(context), context.buffered_tokens) == ((2, 0, 0), 8)
    check(cache)
