"""Counts what the bytes of a request hold, before they are parsed.

A parser makes an object of every entry of a list: an empty entry takes two bytes on the wire and more than sixty in
memory. So a message of 8 MiB could take gigabytes and seconds, during which every other caller waits. The scan makes no
objects. It reads the fields of a message, with the limits of lists and texts that the contract has (`rules.py`), and
stops at the first field that holds too much, with an error that names the field as the validator would. A request that
passes is cheap to parse; it may still be invalid.

Unknown fields are allowed, since a later contract may have them: up to `MAX_UNKNOWN_FIELDS` fields and
`MAX_UNKNOWN_BYTES` together. A field that is no list and comes twice counts as one of them. Groups are refused, as are
bytes that are no message.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from jaxctx.errors import InvalidArgument
from jaxctx.v1.rules_pb2 import FieldRules
from jaxctx_server.validate.cross_field import MAX_RANGES, Limits
from jaxctx_server.validate.rules import MAX_NAME_BYTES, field_rules, limit_named, map_entry

MAX_UNKNOWN_FIELDS = 1024
MAX_UNKNOWN_BYTES = 1 << 16
MAX_ID_BYTES = 64
MAX_VARINT_BYTES = 10
MAX_TAG_BYTES = 5
FIELDS_BETWEEN_PAUSES = 1024  # about half a millisecond
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_INT32: VARINT,
    FieldDescriptor.TYPE_INT64: VARINT,
    FieldDescriptor.TYPE_BOOL: VARINT,
    FieldDescriptor.TYPE_ENUM: VARINT,
    FieldDescriptor.TYPE_STRING: LENGTH,
    FieldDescriptor.TYPE_BYTES: LENGTH,
    FieldDescriptor.TYPE_MESSAGE: LENGTH,
}
CONTINUATION_BYTES = bytes(range(0x80, 0x100))  # bytes of a varint that are not its last
NO_MESSAGE = "is no such message, or has text that is not UTF-8"


@dataclass(slots=True)
class Path:
    """The place of a message in the request: a field of the message around it (None: of the request itself)."""

    around: "Path | None"
    name: str
    place: int  # index in a list; -1 if the field is no list


class Malformed(Exception):
    """The bytes are no message."""


@dataclass(frozen=True, slots=True)
class FieldBounds:
    """How much a field may hold."""

    name: str
    number: int
    wire_type: int  # of one value
    is_list: bool  # or a map
    min_items: int  # entries of a list
    max_items: int  # of a field that is no list: 1
    max_items_together: int | None  # entries of all such lists in the request
    max_bytes: int | None  # of a text, or of bytes
    is_text: bool  # not bytes
    inside: "MessageBounds | None"  # of a message


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """How much the fields of a message may hold, by their tag: number and wire type, as on the wire."""

    fields: dict[int, FieldBounds]


@dataclass(slots=True)
class SeenFields:
    """Counts of one message. Its parts may be anywhere on the wire, as a parser merges them."""

    entries: dict[int, int] = field(default_factory=dict)  # by field number
    inside: dict[int, "SeenFields"] = field(default_factory=dict)  # of fields that hold a single message


def scan(kind: Descriptor, limits: Limits, data: bytes, pause: Callable[[], None] | None = None) -> None:
    """Raise InvalidArgument for a field that holds too much, or for bytes that are no message of this type.

    `pause` is called after every `FIELDS_BETWEEN_PAUSES` fields; an error that it raises ends the scan.
    """
    try:
        Scanner(data, pause).scan_message(message_bounds(kind, limits), SeenFields(), 0, len(data), None)
    except (Malformed, IndexError):
        raise InvalidArgument.field("request", NO_MESSAGE) from None


@functools.lru_cache(maxsize=1024)
def message_bounds(kind: Descriptor, limits: Limits) -> MessageBounds:
    """The bounds of a message type. No message type of the contract contains itself."""
    by_tag: dict[int, FieldBounds] = {}
    for descriptor in kind.fields:
        bounds = field_bounds(descriptor, field_rules(descriptor), limits)
        by_tag[tag_of(bounds.number, bounds.wire_type)] = bounds
        if bounds.is_list and bounds.wire_type != LENGTH:
            by_tag[tag_of(bounds.number, LENGTH)] = bounds  # packed
    return MessageBounds(by_tag)


def tag_of(number: int, wire_type: int) -> int:
    """The tag that precedes a value on the wire."""
    return number << 3 | wire_type


def field_bounds(descriptor: FieldDescriptor, rule: FieldRules, limits: Limits) -> FieldBounds:
    """The bounds of a field."""
    min_items, max_items = (rule.min_items, rule.max_items) if descriptor.is_repeated else (0, 1)
    if rule.max_items_of:
        max_items = limit_named(limits, rule.max_items_of)
    return FieldBounds(
        name=descriptor.name,
        number=descriptor.number,
        wire_type=WIRE_TYPES[descriptor.type],
        is_list=descriptor.is_repeated,
        min_items=min_items,
        max_items=max_items,
        max_items_together=2 * MAX_RANGES if rule.ranges else None,
        max_bytes=max_bytes_of(descriptor, rule),
        is_text=descriptor.type == descriptor.TYPE_STRING,
        inside=bounds_inside(descriptor, rule, limits),
    )


def bounds_inside(descriptor: FieldDescriptor, rule: FieldRules, limits: Limits) -> MessageBounds | None:
    """The bounds of the messages, or of the entries of the map, that a field holds; None for other fields."""
    if descriptor.message_type is None:
        return None
    entry = map_entry(descriptor)
    if entry is None:
        return message_bounds(descriptor.message_type, limits)
    key, value = entry.fields
    value_rule = FieldRules()  # the rules of the values, without the limit on entries of the map
    value_rule.CopyFrom(rule)
    value_rule.ClearField("max_items")
    parts = (field_bounds(key, rule.keys, limits), field_bounds(value, value_rule, limits))
    return MessageBounds({tag_of(part.number, part.wire_type): part for part in parts})


def max_bytes_of(descriptor: FieldDescriptor, rule: FieldRules) -> int | None:
    """The most bytes of a field of text or of bytes; None for any other field."""
    if descriptor.type not in (descriptor.TYPE_STRING, descriptor.TYPE_BYTES):
        return None
    if rule.id:
        return MAX_ID_BYTES
    return MAX_NAME_BYTES if rule.name else rule.max_bytes


class Scanner:
    """One scan over the bytes of a request. Every position is an index into them."""

    def __init__(self, data: bytes, pause: Callable[[], None] | None) -> None:
        self._data = data
        self._pause = pause
        self._together: dict[str, int] = {}  # entries, by the name of a list that has `max_items_together`
        self._unknown_fields, self._unknown_bytes = 0, 0
        self._until_pause = FIELDS_BETWEEN_PAUSES

    def scan_message(self, bounds: MessageBounds, seen: SeenFields, at: int, end: int, path: Path | None) -> None:
        """Scan the fields of a message between two positions.

        Raises InvalidArgument, Malformed, or IndexError for a field that ends beyond the data.
        """
        # The code for short fields is inline: most of the time is spent here.
        data, known = self._data, bounds.fields
        while at < end:
            self._until_pause -= 1
            if self._until_pause == 0:
                self._reach_pause()
            start, tag = at, data[at]
            at += 1
            if tag >= 0x80:
                tag, at = self._varint(start, MAX_TAG_BYTES)
            wire_type = tag & 7
            if wire_type == LENGTH:
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = self._varint(at - 1, MAX_TAG_BYTES)
                stop = at + size
            elif wire_type == VARINT:
                stop = at + 1 if data[at] < 0x80 else self._end_of_varint(at)
            elif wire_type == FIXED64:
                stop = at + 8
            elif wire_type == FIXED32:
                stop = at + 4
            else:
                raise Malformed
            if stop > end or tag < 8:
                raise Malformed
            found = known.get(tag)
            if found is None:
                self._count_unknown(stop - start)
            else:
                self._scan_field(found, wire_type, seen, at, stop, path)
            at = stop

    def _scan_field(
        self, found: FieldBounds, wire_type: int, seen: SeenFields, at: int, stop: int, path: Path | None
    ) -> None:
        """Count a field of the contract, and scan the message that it holds, if any."""
        before = seen.entries.get(found.number, 0)
        if wire_type == found.wire_type:
            count = before + 1
        else:
            count = before + self._count_packed(found, at, stop)
        if count > found.max_items:
            if found.is_list:
                description = f"must have {found.min_items} to {found.max_items} entries, not more"
                raise InvalidArgument.field(path_text(path, found.name), description)
            self._count_unknown(0)  # the same field again, which a parser merges with the one before
        seen.entries[found.number] = count
        place = count - 1 if found.is_list else -1
        if found.max_items_together is not None:
            self._count_together(found, count - before, path)
        if found.max_bytes is not None and stop - at > found.max_bytes:
            noun = "text of up to" if found.is_text else "up to"
            description = f"must be {noun} {found.max_bytes} bytes, not {stop - at}"
            raise InvalidArgument.field(path_text(path, found.name, place), description)
        if found.inside is not None and stop > at:
            inside = SeenFields() if found.is_list else seen.inside.setdefault(found.number, SeenFields())
            self.scan_message(found.inside, inside, at, stop, Path(path, found.name, place))

    def _reach_pause(self) -> None:
        self._until_pause = FIELDS_BETWEEN_PAUSES
        if self._pause is not None:
            self._pause()

    def _varint(self, at: int, max_bytes: int) -> tuple[int, int]:
        """The varint at a position, and the position after it."""
        value = 0
        for index in range(max_bytes):
            byte = self._data[at + index]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value, at + index + 1
        raise Malformed

    def _end_of_varint(self, at: int) -> int:
        """The position after the varint at a position."""
        for position in range(at, at + MAX_VARINT_BYTES):
            if self._data[position] < 0x80:
                return position + 1
        raise Malformed

    def _count_packed(self, found: FieldBounds, at: int, stop: int) -> int:
        """How many numbers are packed between two positions: as many as there are last bytes of a number."""
        if found.wire_type == FIXED64:
            return (stop - at) // 8
        if stop - at > found.max_items * MAX_VARINT_BYTES:  # too many, whatever their sizes are
            return found.max_items + 1
        return len(self._data[at:stop].translate(None, CONTINUATION_BYTES))

    def _count_together(self, found: FieldBounds, entries: int, path: Path | None) -> None:
        """Count the entries of all lists of one kind together: each of them may be short."""
        together = self._together[found.name] = self._together.get(found.name, 0) + entries
        if found.max_items_together is not None and together > found.max_items_together:
            around = path.name if path is not None else found.name
            raise InvalidArgument.field(around, f"must have up to {found.max_items_together // 2} ranges together")

    def _count_unknown(self, size: int) -> None:
        """Count an unknown field, or a field that is no list and comes again."""
        self._unknown_fields += 1
        self._unknown_bytes += size
        if self._unknown_fields > MAX_UNKNOWN_FIELDS or self._unknown_bytes > MAX_UNKNOWN_BYTES:
            description = (
                f"must have up to {MAX_UNKNOWN_FIELDS} unknown or repeated fields of {MAX_UNKNOWN_BYTES} bytes together"
            )
            raise InvalidArgument.field("request", description)


def path_text(path: Path | None, name: str, place: int = -1) -> str:
    """The path of a field of the message at `path`, as errors name it."""
    names = [name_with_place(name, place)]
    while path is not None:
        names.append(name_with_place(path.name, path.place))
        path = path.around
    return ".".join(reversed(names))


def name_with_place(name: str, place: int) -> str:
    """A field's name, with the place of an entry if it is a list."""
    return name if place < 0 else f"{name}[{place}]"
