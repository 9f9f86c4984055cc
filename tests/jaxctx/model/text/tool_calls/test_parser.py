"""Calls and thoughts in a text that streams: the same whatever way it is cut into pieces, and nothing is lost."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from jaxctx.model.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    OutputParser,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    element_values,
)
from jaxctx.model.text.tool_calls.call_sink import CallSink
from tests.tool_call_events import Read, parse


def every_split(name: str, text: str, **options: Any) -> Read:
    """What is read of a text at once; the same must be read of its characters, and of its two parts at every place."""
    make = TOOL_CALL_FORMATS[name].parser
    whole = parse(make(**options), [text])
    assert parse(make(**options), list(text)) == whole
    for place in range(1, len(text)):
        assert parse(make(**options), [text[:place], text[place:]]) == whole, place
    for seed in range(20):
        chooser, pieces, at = random.Random(seed), [], 0
        while at < len(text):
            size = chooser.randint(1, 9)
            pieces.append(text[at : at + size])
            at += size
        assert parse(make(**options), pieces) == whole
    return whole


ARGUMENTS = [
    "{}",
    '{"city": "Köln"}',
    '{ "a" : [1, -2.5e+3, 0.1, true, false, null, {"b": []}], "c": {} }',
    '{"quote": "he said \\"{[}]\\" \\\\", "u": "\\u00e9\\ud83d\\ude00 漢字 👍"}',
    '{"mark": "</tool_call> <tool_call> [TOOL_CALLS] ; [ARGS]"}',
    '{"name": "other", "arguments": {"parameters": 1}}',
]
MARKED = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}',
    "mistral": '[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]',
    "mistral_named": "[TOOL_CALLS]{name}[ARGS]{arguments}",
    "granite": '<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]',
    "phi4": '<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]<|/tool_call|>',
}


OBJECT = '{"name": "f", "arguments": {"a": "x"}}'
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", OBJECT, "<tool_"],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}', "; ", "<|py", OBJECT],
    "mistral": ["[TOOL_CALLS]", "[TOOL", "[ARGS]", "[", "]", ", ", "f", OBJECT],
    "mistral_named": ["[TOOL_CALLS]", "[TOOL", "[ARGS]", "[AR", "[CALL_ID]", "f", '{"a": 1}'],
    "granite": ["<|tool_call|>", "<|tool", "[", "]", ", ", OBJECT],
    "phi4": ["<|tool_call|>", "<|/tool_call|>", "<|/tool", "[", "]", ", ", OBJECT],
    "functools": ["functools", "functools[", "func", "[", "]", ", ", OBJECT],
    "olmo3": ["<function_calls>", "</function_calls>", "f(a=1)", "f(", "b=[1]", ")", ",", "<func", "</fun"],
    "qwen3_coder": [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<tool", "1"),
        *("<fun", "</para", "<parameter=list>", '["</parameter>"]'),
    ],
}
"""What outputs of each format are made of, and what looks like it."""


def call(name: str, tool: str, arguments: str) -> str:
    return MARKED[name].format(name=tool, arguments=arguments)


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", MARKED)
def test_a_call_with_text_around_it(name: str, arguments: str, whole_calls: bool) -> None:
    text = "Let me < see [TOOL <tool_ <|py" + call(name, "f", arguments) + "Done."
    found = every_split(name, text, whole_calls=whole_calls)
    assert found == Read(text="Let me < see [TOOL <tool_ <|pyDone.", calls=[("f", arguments)], order="tct")


@pytest.mark.parametrize("name", PIECES)
def test_random_texts_are_read_the_same_however_they_are_cut(name: str) -> None:
    """Also behind a call that is malformed, where a piece may end within the next mark; and nothing is lost."""
    pieces, calls = [*PIECES[name], "{", "}", '"', "x", " ", "\n", "<", "["], 0
    for seed in range(300):
        chooser = random.Random(seed)
        text = "".join(chooser.choices(pieces, k=chooser.randint(2, 9)))
        whole_calls, schemas = chooser.random() < 0.5, {"f": {"properties": {"list": {"type": "array"}}}}

        def read(*parts: str, whole_calls: bool = whole_calls, schemas: Any = schemas) -> Read:
            make = TOOL_CALL_FORMATS[name].parser
            return parse(make(tool_names=["f"], whole_calls=whole_calls, schemas=schemas), list(parts))

        whole = read(text)
        place, second = sorted(chooser.randint(0, len(text)) for _ in range(2))
        assert read(text[:place], text[place:second], text[second:]) == whole, (text, place, second)
        assert read(*text) == whole, text
        assert whole.calls or whole.text == text
        calls += len(whole.calls)
    assert calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", call("hermes", "f", "{}") + "\n" + call("hermes", "g-1", '{"a": 1}')),
        ("hermes", " \n" + call("hermes", "f", "{}") + call("hermes", "g-1", '{"a": 1}') + "\n"),
        ("hermes", '<tool_call>{"name":"f"}</tool_call><tool_call>{"arguments":{"a": 1},"name":"g-1"}</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}<tool_call>{"arguments":{"a": 1},"name":"g-1"}'),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g-1", "parameters": {"a": 1}}'),
        (
            "llama3_json",
            '\n{"type": "function", "name": "f", "parameters": {}};{"name": "g-1", "arguments": {"a": 1}}\n',
        ),
        ("llama3_json", '<|python_tag|>{"name": "f"}<|python_tag|>{"name": "g-1", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g-1", "arguments": {"a": 1}}]'),
        (
            "mistral",
            '[TOOL_CALLS][{"name":"f","arguments":{},"id":"abc"},{"id":1,"name":"g-1","arguments":{"a": 1}}]\n',
        ),
        ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"g-1","arguments":{"a": 1}}'),
        ("mistral", '[TOOL_CALLS]{"name":"f","arguments":{}}[TOOL_CALLS]{"name":"g-1","arguments":{"a": 1}}'),
        ("granite", '<|tool_call|> [{"name": "f", "arguments": {}}, {"arguments": {"a": 1}, "name": "g-1"}]\n'),
        ("granite", '<|tool_call|>{"name": "f"}<|tool_call|>{"name": "g-1", "arguments": {"a": 1}}'),
        ("phi4", '<|tool_call|>[{"name":"f"},{"name":"g-1","arguments":{"a": 1}}] <|/tool_call|>'),
        (
            "phi4",
            '<|tool_call|>{"name":"f"}<|/tool_call|><|tool_call|>{"name":"g-1","arguments":{"a": 1}}<|/tool_call|>',
        ),
        ("phi4", '<|tool_call|>[{"name":"f"}]<|tool_call|>[{"name":"g-1","arguments":{"a": 1}}]'),
        ("functools", 'functools[{"name": "f", "arguments": {}}, {"name": "g-1", "arguments": {"a": 1}}]'),
        ("olmo3", "<function_calls>\nf()\ng-1(a=1)\n</function_calls>"),
        ("olmo3", "<function_calls>f( )\n\n g-1( a = 1 ,) </function_calls>\n"),
        ("olmo3", "<function_calls>f(), g-1(a=1)"),
        ("olmo3", "<function_calls>f()</function_calls><function_calls>g-1(a=1)</function_calls>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=g-1>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f></function><tool_call><function=g-1> <parameter=a>1</parameter></function>",
        ),
        ("mistral_named", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g-1[ARGS]{"a": 1}'),
        ("mistral_named", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{} [TOOL_CALLS] g-1 {"a": 1}'),
    ],
)
def test_two_calls_and_no_text(name: str, text: str) -> None:
    """Space around calls is no text."""
    for whole_calls in (False, True):
        found = every_split(name, text, whole_calls=whole_calls)
        assert found == Read(calls=[("f", "{}"), ("g-1", '{"a": 1}')], order="cc")


NO_CALLS = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\nf(x)\n</tool_call>"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "other": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
    ("hermes", '<tool_call>{"name": ""}</tool_call>'),
    ("hermes", '<tool_call>{"name": "' + "n" * 300 + '"}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", "a < b <tool_cal"),
    ("hermes", " \n"),
    ("hermes", ' \n<tool_call>{"nam'),
    ("llama3_json", '{"answer": 42, "name": "f"}'),
    ("llama3_json", '{"answer'),
    ("llama3_json", "[1]"),
    ("llama3_json", 'Say {"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("mistral", '[TOOL_CALLS]("f")'),
    ("mistral_named", "[TOOL_CALLS]f[ARGS]7"),
    ("granite", "<|tool_call|>[]"),
    ("granite", "<|tool_call|>f(x)"),
    ("granite", '[{"name": "f", "arguments": {}}]'),
    ("phi4", "<|tool_call|><|/tool_call|>"),
    ("functools", 'functools {"name": "f", "arguments": {}}'),
    ("functools", "import functools\n@functools.cache"),
    ("olmo3", "<function_calls></function_calls>"),
    ("olmo3", "<function_calls>\nno call\n</function_calls>"),
    ("olmo3", "<function_calls>f(1)</function_calls>"),
    ("olmo3", "<function_calls>f(a=x)</function_calls>"),
    ("olmo3", "<function_calls>f(a=1, a=2)</function_calls>"),
    ("olmo3", "<function_calls>f(a=[1)</function_calls>"),
    ("olmo3", "<function_calls>f(a='x)</function_calls>"),
    ("olmo3", "<function_calls>f(a=1"),
    ("olmo3", "f(a=1)"),
    ("mistral_named", "[TOOL_CALLS]f[ARG]{}"),
    ("mistral_named", "[TOOL_CALLS]f"),
]


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_text(name: str, text: str, whole_calls: bool) -> None:
    assert every_split(name, text, whole_calls=whole_calls) == Read(text=text, order="t")


# As model makers show outputs of their models: format of calls, of thoughts, output, and what it says.
DOCUMENTED = [
    (
        "granite",
        None,
        '<|tool_call|>[{"name": "get_current_weather", "arguments": {"location": "New York"}}]',
        Read(calls=[("get_current_weather", '{"location": "New York"}')], order="c"),
    ),
    (
        "hermes",  # Granite 4, SmolLM 3
        "think",
        '<think>\n\n</think>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Copenhagen"}}\n</tool_call>',
        Read(calls=[("get_weather", '{"city": "Copenhagen"}')], order="c"),
    ),
    (
        "phi4",
        None,
        '<|tool_call|>[{"name": "get_weather_updates", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        Read(calls=[("get_weather_updates", '{"city": "Paris"}')], order="c"),
    ),
    (
        "functools",
        None,
        'functools[{"name": "f", "arguments": {"x": 7.0}}, {"name": "g", "arguments": {}}]',
        Read(calls=[("f", '{"x": 7.0}'), ("g", "{}")], order="cc"),
    ),
    (
        "olmo3",
        None,
        "<function_calls>\nget_weather(city='New York', units='celsius')\n</function_calls>",
        Read(calls=[("get_weather", '{"city": "New York", "units": "celsius"}')], order="c"),
    ),
    (
        "granite",
        "think_response",
        "<think>They want the sum.</think>\n<response>It is 4.</response>",
        Read(thoughts="They want the sum.", text="It is 4.", order="t"),
    ),
    (
        "granite",
        "thought_process",
        "Here is my thought process:\n\nThe sum.\n\nHere is my response:\n\nIt is 4.",
        Read(thoughts="The sum.", text="It is 4.", order="t"),
    ),
    (
        None,  # Phi-4 reasoning
        "think",
        "<think> User asks for 2+2. </think> The answer is 4.",
        Read(thoughts="User asks for 2+2.", text="The answer is 4.", order="t"),
    ),
    (None, "think_opened", "Okay, 2+2.\n</think>\n\n4", Read(thoughts="Okay, 2+2.", text="4", order="t")),  # OLMo 3
]


@pytest.mark.parametrize(("calls", "thoughts", "text", "expected"), DOCUMENTED)
def test_outputs_as_model_makers_show_them(calls: str | None, thoughts: str | None, text: str, expected: Read) -> None:
    def parser() -> OutputParser:
        reasoning = None if thoughts is None else REASONING_FORMATS[thoughts].parser()
        return OutputParser(reasoning, None if calls is None else TOOL_CALL_FORMATS[calls].parser())

    assert parse(parser(), [text]) == expected
    for place in range(len(text)):
        assert parse(parser(), [text[:place], text[place:]]) == expected, place
    assert parse(parser(), list(text)) == expected


PYTHON_ARGUMENTS = [
    ("", {}),
    ("city='New York', units='celsius'", {"city": "New York", "units": "celsius"}),
    ('city="Köln", days=[1, -2.5e+3], deep={"a": null, "b": true, \'c\': False,}', None),
    ("a=None, b=True, c=false, d=+7, e=.5, f=(1)", "no call"),
    ("a=None, b=True, c=false, d=+7, e=.5", {"a": None, "b": True, "c": False, "d": 7, "e": 0.5}),
    ("text='it\\'s \"so\": f(x) [1] </function_calls>'", {"text": 'it\'s "so": f(x) [1] </function_calls>'}),
    ('text="\\ud83d\\ude00 \\/ \\u00e9\\n"', {"text": "😀 / é\n"}),
    ("text='\\ud83d\\ude00 \\d\nline'", {"text": "😀 \\d\nline"}),
    ("text='\\ud83d'", "no call"),
    ("n=1e999", "no call"),
    ("n=1__0", "no call"),
    ("a={1: 2}", "no call"),
    ("a=" + "[" * 70 + "]" * 70, "no call"),
    ("a=__import__", "no call"),
    ("**x", "no call"),
]


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize(("arguments", "value"), PYTHON_ARGUMENTS)
def test_calls_as_python_writes_them(arguments: str, value: Any, whole_calls: bool) -> None:
    text = f"Let me see: <f <function_calls>\nget.it({arguments})\n</function_calls>Done."
    found = every_split("olmo3", text, whole_calls=whole_calls)
    if value == "no call":
        assert found == Read(text=text, order="t")
        return
    assert (found.text, found.order, found.broken) == ("Let me see: <f Done.", "tct", [])
    if value is None:
        value = {"city": "Köln", "days": [1, -2500.0], "deep": {"a": None, "b": True, "c": False}}
    assert [(name, json.loads(written)) for name, written in found.calls] == [("get.it", value)]


def test_a_python_call_behind_another_that_is_none() -> None:
    """What was a call stays one; the rest is text, up to what opens calls again."""
    first, wrong = "<function_calls>f(a=1)", "\nno(1)</function_calls>"
    assert every_split("olmo3", first + wrong) == Read(text=wrong, calls=[("f", '{"a": 1}')], order="ct")
    again = every_split("olmo3", first + "\n<function_calls>g()</function_calls>", tool_names={"f", "g"})
    assert again.calls == [("f", '{"a": 1}'), ("g", "{}")]
    other = every_split("olmo3", first + "\ng(b=2)</function_calls>", tool_names={"f"})
    assert (other.calls, other.text) == ([("f", '{"a": 1}')], "\ng(b=2)</function_calls>")


SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"$ref": "#/$defs/list"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "array"]},
        "choice": {"enum": ["1", "2"]},
        "any": {},
    },
    "$defs": {"list": {"type": "array"}},
}


def element(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "", ""),
        ("text", "\n two\n\nlines \n", "\n two\n\nlines \n"),
        ("text", '<a> </tool_call> <function=f> </param "é"', '<a> </tool_call> <function=f> </param "é"'),
        ("whole", "5", 5),
        ("whole", " -5 ", -5),
        ("whole", "five", "five"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("list", '["a", {"b": null}]', ["a", {"b": None}]),
        ("list", "['a', None]", ["a", None]),
        ("list", "[1", "[1"),
        ("list", '["</parameter>", "\\"</parameter></function>"]', ["</parameter>", '"</parameter></function>']),
        ("list", '["a', '["a'),
        ("list", '["a</parameter>b', '["a</parameter>b'),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", "5"),
        ("either", "[5]", [5]),
        ("choice", "1", "1"),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("unknown", '{"a": 1}', {"a": 1}),
    ],
)
def test_values_of_elements_are_what_the_schema_says(key: str, written: str, value: Any, whole_calls: bool) -> None:
    text = f"So <tool <tool_call>\n<function=f>\n{element(key, written)}</function>\n</tool_call>Done."
    found = every_split("qwen3_coder", text, whole_calls=whole_calls, tool_names={"f"}, schemas={"f": SCHEMA})
    assert (found.text, found.order, found.broken) == ("So <tool Done.", "tct", [])
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("f", {key: value})]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Bonn</parameter>\n", "Bonn"),
        ("\nBonn</parameter>\n", "Bonn"),
        ("\n\n\n</parameter>\n", "\n"),
        ("</parameter>", ""),
        ("\n</parameter>", ""),
        ("<</parameter</parameter>", "<</parameter"),
    ],
)
def test_a_text_ends_at_the_first_mark(value: str, expected: str) -> None:
    """A newline before it or none; what follows is another argument, or the end of the call."""
    text = f"<tool_call>\n<function=f>\n<parameter=text>{value}</function>\n</tool_call>"
    assert [json.loads(each) for _, each in every_split("qwen3_coder", text, schemas={"f": SCHEMA}).calls] == [
        {"text": expected}
    ]
    behind = text.replace("</function>", "more\n</parameter>\n</function>")
    assert every_split("qwen3_coder", behind, schemas={"f": SCHEMA}) == Read(text=behind, order="t")


def test_types_of_an_argument_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each value that a model writes."""
    found: list[Any] = []
    argument_types = CallSink.argument_types
    monkeypatch.setattr(CallSink, "argument_types", lambda *given: found.append(given) or argument_types(*given))
    text = f"<tool_call><function=f>{element('whole', '5') * 100}{element('text', '5')}</function></tool_call>"
    read = parse(TOOL_CALL_FORMATS["qwen3_coder"].parser(schemas={"f": SCHEMA}), [text])
    assert read.calls == [("f", '{"whole": 5, "text": "5"}')]
    assert len(found) == 2


