"""Calls whose arguments are elements: whatever fits the grammar of a strict tool is read as values of its schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import closed_objects
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS, element_grammar
from jaxctx.model.text.tool_calls.arguments import MAX_LOOKS, RulesWork
from jaxctx.model.text.tool_calls.element_reader import END_OF_VALUE
from tests.tool_call_events import parse
from tests.tool_call_grammars import PLAIN, accepts, draw, elements

CODER = TOOL_CALL_FORMATS["qwen3_coder"]
TEXT = {"type": "string"}
NULL = {"type": "null"}


def grammar_of(parameters: Any, *, is_strict: bool = True) -> str:
    """That of outputs which must call a tool `f`."""
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    return CODER.grammar([{"type": "function", "function": function}], "required", False)


def read(parameters: Any, text: str) -> Any:
    """The arguments of the one call that a text is."""
    found = parse(CODER.parser(schemas={"f": parameters}), [text])
    assert (found.text, found.broken) == ("", [])
    ((name, arguments),) = found.calls
    assert name == "f"
    return json.loads(arguments)


def called(inside: str) -> str:
    """A call with this in it."""
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parameters", "accepted", "refused"),
    [
        ({}, [{}, {"a": 1, "b": "two\nlines"}], ["x"]),
        ({"properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
        (
            {"properties": {"a": {"type": "integer"}, "b-c": {"type": "string"}, "d": {"$ref": "#/$defs/d"}}}
            | {"$defs": {"d": {"type": "boolean"}}, "required": ["a"]},
            [{"a": 1}, {"a": 1, "b-c": "x </param\n<parameter=a>"}, {"a": 1, "d": True}],
            [{}, {"a": "x"}, {"a": 1, "d": "True"}, {"b-c": "x", "a": 1}, {"a": 1, "e": 1}],
        ),
        (
            {"properties": {"a": {"enum": ["one", ""]}, "b": {"type": "string", "minLength": 2, "maxLength": 3}}},
            [{"a": "one", "b": "xyz"}, {"a": ""}],
            [{"a": "two"}, {"b": "x"}, {"b": "xxxx"}],
        ),
        (
            {
                "properties": {
                    "unit": {"$ref": "#/$defs/unit", "description": "as pydantic writes it"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                    "either": {"type": ["string", "null"]},
                    "any": {},
                },
                "$defs": {"unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["unit"],
            },
            [{"unit": "C"}, {"unit": "F", "note": None}, {"unit": "C", "note": "5", "either": None, "any": [1]}],
            [{"unit": "K"}, {"note": "x"}],
        ),
    ],
)
def test_arguments_as_elements(parameters: dict[str, Any], accepted: list[Any], refused: list[Any]) -> None:
    """Of a strict tool; and what is accepted is read as it was meant."""
    grammar = grammar_of(parameters)
    for arguments in accepted + refused:
        text = called(elements(json.dumps(arguments)))
        assert accepts(PLAIN[0], grammar, text) is (arguments in accepted), arguments
    for arguments in accepted:
        assert read(parameters, CODER.text([("f", arguments)])) == arguments


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (
            TEXT,
            ["\n\n", "\n", "", "\nBonn", "Bonn", "\n<\n\n", "\n</parameter"],
            ["\na</parameter>b\n", "</parameter>"],
        ),
        ({**TEXT, "minLength": 1}, ["\nx\n", "x", "\n\n\n"], ["\n\n", "\n", "", "\n</parameter>\nx\n"]),
        ({**TEXT, "minLength": 2, "maxLength": 3}, ["\nab\n", "\nabc", "\n\n\n\n"], ["\na\n", "\nabcd", "\n\n\n"]),
        ({**TEXT, "maxLength": 0}, ["\n\n", "\n", ""], ["\na\n", "\n\n\n"]),
        ({**TEXT, "type": ["string", "null"], "maxLength": 2}, ["\nab\n", "\nnull\n"], ["\nnul\n"]),
        (
            {"type": "array"},
            ['\n["</parameter>"]\n', '\n[{"t": "a</parameter></function>"}]\n', "\n[1e999]\n"],
            ['\n["</parameter>\n', "\n[1]"],
        ),
        ({"type": "number"}, ["\n5\n", "\n-1e999\n"], ["\n5", "\nfive\n"]),
        ({"enum": ["a", "a\nb"]}, ["\na\n", "\na\nb\n"], ["\na", "\nb\n", "\n\n"]),
    ],
)
def test_where_a_value_ends(schema: Any, accepted: list[str], refused: list[str]) -> None:
    """The same place for the grammar as for the parser. What is written stands between <parameter=x> and its end."""
    parameters = {"properties": {"x": schema}, "required": ["x"]}
    grammar = grammar_of(parameters)
    for value in accepted + refused:
        # Before a value the grammar has a newline.
        before = "" if value.startswith("\n") else "\n"
        text = called(f"<parameter=x>{before}{value}</parameter>\n")
        assert accepts(PLAIN[0], grammar, text) is (value in accepted), value
        if value in accepted:
            jsonschema.validate(read(parameters, text), parameters)


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b", ""]),
        ({"anyOf": [{"type": "string", "enum": ["a", "b"]}, NULL]}, ["a", "b", None], ["c"]),
        ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}], "description": "x"}, ["a", "b"], ["c"]),
        ({"type": "string", "enum": ["a", None]}, ["a"], [None]),
        ({"enum": ["a", ["b"], {"c": None}]}, ["a", ["b"], {"c": None}], ["b", ["a"]]),
        ({"anyOf": [{"$ref": "#/$defs/unit"}, NULL]}, ["C", None], ["K"]),
        ({"anyOf": [{"enum": ["a"]}, TEXT]}, ["a", "b"], []),
        ({"anyOf": [{**TEXT, "maxLength": 2}, NULL, {"type": "integer", "minimum": 3}]}, ["ab", None], ["abc"]),
        ({"anyOf": [{"anyOf": [TEXT, NULL]}, {"type": "boolean"}]}, ["x", None], []),
        (True, ["x", 5, [1], None], []),
    ],
)
def test_values_beside_each_other(schema: Any, accepted: list[Any], refused: list[Any]) -> None:
    parameters = {"properties": {"x": schema}, "required": ["x"], "$defs": {"unit": {"enum": ["C", "F"]}}}
    grammar = grammar_of(parameters)
    for value in accepted + refused:
        text = CODER.text([("f", {"x": value})])
        assert accepts(PLAIN[0], grammar, text) is (value in accepted), value
        if value in accepted:
            assert read(parameters, text) == {"x": value}


def test_many_values_are_one_terminal() -> None:
    """llguidance follows 2000 rules where a value begins: of more values, none could be written."""
    values = [f"v{place}" for place in range(4000)]
    names = {name: {"$ref": "#/$defs/e", "title": name} for name in ("a", "b")}
    grammar = grammar_of({"properties": names, "$defs": {"e": {"enum": values}}})
    assert grammar.count('"v3999"') == 1  # for both arguments
    for text in ({"a": "v3999", "b": "v0"}, {"b": "v39"}):
        assert accepts(PLAIN[0], grammar, called(elements(json.dumps(text))))
    for text in ({"a": "v4000"}, {"b": "v"}, {"a": ""}):
        assert not accepts(PLAIN[0], grammar, called(elements(json.dumps(text))))


@pytest.mark.parametrize("schema", [{"minLength": 3}, {"maxLength": 2}, {"$ref": "#/$defs/bounded"}])
def test_a_bound_of_texts_where_any_value_fits(schema: Any) -> None:
    """A value in quotes is read without them, so that no length of what is written holds the text to the bound."""
    parameters = {"properties": {"x": schema}, "$defs": {"bounded": {"title": "B", "minLength": 1}}}
    with pytest.raises(InvalidArgument) as raised:
        grammar_of(parameters)
    assert [violation.field for violation in raised.value.violations] == ["tools"]
    grammar = grammar_of(parameters, is_strict=False)
    for written in ('"a"', "ab", "abc", "[1, 2, 3]", "", "5"):
        assert accepts(PLAIN[0], grammar, called(f"<parameter=x>\n{written}\n</parameter>\n"))
    unbounded = grammar_of({"properties": {"x": {"minLength": 0, "title": "X"}}})
    assert accepts(PLAIN[0], unbounded, called('<parameter=x>\n"a"\n</parameter>\n'))


TREE = {
    "properties": {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name", "children"],
}
LEAF = {"name": "a", "children": []}
POINTS = {
    "properties": {
        "a": {"properties": {"x": {"type": "integer"}, "y": {"enum": ["p"]}}, "type": "object", "required": ["x"]},
        "b": {"$ref": "#/properties/a"},
        "c": {"type": "array", "items": {"$ref": "#/properties/a/properties/x"}},
        "d": {"$ref": "#/properties/a/properties/y"},
        "e": {"type": "array", "items": {"$ref": "#/properties/e~1%20f/anyOf/0"}},
        "e/ f": {"anyOf": [{"type": "boolean"}]},
    }
}


@pytest.mark.parametrize(
    ("parameters", "accepted", "refused"),
    [
        (
            TREE,
            [LEAF, {"name": "a", "children": [LEAF, {"name": "b", "children": [LEAF]}]}],
            [{"name": "a", "children": [[]]}, {"name": "a", "children": [{"name": "b"}]}],
        ),
        (
            POINTS,
            [{"a": {"x": 1}, "b": {"x": 2, "y": "p"}, "c": [3], "d": "p", "e": [True]}],
            [{"b": {"y": "p"}}, {"b": [2]}, {"c": ["p"]}, {"d": "q"}, {"e": [1]}],
        ),
    ],
)
def test_references_to_the_whole_schema_and_to_properties(
    parameters: dict[str, Any], accepted: list[Any], refused: list[Any]
) -> None:
    grammar = grammar_of(parameters)
    for arguments in accepted + refused:
        text = CODER.text([("f", arguments)])
        assert accepts(PLAIN[0], grammar, text) is (arguments in accepted), arguments
        if arguments in accepted:
            assert read(parameters, text) == arguments


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many schemas, keys and values are looked at, one after the other."""
    found: list[int] = []
    look = RulesWork.look
    monkeypatch.setattr(RulesWork, "look", lambda work, count: found.append(count) or look(work, count))
    return found


