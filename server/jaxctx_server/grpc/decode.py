"""Messages to plain requests. Every field goes over by name; what was not sent is None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from google.protobuf.message import Message

from jaxctx_server import requests

T = TypeVar("T")


def decode(message: Message, into: type[T]) -> T:
    """`message` as the class of `requests` for it. Nothing is copied: lists and maps are the message's own."""
    return into(**{field.name: _value(message, field) for field in message.DESCRIPTOR.fields})


def _value(message: Message, field: Any) -> object:  # a FieldDescriptor, of Python's or C's making
    value = getattr(message, field.name)
    if field.is_repeated:
        is_list_of_messages = field.message_type is not None and not field.message_type.GetOptions().map_entry
        return _Decoded(value) if is_list_of_messages else value
    if field.has_presence and not message.HasField(field.name):
        return None
    return value if field.message_type is None else _nested(value)


def _nested(message: Message) -> object:
    return decode(message, getattr(requests, message.DESCRIPTOR.name))


class _Decoded(Sequence[object]):
    """A list of messages, each decoded when it is looked at: how many there are is checked first."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, place: int) -> object: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[object]: ...
    def __getitem__(self, place: int | slice) -> object:
        if isinstance(place, slice):
            return _Decoded(self._messages[place])
        return _nested(self._messages[place])
