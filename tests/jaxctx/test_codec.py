"""Answers and requests there and back through messages: every class, full and empty; what only a later server knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from jaxctx import types
from jaxctx.convert import generic as convert
from jaxctx.convert import decode, encode
from jaxctx.v1 import (
    context_pb2,
    context_service_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_service_pb2,
)

PAIRS: list[tuple[Any, Any]] = [
    (kind, GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name)))
    for name, kind in convert._TYPES.items()
    if dataclasses.is_dataclass(kind)
]
CHANGES: list[tuple[type, Any]] = [  # in which no labels are no change
    (types.UpdateContextRequest, context_service_pb2.UpdateContextRequest),
    (types.RetentionUpdate, snapshot_service_pb2.UpdateSnapshotRequest),
    (types.RetentionUpdate, snapshot_service_pb2.UpdatePublicationRequest),
]


def full(hint: Any) -> Any:
    """A value of that type which is not its default."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return full(arguments[0])
    if origin is Sequence:
        return (full(arguments[0]), full(arguments[0]))
    if origin is tuple:
        return tuple(full(each) for each in arguments)
    if origin is Mapping:
        return {full(arguments[0]): full(arguments[1])}
    if issubclass(hint, Enum):
        return list(hint)[-1]
    if hint is types.Parameter:  # one of its values
        return types.Parameter(name="é", output=full(types.CallOutput))
    if hint is types.SubmitCallRequest:  # a prompt or a function
        step = {"model_id": "é", "function": "é", "timeout_s": 0.5}
        return types.SubmitCallRequest(parameters=full(Sequence[types.Parameter]), **step)
    if dataclasses.is_dataclass(hint):
        return hint(**{name: full(each) for name, each in get_type_hints(hint).items()})
    moment = datetime(2026, 7, 1, 12, 30, 15, 123_456, UTC)
    return {int: 2**31 - 1, float: 0.5, bool: True, str: "é", bytes: b"\x00\xff", datetime: moment}[hint]


@pytest.mark.parametrize(("kind", "message"), PAIRS + CHANGES, ids=lambda each: each.__name__)
def test_there_and_back(kind: type, message: Any) -> None:
    answer = full(kind)
    assert decode(message.FromString(encode(answer, message).SerializeToString()), kind) == answer


@pytest.mark.parametrize(("kind", "message"), PAIRS, ids=lambda each: each.__name__)
def test_an_empty_message_has_an_answer_of_its_own(kind: type, message: Any) -> None:
    empty = decode(message(), kind)
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            assert getattr(empty, field.name) == field.default, field.name
    if (labels := getattr(empty, "labels", None)) is not None:
        assert labels == {}
        assert labels is not decode(message(), kind).labels


@pytest.mark.parametrize(("kind", "message"), CHANGES, ids=lambda each: each.__name__)
def test_what_is_not_sent_is_no_change(kind: type, message: Any) -> None:
    assert decode(message(), kind) == kind()
    assert decode(message(labels={}), kind) == kind(labels={})


def test_programs_are_asked_for() -> None:
    """Values of a oneof, members that can be compared, and what is meant where nothing is sent."""
    output = session_service_pb2.CallOutput(criterion=session_service_pb2.CRITERION_LATENCY, max_tokens=4)
    places = [{"name": "a", "text": ""}, {"name": "b", "variable_id": "v"}, {"name": "c", "output": output}]
    asked = session_service_pb2.SubmitCallRequest(session_id="s", template="t", parameters=places)
    call = decode(asked, types.SubmitCallRequest)
    assert (call.template, call.function, call.timeout_s) == ("t", None, 600.0)
    assert [(each.text, each.variable_id) for each in call.parameters] == [("", None), (None, "v"), (None, None)]
    assert call.parameters[2].output == types.CallOutput(criterion=types.Criterion.LATENCY, max_tokens=4)
    assert types.Criterion.LATENCY > types.Criterion.THROUGHPUT
    asked.timeout.FromSeconds(2)
    assert decode(asked, types.SubmitCallRequest).timeout_s == 2.0


def test_zero_is_told_from_nothing_where_both_can_be() -> None:
    usage: types.Usage = decode(generation_pb2.Usage(), types.Usage)
    for match in (0, ""):
        piece = types.GeneratePiece(index=0, context_id="a", stop_match=match, seed=0, usage=usage)
        assert decode(encode(piece, context_service_pb2.GenerateResponse), types.GeneratePiece) == piece
    result = types.ForwardOutputResult(index=0, token_id=0, seed=0, entropy=0.0)
    assert decode(encode(result, forward_pb2.ForwardOutputResult), types.ForwardOutputResult) == result


def test_what_only_a_later_server_knows() -> None:
    assert decode(context_pb2.Context(state=99), types.ContextInfo).state is types.ContextState.IDLE  # type: ignore[arg-type]
    layout = context_pb2.ContextPages(tiers=[context_pb2.TIER_DISK, 99])  # type: ignore[list-item]
    assert decode(layout, types.ContextPages).tiers == (types.Tier.DISK, types.Tier.LINEAGE)
    event = context_service_pb2.WatchContextsResponse(change=99)  # type: ignore[arg-type]
    assert decode(event, types.ContextEvent).change is types.ContextChange.CHANGED
    part = context_service_pb2.GenerateResponse(finish=99)  # type: ignore[arg-type]
    assert decode(part, types.GeneratePiece).finish is types.FinishReason.STOP


def test_known_fields_are_not_read() -> None:
    event = decode(context_service_pb2.WatchContextsResponse(context_id="a"), types.ContextEvent, at="now")
    assert (event.at, event.context_id) == ("now", "a")


def test_a_message_with_fewer_fields() -> None:
    info = full(types.EngineInfo)
    told = encode(info, model_service_pb2.Model)
    assert (told.model_id, told.parameters) == (info.model_id, info.parameters)


@pytest.mark.parametrize("seconds", [1e-9, 0.25, 300.25, 10 * 365 * 86_400.0])
def test_seconds_are_exact(seconds: float) -> None:
    expiry = types.Expiry(at=types.utc_datetime(0.0), seconds=seconds, sliding=False)
    assert math.isclose(decode(encode(expiry, lifetime_pb2.Expiry), types.Expiry).seconds, seconds, abs_tol=1e-9)
