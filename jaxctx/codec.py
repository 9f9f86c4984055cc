"""Answers as messages and back, field by field: `jaxctx.answers` and protos/jaxctx/v1 have the same names.

The server encodes, the client decodes; the store does both with its versions. How the fields of a class and a message
go over is found out once, at their first use.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.v1.answers import CLASSES, Change, Tier

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Translation = Callable[[Any], Any]

_TYPES = {"google.protobuf.Timestamp": datetime, "google.protobuf.Duration": float, **CLASSES}

# Fields of messages that may have another name here: seconds are a Duration there, or say that they are.
_NAMES = {"duration": "seconds", "ttl_s": "seconds", "expires_at": "at"}

# How a value reads that only a later server knows, where that is not as the first one.
_UNKNOWN: dict[type, Enum] = {Tier: Tier.LINEAGE, Change: Change.CHANGED}


class _Field(NamedTuple):
    """A field that a dataclass and a message have in common."""

    name: str  # in the dataclass
    has_presence: bool  # in the message
    write: Translation | None  # None: the value goes over as it is
    read: Translation | None


def encode(answer: object, kind: type[M]) -> M:
    """`answer` as a message of that class, which may have fewer fields; None is not set."""
    return kind(**_values(kind.DESCRIPTOR, answer))


def decode(message: Message, kind: type[T], **known: Any) -> T:
    """`message` as an answer of that class. `known` are fields that the caller knows; the message's are not read."""
    common, unset = _common(kind, message.DESCRIPTOR)  # type: ignore[arg-type]  # classes are hashable
    values = unset | known
    for there, value in message.ListFields():
        if (field := common.get(there.name)) is not None and field.name not in known:
            values[field.name] = value if field.read is None else field.read(value)
    return kind(**values)


def _values(descriptor: Any, answer: object) -> dict[str, Any]:
    """The arguments of the message's constructor."""
    values, (common, _) = {}, _common(type(answer), descriptor)  # type: ignore[arg-type]
    for there, (name, has_presence, write, _) in common.items():
        value = getattr(answer, name)
        if value or (has_presence and value is not None):
            values[there] = value if write is None else write(value)
    return values


@functools.cache
def _common(kind: type, descriptor: Any) -> tuple[dict[str, _Field], dict[str, Any]]:
    """Fields by their names in the message; and of those that an answer must have, what they read as if unset."""
    needed = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(kind)}
    common: dict[str, _Field] = {}
    unset: dict[str, Any] = {}
    for there in descriptor.fields:
        oneof = there.containing_oneof
        names = (there.name, _NAMES.get(there.name), oneof and oneof.name)
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
    """Of one value of a field, in an answer."""
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
    if kind is tuple:
        first, second = (each.name for each in field.message_type.fields)
        return lambda pair: {first: pair[0], second: pair[1]}, operator.attrgetter(first, second)
    return functools.partial(_values, field.message_type), functools.partial(decode, kind=kind)


def _each(kind: type, translate: Translation) -> Translation:
    return lambda items: kind(map(translate, items))


def _only(kind: type, write: Translation | None) -> Translation:
    """For one field of a oneof: writes values of this class."""
    return lambda value: (write(value) if write else value) if isinstance(value, kind) else None
