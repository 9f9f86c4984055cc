"""The contract says what the Engine interface and the client's dataclasses say: same names, field by field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor

from jaxctx import answers
from jaxctx.client import options, streams
from jaxctx.engine import interface
from jaxctx.v1 import (
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    error_reason_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    rules_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
    stored_pb2,
)

FILES = [
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    error_reason_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    rules_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
    stored_pb2,
]
PAIRS: list[tuple[type, Any]] = [
    (interface.CreateRequest, context_service_pb2.CreateContextRequest),
    (interface.Sampling, generation_pb2.Sampling),
    (interface.GenerateRequest, context_service_pb2.GenerateRequest),
    (answers.GeneratePiece, context_service_pb2.GenerateResponse),
    (interface.PassOutput, forward_pb2.PassOutput),
    (interface.ForwardRequest, context_service_pb2.ForwardRequest),
    (interface.SaveRequest, snapshot_service_pb2.SaveRequest),
    (interface.OpenRequest, snapshot_service_pb2.OpenRequest),
    (interface.Ttl, lifetime_pb2.Ttl),
    (answers.ContextInfo, context_pb2.Context),
    (answers.ContextPages, context_pb2.ContextPages),
    (answers.FillResult, context_service_pb2.FillResponse),
    (answers.PlanResult, context_service_pb2.PlanResponse),
    (answers.TokenLogprob, generation_pb2.TokenLogprob),
    (answers.Usage, generation_pb2.Usage),
    (answers.Expiry, lifetime_pb2.Expiry),
    (answers.Comparison, context_service_pb2.CompareResponse),
    (answers.ContextEvent, context_service_pb2.WatchContextsResponse),
    (options.Output, forward_pb2.PassOutput),
    (answers.PassResult, forward_pb2.PassResult),
    (answers.ForwardResult, context_service_pb2.ForwardResponse),
    (answers.Snapshot, snapshot_pb2.Snapshot),
    (answers.Publication, snapshot_pb2.Publication),
    (streams.Piece, context_service_pb2.GenerateResponse),
    (answers.Model, model_service_pb2.Model),
    (answers.RenderedChat, model_service_pb2.ApplyChatTemplateResponse),
    (answers.EngineInfo, admin_service_pb2.EngineInfo),
    (answers.EngineStats, admin_service_pb2.EngineStats),
]


# Seconds here are a Duration there; `take` is a method of its own.
PLACES = {"pin_s": "pin_for", "seconds": "duration", "take": "name"}


@pytest.mark.parametrize(("owner", "message"), PAIRS, ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_every_field_has_its_place_in_the_message(owner: type, message: Any) -> None:
    places = {field.name for field in message.DESCRIPTOR.fields} | {each.name for each in message.DESCRIPTOR.oneofs}
    assert {PLACES.get(field.name, field.name) for field in dataclasses.fields(owner)} <= places


def test_the_sampling_options_of_the_client_are_those_of_the_request() -> None:
    places = {field.name for field in generation_pb2.Sampling.DESCRIPTOR.fields}
    places |= {field.name for field in context_service_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert places - {"context_id", "n", "sampling"} == options.GenerateOptions.__annotations__.keys()


@pytest.mark.parametrize(
    ("values", "enum", "prefix"),
    [
        (answers.ContextState, context_pb2.ContextState, "CONTEXT_STATE_"),
        (answers.FinishReason, generation_pb2.FinishReason, "FINISH_REASON_"),
        (answers.Tier, context_pb2.Tier, "TIER_"),
        (answers.Change, context_service_pb2.ContextChange, "CONTEXT_CHANGE_"),
    ],
)
def test_enums_agree(values: Any, enum: Any, prefix: str) -> None:
    assert {prefix + value.name for value in values} == set(enum.keys()) - {prefix + "UNSPECIFIED"}


def test_every_method_has_messages_of_its_own() -> None:
    messages: list[descriptor.Descriptor] = []
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"
                messages += [method.input_type, method.output_type]
    assert len({message.full_name for message in messages}) == len(messages)


def test_stubs_lie_beside_every_proto() -> None:
    import jaxctx.v1

    stubs = {path.name for path in Path(next(iter(jaxctx.v1.__path__))).glob("*_pb2.py")}
    assert stubs == {Path(file.DESCRIPTOR.name).stem + "_pb2.py" for file in FILES}
