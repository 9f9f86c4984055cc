"""Checks a whole request by the rules of its fields (protos/jaxctx/v1/rules.proto).

The checks of a message type are built once for each set of limits: a `MessageCheck`, with a `FieldCheck` for each
field. A check yields violations as pairs: the path below the checked value ("", "[3]", ".temperature"), and what would
be accepted. The latter never quotes a text of the request.
"""

import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.errors import FieldViolation, InvalidArgument
from jaxctx.v1 import rules_pb2
from jaxctx.v1.rules_pb2 import FieldRules
from jaxctx_server.validate.cross_field import CROSS_FIELD_RULES, Limits, Violations

MAX_VIOLATIONS = 16  # reported for one request
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")  # no control characters: they could disturb how the name is shown
MAX_NAME_BYTES = 100
NS_PER_S = 10**9
LARGEST = {  # the largest number of a type; the smallest is the negative of it
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_INT64: 2**63 - 1,
    FieldDescriptor.TYPE_DOUBLE: sys.float_info.max,
}
ValueCheck = Callable[[Any], Violations]


def validate(limits: Limits, request: Message) -> None:
    """Raise one InvalidArgument for everything that is wrong with a request."""
    wrong: dict[str, str] = {}
    for path, description in message_check(request.DESCRIPTOR, limits).violations(request):
        wrong.setdefault(path.removeprefix("."), description)
        if len(wrong) == MAX_VIOLATIONS:
            break
    if wrong:
        message = "; ".join(f"{path}: {description}" for path, description in wrong.items())
        raise InvalidArgument(message, violations=[FieldViolation(*each) for each in wrong.items()])


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """The check of one field of a message."""

    name: str
    has_presence: bool  # whether it is checked only if it is set
    is_required: bool
    violations: ValueCheck


@dataclass(frozen=True, slots=True)
class RequiredChoice:
    """A oneof of which one field must be set."""

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class MessageCheck:
    """The check of a message type: first each field, then fields together."""

    limits: Limits
    fields: list[FieldCheck]
    choices: list[RequiredChoice]
    list_names: frozenset[str]  # of its lists and maps
    field_rules: dict[str, FieldRules] | None  # by field name, if any field has a rule about another one
    cross_field: Callable[[Any, Limits], Violations] | None  # see cross_field.py

    def violations(self, message: Message) -> Violations:
        """All violations of a message."""
        wrong: set[str] = set()  # paths below the message
        for check in self.fields:
            if not check.has_presence or message.HasField(check.name):
                for path, description in check.violations(getattr(message, check.name)):
                    wrong.add(check.name + path)
                    yield f".{check.name}{path}", description
            elif check.is_required:
                yield f".{check.name}", "must be set"
        for choice in self.choices:
            if message.WhichOneof(choice.name) is None:
                yield f".{choice.name}", choice.description
        if self.field_rules is not None:
            for path, description in _field_pairs(self.field_rules, message):
                yield f".{path}", description
        # A list that is wrong may be far too long to read.
        if self.cross_field is not None and self.list_names.isdisjoint(wrong):
            for path, description in self.cross_field(message, self.limits):
                yield f".{path}", description


@functools.cache
def message_check(kind: Descriptor, limits: Limits) -> MessageCheck:
    """The check of a message type."""
    rules = {field.name: field_rules(field) for field in kind.fields}
    fields = [
        FieldCheck(field.name, field.has_presence, rules[field.name].required, _field(field, rules[field.name], limits))
        for field in kind.fields
    ]
    choices = []
    for oneof in kind.oneofs:
        if oneof.GetOptions().Extensions[rules_pb2.choice].required:
            names = [field.name for field in oneof.fields]
            description = f"exactly one of {', '.join(names[:-1])} and {names[-1]} must be set"
            choices.append(RequiredChoice(oneof.name, description))
    has_pairs = any(rule.needs or rule.excludes or rule.one_for_each for rule in rules.values())
    return MessageCheck(
        limits=limits,
        fields=fields,
        choices=choices,
        list_names=frozenset(field.name for field in kind.fields if field.is_repeated),
        field_rules=rules if has_pairs else None,
        cross_field=CROSS_FIELD_RULES.get(GetMessageClass(kind)),
    )


def field_rules(field: FieldDescriptor) -> FieldRules:
    """The rules that the contract states of a field."""
    rules: FieldRules = field.GetOptions().Extensions[rules_pb2.rule]
    return rules


def limit_named(limits: Limits, name: str) -> int:
    """The limit that a rule refers to by this name (rules.proto)."""
    match name:
        case "vocab_size":
            return limits.vocab_size
        case "max_context_tokens":
            return limits.max_context_tokens
        case "queue_limit":
            return limits.queue_limit
    raise ValueError(f"rules.proto has no limit {name!r}")


