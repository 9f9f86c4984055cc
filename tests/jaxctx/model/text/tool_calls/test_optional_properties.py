"""Objects with too many optional properties are refused, and llguidance follows all others."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher

from jaxctx.engine.grammar.compiler import LIMITS
from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import LENIENT, STYLE, References
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
from jaxctx.model.text.tool_calls.optional_properties import MAX_ITEMS, check_optional
from jaxctx.model.text.tool_calls.symbols import json_symbol
from tests.tool_call_grammars import PLAIN

Case = tuple[dict[str, Any], Any]  # a schema, and a value of it


def object_of(optional: int, *, before: int = 0, behind: int = 0, prefix: str = "") -> Case:
    """An object with optional properties between those that are required."""
    required = [f"{prefix}{place}" for place in range(before)]
    middle = [f"{prefix}o{place}" for place in range(optional)]
    last = [f"{prefix}z{place}" for place in range(behind)]
    properties = {name: {"type": "string"} for name in [*required, *middle, *last]}
    schema = {"type": "object", "properties": properties, "required": [*required, *last], "additionalProperties": False}
    return schema, dict.fromkeys([*required, middle[-1], *last], "x")


def either(optional: int, **of_each: int) -> Case:
    """One of two objects, of which one is named by a reference, or null."""
    (first, value), (second, _) = (object_of(optional, prefix=prefix, **of_each) for prefix in "ab")
    return {"anyOf": [first, {"oneOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}], "$defs": {"b": second}}, value


def inside(optional: int) -> Case:
    schema, value = object_of(optional)
    return {"allOf": [{"type": "array", "items": schema}]}, [value]


def merged(optional: int, *, how: str) -> Case:
    """One object of the optional properties of two, and a value that has some of both."""
    (first, value), (second, other) = (object_of(optional, prefix=prefix) for prefix in "ab")
    first, second = ({**each, "additionalProperties": True} for each in (first, second))
    both = {**value, **other}
    match how:
        case "allOf":
            return {"allOf": [first, second]}, both
        case "allOf of references":
            refs = [{"$ref": "#/$defs/a"}, {"description": "says nothing"}, {"$ref": "#/$defs/b"}]
            return {"allOf": refs, "$defs": {"a": first, "b": second}}, both
        case "beside allOf":
            return {**first, "allOf": [second]}, {**other, **value}  # in this order
        case "beside a reference":
            return {**first, "$ref": "#/$defs/b", "$defs": {"b": second}}, both
        case _:
            assert how == "in an array"
            return {"type": "array", "items": {"allOf": [first, second]}}, [both]


def beside_alternatives(optional: int, *, alternatives: int) -> Case:
    """An object that is also one of several others: llguidance makes an object of each of these."""
    schema, value = object_of(optional)
    others = [{"properties": {f"k{place}": {"type": "string"}}} for place in range(alternatives)]
    return {**schema, "additionalProperties": True, "anyOf": others}, {"k0": "x", **value}


def open_alternatives(optional: int, *, alternatives: int) -> Case:
    """One of several objects that may have any other properties as well."""
    each = [object_of(optional, prefix=f"{place}_") for place in range(alternatives)]
    return {"anyOf": [{**schema, "additionalProperties": True} for schema, _ in each]}, each[-1][1]


def first_of(place: int, told_apart: str) -> dict[str, Any]:
    """What the first property of an alternative is."""
    match told_apart:
        case "by a constant":
            return {"const": f"n{place}"}
        case "by several values":
            return {"enum": [f"n{place}", f"m{place}"]}
        case "by a reference":
            return {"$ref": f"#/$defs/n{place}"}
        case _:
            return {"type": "string"}


def alike(optional: int, *, alternatives: int, told_apart: str = "") -> Case:
    """One of several objects that all begin with the same property, of which each has values of its own or any."""
    each = [object_of(optional, prefix=f"{place}_")[0] for place in range(alternatives)]
    first = [first_of(place, told_apart) for place in range(alternatives)]
    objects = [
        {**schema, "properties": {"name": name, **schema["properties"]}, "required": ["name"]}
        for schema, name in zip(each, first, strict=True)
    ]
    last = alternatives - 1
    named = {f"n{place}": {"const": f"n{place}"} for place in range(alternatives)}
    return {"anyOf": objects, "$defs": named}, {"name": f"n{last}", f"{last}_o{optional - 1}": "x"}


def named_alone(optional: int) -> Case:
    """By a reference beside a description, as pydantic writes it: no other than the object itself."""
    schema, value = object_of(optional, before=1)
    named = {"description": "d", "allOf": [{"$ref": "#/$defs/a"}]}
    return {"properties": {"p": named}, "required": ["p"], "$defs": {"a": schema}}, {"p": value}


HOW = ("a constant", "several values", "a reference")


def check(schema: Any) -> None:
    check_optional(schema, References(schema), lambda _: None)


def json_grammar(schema: dict[str, Any]) -> str:
    return "start: " + json_symbol({**schema, "x-guidance": {**STYLE, **LENIENT}})


def is_followed(grammar: str, text: str) -> bool:
    """Whether llguidance takes a text of the grammar, within the limits of the server."""
    matcher = LLMatcher(PLAIN[0], grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    tokens = PLAIN[0].tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("make", "options", "most"),
    [
        (object_of, {}, MAX_ITEMS // 4),
        (object_of, {"behind": 1}, MAX_ITEMS // 3),
        (object_of, {"before": 1}, MAX_ITEMS // 2),
        (object_of, {"before": 1, "behind": 1}, MAX_ITEMS // 2),
        (either, {}, MAX_ITEMS // 8),
        (either, {"behind": 2}, MAX_ITEMS // 6),
        (either, {"before": 1}, MAX_ITEMS // 2),
        (inside, {}, MAX_ITEMS // 4),
        (merged, {"how": "allOf"}, (MAX_ITEMS - 14) // 8),
        (merged, {"how": "allOf of references"}, (MAX_ITEMS - 14) // 8),
        (merged, {"how": "beside allOf"}, (MAX_ITEMS - 14) // 8),
        (merged, {"how": "beside a reference"}, (MAX_ITEMS - 14) // 8),
        (merged, {"how": "in an array"}, (MAX_ITEMS - 14) // 8),
        (beside_alternatives, {"alternatives": 10}, (MAX_ITEMS - 10 * (4 + 2 * 7)) // 40),
        (open_alternatives, {"alternatives": 20}, (MAX_ITEMS // 20 - 7) // 4),
        (named_alone, {}, MAX_ITEMS // 2),
        (alike, {"alternatives": 2}, (MAX_ITEMS // 2 - 1) // 2),
        (alike, {"alternatives": 20}, (MAX_ITEMS - 19) // 40),
        *((alike, {"alternatives": 10, "told_apart": f"by {how}"}, MAX_ITEMS // 2) for how in HOW),
    ],
)
def test_as_many_as_can_be_followed(make: Any, options: dict[str, int], most: int) -> None:
    schema, value = make(most, **options)
    check(schema)
    assert is_followed(json_grammar(schema), json.dumps(value))
    with pytest.raises(InvalidArgument) as raised:
        check(make(most + 1, **options)[0])
    assert [violation.field for violation in raised.value.violations] == ["tools"]


def test_what_nothing_refers_to_does_not_count() -> None:
    check({"type": "object", "$defs": {"unused": object_of(600)[0]}})
    with pytest.raises(InvalidArgument):
        check({"$ref": "#/$defs/used", "$defs": {"used": object_of(600)[0]}})


def test_alternatives_that_are_told_apart_are_looked_at_once() -> None:
    schema, _ = alike(3, alternatives=600, told_apart="by a constant")
    looked: list[int] = []
    check_optional(schema, References(schema), looked.append)
    assert sum(looked) < 20 * 600


def test_those_that_could_not_be_followed() -> None:
    """So that this is not forgotten once llguidance can."""
    schema, value = object_of(501)
    assert not is_followed(json_grammar(schema), json.dumps(value))


def test_what_is_no_schema_has_no_properties() -> None:
    for schema in ({"properties": 5}, {"required": 5, "properties": {"a": 5}}, {"anyOf": 5}, {"anyOf": [5]}):
        check(schema)
    check({"required": [{}], "properties": {"a": {"$ref": "#/none"}}, "$ref": 5, "allOf": [{}, 5]})
    check({"$ref": "#"})


def test_each_schema_is_looked_at_once() -> None:
    """However many others have it among their alternatives."""
    (shared, _), references = object_of(1, before=100), 50
    names = [{"anyOf": [{"$ref": "#/$defs/a"}]} for _ in range(references)]
    document: Any = {"prefixItems": names, "$defs": {"a": shared}}
    looked: list[int] = []
    check_optional(document, References(document), looked.append)
    assert sum(looked) <= 201 + 101 + 13 * references + 2


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_tools_with_many_optional_arguments(name: str) -> None:
    """All are followed, or a strict tool is refused and any other is held to less."""
    tool_format, (parameters, arguments) = TOOL_CALL_FORMATS[name], object_of(512)
    function = {"name": "f", "parameters": parameters}
    strict = {"type": "function", "function": {**function, "strict": True}}
    text = tool_format.text([("f", arguments)])
    if name in ("olmo3", "qwen3_coder"):
        assert is_followed(tool_format.grammar([strict], "required", False), text)
    else:
        for choice in ("required", "auto"):
            with pytest.raises(InvalidArgument):
                tool_format.grammar([strict], choice, False)
    grammar = tool_format.grammar([{"type": "function", "function": function}], "required", False)
    assert is_followed(grammar, text)


@pytest.mark.parametrize("name", ["olmo3", "qwen3_coder"])
def test_arguments_that_are_objects_with_many_optional_properties(name: str) -> None:
    tool_format, (schema, value) = TOOL_CALL_FORMATS[name], object_of(512)
    function = {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/o"}}, "$defs": {"o": schema}}}
    with pytest.raises(InvalidArgument):
        tool_format.grammar([{"type": "function", "function": {**function, "strict": True}}], "required", False)
    grammar = tool_format.grammar([{"type": "function", "function": function}], "required", False)
    assert is_followed(grammar, tool_format.text([("f", {"a": value})]))


def chain(depth: int, keyword: str) -> dict[str, Any]:
    """Each schema names the next one twice, the last one says an object."""
    schemas: dict[str, Any] = {
        f"d{place}": {keyword: [{"$ref": f"#/$defs/d{place + 1}"}] * 2, "description": str(place)}
        for place in range(depth)
    }
    schemas[f"d{depth}"] = object_of(3)[0]
    return {"$ref": "#/$defs/d0", "$defs": schemas}


def circle(count: int, *, merged_with: int = 0) -> dict[str, Any]:
    """Unions that all name each other, each also with some properties of its own if `merged_with` says so."""
    names = [{"$ref": f"#/$defs/d{place}"} for place in range(count)]
    own = object_of(merged_with)[0] if merged_with else {}
    schemas = {f"d{place}": {**own, "anyOf": [{"type": "string"}, *names]} for place in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": schemas}


@pytest.mark.parametrize(
    "document",
    [chain(40, "allOf"), chain(40, "anyOf"), circle(20), {"allOf": [{"$ref": "#"}] * 2}],
    ids=["allOf", "anyOf", "circle", "itself"],
)
def test_what_is_named_again_and_again_is_looked_at_once(document: dict[str, Any]) -> None:
    """However many ways lead there: a request of a kilobyte takes no thread for seconds."""
    looked: list[int] = []
    check_optional(document, References(document), looked.append)
    assert sum(looked) < 10_000


@pytest.mark.parametrize("count", [4, 16, 64])
def test_objects_that_are_merged_in_circles_end_in_a_bounded_time(count: int) -> None:
    """They are let through or refused: all that is looked at is told."""
    document, left = circle(count, merged_with=2), 20_000

    def look(more: int) -> None:
        nonlocal left
        left -= more
        if left < 0:
            raise InvalidArgument.field("tools", "too large")

    with suppress(InvalidArgument):
        check_optional(document, References(document), look)
    assert left > -1000


def test_many_may_name_one_union() -> None:
    union = {"anyOf": [{"properties": {f"k{place}": {}}, "required": [f"k{place}"]} for place in range(150)]}
    document = {"properties": {f"p{place}": {"$ref": "#/$defs/u"} for place in range(250)}, "$defs": {"u": union}}
    looked: list[int] = []
    check_optional(document, References(document), looked.append)
    assert sum(looked) < 4000
