"""The rules that the contract states of its fields (protos/jaxctx/v1/rules.proto), checked of a whole request.

What is to be checked of a message class is worked out once, as a function of the message. A check yields what is wrong
as pairs: where below the value that it is given ("", "[3]", ".temperature"), and what would be accepted, which repeats
no text. Rules between fields that the contract states in words alone are functions of `requests.py`.
"""

import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.errors import FieldViolation, InvalidArgument
from jaxctx.v1 import rules_pb2
from jaxctx.v1.rules_pb2 import FieldRules
from jaxctx_server.validate.cross_field import BETWEEN, Limits, Violations

MAX_VIOLATIONS = 16  # reported of one request
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")  # never shown in a way that control characters could bend
MAX_NAME_BYTES = 100
NS = 10**9  # a second
LARGEST = {  # how large a number of the type may be, or how far below zero
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_INT64: 2**63 - 1,
    FieldDescriptor.TYPE_DOUBLE: sys.float_info.max,
}
Check = Callable[[Any], Violations]


def validate(limits: Limits, request: Message) -> None:
    """Raise one InvalidArgument for everything that is wrong with a request, and before that nothing."""
    wrong: dict[str, str] = {}
    for path, description in _message(request.DESCRIPTOR, limits)(request):
        wrong.setdefault(path.removeprefix("."), description)
        if len(wrong) == MAX_VIOLATIONS:
            break
    if wrong:
        message = "; ".join(f"{path}: {description}" for path, description in wrong.items())
        raise InvalidArgument(message, violations=[FieldViolation(*each) for each in wrong.items()])


@functools.cache
def _message(kind: Descriptor, limits: Limits) -> Check:
    """Of a message of this class: first each field, then fields beside each other."""
    rules = [(field, field.GetOptions().Extensions[rules_pb2.rule]) for field in kind.fields]
    fields = [(each.name, each.has_presence, rule.required, _field(each, rule, limits)) for each, rule in rules]
    lists = {field.name for field in kind.fields if field.is_repeated}
    beside: list[Callable[..., Violations]] = []
    if any(rule.needs or rule.excludes or rule.one_for_each for _, rule in rules):
        beside.append(functools.partial(_beside, {field.name: rule for field, rule in rules}))
    between: list[Callable[..., Violations]] = [rule] if (rule := BETWEEN.get(GetMessageClass(kind))) else []
    required = [each for each in kind.oneofs if each.GetOptions().Extensions[rules_pb2.choice].required]
    choices = [(each.name, [field.name for field in each.fields]) for each in required]

    def check(message: Message) -> Violations:
        refused = set()
        for name, has_presence, is_required, value in fields:
            if not has_presence or message.HasField(name):
                for path, description in value(getattr(message, name)):
                    refused.add(name + path)
                    yield f".{name}{path}", description
            elif is_required:
                yield f".{name}", "must be set"
        for choice, names in choices:
            if message.WhichOneof(choice) is None:
                yield f".{choice}", f"exactly one of {', '.join(names[:-1])} and {names[-1]} must be set"
        few = lists.isdisjoint(refused)  # else a list may be far too long to look at
        for other in beside + between if few else beside:
            for path, description in other(message, limits):
                yield f".{path}", description

    return check


def _beside(rules: Mapping[str, FieldRules], message: Message, limits: Limits) -> Violations:
    """What is wrong with a field because of another one."""
    sent = {field.name: value for field, value in message.ListFields()}
    for name, value in sent.items():
        rule = rules[name]
        if rule.needs and not sent.get(rule.needs):
            yield name, f"needs {rule.needs}"
        if rule.excludes in sent:
            yield name, f"must not be set with {rule.excludes}"
        if rule.one_for_each in sent and len(value) != (most := len(sent[rule.one_for_each])):
            yield name, f"must have one entry for each of the {most} {rule.one_for_each}, or none, not {len(value)}"


def _field(field: FieldDescriptor, rule: FieldRules, limits: Limits) -> Check:
    """Of all that a field holds."""
    if not field.is_repeated:
        return _value(field, rule, limits)
    low, high = rule.min_items, getattr(limits, rule.max_items_of) if rule.max_items_of else rule.max_items
    checks: list[Check] = []
    if rule.ranges:
        checks.append(functools.partial(_ranges, _span(field, rule, limits)[1]))
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        checks.append(functools.partial(_pairs, _value(key, rule.keys, limits), _value(value, rule, limits)))
    else:
        span = _span(field, rule, limits) if field.type == field.TYPE_INT32 else None
        checks.append(functools.partial(_entries, _value(field, rule, limits), span))
    if rule.unique:
        checks.append(_unique)
    if rule.max_total_bytes:
        checks.append(functools.partial(_together, rule.max_total_bytes))

    def check(values: Collection[Any]) -> Violations:
        if low <= len(values) <= high:
            for each in checks:
                yield from each(values)
        else:
            yield "", f"must have {low} to {high} entries, not {len(values)}" if values else "must not be empty"

    return check