def _field_pairs(rules: Mapping[str, FieldRules], message: Message) -> Violations:
    """Violations of rules that relate two fields."""
    sent = {field.name: value for field, value in message.ListFields()}
    for name, value in sent.items():
        rule = rules[name]
        if rule.needs and not sent.get(rule.needs):
            yield name, f"needs {rule.needs}"
        if rule.excludes in sent:
            yield name, f"must not be set with {rule.excludes}"
        if rule.one_for_each in sent:
            expected = len(sent[rule.one_for_each])
            if len(value) != expected:
                description = f"must have one entry for each of the {expected} {rule.one_for_each}, or none, not "
                yield name, f"{description}{len(value)}"


def _field(field: FieldDescriptor, rule: FieldRules, limits: Limits) -> ValueCheck:
    """The check of a field, with all of its entries if it is a list or a map."""
    if not field.is_repeated:
        return _value(field, rule, limits)
    checks: list[ValueCheck] = []
    if rule.ranges:
        checks.append(functools.partial(_ranges, number_bounds(field, rule, limits)[1]))
    elif (entry := map_entry(field)) is not None:
        key, value = entry.fields
        checks.append(functools.partial(_map, _value(key, rule.keys, limits), _value(value, rule, limits)))
    elif field.type == field.TYPE_INT32:
        bounds = number_bounds(field, rule, limits)
        checks.append(functools.partial(_numbers, bounds, _value(field, rule, limits)))
    else:
        checks.append(functools.partial(_entries, _value(field, rule, limits)))
    if rule.unique:
        checks.append(_unique)
    if rule.max_total_bytes:
        checks.append(functools.partial(_total_bytes, rule.max_total_bytes))
    max_items = limit_named(limits, rule.max_items_of) if rule.max_items_of else rule.max_items
    return functools.partial(_list, rule.min_items, max_items, checks)


def map_entry(field: FieldDescriptor) -> Descriptor | None:
    """The type of the entries of a map, a message of key and value; None for a field that is no map."""
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return None
    return field.message_type


def _list(low: int, high: int, checks: Sequence[ValueCheck], values: Collection[Any]) -> Violations:
    """Check a list or map: it has `low` to `high` entries, and passes `checks`, which need the right length."""
    if low <= len(values) <= high:
        for check in checks:
            yield from check(values)
    else:
        yield "", f"must have {low} to {high} entries, not {len(values)}" if values else "must not be empty"


def _entries(check: ValueCheck, values: Sequence[Any]) -> Violations:
    """Check each entry of a list."""
    for place, value in enumerate(values):
        for path, description in check(value):
            yield f"[{place}]{path}", description


def _numbers(bounds: tuple[float, float], check: ValueCheck, values: Sequence[int]) -> Violations:
    """Check each entry of a list of whole numbers. As there may be very many, all are compared at once first."""
    numbers = values[:]
    if numbers and (min(numbers) < bounds[0] or max(numbers) > bounds[1]):
        yield from _entries(check, values)


def _map(check_key: ValueCheck, check_value: ValueCheck, values: Mapping[Any, Any]) -> Violations:
    """Check each entry of a map. A wrong key that is a text is not part of the path."""
    for key, value in values.items():
        place = f"[{key}]"
        for _, description in check_key(key):
            yield ".key" if isinstance(key, str) else place, description
            if isinstance(key, str):
                place = "[]"
        for path, description in check_value(value):
            yield place + path, description


def _unique(values: Sequence[Any]) -> Violations:
    """Check that the entries of a list are different."""
    seen = set()
    for place, value in enumerate(values):
        if value in seen:
            yield f"[{place}]", "must be different from those before it"
        seen.add(value)


def _total_bytes(max_total_bytes: int, values: Sequence[str] | Sequence[Message]) -> Violations:
    """Check the size of all texts of a list together. A text that is too large alone is reported alone."""
    total = largest = 0
    for text in _texts(values):
        size = utf8_size(text)
        total += size
        largest = max(largest, size)
    if total > max_total_bytes >= largest:
        yield "", f"must be up to {max_total_bytes} bytes together"


def _texts(values: Iterable[str] | Iterable[Message]) -> Iterator[str]:
    """The texts of a list, those of the messages inside its messages included."""
    for value in values:
        if isinstance(value, str):
            yield value
            continue
        for field, inner in value.ListFields():
            if isinstance(inner, str):
                yield inner
            elif field.is_repeated and field.type in (field.TYPE_STRING, field.TYPE_MESSAGE):
                yield from _texts(inner)


