"""Grammars of calls, by llguidance's own matcher: what they let through, and that the parser reads all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import closed_objects
from jaxctx.model.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    OutputParser,
    ToolCallFormat,
)
from jaxctx.model.text.tool_calls.arguments import MAX_PROPERTIES
from tests.tool_call_events import Read, parse
from tests.tool_call_grammars import PLAIN, accepts, draw, elements, with_marks

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now-2"}}
ODD: dict[str, Any] = {"type": "function", "function": {"name": 'o"d\\d é/\n', "parameters": {}}}
TOOLS = [WEATHER, NOW]
GOOD = '{"city": "Bonn", "unit": "C", "days": [1, 7]}'
BAD = [
    '{"unit": "C"}',
    '{"city": 7, "unit": "C"}',
    '{"city": "Bonn", "unit": "K"}',
    '{"city": "B", "unit": "C", "x": 1}',
]


SPECIAL = {name: with_marks(*each.markers, "<think>", "</think>") for name, each in TOOL_CALL_FORMATS.items()}
# Outputs of harmony are another kind: see test_harmony_grammar.py.
CASES = [(name, kind) for name in TOOL_CALL_FORMATS if name != "harmony" for kind in ("plain", "special")]


def tokenizer_of(name: str, kind: str) -> tuple[LLTokenizer, dict[str, int]]:
    return PLAIN if kind == "plain" else SPECIAL[name]


LISTS = {"granite": ("<|tool_call|>", ""), "phi4": ("<|tool_call|>", "<|/tool_call|>"), "functools": ("functools", "")}
CLOSED = "</function_calls>"


def keywords(arguments: str) -> str:
    """An object as arguments by name; anything else as an argument without a name."""
    value = json.loads(arguments)
    if not isinstance(value, dict):
        return arguments
    return ", ".join(f"{key}={json.dumps(each, ensure_ascii=False)}" for key, each in value.items())


def written(name: str, *calls: tuple[str, str]) -> str:
    """Calls, names and arguments, as the format's models write them."""
    pairs = [(json.dumps(tool, ensure_ascii=False), arguments) for tool, arguments in calls]
    match name:
        case "hermes":
            each = [
                f'<tool_call>\n{{"name": {tool}, "arguments": {arguments}}}\n</tool_call>' for tool, arguments in pairs
            ]
            return "\n".join(each)
        case "llama3_json":
            return "; ".join(f'{{"name": {tool}, "parameters": {arguments}}}' for tool, arguments in pairs)
        case "mistral":
            each = [f'{{"name": {tool}, "arguments": {arguments}}}' for tool, arguments in pairs]
            return "[TOOL_CALLS] [" + ", ".join(each) + "]"
        case "granite" | "phi4" | "functools":
            each = [f'{{"name": {tool}, "arguments": {arguments}}}' for tool, arguments in pairs]
            opening, closing = LISTS[name]
            return opening + "[" + ", ".join(each) + "]" + closing
        case "qwen3_coder":
            each = [
                f"<tool_call>\n<function={tool}>\n{elements(text)}</function>\n</tool_call>" for tool, text in calls
            ]
            return "\n".join(each)
        case "olmo3":
            return "<function_calls>" + "\n".join(f"{tool}({keywords(text)})" for tool, text in calls) + CLOSED
    return "".join(f"[TOOL_CALLS]{tool}[ARGS]{arguments}" for tool, arguments in calls)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_required_call_is_one_of_the_tools_with_its_schema(name: str, kind: str) -> None:
    tokenizer, ids = tokenizer_of(name, kind)
    grammar = TOOL_CALL_FORMATS[name].grammar(TOOLS, "required", False, special_ids=ids)
    assert accepts(tokenizer, grammar, written(name, ("get_weather", GOOD)))
    assert accepts(tokenizer, grammar, written(name, ("now-2", '{"any": [{}]}')))
    for arguments in BAD:
        if name == "qwen3_coder" and json.loads(arguments).get("city") == 7:
            continue  # a text without quotes may be 7
        assert not accepts(tokenizer, grammar, written(name, ("get_weather", arguments)))
    for text in (
        "",
        "Hello",
        written(name, ("other", "{}")),
        written(name, ("now-2", "[]")),
        written(name, ("now-2", "{}"), ("now-2", "{}")),
        written(name, ("now-2", "{}"))[:-1],
        written(name, ("now-2", "{}")) + "x",
    ):
        assert not accepts(tokenizer, grammar, text), text


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_named_call_and_parallel_calls(name: str, kind: str) -> None:
    tokenizer, ids = tokenizer_of(name, kind)
    make = TOOL_CALL_FORMATS[name].grammar
    named = make(TOOLS, "get_weather", False, special_ids=ids)
    assert accepts(tokenizer, named, written(name, ("get_weather", GOOD)))
    assert not accepts(tokenizer, named, written(name, ("now-2", "{}")))
    parallel = make(TOOLS, "required", True, special_ids=ids)
    for count in (1, 2, 3):
        assert accepts(tokenizer, parallel, written(name, *[("get_weather", GOOD), ("now-2", "{}")] * count))
    assert not accepts(tokenizer, parallel, written(name, ("get_weather", GOOD), ("get_weather", BAD[0])))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_free_calls_are_text_or_calls_of_the_tools(name: str, kind: str) -> None:
    """Only a strict tool has its schema."""
    tokenizer, ids = tokenizer_of(name, kind)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = TOOL_CALL_FORMATS[name].grammar([strict, NOW], "auto", True, special_ids=ids)
    for text in (
        "",
        "Hello\n {} <tool",
        *([] if name == "llama3_json" else ["{1}", "7 " + written(name, ("now-2", "{}"))]),
    ):
        assert accepts(tokenizer, grammar, text), text
    assert accepts(tokenizer, grammar, written(name, ("get_weather", GOOD), ("now-2", '{"a": 1}')))
    assert not accepts(tokenizer, grammar, written(name, ("get_weather", BAD[0])))
    assert not accepts(tokenizer, grammar, written(name, ("other", "{}")))
    assert accepts(
        tokenizer,
        TOOL_CALL_FORMATS[name].grammar(TOOLS, "auto", False, special_ids=ids),
        written(name, ("get_weather", BAD[0])),
    )


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_free_calls_whose_opening_mark_was_forgotten(kind: str) -> None:
    """The parser takes them, so a strict tool has its schema there too."""
    tokenizer, ids = tokenizer_of("qwen3_coder", kind)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    each = TOOL_CALL_FORMATS["qwen3_coder"]
    grammar = each.grammar([strict, NOW], "auto", True, special_ids=ids)

    def bare(*calls: tuple[str, str]) -> str:
        return "So " + written("qwen3_coder", *calls).removeprefix("<tool_call>\n")

    text = bare(("get_weather", GOOD), ("now-2", '{"a": 1}'))
    assert accepts(tokenizer, grammar, text)
    assert [name for name, _ in parse(each.parser(), [text]).calls] == ["get_weather", "now-2"]
    assert accepts(tokenizer, grammar, bare(("now-2", "{}")))
    assert accepts(tokenizer, grammar, "So <function, and <tool")
    for refused in (
        bare(("get_weather", BAD[0])),
        bare(("get_weather", BAD[2])),
        bare(("other", "{}")),
        bare(("now-2", "{}"), ("get_weather", BAD[0])),
        bare(("now-2", "{}")) + bare(("get_weather", BAD[0])),
    ):
        assert not accepts(tokenizer, grammar, refused), refused


