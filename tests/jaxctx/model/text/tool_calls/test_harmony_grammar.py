"""Grammars of outputs with channels, by llguidance's own matcher: what they let through, and that it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.tool_calls.formats import HARMONY
from jaxctx.model.text.tool_calls.harmony import MARKS
from jaxctx.model.text.tool_calls.harmony_grammar import choices_symbol, lark_symbol, regex_symbol
from tests.tool_call_events import parse
from tests.tool_call_grammars import PLAIN, accepts, draw, with_marks

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now-2"}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
GOOD, BAD, OTHER = '{"city": "Bonn", "unit": "C"}', '{"city": "Bonn", "unit": "K"}', '{"any": [{}]}'
NEXT = "<|end|><|start|>assistant"
THOUGHTS = f"<|channel|>analysis<|message|>Hm < <|en\n{{}}{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>Let me see.{NEXT}"
FINAL = "<|channel|>final<|message|>"
KINDS = {"plain": PLAIN, "special": with_marks(*MARKS, end="<|endoftext|>")}
HEADS = ("<|channel|>commentary to=functions.{}", " to=functions.{}<|channel|>commentary")
TYPES = (" <|constrain|>json", "<|constrain|>json", " json", "")


def call(name: str, arguments: str, head: str = HEADS[0], kind: str = TYPES[0]) -> str:
    return f"{head.format(name)}{kind}<|message|>{arguments}"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[LLTokenizer, dict[str, int]]:
    """A tokenizer, and the marks that are special tokens of it."""
    return KINDS[request.param]


def refused(tokenizer: LLTokenizer, grammar: str, *texts: str) -> None:
    for text in texts:
        assert not accepts(tokenizer, grammar, text), text


def test_a_required_call(kind: tuple[LLTokenizer, dict[str, int]]) -> None:
    tokenizer, ids = kind
    grammar = HARMONY.grammar([WEATHER, NOW], "required", False, special_ids=ids)
    for head in HEADS:
        for each in TYPES:
            assert accepts(tokenizer, grammar, call("get_weather", GOOD, head, each))
            assert accepts(tokenizer, grammar, THOUGHTS + call("now-2", OTHER, head, each))
            refused(tokenizer, grammar, call("get_weather", BAD, head, each), call("other", "{}", head, each))
    refused(
        tokenizer,
        grammar,
        *("", "Hello", THOUGHTS, FINAL + "x", THOUGHTS + FINAL + "x", PREAMBLE + call("now-2", "{}")),
        *(call("now-2", "[]"), call("now-2", "{}") + "x", call("now-2", "{}") + NEXT + call("now-2", "{}")),
    )


def test_named_and_parallel_calls(kind: tuple[LLTokenizer, dict[str, int]]) -> None:
    tokenizer, ids = kind
    named = HARMONY.grammar([WEATHER, NOW], "get_weather", False, special_ids=ids)
    assert accepts(tokenizer, named, THOUGHTS + call("get_weather", GOOD))
    refused(tokenizer, named, call("now-2", "{}"))
    parallel = HARMONY.grammar([WEATHER, NOW], "required", True, special_ids=ids)
    assert accepts(tokenizer, parallel, NEXT.join([call("get_weather", GOOD), call("now-2", "{}")] * 2))
    refused(tokenizer, parallel, NEXT.join([call("now-2", "{}"), call("get_weather", BAD)]))


def test_free_calls(kind: tuple[LLTokenizer, dict[str, int]]) -> None:
    """Only a strict tool has its schema."""
    tokenizer, ids = kind
    grammar = HARMONY.grammar([STRICT, NOW], "auto", True, special_ids=ids)
    for before in ("", THOUGHTS, THOUGHTS + PREAMBLE, PREAMBLE + THOUGHTS):
        assert accepts(tokenizer, grammar, f"{before}{FINAL}Yes < <|en\n")
        assert accepts(tokenizer, grammar, before + call("get_weather", GOOD, HEADS[1], TYPES[2]))
        assert accepts(tokenizer, grammar, before + call("now-2", OTHER))
        refused(tokenizer, grammar, before, before + call("get_weather", BAD), before + call("other", "{}"))
    loose = HARMONY.grammar([WEATHER], "auto", False, special_ids=ids)
    assert accepts(tokenizer, loose, call("get_weather", BAD))
    bound = HARMONY.grammar([STRICT, WEATHER], "get_weather", False, special_ids=ids, strict_only=True)
    refused(tokenizer, bound, call("get_weather", BAD))


def test_calls_in_place_of_json(kind: tuple[LLTokenizer, dict[str, int]]) -> None:
    tokenizer, ids = kind
    grammar = HARMONY.grammar([STRICT, NOW], "auto", False, special_ids=ids, text_schema=SCHEMA)
    for before in ("", THOUGHTS):
        assert accepts(tokenizer, grammar, before + FINAL + '{"city": "Bonn"}')
        assert accepts(tokenizer, grammar, before + call("get_weather", GOOD))
        refused(tokenizer, grammar, before + FINAL + "Bonn", before + call("get_weather", BAD), before + "{}")
    refused(tokenizer, grammar, '{"city": "Bonn"}', PREAMBLE + call("now-2", "{}"))


def test_an_answer_that_goes_on(kind: tuple[LLTokenizer, dict[str, int]]) -> None:
    """Its header is in the prompt, so it ends before a call begins."""
    tokenizer, ids = kind

    def grammar(choice: str, **options: Any) -> str:
        return HARMONY.grammar([STRICT, NOW], choice, False, special_ids=ids, in_answer=True, **options)

    behind = NEXT + THOUGHTS + call("now-2", "{}")
    assert accepts(tokenizer, grammar("required"), behind)
    refused(tokenizer, grammar("required"), "so" + behind, call("now-2", "{}"))
    for text in ("", " and so", " and so" + behind):
        assert accepts(tokenizer, grammar("auto"), text)
    refused(tokenizer, grammar("auto"), " and so" + NEXT + call("get_weather", BAD))
    for text in ('{"city": "Bonn"}', behind):
        assert accepts(tokenizer, grammar("auto", text_schema=SCHEMA), text)
    refused(tokenizer, grammar("auto", text_schema=SCHEMA), FINAL + '{"city": "Bonn"}', "x")


@pytest.mark.parametrize(
    ("symbol", "good", "bad"),
    [
        (regex_symbol(r"[a/]+\/b\\"), "a//b\\", "a/c"),
        (choices_symbol(["yes", 'no "\n']), 'no "\n', "no"),
        (lark_symbol('start: "x" more\nmore: "y"+'), "xyy", "x"),
        (f"%json {json.dumps(SCHEMA)}", '{"city":"Bonn"}', "{}"),
    ],
)
def test_texts_of_a_form(kind: tuple[LLTokenizer, dict[str, int]], symbol: str, good: str, bad: str) -> None:
    """Thoughts stand before, but nothing that is text."""
    tokenizer, ids = kind
    grammar = HARMONY.text_grammar(symbol, ids)
    for before in ("", THOUGHTS):
        assert accepts(tokenizer, grammar, before + FINAL + good)
        refused(tokenizer, grammar, before + FINAL + bad, before + good, before)
    refused(tokenizer, grammar, PREAMBLE + FINAL + good)
    assert parse(HARMONY.parser(), [THOUGHTS + FINAL + good]).text == good


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_whatever_the_masks_let_through_is_read_as_calls(kind: tuple[LLTokenizer, dict[str, int]], choice: str) -> None:
    tokenizer, ids = kind
    bound = {**NOW, "function": {"name": "now-2", "parameters": {"properties": {}, "additionalProperties": False}}}
    grammar = HARMONY.grammar([WEATHER, bound], choice, True, special_ids=ids)
    pieces = [call(name, "") for name in ("get_weather", "now-2")]
    outputs = [text for seed in range(12) if (text := draw(tokenizer, grammar, seed, pieces=pieces)) is not None]
    assert len(outputs) >= 4
    for text in outputs:
        found = parse(HARMONY.parser(tool_names={"get_weather", "now-2"}), list(text))
        assert (found.text, found.broken) == ("", [])
        assert found.calls
        for name, arguments in found.calls:
            value = json.loads(arguments)
            assert (name == "now-2" and value == {}) or value["unit"] in ("C", "F")


@pytest.mark.parametrize(("tools", "choice", "field"), [([], "auto", "tools"), ([NOW], "other", "tool_choice")])
def test_choices_that_cannot_be(tools: Any, choice: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        HARMONY.grammar(tools, choice, False)
    assert [violation.field for violation in raised.value.violations] == [field]
