"""Contexts, pages, engines and sessions as the page's scripts read them."""

from __future__ import annotations

import json

import pytest

from jaxctx.v1.admin_service_pb2 import Attention, Engine, EngineInfo, EngineStats
from jaxctx.v1.context_pb2 import CONTEXT_STATE_SUSPENDED, Context, ContextPages
from jaxctx.v1.context_pb2 import TIER_DEVICE as DEVICE
from jaxctx.v1.context_pb2 import TIER_DISK as DISK
from jaxctx.v1.context_pb2 import TIER_HOST as HOST
from jaxctx.v1.context_pb2 import TIER_LINEAGE as LINEAGE
from jaxctx_server.http.page.as_json import MAX_DRAWN_PAGES, context_json, engine_json, pages_json


def test_a_context() -> None:
    context = Context(context_id="a", parent_id="p", state=CONTEXT_STATE_SUSPENDED, committed_pages=3, working_pages=2)
    context.created_at.FromMilliseconds(1_700_000_000_123)
    found = context_json(context)
    assert (found["context_id"], found["parent_id"], found["state"], found["pages"]) == ("a", "p", "suspended", 5)
    assert found["created_at"] == 1_700_000_000_123
    assert found["expires_at"] is None
    json.dumps(found)


def test_a_context_without_a_parent_that_ends() -> None:
    context = Context(context_id="a")
    context.expiry.at.FromMilliseconds(5000)
    assert context_json(context)["parent_id"] is None
    assert context_json(context)["expires_at"] == 5000


def test_a_context_that_switched_its_adapter() -> None:
    context = Context(adapter="sql", adapter_spans=[{"adapter": "fr"}, {"start": 5, "adapter": "sql"}])
    found = context_json(context)
    assert found["adapter"] == "sql"
    assert found["adapter_spans"] == [{"start": 0, "adapter": "fr"}, {"start": 5, "adapter": "sql"}]
    assert context_json(Context())["adapter_spans"] == []


def test_pages_and_their_tiers() -> None:
    pages = ContextPages(page_ids=[4, 5, 6, 9], refcounts=[2, 2, 1, 1], tiers=[DEVICE, HOST, DISK, LINEAGE])
    assert pages_json("a", pages) == {
        "context_id": "a",
        "count": 4,
        "stride": 1,
        "page_ids": [4, 5, 6, 9],
        "refcounts": [2, 2, 1, 1],
        "tiers": "dhkl",
    }


def test_a_suspended_context_has_tiers_only() -> None:
    found = pages_json("a", ContextPages(tiers=[HOST, HOST]))
    assert (found["count"], found["page_ids"], found["tiers"]) == (2, [], "hh")


@pytest.mark.parametrize(
    ("count", "stride"), [(0, 1), (MAX_DRAWN_PAGES, 1), (MAX_DRAWN_PAGES + 1, 2), (100 * MAX_DRAWN_PAGES, 128)]
)
def test_of_many_pages_some_are_drawn(count: int, stride: int) -> None:
    found = pages_json("a", ContextPages(page_ids=range(count), refcounts=[1] * count, tiers=[DEVICE] * count))
    assert (found["count"], found["stride"]) == (count, stride)
    assert found["page_ids"] == list(range(0, count, stride))
    assert len(found["page_ids"]) == len(found["refcounts"]) == len(found["tiers"]) <= MAX_DRAWN_PAGES


def test_an_engine() -> None:
    engine = Engine(
        info=EngineInfo(model_id="m", page_size=16),
        stats=EngineStats(pages_total=9, running=2),
        attention=Attention(implementation="tpu", reason="checked"),
    )
    assert engine_json(engine)["engine_id"] == "local"
    assert engine_json(engine)["running"] == 2
    assert engine_json(engine)["attention"] == "tpu"
    assert engine_json(engine)["attention_reason"] == "checked"
    assert engine_json(Engine(address="127.0.0.1:5"))["engine_id"] == "127.0.0.1:5"
