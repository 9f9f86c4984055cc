"""Where the contexts of a router are."""

from typing import Any

import pytest

from jaxctx.v1.context_pb2 import Context
from jaxctx_server.router import placement
from jaxctx_server.router.placement import ContextKey, CreatedKey, PlacementTable

FIRST: Any = "first engine"
SECOND: Any = "second engine"
KEY = ContextKey("alice", "a")


@pytest.fixture
def table() -> PlacementTable:
    return PlacementTable()


def test_contexts_are_remembered_by_tenant(table: PlacementTable) -> None:
    table.remember("alice", FIRST, Context(context_id="a"))
    table.remember("bob", SECOND, Context(context_id="a"))
    table.remember("bob", SECOND, Context())  # a response without a context
    assert table.on_engine(FIRST).keys() == {KEY}
    assert table.on_engine(SECOND).keys() == {ContextKey("bob", "a")}
    assert table.tenants() == {"alice", "bob"}
    table.forget(KEY)
    assert table.get(KEY) is None


def test_a_known_placement_is_not_replaced_by_what_an_engine_lists(table: PlacementTable) -> None:
    table.remember("alice", FIRST, Context(context_id="a"))
    table.add_unknown(KEY, SECOND)
    found = table.get(KEY)
    assert found is not None
    assert found.handle is FIRST


def test_the_latest_used_are_remembered(table: PlacementTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_PLACEMENTS", 2)
    for context_id in ("a", "b"):
        table.remember("alice", FIRST, Context(context_id=context_id))
    table.use(KEY)
    table.remember("alice", FIRST, Context(context_id="c"))
    assert {key.context_id for key in table.on_engine(FIRST)} == {"a", "c"}


def test_a_context_is_in_use_while_any_call_is_at_work_on_it(table: PlacementTable) -> None:
    with table.in_use(KEY):
        with table.in_use(KEY):
            assert table.idle([KEY, ContextKey("alice", "b")]) == [ContextKey("alice", "b")]
        assert table.is_in_use(KEY)
    assert not table.is_in_use(KEY)


def test_calls_that_create_the_same_share_a_lock(table: PlacementTable) -> None:
    key = CreatedKey("alice", "GetContext", "a")
    lock = table.creation_lock(key)
    assert table.creation_lock(key) is lock
    assert table.creation_lock(key._replace(tenant="bob")) is not lock
