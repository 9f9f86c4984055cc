"""How much a request's wire form holds, counted before anything is made of it.

A parser makes an object of every entry of a list: of an empty one, two bytes, more than sixty. So a message of 8 MiB
could take gigabytes and seconds, for which everybody waits. The walk here makes nothing. It goes over the fields of a
message by the limits that the contract states of its lists and texts (`rules.py`), and ends at the first that holds too
much, naming it as the validator would. What it lets through costs a parser little; it is not valid by that.

Fields that the contract does not have may be there, as a later contract may have them: up to `MOST_SPARE` fields and
`MOST_SPARE_BYTES` together, among which a single value counts that is sent again. A group is refused, as are bytes that
are no message at all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from jaxctx.errors import InvalidArgument
from jaxctx.v1 import rules_pb2
from jaxctx.v1.rules_pb2 import FieldRules
from jaxctx_server.validate.cross_field import MAX_RANGES, Limits
from jaxctx_server.validate.rules import MAX_NAME_BYTES

MOST_SPARE = 1024
MOST_SPARE_BYTES = 1 << 16
MAX_ID_BYTES = 64
MAX_NUMBER_BYTES = 10  # of a varint
MAX_TAG_BYTES = 5
STRETCH = 1024  # fields between two pauses: about half a millisecond
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_INT32: VARINT,
    FieldDescriptor.TYPE_INT64: VARINT,
    FieldDescriptor.TYPE_BOOL: VARINT,
    FieldDescriptor.TYPE_ENUM: VARINT,
    FieldDescriptor.TYPE_STRING: LENGTH,
    FieldDescriptor.TYPE_MESSAGE: LENGTH,
}
CONTINUED = bytes(range(0x80, 0x100))  # bytes of a varint that are not its last
NO_MESSAGE = "is no such message, or has text that is not UTF-8"
Path = tuple["Path", str, int] | None  # of a field: that around it, its name, its place in a list or -1


class Malformed(Exception):
    """The bytes are no message."""


@dataclass(frozen=True, slots=True)
class FieldBounds:
    """How much a field may hold."""

    name: str
    number: int
    wire_type: int  # of one value
    is_list: bool  # or a map
    low: int  # entries of a list
    most: int
    most_together: int | None  # entries of all such lists in the message
    max_bytes: int | None  # of a text
    inside: "MessageBounds | None"


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """How much the fields of a message may hold, by number and wire type as they stand before a value."""

    fields: dict[int, FieldBounds]


@dataclass(slots=True)
class Seen:
    """What there is of one message, whose parts may be anywhere on the wire: a parser merges them."""

    entries: dict[int, int] = field(default_factory=dict)  # by field number
    inside: dict[int, "Seen"] = field(default_factory=dict)  # of fields that hold a single message


def scan(kind: Descriptor, limits: Limits, data: bytes, pause: Callable[[], None] | None = None) -> None:
    """Raise InvalidArgument that names a field that holds too much, or the whole for bytes that are no message.

    `pause` is called after each `STRETCH` of fields. What it raises goes through.
    """
    try:
        Walk(data, pause).message(bounds_of(kind, limits), Seen(), 0, len(data), None)
    except (Malformed, IndexError):
        raise InvalidArgument.field("request", NO_MESSAGE) from None


@functools.lru_cache(maxsize=1024)
def bounds_of(kind: Descriptor, limits: Limits) -> MessageBounds:
    """Of a message of this class. No message of the contract is part of itself."""
    found = MessageBounds({})
    for each in kind.fields:
        rule = each.GetOptions().Extensions[rules_pb2.rule]
        bounds = _field(each, rule, limits)
        found.fields[each.number << 3 | bounds.wire_type] = bounds
        if each.is_repeated and bounds.wire_type != LENGTH:
            found.fields[each.number << 3 | LENGTH] = bounds  # packed
    return found


def _field(each: FieldDescriptor, rule: FieldRules, limits: Limits) -> FieldBounds:
    low, most = (rule.min_items, rule.max_items) if each.is_repeated else (0, 1)
    if rule.max_items_of:
        most = getattr(limits, rule.max_items_of)
    inside = None
    if each.message_type is not None and each.message_type.GetOptions().map_entry:
        key, value = each.message_type.fields
        parts = (_field(key, rule.keys, limits), _one_value(value, rule, limits))
        inside = MessageBounds({part.number << 3 | part.wire_type: part for part in parts})
    elif each.message_type is not None:
        inside = bounds_of(each.message_type, limits)
    max_bytes = None
    if each.type == each.TYPE_STRING:
        max_bytes = MAX_ID_BYTES if rule.id else MAX_NAME_BYTES if rule.name else rule.max_bytes
    return FieldBounds(
        name=each.name,
        number=each.number,
        wire_type=WIRE_TYPES[each.type],
        is_list=each.is_repeated,
        low=low,
        most=most,
        most_together=2 * MAX_RANGES if rule.ranges else None,
        max_bytes=max_bytes,
        inside=inside,
    )


def _one_value(value: FieldDescriptor, rule: FieldRules, limits: Limits) -> FieldBounds:
    """Of the value of a map, whose own limits are beside those of its values."""
    of_values = FieldRules()
    of_values.CopyFrom(rule)
    of_values.ClearField("max_items")
    return _field(value, of_values, limits)


class Walk:
    """One way over the bytes of a message."""

    def __init__(self, data: bytes, pause: Callable[[], None] | None) -> None:
        self._data = data
        self._pause = pause
        self._together: dict[str, int] = {}  # entries, by the name of a list that has `most_together`
        self._spare, self._spare_bytes = 0, 0
        self._until_pause = STRETCH

    def message(self, bounds: MessageBounds, seen: Seen, at: int, end: int, path: Path) -> None:
        """Over the fields between two places."""
        data, known, entries = self._data, bounds.fields, seen.entries
        while at < end:
            self._until_pause -= 1
            if self._until_pause == 0:
                self._until_pause = STRETCH
                if self._pause is not None:
                    self._pause()
            start, tag = at, data[at]
            at += 1
            if tag >= 0x80:
                tag, at = self._number(start, MAX_TAG_BYTES)
            wire_type, size = tag & 7, 0
            if wire_type == LENGTH:
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = self._number(at - 1, MAX_TAG_BYTES)
            elif wire_type == VARINT:
                at = self._behind_number(at)
            elif wire_type == FIXED64:
                at += 8
            elif wire_type == FIXED32:
                at += 4
            else:
                raise Malformed
            stop = at + size
            if stop > end or tag < 8:
                raise Malformed
            found = known.get(tag)
            if found is None:
                self._not_known(stop - start)
                at = stop
                continue
            before = entries.get(found.number, 0)
            count = before + (1 if wire_type == found.wire_type else self._packed(found, at, stop))
            if count > found.most:
                if found.is_list:
                    description = f"must have {found.low} to {found.most} entries, not more"
                    raise InvalidArgument.field(told(path, found.name), description)
                self._not_known(0)  # the same again, which a parser merges with what was there
            entries[found.number] = count
            if found.most_together is not None:
                self._count_together(found, count - before, path)
            if found.max_bytes is not None and size > found.max_bytes:
                description = f"must be text of up to {found.max_bytes} bytes, not {size}"
                raise InvalidArgument.field(told(path, found.name, count - 1 if found.is_list else -1), description)
            if found.inside is not None:
                if found.is_list:
                    inside, place = Seen(), count - 1
                else:
                    inside, place = seen.inside.setdefault(found.number, Seen()), -1
                if size:
                    self.message(found.inside, inside, at, stop, (path, found.name, place))
            at = stop

    def _number(self, at: int, max_bytes: int) -> tuple[int, int]:
        """The varint at a place, and the place behind it."""
        value = 0
        for index in range(max_bytes):
            byte = self._data[at + index]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value, at + index + 1
        raise Malformed

    def _behind_number(self, at: int) -> int:
        """The place behind the varint at a place."""
        for stop in range(at, at + MAX_NUMBER_BYTES):
            if self._data[stop] < 0x80:
                return stop + 1
        raise Malformed

    def _packed(self, found: FieldBounds, at: int, stop: int) -> int:
        """How many numbers lie between two places: as many as there are bytes that end one."""
        if found.wire_type == FIXED64:
            return (stop - at) // 8
        if stop - at > found.most * MAX_NUMBER_BYTES:  # too many, whatever they are
            return found.most + 1
        return len(self._data[at:stop].translate(None, CONTINUED))

    def _count_together(self, found: FieldBounds, entries: int, path: Path) -> None:
        """Entries of all lists of one kind, each of which may be short."""
        together = self._together[found.name] = self._together.get(found.name, 0) + entries
        if found.most_together is not None and together > found.most_together:
            around = path[1] if path is not None else found.name
            raise InvalidArgument.field(around, f"must have up to {found.most_together // 2} ranges together")

    def _not_known(self, size: int) -> None:
        """A field that is nothing to the contract, or more of what it has once."""
        self._spare += 1
        self._spare_bytes += size
        if self._spare > MOST_SPARE or self._spare_bytes > MOST_SPARE_BYTES:
            description = (
                f"must have up to {MOST_SPARE} unknown or repeated fields of {MOST_SPARE_BYTES} bytes together"
            )
            raise InvalidArgument.field("request", description)


def told(path: Path, name: str, place: int = -1) -> str:
    """A path as errors name it."""
    names = [name if place < 0 else f"{name}[{place}]"]
    while path is not None:
        path, name, place = path
        names.append(name if place < 0 else f"{name}[{place}]")
    return ".".join(reversed(names))
