"""The rules that the contract states of its fields: every field has one, and each of them is applied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxctx.v1 import context_service_pb2, rules_pb2
from tests.server.validate.requests import FILES, METHODS, NUMBERS, VALID, refused_fields


def parts(message_type: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, field, rule) of all fields of a request and of the messages in it."""
    for field in message_type.fields:
        yield path + field.name, field, field.GetOptions().Extensions[rules_pb2.rule]
        kind = field.message_type
        if kind is not None and kind.file.package == "jaxctx.v1" and not kind.GetOptions().map_entry:
            yield from parts(kind, f"{path}{field.name}.")


FIELDS = [
    pytest.param(name, path, field, rule, id=f"{name}.{path}")
    for name, (_, method) in METHODS.items()
    for path, field, rule in parts(method.input_type)
]


@pytest.mark.parametrize(("name", "path", "field", "rule"), FIELDS)
def test_every_field_of_a_request_has_a_rule(name: str, path: str, field: Any, rule: Any, limits: Any) -> None:
    """Any value of a bool or an enum may be sent, and a message has the rules of its fields; nothing else goes free."""
    kind = field.message_type
    sizes = [(field, rule)]
    if kind is not None and kind.GetOptions().map_entry:
        sizes = [(kind.fields_by_name["key"], rule.keys), (kind.fields_by_name["value"], rule)]
    if field.is_repeated:
        assert rule.max_items or rule.max_items_of, "a list or map of any length"
    for each, bounds in sizes:
        if each.type == each.TYPE_STRING:
            assert bounds.max_bytes or bounds.id or bounds.name, "a text of any size"
        elif each.type == each.TYPE_BYTES:
            assert bounds.max_bytes, "bytes of any size"
        elif each.type == each.TYPE_DOUBLE:
            assert bounds.HasField("gte") or bounds.HasField("gt"), "any number"
            assert bounds.HasField("lte"), "any number"
        elif each.type in (each.TYPE_INT32, each.TYPE_INT64):
            assert bounds.HasField("gte") or bounds.token_id or bounds.ranges, "any number"
        elif each.type == each.TYPE_MESSAGE and each.message_type.full_name == "google.protobuf.Duration":
            assert bounds.HasField("gt"), "any time"
            assert bounds.HasField("lte"), "any time"
        else:
            ours = each.message_type is not None and each.message_type.file.package == "jaxctx.v1"
            assert ours or each.type in (each.TYPE_BOOL, each.TYPE_ENUM), "a type without rules"
    for limit in (rule.lte_of, rule.lt_of, rule.max_items_of):
        assert not limit or type(getattr(limits, limit)) is int
    for other in (rule.needs, rule.excludes, rule.one_for_each):
        assert not other or other in field.containing_type.fields_by_name