@pytest.mark.parametrize("opened", ["think", "think_opened"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_thoughts_may_stand_before_calls(name: str, kind: str, opened: str) -> None:
    tokenizer, ids = tokenizer_of(name, kind)
    reasoning = REASONING_FORMATS[opened]
    special = {mark: tokenizer.tokenize_str(mark, parse_special=True)[0] for mark in reasoning.markers} if ids else {}
    grammar = TOOL_CALL_FORMATS[name].grammar(TOOLS, "required", True, special_ids=ids | special, reasoning=reasoning)
    made = written(name, ("now-2", "{}"))
    thought = f"\nShould I < {made}?\n</think>\n\n"
    thought = thought if reasoning.is_open else "<think>" + thought
    if kind == "special":  # a model does not write marks in its thoughts
        thought = thought.replace(made, "call")
    assert accepts(tokenizer, grammar, thought + made)
    assert accepts(tokenizer, grammar, made) is not reasoning.is_open
    assert not accepts(tokenizer, grammar, thought + "no")
    assert not accepts(tokenizer, grammar, thought)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_a_name_of_any_letters(name: str) -> None:
    grammar = TOOL_CALL_FORMATS[name].grammar([ODD], "required", False)
    text = written(name, (ODD["function"]["name"], '{"a": 1}'))
    assert accepts(PLAIN[0], grammar, text)
    assert parse(TOOL_CALL_FORMATS[name].parser(), [text]).calls == [(ODD["function"]["name"], '{"a": 1}')]


@pytest.mark.parametrize("choice", ["required", "get_weather"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_whatever_the_masks_let_through_is_read_as_calls(name: str, kind: str, choice: str) -> None:
    """Round trip: grammar, random output, parser."""
    tokenizer, ids = tokenizer_of(name, kind)
    each = TOOL_CALL_FORMATS[name]
    bound = {**NOW, "function": {"name": "now-2", "parameters": {"properties": {}, "additionalProperties": False}}}
    grammar = each.grammar([WEATHER, bound], choice, True, special_ids=ids)
    outputs = [text for seed in range(12) if (text := draw(tokenizer, grammar, seed)) is not None]
    assert len(outputs) >= 4
    for text in outputs:
        found: Read = parse(each.parser(tool_names={"get_weather", "now-2"}), list(text))
        assert found.text == ""
        assert found.calls
        assert not found.broken
        for tool, arguments in found.calls:
            value = json.loads(arguments)
            if tool == "get_weather":
                assert {"city", "unit"} <= value.keys() <= {"city", "unit", "days"}
                assert value["unit"] in ("C", "F")
            else:
                assert (tool, value) == ("now-2", {})
                assert choice == "required"


def test_thoughts_and_calls_are_read_as_such() -> None:
    reasoning = REASONING_FORMATS["think"]
    each: ToolCallFormat = TOOL_CALL_FORMATS["hermes"]
    grammar = each.grammar(TOOLS, "now-2", False, reasoning=reasoning)
    text = "<think>\nso\n</think>\n\n" + written("hermes", ("now-2", "{}"))
    assert accepts(PLAIN[0], grammar, text)
    found = parse(OutputParser(reasoning.parser(), each.parser()), [text])
    assert (found.thoughts, found.calls, found.text) == ("so", [("now-2", "{}")], "")


@pytest.mark.parametrize(
    ("parameters", "accepted", "refused"),
    [
        ({}, ["", "a=1", 'a=1, b={"c": [null]}'], ["a", "1", "a=1,"]),
        ({"properties": {}, "additionalProperties": False}, [""], ["a=1"]),
        (
            {"properties": {"a": {"type": "integer"}, "b-c": True}},
            ["", "a=1", 'b-c="x"', "a=1, b-c=2"],
            ["a='x'", "d=1"],
        ),
        (
            {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
            ["b=1", "a=1, b=1", "b=1, c=1"],
            ["a=1", "", "b=1, a=1"],
        ),
        (
            {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}, "b": {"$ref": "#/properties/a"}}},
            ["a=[]", 'a=[{"b": []}], b=[{}]'],
            ["a=[[]]", 'a=[{"a": 1}]', "b={}"],
        ),
    ],
)
def test_arguments_by_name(parameters: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = TOOL_CALL_FORMATS["olmo3"].grammar([tool], "required", False)
    for arguments in accepted + refused:
        text = f"<function_calls>f({arguments})</function_calls>"
        assert accepts(PLAIN[0], grammar, text) is (arguments in accepted), arguments
    for arguments in accepted:
        assert parse(TOOL_CALL_FORMATS["olmo3"].parser(), [f"<function_calls>f({arguments})"]).calls[0][0] == "f"


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"properties": {"a b": {}}},
        {"properties": {"a=": {}}},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "required": [{}]},
        {"properties": ["a"]},
        {"properties": {"a": 5}},
        {"properties": {"a": False}},
    ],
)
def test_arguments_that_cannot_be_held_by_name(parameters: dict[str, Any]) -> None:
    function = {"name": "f", "parameters": parameters}
    strict = {"type": "function", "function": {**function, "strict": True}}
    for choice in ("required", "auto"):
        with pytest.raises(InvalidArgument) as raised:
            TOOL_CALL_FORMATS["olmo3"].grammar([strict], choice, False)
        assert [violation.field for violation in raised.value.violations] == ["tools"]
    grammar = TOOL_CALL_FORMATS["olmo3"].grammar([{"type": "function", "function": function}], "required", False)
    assert accepts(PLAIN[0], grammar, "<function_calls>f(x=1)</function_calls>")


