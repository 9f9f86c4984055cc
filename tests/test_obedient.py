"""What the obedient assistant writes, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.model.text.chat import TemplateOptions
from tests.obedient import obedient_text, obey
from tests.tool_call_events import parse

TEXT = obedient_text()


def tool(called: str, /, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": called, "parameters": parameters}}


ADD = tool("add", a={"type": "integer"}, b={"type": "number"})
GREET = tool("greet", name={"type": "string"})


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def called(*names: str) -> Any:
    calls = [{"id": "", "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text: str) -> Any:
    return {"role": "tool", "content": text}


def wishes(*messages: Any, tools: Any = None, written: str = "") -> Any:
    """What it would write behind this."""
    assert TEXT.chat_template is not None
    return obey(TEXT.chat_template.render(messages, options=TemplateOptions(tools=tools)) + written)


def calls(text: str) -> Any:
    """Names and arguments of the calls in a text that has nothing else, by the format's own parser."""
    assert TEXT.tool_call_format is not None
    parser = TEXT.tool_call_format.parser()
    found = parse(parser, [text])
    assert not found.text.strip()
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


def test_a_question_is_heard() -> None:
    assert wishes(user("What is 1 + 2?"))[0] == "I hear you: What is 1 + 2?"
    assert wishes({"role": "system", "content": "x"}, user("a"), {"role": "assistant", "content": "b"}, user("c"))[
        0
    ].endswith(": c")


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is 1 + 2.5?", "add", {"a": 1, "b": 2.5}),
        ("What?", "add", {"a": 0, "b": 0.0}),
        ("Use greet for '你好' (Hello)", "greet", {"name": "你好"}),
        ("Please greet in Old San Francisco, CA.", "greet", {"name": "Old San Francisco, CA"}),
    ],
)
def test_a_tool_is_called_with_what_the_question_says(question: str, name: str, arguments: Any) -> None:
    assert calls(wishes(user(question), tools=[ADD, GREET])[0]) == [(name, arguments)]


def test_each_tool_that_is_named_is_called() -> None:
    found = calls(wishes(user("add 3 and 4, and greet 'X'"), tools=[ADD, GREET])[0])
    assert found == [("add", {"a": 3, "b": 4.0}), ("greet", {"name": "X"})]


def test_results_are_told_and_a_new_question_is_one() -> None:
    told = [user("1 + 2"), called("add", "greet"), result("3"), result("hi")]
    assert wishes(*told, tools=[ADD])[0] == "The result is: 3; hi"
    said = {"role": "assistant", "content": "The result is: 3; hi"}
    assert calls(wishes(*told, said, user("3 + 4"), tools=[ADD])[0]) == [("add", {"a": 3, "b": 4.0})]


def test_it_goes_on_with_the_answer_that_has_begun() -> None:
    whole = wishes(user("1 + 2"), tools=[ADD, GREET])[0]
    for end in range(len(whole) + 1):
        assert wishes(user("1 + 2"), tools=[ADD, GREET], written=whole[:end])[0] == whole[end:]
    forced = '<tool_call>\n{"name": "greet", "arguments": '
    assert calls(forced + wishes(user("to 'X'"), tools=[ADD, GREET], written=forced)[0]) == [("greet", {"name": "X"})]
    after = wishes(user("1 + 2"), called("add"), result("3"), tools=[ADD, GREET], written="<tool_call>")[0]
    assert calls("<tool_call>" + after)[0][0] == "greet", "which was not called yet"


def test_json_by_names_and_by_schemas() -> None:
    by_names = wishes(user("Make a JSON with 'setup' and 'end' keys"))[0]
    assert set(json.loads(by_names)) == {"setup", "end"}
    schema = {
        "$defs": {"kind": {"enum": ["x", "yes"]}},
        "properties": {
            "kind": {"$ref": "#/$defs/kind"},
            "many": {"type": "array", "items": {"type": "integer"}},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "short": {"type": "string", "maxLength": 2},
            "left": {"type": "string"},
        },
        "required": ["kind", "many", "maybe", "short"],
    }
    system = {"role": "system", "content": f"Answer by this schema: {json.dumps(schema)}"}
    by_schema = wishes(system, user("Is it yes for 7?"))[0]
    found = json.loads(by_schema)
    assert (found["kind"], found["many"], found["maybe"]) == ("yes", [7], True)
    assert len(found["short"]) == 2
    assert "left" not in found


@pytest.mark.parametrize(
    ("written", "ends"),
    [('{"a": "', 'X"'), ('{"a": "b', '"'), ('{"a": "b"', "}"), ('{"a": [1', "}"), ('{"a": "b\\"', '"'), ("{", "}")],
)
def test_other_json_ends_soon(written: str, ends: str) -> None:
    wanted = [each for each in wishes(user("to 'X'"), written=written) if each]
    assert wanted[0] == ends
    if written.count("[") > written.count("]"):
        assert "]" in wanted
