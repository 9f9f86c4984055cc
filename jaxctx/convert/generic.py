"""Superseded by the explicit functions of this package: removed once nobody calls `encode` and `decode` any more.

Requests and answers as messages and back, field by field: `jaxctx.v1` says both with the same names.

A server decodes requests and encodes answers, a client decodes these; the store does both with its versions. How the
fields of a class and a message go over is found out once, at their first use.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.types import (
    CallOutput,
    Comparison,
    ContextChange,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    CreateContextRequest,
    Criterion,
    EngineInfo,
    EngineStats,
    EngineStatus,
    Expiry,
    FillResult,
    FinishReason,
    ForwardOutput,
    ForwardOutputResult,
    ForwardRequest,
    ForwardResult,
    GeneratePiece,
    GenerateRequest,
    GetContextResult,
    GraphTask,
    Model,
    OpenRequest,
    Parameter,
    PlanResult,
    Publication,
    RenderedChat,
    RetentionUpdate,
    SamplingParams,
    SaveRequest,
    SessionInfo,
    Snapshot,
    SubmitCallRequest,
    SubmitCallResult,
    TaskPhase,
    Tier,
    TokenIds,
    TokenLogprob,
    Ttl,
    UpdateContextRequest,
    Usage,
    VariableInfo,
    VariableState,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Translation = Callable[[Any], Any]

# The class of a message or enum, by its full name; a tuple or Sequence holds its values.
_TYPES: dict[str, type] = {
    "google.protobuf.Timestamp": datetime,
    "google.protobuf.Duration": float,
    "jaxctx.v1.EngineInfo": EngineInfo,
    "jaxctx.v1.EngineStats": EngineStats,
    "jaxctx.v1.Engine": EngineStatus,
    "jaxctx.v1.ContextState": ContextState,
    "jaxctx.v1.Expiry": Expiry,
    "jaxctx.v1.Context": ContextInfo,
    "jaxctx.v1.FillResponse": FillResult,
    "jaxctx.v1.FlushResponse": FillResult,
    "jaxctx.v1.TopLogprob": tuple,
    "jaxctx.v1.TokenLogprob": TokenLogprob,
    "jaxctx.v1.FinishReason": FinishReason,
    "jaxctx.v1.Usage": Usage,
    "jaxctx.v1.GenerateResponse": GeneratePiece,
    "jaxctx.v1.ForwardOutputResult": ForwardOutputResult,
    "jaxctx.v1.ForwardResponse": ForwardResult,
    "jaxctx.v1.Tier": Tier,
    "jaxctx.v1.ContextPages": ContextPages,
    "jaxctx.v1.TokenIds": TokenIds,
    "jaxctx.v1.Ancestor": tuple,
    "jaxctx.v1.GetContextResponse": GetContextResult,
    "jaxctx.v1.ContextChange": ContextChange,
    "jaxctx.v1.WatchContextsResponse": ContextEvent,
    "jaxctx.v1.CompareResponse": Comparison,
    "jaxctx.v1.PlanResponse": PlanResult,
    "jaxctx.v1.Model": Model,
    "jaxctx.v1.ApplyChatTemplateResponse": RenderedChat,
    "jaxctx.v1.Session": SessionInfo,
    "jaxctx.v1.VariableState": VariableState,
    "jaxctx.v1.Variable": VariableInfo,
    "jaxctx.v1.SubmitCallResponse": SubmitCallResult,
    "jaxctx.v1.TaskPhase": TaskPhase,
    "jaxctx.v1.Criterion": Criterion,
    "jaxctx.v1.GraphTask": GraphTask,
    "jaxctx.v1.Snapshot": Snapshot,
    "jaxctx.v1.OpenResponse": FillResult,
    "jaxctx.v1.TakeResponse": FillResult,
    "jaxctx.v1.Publication": Publication,
    "jaxctx.v1.UpdateContextRequest.Labels": Mapping,
    "jaxctx.v1.UpdateSnapshotRequest.Labels": Mapping,
    "jaxctx.v1.UpdatePublicationRequest.Labels": Mapping,
    "jaxctx.v1.Ttl": Ttl,
    "jaxctx.v1.CreateContextRequest": CreateContextRequest,
    "jaxctx.v1.UpdateContextRequest": UpdateContextRequest,
    "jaxctx.v1.SamplingParams": SamplingParams,
    "jaxctx.v1.GenerateRequest": GenerateRequest,
    "jaxctx.v1.AttentionMask": Sequence,
    "jaxctx.v1.ForwardOutput": ForwardOutput,
    "jaxctx.v1.ForwardRequest": ForwardRequest,
    "jaxctx.v1.SaveRequest": SaveRequest,
    "jaxctx.v1.OpenRequest": OpenRequest,
    "jaxctx.v1.UpdateSnapshotRequest": RetentionUpdate,
    "jaxctx.v1.CallOutput": CallOutput,
    "jaxctx.v1.Parameter": Parameter,
    "jaxctx.v1.SubmitCallRequest": SubmitCallRequest,
}

# Fields of messages that may have another name here: seconds are a Duration there, or say that they are.
_NAMES = {"duration": "seconds", "ttl_s": "seconds", "expires_at": "at", "pin_for": "pin_s"}

# How a value reads that only a later server knows, where that is not as the first one.
_UNKNOWN: dict[type, Enum] = {Tier: Tier.LINEAGE, ContextChange: ContextChange.CHANGED}


class _Field(NamedTuple):
    """A field that a dataclass and a message have in common."""

    name: str  # in the dataclass
    has_presence: bool  # in the message
    write: Translation | None  # None: the value goes over as it is
    read: Translation | None


def encode(told: object, kind: type[M], **known: Any) -> M:
    """A dataclass as a message of that class, which may have fewer fields, or `known` ones more; None is not set. A
    message as it is.
    """
    return told if isinstance(told, kind) else kind(**_values(kind.DESCRIPTOR, told) | known)


def decode(message: Message, kind: type[T], **known: Any) -> T:
    """`message` as a dataclass. `known` are fields that the caller knows; the message's are not read."""
    common, unset = _common(kind, message.DESCRIPTOR)  # type: ignore[arg-type]  # classes are hashable
    values = unset | known
    for there, value in message.ListFields():
        if (field := common.get(there.name)) is not None and field.name not in known:
            values[field.name] = value if field.read is None else field.read(value)
    return kind(**values)