def test_each_schema_is_looked_at_once(looks: list[int]) -> None:
    """However many ways there are to it."""
    depth, branching = 16, 10
    defs: dict[str, Any] = {str(depth): {**TEXT, "maxLength": 2}}
    for level in range(depth):
        defs[str(level)] = {"anyOf": [{"$ref": f"#/$defs/{level + 1}"} for _ in range(branching)]}
    grammar = grammar_of({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": defs})
    assert sum(looks) <= 4 * depth * (branching + 1) + 10  # for its types and for its texts, and as alternatives
    assert accepts(PLAIN[0], grammar, called(elements('{"x": "ab"}')))
    assert not accepts(PLAIN[0], grammar, called(elements('{"x": "abc"}')))


def test_a_schema_that_many_arguments_refer_to_is_looked_at_once(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 48 KB took 12 s."""
    values, arguments = 2000, 100
    read: list[str] = []
    argument_text = element_grammar.argument_text
    monkeypatch.setattr(
        element_grammar, "argument_text", lambda text, types: read.append(text) or argument_text(text, types)
    )
    listed = {"enum": [*map(str, range(values)), END_OF_VALUE]}  # which is found last to be no text
    grammar = grammar_of(referring(arguments, listed), is_strict=False)
    assert len(read) == values
    assert sum(looks) <= 4 * (values + 1) + 8 * arguments
    assert accepts(PLAIN[0], grammar, called(elements('{"a1": "anything"}')))


def referring(count: int, *shared: Any) -> dict[str, Any]:
    """So many arguments, all of the same schema, or of one of the same schemas and one of their own."""
    names = [{"$ref": f"#/$defs/{place}"} for place, _ in enumerate(shared)]
    properties = {f"a{place}": {**names[0], "title": str(place)} for place in range(count)}
    if len(names) > 1:
        properties = {f"a{place}": {"anyOf": [*names, {"const": f"own {place}"}]} for place in range(count)}
    return {"properties": properties, "$defs": {str(place): each for place, each in enumerate(shared)}}


@pytest.mark.parametrize(
    "parameters",
    [
        referring(512, {"enum": [str(value) for value in range(1000)]}, {"enum": ["x", END_OF_VALUE]}),
        referring(512, *({"anyOf": [{"type": "integer"}] * 10} for _ in range(30))),
        referring(30, {"const": ["long" * 20_000]}, {"const": END_OF_VALUE}),
    ],
)
def test_so_much_is_looked_at_for_all_arguments(parameters: Any, looks: list[int]) -> None:
    """Where each has schemas of others and more, what is kept does not help. They are many together."""
    with pytest.raises(InvalidArgument) as raised:
        grammar_of(parameters)
    assert [violation.field for violation in raised.value.violations] == ["tools"]
    looks.clear()
    grammar = grammar_of(parameters, is_strict=False)
    assert MAX_LOOKS < sum(looks) < 2 * MAX_LOOKS
    assert accepts(PLAIN[0], grammar, called(elements('{"a1": [1], "b": 1}')))


def test_alternatives_of_which_not_all_are_known() -> None:
    """A tool that is not strict may have any of them, and not those alone that are known."""
    for unknown in ({"$ref": "#/$defs/none"}, 5):
        grammar = grammar_of({"properties": {"a": {"anyOf": [{"const": "x"}, unknown]}}}, is_strict=False)
        assert accepts(PLAIN[0], grammar, called(elements('{"a": "y"}')))


MIXED = closed_objects(
    {
        "type": "object",
        "properties": {
            "text": TEXT,
            "short": {**TEXT, "minLength": 1, "maxLength": 3},
            "maybe": {"anyOf": [TEXT, NULL]},
            "unit": {"type": ["string", "null"], "enum": ["a", "a\nb", "nul", None]},
            "list": {"type": "array", "items": TEXT},
            "tree": {"type": "object", "properties": {"t": TEXT, "n": {"anyOf": [{"$ref": "#"}, NULL]}}},
            "number": {"type": "number"},
        },
        "required": ["short"],
    }
)
PIECES = [
    *("</parameter>", "\n</parameter>\n", "</function>", "\n", "a", "null", '"', '["', '"]', '{"t": "', '"}', "}"),
    *('", "n": {', "null}", "1", "e999", "-", ".5", "\\n", '\\"', "<parameter=", *MIXED["properties"]),
]


def test_whatever_fits_is_read_as_values_of_the_schema() -> None:
    grammar, found = grammar_of(MIXED), set[str]()
    for seed in range(100):
        text = draw(PLAIN[0], grammar, seed, pieces=PIECES)
        if text is not None:
            arguments = read(MIXED, text)
            jsonschema.validate(arguments, MIXED)
            found |= arguments.keys()
    assert found == MIXED["properties"].keys()


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"type": ["string", "array"]}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}}},
        {"properties": {"a>": {"type": "integer"}}},
        {"properties": {"a": {"type": "string", "format": "uuid"}}},
        {"properties": {"a": {"enum": ["null", None]}}},
        {"properties": {"a": {"enum": ["a", 1]}}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
        {"properties": {"a": {"enum": ["a"], "pattern": "x"}}},
        {"properties": {"a": {"anyOf": [{**TEXT, "maxLength": 1}, {**TEXT, "minLength": 3}]}}},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"anyOf": 5}}},
        {"properties": {"a": {"anyOf": True}}},
        {"properties": {"a": {"anyOf": []}}},
        {"properties": {"a": {"anyOf": [TEXT, 5]}}},
        {"properties": {"a": {"anyOf": [TEXT], "oneOf": [TEXT]}}},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": ["string", 5]}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "minLength": "1"}}},
        {"properties": {"a": {"type": "string", "minLength": True}}},
        {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 1}}},
        {"properties": {"a": 5}},
        {"properties": {"a": False}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
    ],
)
def test_arguments_that_cannot_be_held_as_elements(parameters: dict[str, Any]) -> None:
    """A strict tool is refused; any other is held to what can be."""
    with pytest.raises(InvalidArgument) as raised:
        grammar_of(parameters)
    assert [violation.field for violation in raised.value.violations] == ["tools"]
    assert LLMatcher.validate_grammar(grammar_of(parameters, is_strict=False), PLAIN[0]) == ""
