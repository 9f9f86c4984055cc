"""Suspension, names, and what every operation refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxctx.cache import page_control
from jaxctx.cache.audit import refcounts
from jaxctx.cache.context_cache import OutOfPages
from jaxctx.cache.tiers import MoveKind
from jaxctx.errors import AlreadyExists, FailedPrecondition, NotFound, OutOfRange

from .filling import IDENTITY, TOKENS, fill, filled, layout, new_cache, resident, used, would_find
from .recount import check

# --- suspension ------------------------------------------------------------------------------------------------------


def test_suspension_keeps_the_tokens_and_nothing_else():
    cache = new_cache()
    context = filled(cache, TOKENS)
    cache.append(context, [1, 2])
    assert cache.suspendable() == 63
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
    c.pinned = True
    cache.create(IDENTITY)
    d.busy = True
    assert [*cache.victims()] == [a, b, e]
    cache.touch(a)
    assert a.used_at > e.used_at
    assert [*cache.victims()] == [b, e, a]
    assert cache.suspendable() == 6
    for victim in cache.victims():
        cache.suspend(victim)
    assert [*cache.victims()] == []
    assert [context.suspended for context in (c, d)] == [False, False]
    cache.match(e)
    assert [*cache.victims()] == [e]


# --- names and refusals ----------------------------------------------------------------------------------------------


def test_contexts_are_found_and_listed_by_tenant():
    cache = new_cache()
    for context_id in ("b", "d", "a", "c"):
        cache.create(IDENTITY, tenant="t", context_id=context_id)
    other = cache.create(IDENTITY, tenant="u", context_id="a")
    assert [context.id for context in cache.list("t", "", 10)] == ["a", "b", "c", "d"]
    assert [context.id for context in cache.list("t", "a", 2)] == ["b", "c"]
    assert [context.id for context in cache.list("t", "bb", 2)] == ["c", "d"]
    assert cache.list("nobody", "", 10) == []
    assert cache.get("u", "a") is other
    assert len(cache.context_table) == len([*cache.context_table]) == 5
    with pytest.raises(AlreadyExists):
        cache.create(IDENTITY, tenant="t", context_id="a")
    with pytest.raises(AlreadyExists):
        cache.fork(other, context_id="a")
    messages = set()
    for context_id in ("b", "nowhere"):
        with pytest.raises(NotFound) as error:
            cache.get("u", context_id)
        messages.add(error.value.message.replace(context_id, "?"))
    assert len(messages) == 1, "another tenant's context is told by nothing"
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


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 1001), (1001, 1001)])
def test_tokens_out_of_range(start, stop):
    context = filled(new_cache(), TOKENS)
    with pytest.raises(IndexError):
        context.tokens(start, stop)


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