def _values(descriptor: Any, told: object) -> dict[str, Any]:
    """The arguments of the message's constructor."""
    values, (common, _) = {}, _common(type(told), descriptor)  # type: ignore[arg-type]
    for there, (name, has_presence, write, _) in common.items():
        value = getattr(told, name)
        if value or (has_presence and value is not None):
            values[there] = value if write is None else write(value)
    return values


@functools.cache
def _common(kind: type, descriptor: Any) -> tuple[dict[str, _Field], dict[str, Any]]:
    """Fields by their names in the message; and of those that the class must be given, what they read as if unset."""
    needed = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(kind)}
    common: dict[str, _Field] = {}
    unset: dict[str, Any] = {}
    for there in descriptor.fields:
        oneof = there.containing_oneof
        names = (there.name, _NAMES.get(there.name), f"{there.name}_s", oneof and oneof.name)
        name = next((name for name in names if name in needed), None)
        if name is None:
            continue
        kind = _type(there)
        write, read = _translations(there, kind)
        if there.message_type and there.message_type.GetOptions().map_entry:
            write, read = None, dict
        elif there.is_repeated:
            write, read = write and _each(list, write), _each(tuple, read) if read else tuple
        elif oneof and name == oneof.name:
            write = _only(kind, write)
        if needed[name]:
            is_message = there.message_type and not there.is_repeated
            empty = GetMessageClass(there.message_type)() if is_message else there.default_value
            unset[name] = read(empty) if read else empty
        common[there.name] = _Field(name, there.has_presence, write, read)
    return common, unset


def _type(field: Any) -> type:
    """Of one value of a field, in a dataclass."""
    named = field.enum_type or field.message_type
    return type(field.default_value) if named is None else _TYPES.get(named.full_name, Message)


def _translations(field: Any, kind: Any) -> tuple[Translation | None, Translation | None]:
    """How one value of a field is written and read."""
    if field.enum_type is not None:
        unset, *values = field.enum_type.values
        members = {each.number: kind[each.name.removeprefix(unset.name.removesuffix("UNSPECIFIED"))] for each in values}
        numbers = {member: number for number, member in members.items()}
        unknown = _UNKNOWN.get(kind, next(iter(kind)))
        return numbers.__getitem__, lambda number: members.get(number, unknown)
    if field.message_type is None or kind is Message:
        return None, None
    if kind is datetime:
        return None, lambda message: message.ToDatetime(UTC)
    if kind is float:
        return lambda seconds: timedelta(seconds=seconds), lambda message: message.ToNanoseconds() / 1e9
    if kind not in (tuple, Sequence, Mapping):
        return functools.partial(_values, field.message_type), functools.partial(decode, kind=kind)
    first, *second = (each.name for each in field.message_type.fields)
    if kind is Sequence:
        return lambda pairs: {first: list(chain(*pairs))}, lambda message: _pairs(getattr(message, first))
    if kind is Mapping:
        return lambda mapping: {first: mapping}, lambda message: dict(getattr(message, first))
    return lambda pair: {first: pair[0], second[0]: pair[1]}, operator.attrgetter(first, *second)


def _pairs(flat: Sequence[T]) -> tuple[tuple[T, T], ...]:
    """Of first, second, first, second, ..."""
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _each(kind: type, translate: Translation) -> Translation:
    return lambda items: kind(map(translate, items))


def _only(kind: type, write: Translation | None) -> Translation:
    """For one field of a oneof: writes values of this class."""
    return lambda value: (write(value) if write else value) if isinstance(value, kind) else None
