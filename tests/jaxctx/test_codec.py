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

from jaxctx import answers
from jaxctx.codec import decode, encode
from jaxctx.engine import interface
from jaxctx.v1 import (
    admin_service_pb2,
    context_pb2,
    context_service_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
)

PAIRS: list[tuple[type, Any]] = [
    (answers.Expiry, lifetime_pb2.Expiry),
    (answers.ContextInfo, context_pb2.Context),
    (answers.ContextPages, context_pb2.ContextPages),
    (answers.FillResult, context_service_pb2.FillResponse),
    (answers.FillResult, snapshot_service_pb2.OpenResponse),
    (answers.PlanResult, context_service_pb2.PlanResponse),
    (answers.Comparison, context_service_pb2.CompareResponse),
    (answers.ContextEvent, context_service_pb2.WatchContextsResponse),
    (answers.TokenLogprob, generation_pb2.TokenLogprob),
    (answers.GeneratePiece, context_service_pb2.GenerateResponse),
    (answers.PassResult, forward_pb2.PassResult),
    (answers.ForwardResult, context_service_pb2.ForwardResponse),
    (answers.Snapshot, snapshot_pb2.Snapshot),
    (answers.Publication, snapshot_pb2.Publication),
    (answers.Model, model_service_pb2.Model),
    (answers.Engine, admin_service_pb2.Engine),
    (answers.RenderedChat, model_service_pb2.ApplyChatTemplateResponse),
    (interface.CreateRequest, context_service_pb2.CreateContextRequest),
    (interface.GenerateRequest, context_service_pb2.GenerateRequest),
    (interface.ForwardRequest, context_service_pb2.ForwardRequest),
    (interface.SaveRequest, snapshot_service_pb2.SaveRequest),
]
CHANGES: list[tuple[type, Any]] = [  # in which no labels are no change
    (interface.UpdateRequest, context_service_pb2.UpdateContextRequest),
    (interface.Changes, snapshot_service_pb2.UpdateSnapshotRequest),
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
    labels = getattr(empty, "labels", {})
    assert labels == {}
    assert labels is not getattr(decode(message(), kind), "labels", None)


@pytest.mark.parametrize(("kind", "message"), CHANGES, ids=lambda each: each.__name__)
def test_what_is_not_sent_is_no_change(kind: type, message: Any) -> None:
    assert decode(message(), kind) == kind()
    assert decode(message(labels={}), kind) == kind(labels={})


def test_zero_is_told_from_nothing_where_both_can_be() -> None:
    usage = answers.Usage(prompt_tokens=0, cached_tokens=0, computed_tokens=0, completion_tokens=0)
    for match in (0, ""):
        piece = answers.GeneratePiece(index=0, context_id="a", stop_match=match, seed=0, usage=usage)
        assert decode(encode(piece, context_service_pb2.GenerateResponse), answers.GeneratePiece) == piece
    result = answers.PassResult(index=0, token_id=0, seed=0, entropy=0.0)
    assert decode(encode(result, forward_pb2.PassResult), answers.PassResult) == result


def test_what_only_a_later_server_knows() -> None:
    assert decode(context_pb2.Context(state=99), answers.ContextInfo).state is answers.ContextState.IDLE  # type: ignore[arg-type]
    layout = context_pb2.ContextPages(tiers=[context_pb2.TIER_DISK, 99])  # type: ignore[list-item]
    assert decode(layout, answers.ContextPages).tiers == (answers.Tier.DISK, answers.Tier.LINEAGE)
    event = context_service_pb2.WatchContextsResponse(change=99)  # type: ignore[arg-type]
    assert decode(event, answers.ContextEvent).change is answers.Change.CHANGED
    part = context_service_pb2.GenerateResponse(finish=99)  # type: ignore[arg-type]
    assert decode(part, answers.OutputPart).finish is answers.FinishReason.STOP


def test_known_fields_are_not_read() -> None:
    event = decode(context_service_pb2.WatchContextsResponse(context_id="a"), answers.ContextEvent, at="now")
    assert (event.at, event.context_id) == ("now", "a")


def test_a_message_with_fewer_fields() -> None:
    info = full(answers.EngineInfo)
    told = encode(info, model_service_pb2.Model)
    assert (told.model_id, told.parameters) == (info.model_id, info.parameters)


@pytest.mark.parametrize("seconds", [1e-9, 0.25, 300.25, 10 * 365 * 86_400.0])
def test_seconds_are_exact(seconds: float) -> None:
    expiry = answers.Expiry(at=answers.moment(0.0), seconds=seconds, sliding=False)
    assert math.isclose(decode(encode(expiry, lifetime_pb2.Expiry), answers.Expiry).seconds, seconds, abs_tol=1e-9)
