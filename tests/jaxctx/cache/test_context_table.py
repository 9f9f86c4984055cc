"""The table of contexts: lists by tenant, lifetimes, and what is remembered of expired contexts."""

from dataclasses import replace

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.context_table import MAX_EXPIRED_IDS
from jaxctx.errors import AlreadyExists, NotFound
from jaxctx.lifetime import FOREVER, Lifetime

from .builders import IDENTITY, TOKENS, fill, new_cache
from .invariants import check


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def cache(time: Time) -> ContextCache:
    ids = iter(range(10**6))
    return ContextCache(BlockManager(64, 16), clock=time, new_id=lambda: f"c{next(ids):06}")


def lasting(cache: ContextCache, lifetime: Lifetime, **chosen: str) -> Context:
    context = cache.create(IDENTITY, **chosen)
    cache.set_lifetime(context, lifetime)
    return context


def reason(cache: ContextCache, context_id: str, tenant: str = "t") -> str:
    with pytest.raises(NotFound) as error:
        cache.get(tenant, context_id)
    return error.value.reason


def test_a_page_is_full_without_what_was_made_for_programs(cache: ContextCache) -> None:
    made = [cache.create(IDENTITY, tenant="t", context_id=context_id) for context_id in "abcdef"]
    for context in made[1:4]:
        context.of_program = True
    assert [each.id for each in cache.list("t", "", 2, with_programs=False)] == ["a", "e"]
    assert [each.id for each in cache.list("t", "a", 2, with_programs=False)] == ["e", "f"]
    assert [each.id for each in cache.list("t", "a", 2)] == ["b", "c"]
    assert not cache.fork(made[1]).of_program


def test_shown_until_its_end_and_never_after(cache: ContextCache, time: Time) -> None:
    context = lasting(cache, Lifetime.begin(10, False, 0), tenant="t")
    other = cache.create(IDENTITY, tenant="t")
    time.now = 9.999
    assert cache.get("t", context.id) is context
    assert cache.list("t", "", 1) == [context]
    time.now = 10
    assert reason(cache, context.id) == "CONTEXT_EXPIRED"
    assert cache.list("t", "", 1) == [other]  # a page of the list is full all the same
    assert reason(cache, context.id, tenant="u") == "CONTEXT_NOT_FOUND"
    assert cache.lifetimes.due(time.now) == [context]
    cache.close(context)
    check(cache)
    assert reason(cache, context.id) == "CONTEXT_EXPIRED"
    assert reason(cache, context.id, tenant="u") == "CONTEXT_NOT_FOUND"


def test_what_its_owner_closed_in_time_did_not_expire(cache: ContextCache, time: Time) -> None:
    context = lasting(cache, Lifetime.begin(10, False, 0), tenant="t")
    cache.close(context)
    time.now = 11
    assert reason(cache, context.id) == "CONTEXT_NOT_FOUND"
    assert cache.lifetimes.due(time.now) == []


def test_an_expired_id_can_be_used_again(cache: ContextCache, time: Time) -> None:
    lasting(cache, Lifetime.begin(1, False, 0), tenant="t", context_id="x")
    time.now = 2
    cache.close(cache.lifetimes.due(2)[0])
    again = cache.create(IDENTITY, tenant="t", context_id="x")
    assert cache.get("t", "x") is again
    cache.close(again)
    assert reason(cache, "x") == "CONTEXT_NOT_FOUND"


def test_a_use_begins_a_sliding_lifetime_again_and_leaves_a_fixed_one(cache: ContextCache, time: Time) -> None:
    sliding, fixed = (lasting(cache, Lifetime.begin(10, s, 0), tenant="t") for s in (True, False))
    time.now = 9
    cache.touch(sliding)
    cache.touch(fixed)
    assert (sliding.lifetime.at, fixed.lifetime.at) == (19, 10)
    time.now = 18.9
    assert cache.lifetimes.due(time.now) == [fixed]
    assert cache.get("t", sliding.id) is sliding
    time.now = 19
    cache.touch(sliding)  # too late
    assert reason(cache, sliding.id) == "CONTEXT_EXPIRED"


def test_a_lifetime_can_be_changed(cache: ContextCache, time: Time) -> None:
    context = cache.create(IDENTITY, tenant="t")
    cache.set_lifetime(context, Lifetime.begin(5, False, 0))
    assert cache.lifetimes.next == 5
    cache.set_lifetime(context, FOREVER)
    assert cache.lifetimes.due(1e9) == []
    time.now = 1e9
    assert cache.get("t", context.id) is context


def test_a_fork_lives_as_long_from_its_birth_and_starts_its_own_count(cache: ContextCache, time: Time) -> None:
    parent = lasting(cache, Lifetime.begin(10, True, 0), tenant="t")
    fill(cache, parent, TOKENS[:40])
    cache.append(parent, TOKENS[:3])
    parent.version, parent.pinned_until = 7, 99.0
    time.now = 4
    child = cache.fork(parent)
    assert (child.lifetime, child.version, child.ancestors[0][1]) == (Lifetime(14, 10, True), 0, 43)
    assert (child.pinned, child.pinned_until) == (False, None)
    assert cache.fork(parent, tenant="elsewhere").lifetime is FOREVER
    time.now = 14
    assert set(cache.lifetimes.due(time.now)) == {parent, child}


def test_memory_of_the_expired_is_bounded_and_each_tenant_s_own(cache: ContextCache, time: Time) -> None:
    def expire(tenant: str) -> str:
        context = lasting(cache, Lifetime.begin(1, False, time.now), tenant=tenant)
        time.now += 1
        cache.close(context)
        return context.id

    first, theirs = expire("t"), expire("u")
    ids = [expire("t") for _ in range(MAX_EXPIRED_IDS)]
    assert reason(cache, first) == "CONTEXT_NOT_FOUND"
    assert {reason(cache, context_id) for context_id in ids} == {"CONTEXT_EXPIRED"}
    assert reason(cache, theirs, "u") == "CONTEXT_EXPIRED"


def test_counts_are_of_one_tenant(cache: ContextCache) -> None:
    contexts = [cache.create(IDENTITY, tenant=tenant) for tenant in "aab"]
    cache.close(contexts[0])
    assert [cache.count(tenant) for tenant in "abc"] == [1, 1, 0]


def test_contexts_are_found_and_listed_by_tenant() -> None:
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


def test_pinned_contexts_are_known_by_tenant(cache: ContextCache) -> None:
    table = cache.context_table
    first, second, other = (cache.create(IDENTITY, tenant=tenant) for tenant in "ttu")
    for context in (first, second, other, second):
        cache.pin(context, True)
    assert ([*table.pinned("t")], [*table.pinned("u")], [*table.pinned("v")]) == ([first, second], [other], [])
    cache.pin(first, False)
    cache.pin(first, False)
    cache.close(other)
    assert ([*table.pinned("t")], [*table.pinned("u")]) == ([second], [])
    assert (first.pinned, second.pinned) == (False, True)
    check(cache)


def test_contexts_are_known_by_namespace(cache: ContextCache) -> None:
    table, elsewhere = cache.context_table, replace(IDENTITY, namespace="else")
    mine = cache.create(IDENTITY, tenant="t")
    other = cache.create(elsewhere, tenant="t")
    fork = cache.fork(other, tenant="u")
    assert [*table.in_namespace(IDENTITY.namespace)] == [mine]
    assert [*table.in_namespace("else")] == [other, fork]
    cache.close(other)
    cache.close(fork)
    assert [*table.in_namespace("else")] == []
    check(cache)
