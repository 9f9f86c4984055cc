"""Compares hand-written classes with descriptors of protos/jaxctx/v1, for test_types and convert/test_all_messages."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from jaxctx import types
from jaxctx.v1 import (
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A class and the message that it stands for."""

    kind: type[Any]
    message: Any
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names in the message: names in the class
    left_out: frozenset[str] = frozenset()  # fields of the message that stand beside the class, in an engine's calls
    # Fields whose messages are always sent, and so are not optional in the class.
    always_sent: frozenset[str] = frozenset()
    # What an unset optional field means, where that is not None.
    unset: Mapping[str, object] = dataclasses.field(default_factory=dict)


CONTEXT_SENT = frozenset({"context"})

PAIRS = [
    Pair(kind=types.EngineInfo, message=admin_service_pb2.EngineInfo),
    Pair(kind=types.EngineStats, message=admin_service_pb2.EngineStats),
    Pair(kind=types.Attention, message=admin_service_pb2.Attention),
    Pair(kind=types.EngineStatus, message=admin_service_pb2.Engine, always_sent=frozenset({"info", "stats"})),
    Pair(kind=types.AdapterInfo, message=admin_service_pb2.Adapter),
    Pair(kind=types.AdapterSpan, message=context_pb2.AdapterSpan),
    Pair(
        kind=types.Expiry,
        message=lifetime_pb2.Expiry,
        renamed={"duration": "seconds"},
        always_sent=frozenset({"at", "seconds"}),
    ),
    Pair(kind=types.Ttl, message=lifetime_pb2.Ttl, renamed={"duration": "seconds"}),
    Pair(kind=types.ContextInfo, message=context_pb2.Context, always_sent=frozenset({"created_at", "used_at"})),
    Pair(kind=types.FillResult, message=context_service_pb2.FillResponse, always_sent=CONTEXT_SENT),
    Pair(kind=types.FillResult, message=context_service_pb2.FlushResponse, always_sent=CONTEXT_SENT),
    Pair(kind=types.FillResult, message=snapshot_service_pb2.OpenResponse, always_sent=CONTEXT_SENT),
    Pair(kind=types.FillResult, message=snapshot_service_pb2.TakeResponse, always_sent=CONTEXT_SENT),
    Pair(kind=types.TokenLogprob, message=generation_pb2.TokenLogprob),
    Pair(kind=types.Usage, message=generation_pb2.Usage),
    Pair(
        kind=types.GeneratePiece,
        message=context_service_pb2.GenerateResponse,
        renamed={"stop_text": "stop_match", "stop_token_id": "stop_match"},
    ),
    Pair(kind=types.ForwardOutputParams, message=forward_pb2.ForwardOutputParams),
    Pair(kind=types.ForwardOutputResult, message=forward_pb2.ForwardOutputResult),
    Pair(kind=types.ForwardRequest, message=context_service_pb2.ForwardRequest),
    Pair(kind=types.ForwardResult, message=context_service_pb2.ForwardResponse, always_sent=CONTEXT_SENT),
    Pair(kind=types.TokenIds, message=content_pb2.TokenIds),
    Pair(kind=types.ContextPages, message=context_pb2.ContextPages),
    Pair(kind=types.GetContextResult, message=context_service_pb2.GetContextResponse, always_sent=CONTEXT_SENT),
    Pair(kind=types.ContextEvent, message=context_service_pb2.WatchContextsResponse, always_sent=frozenset({"at"})),
    Pair(kind=types.Comparison, message=context_service_pb2.CompareResponse),
    Pair(kind=types.PlanResult, message=context_service_pb2.PlanResponse),
    Pair(kind=types.Model, message=model_service_pb2.Model),
    Pair(
        kind=types.RenderedChat,
        message=model_service_pb2.ApplyChatTemplateResponse,
        left_out=frozenset({"entries"}),
    ),
    Pair(
        kind=types.SessionInfo,
        message=session_service_pb2.Session,
        renamed={"ttl": "ttl_s"},
        always_sent=frozenset({"ttl_s"}),
    ),
    Pair(kind=types.VariableInfo, message=session_service_pb2.Variable),
    Pair(kind=types.SubmitCallResult, message=session_service_pb2.SubmitCallResponse),
    Pair(kind=types.GraphTask, message=session_service_pb2.GraphTask),
    Pair(kind=types.Snapshot, message=snapshot_pb2.Snapshot, always_sent=frozenset({"created_at"})),
    Pair(kind=types.Publication, message=snapshot_pb2.Publication, always_sent=frozenset({"created_at"})),
    Pair(
        kind=types.CreateContextRequest,
        message=context_service_pb2.CreateContextRequest,
        renamed={"pin_for": "pin_s"},
        left_out=frozenset({"model_id"}),
        unset={"ttl": types.Ttl()},
    ),
    Pair(
        kind=types.UpdateContextRequest,
        message=context_service_pb2.UpdateContextRequest,
        renamed={"pin_for": "pin_s"},
        left_out=frozenset({"context_id"}),
    ),
    Pair(
        kind=types.SamplingParams,
        message=generation_pb2.SamplingParams,
        unset={"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0},
    ),
    Pair(kind=types.OutputFormat, message=generation_pb2.OutputFormat),
    Pair(
        kind=types.GenerateRequest,
        message=context_service_pb2.GenerateRequest,
        unset={"n": 1, "sampling": types.SamplingParams()},
    ),
    Pair(
        kind=types.GetSnapshotResult,
        message=snapshot_service_pb2.GetSnapshotResponse,
        always_sent=frozenset({"snapshot"}),
    ),
    Pair(kind=types.SaveRequest, message=snapshot_service_pb2.SaveRequest, unset={"ttl": types.Ttl()}),
    Pair(
        kind=types.OpenRequest,
        message=snapshot_service_pb2.OpenRequest,
        renamed={"pin_for": "pin_s"},
        unset={"ttl": types.Ttl()},
    ),
    Pair(
        kind=types.RetentionUpdate,
        message=snapshot_service_pb2.UpdateSnapshotRequest,
        left_out=frozenset({"name", "version"}),
    ),
    Pair(
        kind=types.RetentionUpdate,
        message=snapshot_service_pb2.UpdatePublicationRequest,
        left_out=frozenset({"publication_id"}),
    ),
    Pair(kind=types.CallOutput, message=session_service_pb2.CallOutput, unset={"sampling": types.SamplingParams()}),
    Pair(kind=types.Parameter, message=session_service_pb2.Parameter),
    Pair(
        kind=types.SubmitCallRequest,
        message=session_service_pb2.SubmitCallRequest,
        renamed={"timeout": "timeout_s"},
        left_out=frozenset({"session_id"}),
        unset={"timeout_s": 600.0},
    ),
]

ENUMS: list[tuple[type[enum.Enum], EnumDescriptor]] = [
    (types.ContextState, context_pb2.ContextState.DESCRIPTOR),
    (types.Tier, context_pb2.Tier.DESCRIPTOR),
    (types.ContextChange, context_service_pb2.ContextChange.DESCRIPTOR),
    (types.FinishReason, generation_pb2.FinishReason.DESCRIPTOR),
    (types.Criterion, session_service_pb2.Criterion.DESCRIPTOR),
    (types.VariableState, session_service_pb2.VariableState.DESCRIPTOR),
    (types.TaskPhase, session_service_pb2.TaskPhase.DESCRIPTOR),
]

# What fields of these messages are in the classes.
TYPES_OF_MESSAGES: dict[str, Any] = {pair.message.DESCRIPTOR.full_name: pair.kind for pair in PAIRS} | {
    "google.protobuf.Timestamp": datetime,
    "google.protobuf.Duration": float,
    "jaxctx.v1.TopLogprob": tuple[int, float],
    "jaxctx.v1.Choices": Sequence[str],
    "jaxctx.v1.Ancestor": tuple[str, int],
    "jaxctx.v1.AttentionMask": Sequence[tuple[int, int]],
    "jaxctx.v1.UpdateContextRequest.Labels": Mapping[str, str],
    "jaxctx.v1.UpdateSnapshotRequest.Labels": Mapping[str, str],
    "jaxctx.v1.UpdatePublicationRequest.Labels": Mapping[str, str],
}
TYPES_OF_SCALARS = {
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_BYTES: bytes,
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_STRING: str,
}
TYPES_OF_ENUMS = {descriptor.full_name: kind for kind, descriptor in ENUMS}


def type_of_value(field: FieldDescriptor) -> Any:
    """The type of one value of a field."""
    if field.message_type is not None:
        return TYPES_OF_MESSAGES[field.message_type.full_name]
    if field.enum_type is not None:
        return TYPES_OF_ENUMS[field.enum_type.full_name]
    return TYPES_OF_SCALARS[field.type]


def type_of_field(field: FieldDescriptor) -> Any:
    """The type of a field in the class, without None."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return Mapping[type_of_value(key), type_of_value(value)]  # type: ignore[misc]  # computed
    return Sequence[type_of_value(field)] if field.is_repeated else type_of_value(field)  # type: ignore[misc]


def without_none(hint: Any) -> tuple[set[Any], bool]:
    """The alternatives of a type, and whether None is one."""
    alternatives = set(get_args(hint)) if get_origin(hint) in (UnionType, Union) else {hint}
    return alternatives - {NoneType}, NoneType in alternatives


def default_of(field: dataclasses.Field[Any]) -> object:
    """The default of a dataclass's field; MISSING if it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def zero_of(field: FieldDescriptor) -> object:
    """The default, in the class, of a field that a message cannot leave unset."""
    if field.enum_type is not None and not field.is_repeated:
        return None
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {}
    return () if field.is_repeated else field.default_value


def differences(pair: Pair, descriptor: Descriptor) -> list[str]:
    """How the class differs from the message of this descriptor, in words. Empty: it does not."""
    found: list[str] = []
    hints = get_type_hints(pair.kind)
    fields = {field.name: field for field in dataclasses.fields(pair.kind)}
    expected_names = {
        pair.renamed.get(field.name, field.name) for field in descriptor.fields if field.name not in pair.left_out
    }
    found += [f"{name}: only in the class" for name in sorted(fields.keys() - expected_names)]
    found += [f"{name}: only in the message" for name in sorted(expected_names - fields.keys())]
    found += [f"{name}: not in the message" for name in sorted(pair.left_out - set(descriptor.fields_by_name))]
    for proto_field in descriptor.fields:
        name = pair.renamed.get(proto_field.name, proto_field.name)
        if name not in fields or proto_field.name in pair.left_out:
            continue
        alternatives, is_optional = without_none(hints[name])
        if type_of_field(proto_field) not in alternatives:
            found.append(f"{name}: {hints[name]} in the class, {type_of_field(proto_field)} in the message")
        found += [f"{name}: {word}" for word in default_differences(pair, name, proto_field, is_optional, fields[name])]
    return found


def default_differences(
    pair: Pair, name: str, proto_field: FieldDescriptor, is_optional: bool, field: dataclasses.Field[Any]
) -> list[str]:
    """How the default of a field in the class differs from what it means if it is not set in the message."""
    default = default_of(field)
    if name in pair.unset:
        ok = proto_field.has_presence and not is_optional and default == pair.unset[name]
        return [] if ok else [f"means {pair.unset[name]} if unset, but the default is {default}"]
    if name in pair.always_sent:
        ok = proto_field.has_presence and not is_optional and default is dataclasses.MISSING
        return [] if ok else ["is always sent, but optional in the class"]
    if proto_field.has_presence:
        return [] if is_optional and default is None else ["may be unset in the message, but None is not the default"]
    zero = zero_of(proto_field)
    if is_optional != (zero is None and default is None):
        return ["is optional in the class, but cannot be unset in the message"]
    ok = default is dataclasses.MISSING or (default == zero and type(default) is type(zero))
    return [] if ok else [f"has the default {default!r}, but {zero!r} in the message"]


def enum_differences(kind: type[enum.Enum], descriptor: EnumDescriptor) -> list[str]:
    """How the members of an enum differ from those of this descriptor: names, and numbers of an IntEnum."""
    unspecified, *values = descriptor.values
    prefix = unspecified.name.removesuffix("UNSPECIFIED")
    if unspecified.number != 0 or not prefix:
        return ["0 is not UNSPECIFIED"]
    is_numbered = issubclass(kind, enum.IntEnum)
    expected = {
        value.name.removeprefix(prefix): value.number if is_numbered else value.name.removeprefix(prefix).lower()
        for value in values
    }
    members = {member.name: member.value for member in kind}
    names = sorted(expected.keys() | members.keys())
    return [
        f"{name}: {members.get(name)} in the class, {expected.get(name)} in the message"
        for name in names
        if members.get(name) != expected.get(name)
    ]