@pytest.mark.parametrize("name", ["olmo3", "qwen3_coder"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {f"a{place}": {} for place in range(MAX_PROPERTIES + 1)}},
        {"properties": {f"a{place}": {"type": "array", "items": {"$ref": "#"}} for place in range(MAX_PROPERTIES)}},
    ],
)
def test_schemas_that_are_too_large(name: str, parameters: dict[str, Any]) -> None:
    """As where each argument refers to all of them: rules would be at the square of the schema's length."""
    function = {"name": "f", "parameters": parameters}
    strict = {"type": "function", "function": {**function, "strict": True}}
    with pytest.raises(InvalidArgument) as raised:
        TOOL_CALL_FORMATS[name].grammar([strict], "required", False)
    assert [violation.field for violation in raised.value.violations] == ["tools"]
    grammar = TOOL_CALL_FORMATS[name].grammar([{"type": "function", "function": function}], "required", False)
    assert len(grammar) < 2000
    assert accepts(PLAIN[0], grammar, written(name, ("f", '{"x": 1}')))


TEXT = {"type": "string"}
HARD: dict[str, dict[str, Any]] = {
    "names": {"propertyNames": {"pattern": "^a"}},
    "unique": {"properties": {"a": {"type": "array", "items": TEXT, "uniqueItems": True}}},
    "not": {"properties": {"a": {"not": {"type": "integer"}}}},
    "contains": {"properties": {"a": {"type": "array", "contains": TEXT, "minContains": 1}}},
    "if": {"properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependent": {"properties": {"a": TEXT}, "dependentRequired": {"a": ["b"]}},
    "format": {"properties": {"a": {"type": "string", "format": "binary"}}},
    "one of": {"properties": {"a": {"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}}},
    "look ahead": {"properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}},
    "look behind": {"properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}},
    "names by look ahead": {"patternProperties": {"^(?!x)": TEXT}, "additionalProperties": False},
}


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(("name", "choice"), [("hermes", "required"), ("hermes", "f"), ("mistral", "required")])
def test_a_tool_that_is_not_strict_keeps_no_other_from_being_called(name: str, choice: str, kind: str) -> None:
    """What cannot be followed of its schema is left out; a strict one is refused where that is compiled."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": HARD[kind]}}
    grammar = TOOL_CALL_FORMATS[name].grammar([tool, WEATHER], choice, False)
    assert accepts(PLAIN[0], grammar, written(name, ("f", "{}")))
    value = '["x"]' if kind in ("unique", "contains") else '"x"'
    assert accepts(PLAIN[0], grammar, written(name, ("f", f'{{"a": {value}}}')))
    if choice == "required":
        assert accepts(PLAIN[0], grammar, written(name, ("get_weather", GOOD)))
        assert not accepts(PLAIN[0], grammar, written(name, ("get_weather", BAD[0])))
    strict = {**tool, "function": {**tool["function"], "strict": True}}
    grammar = TOOL_CALL_FORMATS[name].grammar([strict], "required", False)
    assert "failed to compile" in LLMatcher.validate_grammar(grammar, PLAIN[0])


def test_only_strict_tools_may_be_held_to_their_schema() -> None:
    """As where the engine refuses a schema of another one."""
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "any"}}}}}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = TOOL_CALL_FORMATS["hermes"].grammar([broken, strict], "required", False)
    assert "failed to compile" in LLMatcher.validate_grammar(grammar, PLAIN[0])
    grammar = TOOL_CALL_FORMATS["hermes"].grammar([broken, strict], "required", False, strict_only=True)
    assert accepts(PLAIN[0], grammar, written("hermes", ("f", '{"b": 1}')))
    assert accepts(PLAIN[0], grammar, written("hermes", ("get_weather", GOOD)))
    assert not accepts(PLAIN[0], grammar, written("hermes", ("get_weather", BAD[0])))
    assert not accepts(PLAIN[0], grammar, "Hello")


@pytest.mark.parametrize(
    ("tools", "choice", "field"), [([], "required", "tools"), ([], "auto", "tools"), (TOOLS, "other", "tool_choice")]
)
def test_choices_that_cannot_be(tools: Any, choice: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        TOOL_CALL_FORMATS["hermes"].grammar(tools, choice, False)
    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize(
    ("key", "parallel"), [("name", True), ("name", False), ("city", True), ("na", False), ("parameters", True)]
)
def test_calls_in_place_of_json(name: str, kind: str, key: str, parallel: bool) -> None:
    """A text with a schema is JSON of it; nothing stands before the calls, and only a strict one has its schema."""
    tokenizer, ids = tokenizer_of(name, kind)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    schema = closed_objects({"type": "object", "properties": {key: {"type": "string"}}, "required": [key]})
    tools = [strict, NOW, ODD]
    grammar = TOOL_CALL_FORMATS[name].grammar(tools, "auto", parallel, special_ids=ids, text_schema=schema)
    text = f'{{"{key}": "Bonn"}}'
    assert accepts(tokenizer, grammar, text)
    assert accepts(tokenizer, grammar, written(name, ("get_weather", GOOD)))
    assert accepts(tokenizer, grammar, written(name, ("now-2", '{"a": 1}')))
    if TOOL_CALL_FORMATS[name].syntax.name_is_json:
        assert accepts(tokenizer, grammar, written(name, (ODD["function"]["name"], "{}")))
    assert accepts(tokenizer, grammar, written(name, ("now-2", "{}"), ("now-2", "{}"))) == parallel
    for refused in (
        "",
        "Hello",
        f'{{"{key}":  "Bonn"}}',
        f'{{"{key}": 1}}',
        written(name, ("get_weather", BAD[0])),
        written(name, ("other", "{}")),
        text + written(name, ("now-2", "{}")),
        written(name, ("now-2", "{}")) + text,
    ):
        assert not accepts(tokenizer, grammar, refused), refused


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_json_that_looks_like_a_call_is_read_as_text(name: str) -> None:
    """As far as it calls none of the tools: some families write calls as bare objects."""
    text = '{"name": "Bonn", "parameters": {"days": [1]}}'
    read = parse(TOOL_CALL_FORMATS[name].parser(tool_names=["get_weather"]), [*text])
    assert (read.text, read.calls) == (text, [])


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
@pytest.mark.parametrize("name", ["hermes", "olmo3", "qwen3_coder"])
def test_a_tool_that_is_too_large_does_not_take_the_schema_from_others(name: str, places: tuple[int, int]) -> None:
    """In whatever order they come."""
    kinds = [{"properties": {f"k{place}": {"const": place}}, "required": [f"k{place}"]} for place in range(300)]
    names = [{"anyOf": [{"$ref": "#/$defs/kind"}, *({"const": name} for name in range(300))]} for _ in range(300)]
    large = {"properties": {f"p{place}": each for place, each in enumerate(names)}, "$defs": {"kind": {"anyOf": kinds}}}
    small = {"properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tools = [
        {"type": "function", "function": {"name": "large", "parameters": {"type": "object", **large}}},
        {"type": "function", "function": {"name": "small", "parameters": {"type": "object", **small}}},
    ]
    tokenizer, ids = tokenizer_of(name, "plain")
    grammar = TOOL_CALL_FORMATS[name].grammar([tools[place] for place in places], "required", False, special_ids=ids)
    assert accepts(tokenizer, grammar, written(name, ("small", '{"unit": "F"}')))
    assert not accepts(tokenizer, grammar, written(name, ("small", '{"unit": "K"}')))
    assert accepts(tokenizer, grammar, written(name, ("large", '{"p1": "anything"}')))  # it is held to nothing