def _entries(check: Check, span: tuple[float, float] | None, values: Sequence[Any]) -> Violations:
    """Of each entry of a list. There may be very many whole numbers, which are looked at together first."""
    if span and (not (plain := values[:]) or (span[0] <= min(plain) and max(plain) <= span[1])):
        return
    for place, value in enumerate(values):
        for path, description in check(value):
            yield f"[{place}]{path}", description


def _pairs(check_key: Check, check_value: Check, values: Mapping[Any, Any]) -> Violations:
    """Of each entry of a map."""
    for key, value in values.items():
        place, is_text = f"[{key}]", isinstance(key, str)
        for _, description in check_key(key):
            yield ".key" if is_text else place, description
            place = "[]" if is_text else place  # a text that is wrong is no part of a path
        for path, description in check_value(value):
            yield place + path, description


def _unique(values: Sequence[Any]) -> Violations:
    seen = set()
    for place, value in enumerate(values):
        if value in seen:
            yield f"[{place}]", "must be different from those before it"
        seen.add(value)


def _together(most: int, messages: Sequence[Message]) -> Violations:
    """Of the texts in messages. One that is too large by itself is refused elsewhere."""
    sizes = [utf8_size(text) for each in messages for _, text in each.ListFields() if isinstance(text, str)]
    if sum(sizes) > most >= max(sizes):
        yield "", f"must be up to {most} bytes together"


def _ranges(high: float, bounds: Sequence[int]) -> Violations:
    """Of start, stop, start, stop, ..."""
    plain = bounds[:]
    starts, stops = plain[::2], plain[1::2]
    in_order = all(map(operator.lt, starts, stops)) and all(map(operator.le, stops, starts[1:]))
    if len(starts) != len(stops):
        yield "", "must be start and stop of each range"
    elif not in_order or min(plain, default=0) < 0 or max(plain, default=0) > high:
        yield "", f"must be ranges of indices, start below stop, ascending and apart, within 0 to {high}"


def _value(field: FieldDescriptor, rule: FieldRules, limits: Limits) -> Check:
    """Of one value: of a field that is no list, of an entry of one, or of a key or value of a map."""
    if rule.id:
        return _one(ID.fullmatch, "must be 1 to 64 characters of A-Z a-z 0-9 . _ -, the first a letter or digit")
    if rule.name:
        description = f"must be text of 1 to {MAX_NAME_BYTES} bytes without control characters"
        return _one(lambda text: NAME.fullmatch(text) and utf8_size(text) <= MAX_NAME_BYTES, description)
    if field.type == field.TYPE_STRING:
        return functools.partial(_text, rule.min_bytes, rule.max_bytes)
    if field.type == field.TYPE_BOOL:
        return lambda value: iter(())
    if (enum := field.enum_type) is not None:
        return _one({each.number for each in enum.values}.__contains__, f"must be a value of {enum.name}, not {{}}")
    if (kind := field.message_type) is not None and kind.full_name != Duration.DESCRIPTOR.full_name:
        return _message(kind, limits)
    if kind is not None:
        low, high = rule.gt * NS, rule.lte * NS
        description = f"must be above {rule.gt:.15g} and up to {rule.lte:.15g} seconds"
        return _one(lambda value: 0 <= value.nanos < NS and low < value.ToNanoseconds() <= high, description)
    low, high = _span(field, rule, limits)
    if field.type != field.TYPE_DOUBLE:
        noun = "token id" if rule.token_id else "whole number"
        return _one(lambda value: low <= value <= high, f"must be a {noun} from {low} to {high}, not {{}}")
    bounds = f"above {rule.gt:g} and up to {high:g}" if rule.HasField("gt") else f"from {low:g} to {high:g}"
    return _one(lambda value: low <= value <= high, f"must be a number {bounds}, not {{:.6g}}")  # NaN is not


def _one(accepts: Callable[[Any], object], description: str) -> Check:
    """Of a value as a whole. The description may show a number, as "{}", and no text."""

    def check(value: Any) -> Violations:
        if not accepts(value):
            yield "", description.format(value)

    return check


def _span(field: FieldDescriptor, rule: FieldRules, limits: Limits) -> tuple[float, float]:
    """The least and the greatest number that a field may hold."""
    largest = LARGEST[field.type]
    low = rule.gt if rule.HasField("gt") else rule.gte if rule.HasField("gte") else 0 if rule.token_id else -largest
    high = min(
        rule.lte if rule.HasField("lte") else largest,
        getattr(limits, rule.lte_of) if rule.lte_of else largest,
        getattr(limits, rule.lt_of) - 1 if rule.lt_of else largest,
        limits.vocab_size - 1 if rule.token_id else largest,
    )
    if field.type == field.TYPE_DOUBLE:
        return math.nextafter(low, math.inf) if rule.HasField("gt") else low, high
    return int(low) + rule.HasField("gt"), int(high)


def _text(low: int, high: int, text: str) -> Violations:
    size = utf8_size(text)
    if not low <= size <= high:
        yield "", f"must be text of {low} to {high} bytes, not {size}" if text else "must not be empty"


def utf8_size(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
