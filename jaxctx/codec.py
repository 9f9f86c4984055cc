"""Answers as messages and back, field by field: `jaxctx.answers` and protos/jaxctx/v1 have the same names.

The server encodes, the client decodes; the store does both with its versions. How the fields of two classes go over is
found out once, at their first use.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import chain
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.answers import Change, ContextState, FinishReason, Tier

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Translation = Callable[[Any], Any]

# Fields of messages that have another name here: seconds are a Duration there, or say that they are, and a oneof has a
# name for each type.
_NAMES = {"duration": "seconds", "ttl_s": "seconds", "expires_at": "at"}
_NAMES |= {"pin_for": "pin_s", "stop_text": "stop_match", "stop_token_id": "stop_match"}
_ONE_OF = {"stop_text": str, "stop_token_id": int}

# How a value reads that only a later server knows.
_UNKNOWN: dict[type[Enum], Enum] = {
    ContextState: ContextState.IDLE,  # all operations may be tried
    FinishReason: FinishReason.STOP,
    Tier: Tier.LINEAGE,  # none of its guesses is better
    Change: Change.CHANGED,
}


class _Field(NamedTuple):
    """A field that a dataclass and a message have in common."""

    name: str  # in the dataclass
    has_presence: bool  # in the message
    write: Translation | None  # None: the value goes over as it is
    read: Translation | None
    unset: Any  # what it reads as where the message does not have it; of a map, each time another one


def encode(answer: object, kind: type[M]) -> M:
    """`answer` as a message of that class, which may have fewer fields; None is not set."""
    return kind(**_values(kind.DESCRIPTOR, answer))


def decode(message: Message, kind: type[T], **known: Any) -> T:
    """`message` as an answer of that class. `known` are fields that the caller knows and the message does not."""
    fields = _fields(kind, message.DESCRIPTOR)  # type: ignore[arg-type]  # classes are hashable
    values = {each.name: {} if each.read is dict else each.unset for each in fields.values()} | known
    for there, value in message.ListFields():
        if (field := fields.get(there.name)) is not None:
            values[field.name] = value if field.read is None else field.read(value)
    return kind(**values)


def _values(descriptor: Any, answer: object) -> dict[str, Any]:
    """The arguments of the message's constructor."""
    values, fields = {}, _fields(type(answer), descriptor)  # type: ignore[arg-type]
    for there, (name, has_presence, write, _, _) in fields.items():
        value = getattr(answer, name)
        if value or (has_presence and value is not None):
            values[there] = value if write is None else write(value)
    return values


@functools.cache
def _fields(kind: type, descriptor: Any) -> dict[str, _Field]:
    """By their names in the message."""
    hints, found = get_type_hints(kind), {}
    defaults = {each.name: each.default for each in dataclasses.fields(kind)}
    for there in descriptor.fields:
        name = _NAMES.get(there.name, there.name)
        hint = hints.get(name)
        optional = get_origin(hint) is UnionType
        while get_origin(hint) in (UnionType, Sequence):
            hint = get_args(hint)[0]
        if hint is None or isinstance(hint, TypeVar):
            continue
        write, read = _translations(there, hint)
        unset: Any = None
        if get_origin(hint) is Mapping:
            write, read = (None, dict) if there.is_repeated else _wrapped(there.message_type.fields[0].name)
        elif there.is_repeated:
            write, read, unset = write and _each(list, write), _each(tuple, read) if read else tuple, ()
        elif there.has_presence and defaults[name] is not dataclasses.MISSING:
            unset = defaults[name]
        elif not optional:
            empty = GetMessageClass(there.message_type)() if there.message_type else there.default_value
            unset = read(empty) if read else empty
        found[there.name] = _Field(name, there.has_presence, write, read, unset)
    return found


def _translations(field: Any, hint: Any) -> tuple[Translation | None, Translation | None]:
    """How one value of a field is written and read."""
    if field.name in _ONE_OF:
        return (lambda value: value if isinstance(value, _ONE_OF[field.name]) else None), None
    if field.enum_type is not None:
        unset, *values = field.enum_type.values
        members = {each.number: hint[each.name.removeprefix(unset.name.removesuffix("UNSPECIFIED"))] for each in values}
        numbers = {member: number for number, member in members.items()}
        return numbers.__getitem__, lambda number: members.get(number, _UNKNOWN[hint])
    if field.message_type is None:
        return None, None
    if hint is datetime:
        return None, lambda message: message.ToDatetime(UTC)
    if hint is float:
        return lambda seconds: timedelta(seconds=seconds), lambda message: message.ToNanoseconds() / 1e9
    if get_origin(hint) is tuple:
        first, *others = (each.name for each in field.message_type.fields)
        if not others:
            return lambda pairs: {first: list(chain(*pairs))}, lambda message: _pairs(getattr(message, first))
        return lambda pair: {first: pair[0], others[0]: pair[1]}, operator.attrgetter(first, *others)
    return functools.partial(_values, field.message_type), functools.partial(decode, kind=hint)


def _wrapped(name: str) -> tuple[Translation, Translation]:
    """Of a map in a message of its own, which can be told from none: as its field of this name."""
    return lambda mapping: {name: mapping}, lambda message: dict(getattr(message, name))


def _pairs(flat: Sequence[T]) -> tuple[tuple[T, T], ...]:
    """Of first, second, first, second, ..."""
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _each(kind: type, translate: Translation) -> Translation:
    return lambda items: kind(map(translate, items))