def _ranges(high: float, bounds: Sequence[int]) -> Violations:
    """Check a list of ranges, which is start, stop, start, stop, ...."""
    numbers = bounds[:]
    starts, stops = numbers[::2], numbers[1::2]
    in_order = all(map(operator.lt, starts, stops)) and all(map(operator.le, stops, starts[1:]))
    if len(starts) != len(stops):
        yield "", "must be start and stop of each range"
    elif not in_order or min(numbers, default=0) < 0 or max(numbers, default=0) > high:
        yield "", f"must be ranges of indices, start below stop, ascending and apart, within 0 to {high}"


def _value(field: FieldDescriptor, rule: FieldRules, limits: Limits) -> ValueCheck:
    """The check of one value: of a field that is no list, of an entry of a list, or of a key or value of a map."""
    if rule.id:
        return functools.partial(
            _matches, is_id, "must be 1 to 64 characters of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    if rule.name:
        description = f"must be text of 1 to {MAX_NAME_BYTES} bytes without control characters"
        return functools.partial(_matches, is_name, description)
    if field.type == field.TYPE_STRING:
        return functools.partial(_text, rule.min_bytes, rule.max_bytes)
    if field.type == field.TYPE_BYTES:
        return functools.partial(_bytes, rule.min_bytes, rule.max_bytes)
    if field.type == field.TYPE_BOOL:
        return _anything
    if field.enum_type is not None:
        numbers = frozenset(value.number for value in field.enum_type.values)
        return functools.partial(_enum, numbers, field.enum_type.name)
    if field.message_type is not None:
        if field.message_type.full_name == Duration.DESCRIPTOR.full_name:
            return functools.partial(_duration, rule.gt, rule.lte)
        return message_check(field.message_type, limits).violations
    low, high = number_bounds(field, rule, limits)
    if field.type != field.TYPE_DOUBLE:
        noun = "token id" if rule.token_id else "whole number"
        return functools.partial(_integer, int(low), int(high), noun)
    bounds = f"above {rule.gt:g} and up to {high:g}" if rule.HasField("gt") else f"from {low:g} to {high:g}"
    return functools.partial(_double, low, high, bounds)


def is_id(text: str) -> bool:
    """Whether a text has the form of an id."""
    return ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether a text may be a snapshot's name."""
    return NAME.fullmatch(text) is not None and utf8_size(text) <= MAX_NAME_BYTES


def _matches(accepts: Callable[[str], bool], description: str, text: str) -> Violations:
    if not accepts(text):
        yield "", description


def _anything(value: object) -> Violations:
    yield from ()


def _enum(numbers: Collection[int], name: str, value: int) -> Violations:
    if value not in numbers:
        yield "", f"must be a value of {name}, not {value}"


def _duration(low_s: float, high_s: float, value: Duration) -> Violations:
    if not (0 <= value.nanos < NS_PER_S and low_s * NS_PER_S < value.ToNanoseconds() <= high_s * NS_PER_S):
        yield "", f"must be above {low_s:.15g} and up to {high_s:.15g} seconds"


def _integer(low: int, high: int, noun: str, value: int) -> Violations:
    if not low <= value <= high:
        yield "", f"must be a {noun} from {low} to {high}, not {value}"


def _double(low: float, high: float, bounds: str, value: float) -> Violations:
    if not low <= value <= high:  # NaN fails every comparison
        yield "", f"must be a number {bounds}, not {value:.6g}"


def _text(low: int, high: int, text: str) -> Violations:
    size = utf8_size(text)
    if not low <= size <= high:
        yield "", f"must be text of {low} to {high} bytes, not {size}" if text else "must not be empty"


def _bytes(low: int, high: int, data: bytes) -> Violations:
    if not low <= len(data) <= high:
        yield "", f"must be {low} to {high} bytes, not {len(data)}" if data else "must not be empty"


def number_bounds(field: FieldDescriptor, rule: FieldRules, limits: Limits) -> tuple[float, float]:
    """The smallest and the largest number that a field may hold."""
    largest = LARGEST[field.type]
    if rule.HasField("gt"):
        low = rule.gt
    elif rule.HasField("gte"):
        low = rule.gte
    else:
        low = 0 if rule.token_id else -largest
    highs: list[float] = [largest]
    if rule.HasField("lte"):
        highs.append(rule.lte)
    if rule.lte_of:
        highs.append(limit_named(limits, rule.lte_of))
    if rule.lt_of:
        highs.append(limit_named(limits, rule.lt_of) - 1)
    if rule.token_id:
        highs.append(limits.vocab_size - 1)
    high = min(highs)
    if field.type == field.TYPE_DOUBLE:
        return math.nextafter(low, math.inf) if rule.HasField("gt") else low, high
    return int(low) + rule.HasField("gt"), int(high)


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
