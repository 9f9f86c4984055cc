"""What is reported of a context: every field, from where it stands in the cache."""

from dataclasses import fields
from datetime import UTC, datetime

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity
from jaxctx.engine.contexts.info import context_info, expiry
from jaxctx.lifetime import FOREVER, Lifetime
from jaxctx.types import AdapterSpan, ContextInfo, ContextState, Expiry


@pytest.fixture
def cache() -> ContextCache:
    return ContextCache(BlockManager(pages=16, page_size=4), lambda: 1000.0, lambda: "new")


def make_context(cache: ContextCache) -> Context:
    """A fork with something in every counter and setting."""
    identity = Identity("tenant", "model", salt="pepper", adapter="content")
    parent = cache.create(identity, tenant="tenant", context_id="parent")
    cache.append(parent, list(range(10)))
    cache.grow(parent, 10)
    cache.mark_computed(parent, 10)
    context = cache.fork(parent, context_id="child")
    cache.switch_adapter(context, "other", "other content")
    cache.append(context, [7, 8, 9])
    context.priority, context.pinned, context.pinned_until, context.version = 5, True, 3000.0, 6
    context.labels, context.snapshot, context.used_at = {"k": "v"}, "name@2", 1500.0
    context.adapter = "it"
    cache.set_lifetime(context, Lifetime.begin(60.0, True, 1000.0))
    return context


def test_every_field_of_a_context(cache: ContextCache) -> None:
    context = make_context(cache)
    told = context_info(context, model_id="m", has_writer=False)
    assert told == ContextInfo(
        context_id="child",
        parent_id="parent",
        model_id="m",
        state=ContextState.IDLE,
        seq_len=10,
        committed_pages=2,
        working_pages=1,
        working_tokens=2,
        buffered_tokens=3,
        page_size=4,
        priority=5,
        pinned=True,
        salt="pepper",
        created_at=datetime.fromtimestamp(1000, UTC),
        used_at=datetime.fromtimestamp(context.used_at, UTC),
        labels={"k": "v"},
        pinned_until=datetime.fromtimestamp(3000, UTC),
        expiry=Expiry(at=datetime.fromtimestamp(1060, UTC), seconds=60.0, sliding=True),
        version=6,
        forked_at=10,
        snapshot="name@2",
        engine_id="local",
        adapter="other",
        adapter_revision="other content",
        adapter_spans=(
            AdapterSpan(start=0, adapter="it", adapter_revision="content"),
            AdapterSpan(start=10, adapter="other", adapter_revision="other content"),
        ),
    )
    unset = [field.name for field in fields(told) if not getattr(told, field.name)]
    assert unset == [], "each field is told apart from its default"


def test_a_context_that_was_created_has_no_parent_and_no_end(cache: ContextCache) -> None:
    told = context_info(cache.create(Identity("", "model")), model_id="m", has_writer=False)
    assert (told.parent_id, told.forked_at, told.expiry, told.pinned_until, told.snapshot) == (None, 0, None, None, "")


@pytest.mark.parametrize(
    ("suspended", "has_writer", "state"),
    [
        (False, False, ContextState.IDLE),
        (True, False, ContextState.SUSPENDED),
        (False, True, ContextState.BUSY),
        (True, True, ContextState.BUSY),
    ],
)
def test_a_writer_counts_more_than_a_suspension(
    cache: ContextCache, suspended: bool, has_writer: bool, state: ContextState
) -> None:
    context = make_context(cache)
    context.pinned = False
    if suspended:
        cache.suspend(context)
    assert context_info(context, model_id="", has_writer=has_writer).state is state


def test_what_never_ends_has_no_expiry() -> None:
    assert expiry(FOREVER) is None
    assert expiry(Lifetime.begin(5.0, False, 10.0)) == Expiry(
        at=datetime.fromtimestamp(15, UTC), seconds=5.0, sliding=False
    )