def violating(field: Any, rule: Any, limits: Any) -> list[tuple[Any, str]]:
    """For each rule of a field by itself a value that breaks it, and where that is in the field."""
    kind, found = field.message_type, []
    most = getattr(limits, rule.max_items_of) if rule.max_items_of else rule.max_items
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        good = 1 if key.type == key.TYPE_INT32 else "k"
        found += [({wrong: 0 if good == 1 else ""}, "") for wrong, _ in single(key, rule.keys, limits)]
        found += [({good: wrong}, f"[{good}]") for wrong, _ in single(value, rule, limits)]
        found += [({i if good == 1 else f"k{i}": 0 if good == 1 else "" for i in range(most + 1)}, "")]
        return found
    if not field.is_repeated:
        return single(field, rule, limits)
    one = {field.TYPE_STRING: "x", field.TYPE_MESSAGE: {}}.get(field.type, 1)
    found += [([one] * (most + 1), "")]
    if rule.min_items:
        found += [([], "")]
    if rule.unique:
        found += [([one, one], "[1]")]
    if rule.max_total_bytes and kind is None:
        lengths = range(rule.max_bytes - rule.max_total_bytes // rule.max_bytes, rule.max_bytes + 1)  # all different
        found += [(["x" * length for length in lengths], "")]
    elif rule.max_total_bytes:
        text = next(each.name for each in kind.fields if each.name == "content")
        found += [([{"role": "r", text: "x" * (rule.max_total_bytes // 2)}] * 3, "")]
    if rule.ranges:
        high = getattr(limits, rule.lte_of)
        return found + [(bounds, "") for bounds in ([1], [-1, 2], [2, 2], [3, 2], [0, 3, 2, 4], [0, high + 1])]
    return found + [([wrong], f"[0]{below}") for wrong, below in single(field, rule, limits)]


def single(field: Any, rule: Any, limits: Any) -> list[tuple[Any, str]]:
    """Likewise of one value."""
    if field.type == field.TYPE_STRING:
        texts = [" ", "", "x" * 65] if rule.id else ["\n", "", "x" * 101] if rule.name else ["x" * (rule.max_bytes + 1)]
        return [(text, "") for text in (*texts, *[""] * bool(rule.min_bytes))]
    if field.type == field.TYPE_BYTES:
        return [(b"x" * (rule.max_bytes + 1), ""), *[(b"", "")] * bool(rule.min_bytes)]
    if field.type == field.TYPE_MESSAGE:
        if field.message_type.full_name != "google.protobuf.Duration":
            return []
        return [({"seconds": int(rule.gt)}, ""), ({"seconds": int(rule.lte), "nanos": 1}, "")]
    wrong: list[Any] = []
    wrong += (
        [rule.gte - 1] * rule.HasField("gte") + [rule.gt] * rule.HasField("gt") + [rule.lte + 1] * rule.HasField("lte")
    )
    wrong += [getattr(limits, rule.lte_of) + 1] if rule.lte_of else []
    wrong += [getattr(limits, rule.lt_of)] if rule.lt_of else []
    wrong += [-1, limits.vocab_size] if rule.token_id else []
    if field.type == field.TYPE_DOUBLE:
        return [(each, "") for each in (*wrong, *NUMBERS)]
    return [(int(each), "") for each in wrong]


def around(message_type: Any, path: str, value: Any) -> dict[str, Any]:
    """The fields of such a message, with one somewhere in it set, and whatever is needed to find no other fault."""
    name, _, below = path.partition(".")
    field = message_type.fields_by_name[name]
    if below:
        inner = around(field.message_type, below, value)
        value = [inner] if field.is_repeated else inner
    needed = {key: each for key, each in VALID.items() if key in message_type.fields_by_name and key != name}
    oneof = field.containing_oneof
    for key in [each.name for each in oneof.fields] if oneof else []:
        needed.pop(key, None)
    if message_type.name == "PlanRequest":
        needed.pop("context_id", None)
    if message_type.name == "ForwardRequest" and name != "tokens":
        needed["tokens"] = [1]
    if message_type.name == "ChatMessage" and name != "role":
        needed["role"] = "user"
    if message_type.name == "ToolCall" and name != "name":
        needed["name"] = "f"
    if message_type.name == "ChatMessages" and name != "messages":
        needed["messages"] = [{"role": "assistant"}]
    if message_type.name == "ApplyChatTemplateRequest" and name != "messages":
        needed["messages"] = {"messages": [{"role": "user"}]}
    rule = field.GetOptions().Extensions[rules_pb2.rule]
    if rule.needs:
        needed[rule.needs] = True
    return needed | {name: value}


@pytest.mark.parametrize(("name", "path", "field", "rule"), FIELDS)
def test_every_rule_is_kept(name: str, path: str, field: Any, rule: Any, limits: Any) -> None:
    """A value that breaks it is refused, with the field's name, and by no other rule."""
    message_type = METHODS[name][1].input_type
    module = next(module for module in FILES if hasattr(module, name))
    pattern = re.escape(path).replace(r"\.", r"(\[0\])?\.")
    for value, below in violating(field, rule, limits):
        message = getattr(module, name)(**around(message_type, path, value))
        named = refused_fields(limits, message)
        assert all(re.match(pattern, each) for each in named), (str(value)[:100], named)
        assert any(re.match(pattern + re.escape(below), each) for each in named), (str(value)[:100], named)
    if rule.required:
        assert refused_fields(limits, getattr(module, name)()) == [path]
    if rule.needs:
        value = {"seconds": 1} if field.type == field.TYPE_MESSAGE else 1
        fields = around(message_type, path, value) | {rule.needs: False}
        assert refused_fields(limits, getattr(module, name)(**fields)) == [path]
    if rule.excludes:
        fields = around(message_type, path, "x") | {rule.excludes: "x"}
        assert refused_fields(limits, getattr(module, name)(**fields)) == [path]
    if rule.one_for_each:
        value = [{}] * 2 if field.type == field.TYPE_MESSAGE else [0] * 2
        fields = around(message_type, path, value) | {rule.one_for_each: [1] * 3}
        assert refused_fields(limits, getattr(module, name)(**fields)) == [path]


def test_the_rules_that_a_test_knows_are_all_there_are() -> None:
    """A new one needs a value above that breaks it."""
    known = {"required", "gt", "gte", "lte", "lte_of", "lt_of", "token_id", "min_bytes", "max_bytes", "id", "name"}
    known |= {"min_items", "max_items", "max_items_of", "unique", "max_total_bytes", "ranges", "keys"}
    known |= {"needs", "excludes", "one_for_each"}
    assert known == {field.name for field in rules_pb2.FieldRules.DESCRIPTOR.fields}
    assert {field.name for field in rules_pb2.OneofRules.DESCRIPTOR.fields} == {"required"}


@pytest.mark.parametrize("kind", [context_service_pb2.FillRequest, context_service_pb2.PlanRequest])
def test_a_required_choice_is_made(kind: Any, limits: Any) -> None:
    assert refused_fields(limits, kind(context_id="a")) == ["content"]
