"""Contexts: what may be unset, empty lists that are not None, and ids beside a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxctx import types
from jaxctx.convert import contexts
from jaxctx.v1 import context_pb2, context_service_pb2
from tests.jaxctx.convert.examples import example_of

UNKNOWN: Any = 99  # a number that only a later server knows


def test_numbers_that_only_a_later_server_knows() -> None:
    assert contexts.context_state_from_proto(UNKNOWN) is types.ContextState.IDLE
    assert contexts.tier_from_proto(UNKNOWN) is types.Tier.LINEAGE
    assert contexts.context_change_from_proto(UNKNOWN) is types.ContextChange.CHANGED
    assert contexts.context_info_from_proto(context_pb2.Context(state=UNKNOWN)).state is types.ContextState.IDLE
    pages = context_pb2.ContextPages(tiers=[context_pb2.TIER_DISK, UNKNOWN])
    assert contexts.context_pages_from_proto(pages).tiers == (types.Tier.DISK, types.Tier.LINEAGE)
    event = context_service_pb2.WatchContextsResponse(change=UNKNOWN)
    assert contexts.context_event_from_proto(event).change is types.ContextChange.CHANGED


@pytest.mark.parametrize("name", ["parent_id", "pinned_until", "expiry"])
def test_what_a_context_may_lack_is_unset_and_none(name: str) -> None:
    info = replace(example_of(types.ContextInfo), **{name: None})
    sent = contexts.context_info_to_proto(info)
    assert not sent.HasField(name)  # type: ignore[arg-type]
    assert contexts.context_info_from_proto(sent) == info


def test_a_parent_with_an_empty_id_is_not_none() -> None:
    assert contexts.context_info_from_proto(context_pb2.Context(parent_id="")).parent_id == ""


def test_labels_are_a_copy_of_the_message() -> None:
    message = context_pb2.Context(labels={"a": "b"})
    info = contexts.context_info_from_proto(message)
    message.labels["a"] = "changed"
    assert info.labels == {"a": "b"}


def test_fill_and_flush_have_a_message_each() -> None:
    result = example_of(types.FillResult)
    assert isinstance(contexts.fill_result_to_proto(result), context_service_pb2.FillResponse)
    assert isinstance(contexts.flush_response_to_proto(result), context_service_pb2.FlushResponse)


def test_no_pages_and_no_tokens_are_not_none() -> None:
    """None means that nobody asked for them."""
    info = example_of(types.ContextInfo)
    not_asked = types.GetContextResult(context=info)
    empty = types.GetContextResult(
        context=info, pages=types.ContextPages(page_ids=(), refcounts=(), tiers=()), tokens=types.TokenIds(ids=())
    )
    for result in (not_asked, empty):
        assert contexts.get_context_result_from_proto(contexts.get_context_result_to_proto(result)) == result


def test_ancestors_stay_in_their_order() -> None:
    result = types.GetContextResult(context=example_of(types.ContextInfo), ancestors=[("b", 7), ("a", 3)])
    sent = contexts.get_context_result_to_proto(result)
    assert [(each.context_id, each.forked_at) for each in sent.ancestors] == [("b", 7), ("a", 3)]
    assert contexts.get_context_result_from_proto(sent).ancestors == (("b", 7), ("a", 3))


def test_an_event_of_a_closed_context_has_none() -> None:
    event = types.ContextEvent(change=types.ContextChange.CLOSED, at=types.utc_datetime(5.0), context_id="a")
    sent = contexts.context_event_to_proto(event)
    assert not sent.HasField("context")
    assert contexts.context_event_from_proto(sent) == event


def test_a_new_context_is_of_the_default_model_for_ever_and_not_pinned() -> None:
    sent = contexts.create_context_request_to_proto(types.CreateContextRequest())
    assert sent.model_id == ""
    assert (sent.HasField("context_id"), sent.HasField("pin_for")) == (False, False)
    assert not sent.ttl.HasField("duration")
    with_model = context_service_pb2.CreateContextRequest(model_id="m", salt="s")
    assert contexts.create_context_request_from_proto(with_model) == types.CreateContextRequest(salt="s")


def test_an_update_to_zero_is_not_no_change() -> None:
    update = types.UpdateContextRequest(priority=0, pinned=False, labels={}, ttl=types.Ttl(), pin_s=0.0)
    sent = contexts.update_context_request_to_proto(update, context_id="c")
    assert sent.context_id == "c"
    assert {field.name for field, _ in sent.ListFields()} == {
        "context_id",
        "priority",
        "pinned",
        "labels",
        "ttl",
        "pin_for",
    }
    assert contexts.update_context_request_from_proto(sent) == update


def test_an_update_of_nothing_sends_nothing() -> None:
    sent = contexts.update_context_request_to_proto(types.UpdateContextRequest())
    assert sent.ListFields() == []
    assert contexts.update_context_request_from_proto(sent) == types.UpdateContextRequest()
