"""The contract says what the Engine interface and the client say by hand: same names, field by field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor

from jaxctx import types
from jaxctx.client import streams
from jaxctx.client.options import ForwardOutputOptions
from jaxctx.v1 import (
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    engine_service_pb2,
    error_reason_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    rules_pb2,
    session_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
    stored_pb2,
)

FILES = [
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    engine_service_pb2,
    error_reason_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    rules_pb2,
    session_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
    stored_pb2,
]
PAIRS: list[tuple[type, Any]] = [
    (types.CreateContextRequest, context_service_pb2.CreateContextRequest),
    (types.SamplingParams, generation_pb2.SamplingParams),
    (types.GenerateRequest, context_service_pb2.GenerateRequest),
    (types.ForwardOutput, forward_pb2.ForwardOutput),
    (types.ForwardRequest, context_service_pb2.ForwardRequest),
    (types.SaveRequest, snapshot_service_pb2.SaveRequest),
    (types.OpenRequest, snapshot_service_pb2.OpenRequest),
    (types.Ttl, lifetime_pb2.Ttl),
    (ForwardOutputOptions, forward_pb2.ForwardOutput),
    (streams.Piece, context_service_pb2.GenerateResponse),
]


# Seconds here are a Duration there.
PLACES = {"pin_s": "pin_for", "seconds": "duration"}


@pytest.mark.parametrize(("owner", "message"), PAIRS, ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_every_field_has_its_place_in_the_message(owner: type, message: Any) -> None:
    places = {field.name for field in message.DESCRIPTOR.fields} | {each.name for each in message.DESCRIPTOR.oneofs}
    assert {PLACES.get(field.name, field.name) for field in dataclasses.fields(owner)} <= places


def test_every_method_has_messages_of_its_own() -> None:
    messages: list[descriptor.Descriptor] = []
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == f"{method.name}Response"
                messages += [method.input_type, method.output_type]
    assert len({message.full_name for message in messages}) == len(messages)


def test_what_adds_or_takes_away_may_not_be_repeated() -> None:
    """Nobody knows whether a call that was lost was made: only what does no more the second time is sent once more."""
    methods = [each for file in FILES for every in file.DESCRIPTOR.services_by_name.values() for each in every.methods]
    level = {each.name: each.GetOptions().idempotency_level for each in methods}
    may = ("Get", "List", "Watch", "Read", "Update", "Plan", "Compare", "Tokenize", "Detokenize", "ApplyChatTemplate")
    assert {name for name in level if level[name]} == {name for name in level if name.startswith(may)}


def test_stubs_lie_beside_every_proto() -> None:
    import jaxctx.v1

    stubs = {path.name for path in Path(next(iter(jaxctx.v1.__path__))).glob("*_pb2.py")}
    assert stubs == {Path(file.DESCRIPTOR.name).stem + "_pb2.py" for file in FILES}