def test_a_schema_that_many_arguments_refer_to_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several calls: it may list many values, while the server waits."""
    shared: Any = {"enum": [1] * 100}
    names = [f"a{place}" for place in range(20)]
    schema = {"properties": {name: {"$ref": "#/$defs/e"} for name in names}, "$defs": {"e": shared}}
    own_types, looked = element_values.own_types, list[Any]()
    monkeypatch.setattr(element_values, "own_types", lambda given: looked.append(given) or own_types(given))
    written = "".join(element(name, "1") for name in names)
    text = f"<tool_call><function=f>{written}</function></tool_call>" * 3
    read = parse(TOOL_CALL_FORMATS["qwen3_coder"].parser(schemas={"f": schema}), [text])
    assert [json.loads(arguments) for _, arguments in read.calls] == [dict.fromkeys(names, 1)] * 3
    assert sum(given is shared for given in looked) == 1


def test_elements_whose_opening_mark_was_forgotten() -> None:
    text = f"Well <func <function=f>\n{element('whole', '5')}</function>\n</tool_call> <function=f></function>Done."
    found = every_split("qwen3_coder", text, tool_names={"f"}, schemas={"f": SCHEMA})
    assert (found.text, found.calls) == ("Well <func Done.", [("f", '{"whole": 5}'), ("f", "{}")])
    other = "So <function=g>\n</function>\n</tool_call>"
    assert every_split("qwen3_coder", other, tool_names={"f"}) == Read(text=other, order="t")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        f"<tool_call>\n<function=f>\n{element('a', '1')}",
        f"<tool_call>\n<function=f>\nno{element('a', '1')}</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1",
        "<tool_call>\n<function=f>\n<parameter=a\n>1</parameter></function>",
        f"<tool_call>\n<function=f>\n{element('n', '1' * 5000)}<parameter=a>"[:40] + "<",
    ],
)
def test_elements_that_are_no_call_are_text(text: str) -> None:
    assert every_split("qwen3_coder", text, tool_names={"f"}) == Read(text=text, order="t")


BROKEN_ARGUMENTS = [
    '{"a": oops}',
    '{"a": "x\n"}',
    '{"a": 01}',
    '{"a": 1,}',
    '{"a" 1}',
    '{"a": "\\x"}',
    "{" + '"a":{' * 70,
]


@pytest.mark.parametrize("arguments", BROKEN_ARGUMENTS)
@pytest.mark.parametrize("name", MARKED)
def test_arguments_that_are_no_json(name: str, arguments: str) -> None:
    """What was given as arguments stays; the rest is text. If calls are given only when they are whole, all is text."""
    text = call(name, "f", arguments) + " and more"
    found = every_split(name, text)
    assert found.broken == [0]
    assert text.endswith(found.calls[0][1] + found.text)
    assert found.text.endswith(" and more")
    assert every_split(name, text, whole_calls=True) == Read(text=text, order="t")


@pytest.mark.parametrize("name", MARKED)
def test_an_output_that_ends_within_a_call(name: str) -> None:
    """As at `max_tokens`."""
    text = "So " + call(name, "f", '{"a": "long tex')[: len("So ") + 200].partition("long tex")[0] + "long tex"
    found = every_split(name, text)
    assert found == Read(text="So ", calls=[("f", '{"a": "long tex')], broken=[0], order="tc")
    assert every_split(name, text, whole_calls=True) == Read(text=text, order="t")


@pytest.mark.parametrize("name", MARKED)
def test_calls_of_tools_that_do_not_exist_are_text(name: str) -> None:
    wrong, right = call(name, "g", '{"a": 1}'), call(name, "f", "{}")
    found = every_split(name, wrong + "\n" + right, tool_names={"f"})
    assert found.calls == [("f", "{}")]
    assert found.text == wrong + "\n"


def test_a_second_call_that_is_malformed_is_text() -> None:
    first = '[TOOL_CALLS][{"name": "f", "arguments": {}}'
    for rest in (', {"nam', ', {"name": 1}]', ", 7]"):
        found = every_split("mistral", first + rest)
        assert found.calls == [("f", "{}")]
        assert found.text == rest or rest.endswith(found.text)
    after = every_split("llama3_json", '{"name": "f"} and {')
    assert (after.calls, after.text) == ([("f", "{}")], " and {")


def test_arguments_stream_as_they_are_written() -> None:
    parser = TOOL_CALL_FORMATS["hermes"].parser()
    assert parser.feed('<tool_call>{"name": "f", "arguments"') == []
    assert parser.feed(': {"a"') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a"')]
    assert parser.feed(': "b') == [ToolCallArguments(0, ': "b')]
    assert parser.feed('"}') == [ToolCallArguments(0, '"}')]
    assert parser.feed("}") == [ToolCallEnd(0)]
    assert parser.feed("\n</tool_call>") == []
    assert parser.feed("a") == [TextDelta("a")]
    assert parser.finish() == []


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    parser = TOOL_CALL_FORMATS["hermes"].parser()
    assert parser.feed("Hello <") == [TextDelta("Hello ")]
    assert parser.feed("b>") == [TextDelta("<b>")]


@pytest.mark.parametrize("size", [7, 1 << 30])
@pytest.mark.parametrize("name", [name for name in MARKED if name != "granite"])  # which has the reader of phi4
def test_long_arguments_take_linear_time(name: str, size: int) -> None:
    """Four times the text may take little more than four times as long: at the square it would be sixteen."""

    def seconds(count: int) -> float:
        arguments = json.dumps({"text": 'line "with" quotes\n' * count, "numbers": list(range(count))})
        text, best = call(name, "f", arguments), float("inf")
        for _ in range(3):
            parser = TOOL_CALL_FORMATS[name].parser()
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            began = time.thread_time()
            found = parse(parser, pieces) if size > 7 else None
            if found is None:
                for piece in pieces:
                    parser.feed(piece)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(8000) < 10 * seconds(2000)


# --- Thoughts


def reasoned(name: str, text: str, calls: str | None = None) -> Read:
    """What is read, the same for every split."""

    def parser() -> OutputParser:
        return OutputParser(REASONING_FORMATS[name].parser(), TOOL_CALL_FORMATS[calls].parser() if calls else None)

    whole = parse(parser(), [text])
    assert parse(parser(), list(text)) == whole
    for place in range(1, len(text)):
        assert parse(parser(), [text[:place], text[place:]]) == whole, place
    return whole


@pytest.mark.parametrize(
    ("name", "text", "thoughts", "answer"),
    [
        ("think", "<think>\nso  it is\n\n</think>\n\nYes. ", "so  it is", "Yes. "),
        ("think", "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("think", "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("think", " Yes.", "", " Yes."),
        ("think", "<thin", "", "<thin"),
        ("think", "<think>never < ends </thin", "never < ends </thin", ""),
        ("think", "<think>a</think>b</think>", "a", "b</think>"),
        ("think", "", "", ""),
        ("think_opened", "\nso it is\n</think>\n\nYes.", "so it is", "Yes."),
        ("think_opened", "<think>\nso it is</think>Yes.", "so it is", "Yes."),
        ("think_opened", "never ends", "never ends", ""),
        ("think_opened", "<thi", "<thi", ""),
        ("think_opened", "</think>Yes.", "", "Yes."),
        ("think_response", "<think>so it is</think>\n<response>\n Yes < no. \n</response>\n", "so it is", "Yes < no."),
        ("think_response", "<think>so</think><response>Yes, and </resp", "so", "Yes, and </resp"),
        ("think_response", "<think>so</think> <resp", "so", "<resp"),
        ("think_response", "<think>so</think> Yes.</response>", "so", "Yes.</response>"),
        ("think_response", "<think>so</think><response></response>", "so", ""),
        ("think_response", "<think>so</think><response>a</response> b </response>", "so", "ab </response>"),
        ("think_response", "<response>Yes.</response>", "", "<response>Yes.</response>"),
        (
            "thought_process",
            "Here is my thought process: so\n it is. Here is my response:\nYes.",
            "so\n it is.",
            "Yes.",
        ),
        ("thought_process", "Here is my", "", "Here is my"),
    ],
)
def test_thoughts(name: str, text: str, thoughts: str, answer: str) -> None:
    found = reasoned(name, text)
    assert (found.thoughts, found.text) == (thoughts, answer)


def test_calls_behind_thoughts_and_none_in_them() -> None:
    made = call("hermes", "f", '{"a": 1}')
    found = reasoned("think", f"<think>maybe {made}?</think>\n\n{made}", "hermes")
    assert found == Read(thoughts=f"maybe {made}?", calls=[("f", '{"a": 1}')], order="c")


def test_calls_without_thoughts() -> None:
    parser = OutputParser(None, TOOL_CALL_FORMATS["hermes"].parser())
    assert parse(parser, ["x" + call("hermes", "f", "{}")]).calls == [("f", "{}")]
    assert parse(OutputParser(None, None), ["a", "", "b"]).text == "ab"
