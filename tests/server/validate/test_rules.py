"""The rules of single fields, and how violations are named and reported together."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx import convert, types
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2
from jaxctx_server.validate import validate
from tests.server.validate.requests import refused_fields


def test_fields_that_are_wrong_and_fields_that_are_wrong_together_are_told_together(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(
        context_id="a", max_tokens=3, min_tokens=4, top_logprobs=1, stop=["ok", ""], sampling={"top_k": -1}
    )
    assert sorted(refused_fields(limits, request)) == ["min_tokens", "sampling.top_k", "stop[1]", "top_logprobs"]


def test_a_field_that_is_wrong_twice_is_told_once(limits: Any) -> None:
    assert refused_fields(limits, context_service_pb2.ForkRequest(context_id="a", n=2000, child_ids=["x"])) == ["n"]
    assert refused_fields(limits, context_service_pb2.CreateContextRequest(pin_for={"seconds": -1})) == ["pin_for"]


def test_a_list_that_is_far_too_long_is_not_looked_at(limits: Any) -> None:
    outputs = [{"index": 7, "logits": True, "top": -1}] * 100_000
    request = context_service_pb2.ForwardRequest(context_id="", tokens=[1], outputs=outputs, positions=[1, 2])
    assert refused_fields(limits, request) == ["context_id", "outputs", "positions"]


def test_labels_are_named_by_their_keys_unless_these_are_wrong(limits: Any) -> None:
    request = context_service_pb2.CreateContextRequest(labels={"team": "v" * 257})
    assert refused_fields(limits, request) == ["labels[team]"]
    request = context_service_pb2.CreateContextRequest(labels={"private" * 50: "v" * 257})
    assert refused_fields(limits, request) == ["labels.key", "labels[]"]


def test_descriptions_repeat_no_text(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(context_id="my secret", stop=["private" * 50])
    with pytest.raises(InvalidArgument) as raised:
        validate(limits, request)
    assert "secret" not in str(raised.value)
    assert "private" not in str(raised.value)


def test_masks_may_touch_and_end_anywhere_in_the_context(limits: Any) -> None:
    masks = [{"bounds": [0, 4, 4, 10_000]}, {}]
    request = context_service_pb2.ForwardRequest(context_id="a", tokens=[1, 2], masks=masks)
    validate(limits, request)
    assert convert.forward_request_from_proto(request).masks == (((0, 4), (4, 10_000)), ())


def test_what_is_not_sent_is_made_what_the_contract_says(limits: Any) -> None:
    """And what is sent as zero is not the same."""
    request = context_service_pb2.GenerateRequest(context_id="a")
    validate(limits, request)
    assert convert.generate_request_from_proto(request) == types.GenerateRequest(context_id="a")
    request = context_service_pb2.GenerateRequest(context_id="a", sampling={"temperature": 0, "seed": 0})
    validate(limits, request)
    sampling = types.SamplingParams(temperature=0.0, seed=0)
    assert convert.generate_request_from_proto(request) == types.GenerateRequest(context_id="a", sampling=sampling)
    update = context_service_pb2.UpdateContextRequest(context_id="a")
    assert convert.update_context_request_from_proto(update) == types.UpdateContextRequest()
    update = context_service_pb2.UpdateContextRequest(context_id="a", pinned=False, priority=0, ttl={}, labels={})
    nothing = types.UpdateContextRequest(pinned=False, priority=0, ttl=types.Ttl(None), labels={})
    assert convert.update_context_request_from_proto(update) == nothing
    create = context_service_pb2.CreateContextRequest(pinned=True, pin_for={"seconds": 1, "nanos": 500_000_000})
    assert convert.create_context_request_from_proto(create) == types.CreateContextRequest(pinned=True, pin_s=1.5)
