"""Outputs in messages with channels: thoughts, texts and calls, the same whatever way the text is cut into pieces."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from jaxctx.model.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    HarmonyFormat,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jaxctx.model.text.tool_calls.formats import HARMONY
from jaxctx.model.text.tool_calls.harmony import MARKS, MAX_HEADER, NoHeader, read_header
from tests.tool_call_events import Read, parse

THOUGHTS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def every_split(text: str, **options: Any) -> Read:
    """What is read of a text at once; the same must be read of its characters, and of its two parts at every place."""
    whole = parse(HARMONY.parser(**options), [text])
    assert parse(HARMONY.parser(**options), list(text)) == whole
    for place in range(1, len(text)):
        assert parse(HARMONY.parser(**options), [text[:place], text[place:]]) == whole, place
    for seed in range(20):
        chooser, pieces, at = random.Random(seed), [], 0
        while at < len(text):
            size = chooser.randint(1, 9)
            pieces.append(text[at : at + size])
            at += size
        assert parse(HARMONY.parser(**options), pieces) == whole
    return whole


def test_it_is_one_of_the_formats() -> None:
    assert isinstance(HARMONY, HarmonyFormat)
    assert TOOL_CALL_FORMATS["harmony"] is HARMONY
    assert set(HARMONY.markers) == set(MARKS)


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_thoughts_and_an_answer(end: str) -> None:
    text = f"{THOUGHTS}So <it> is.\n{NEXT}{FINAL}Yes < no. <|en\n{end}"
    assert every_split(text) == Read(text="Yes < no. <|en\n", thoughts="So <it> is.\n", order="t")


@pytest.mark.parametrize("end", ["", "<|call|>", " \n<|call|>"])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f code <|message|>",
        "<|channel|>analysis to=functions.f <|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f <|channel|>commentary<|message|>",
    ],
)
def test_a_call_with_every_header(header: str, end: str) -> None:
    text = f'{THOUGHTS}Hm{NEXT}{header}{{"city": "Köln", "mark": "<|call|> <|end|>"}}{end}'
    arguments = '{"city": "Köln", "mark": "<|call|> <|end|>"}'
    assert every_split(text, tool_names={"f"}) == Read(thoughts="Hm", calls=[("f", arguments)], order="c")
    assert every_split(text, whole_calls=True) == Read(thoughts="Hm", calls=[("f", arguments)], order="c")


def test_a_preamble_and_several_calls() -> None:
    text = (
        f"{THOUGHTS}Two.{NEXT}{PREAMBLE}Let me see.{NEXT}{CALL}{{}}<|call|><|start|>assistant"
        f'{THOUGHTS}More.{NEXT} to=functions.g-1<|channel|>commentary json<|message|> {{"a": [1]}}\n{NEXT}{FINAL}Done.'
    )
    expected = Read(
        text="Let me see.\nDone.",
        thoughts="Two.\nMore.",
        calls=[("f", "{}"), ("g-1", '{"a": [1]}')],
        order="tcrct",
    )
    assert every_split(text) == expected


def test_messages_of_a_kind_are_on_lines_of_their_own() -> None:
    text = f"{THOUGHTS}a{NEXT}{THOUGHTS}b{NEXT}{PREAMBLE}c{NEXT}{FINAL}d"
    assert every_split(text) == Read(text="c\nd", thoughts="a\nb", order="t")
    empty = f"{THOUGHTS}{NEXT}{THOUGHTS}b{NEXT}{PREAMBLE}{NEXT}{FINAL}d"
    assert every_split(empty) == Read(text="d", thoughts="b", order="t")


@pytest.mark.parametrize(
    "text", ["", "Hello", " to", "t", " to be", "<", "<|chan", "<|return", "Hello <|channel|>final"]
)
def test_a_text_without_a_channel(text: str) -> None:
    assert every_split(text) == Read(text=text, order="t" if text else "")


@pytest.mark.parametrize("beginning", ["<|start|>assistant", ""])
def test_what_opens_an_answer_may_be_written_or_be_in_the_prompt(beginning: str) -> None:
    assert every_split(f"{beginning}{FINAL}Yes").text == "Yes"


def test_a_beginning_that_was_forgotten() -> None:
    assert every_split(f"{THOUGHTS}Hm<|end|>{FINAL}Yes") == Read(text="Yes", thoughts="Hm", order="t")


@pytest.mark.parametrize(
    "header",
    [
        "<|start|>assistant",
        "<|start|>assis",
        "<|channel|>",
        "<|start|>assistant<|channel|>fin",
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>js",
        "<|start|>assistant to=functions.f<|channel|>comm",
        "<|start|>assistant to=functions.f",
        "<|start|>assistant to=",
    ],
)
@pytest.mark.parametrize("before", [f"{THOUGHTS}Hm<|end|>", f"{CALL}{{}}<|call|>"])
def test_an_output_that_ends_within_a_header(before: str, header: str) -> None:
    """As at `max_tokens`: there are only marks, which are no text."""
    whole = every_split(before)
    assert every_split(before + header) == whole
    assert whole.text == ""


def test_an_output_that_ends_within_its_first_header() -> None:
    assert every_split(" to=functions.f") == every_split(" to=functions.f ") == Read()


def test_an_output_that_ends_behind_a_header() -> None:
    assert every_split(f"{THOUGHTS}Hm{NEXT}{FINAL}") == Read(thoughts="Hm")
    assert every_split(THOUGHTS) == Read()


@pytest.mark.parametrize("end", ["", "<|call|>", "\n<|call|>", f"<|call|><|start|>assistant{FINAL}"])
def test_a_call_without_arguments(end: str) -> None:
    """Whose tool has none."""
    assert every_split(f"{CALL}{end}") == Read(calls=[("f", "{}")], order="c")


def test_an_output_that_ends_within_a_call() -> None:
    text = f'{PREAMBLE}So{NEXT}{CALL}{{"a": "long tex'
    expected = Read(text="So", calls=[("f", '{"a": "long tex')], broken=[0], order="tc")
    assert every_split(text) == expected
    assert every_split(text, whole_calls=True) == Read(text=f'So{CALL}{{"a": "long tex', order="t")


@pytest.mark.parametrize("arguments", ['{"a": oops}', '{"a": 1,}', '{"a" 1}', '{"a": <|call|>', "{" + '"a":{' * 70])
def test_arguments_that_are_no_json(arguments: str) -> None:
    """What was given as arguments stays; the rest is text."""
    found = every_split(f"{CALL}{arguments} and more")
    assert found.broken == [0]
    assert found.calls[0][1] + found.text == f"{arguments} and more"
    behind = every_split(f"{CALL}{arguments}{NEXT}{FINAL}Sorry.")
    assert behind.text.endswith("\nSorry.")
    whole = every_split(f"{CALL}{arguments} and more", whole_calls=True)
    assert whole == Read(text=f"{CALL}{arguments} and more", order="t")


@pytest.mark.parametrize("body", ["[1]", '"x"', "f()", "<|ca", "7 {}"])
def test_a_body_that_is_no_object_is_text(body: str) -> None:
    assert every_split(CALL + body) == Read(text=CALL + body, order="t")


def test_text_behind_arguments() -> None:
    assert every_split(f"{CALL}{{}} and more") == Read(text="and more", calls=[("f", "{}")], order="ct")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.g <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.<|message|>",
        "<|channel|>analysis to=python code<|message|>",
        "<|channel|>commentary to=browser.search<|message|>",
        " to=browser.open<|channel|>commentary<|message|>",
        "<|channel|>thinking<|message|>",
        "<|channel|><|message|>",
        "<|channel|>final<|channel|>final<|message|>",
        "<|channel|>final\n<|message|>",
        "<|channel|>commentary to= <|constrain|><|constrain|>json<|message|>",
        "<|message|>",
        "to=functions.f<|message|>",
        "<|channel|>commentary to=functions." + "f" * MAX_HEADER + "<|message|>",
        "<|channel|>commentary" + " " * MAX_HEADER + "<|message|>",
    ],
)
def test_a_message_to_somebody_else_is_text_with_its_header(header: str) -> None:
    """And so is one whose header is none."""
    text = f'{header}{{"a": 1}}'
    assert every_split(text, tool_names={"f"}) == Read(text=text, order="t")
    found = every_split(f"{THOUGHTS}Hm{NEXT}{text}<|call|><|start|>assistant{FINAL}Yes", tool_names={"f"})
    assert found.thoughts == "Hm"
    assert found.text == f"{text}\nYes"


@pytest.mark.parametrize("role", ["user", "system", "functions.f", "assist", "tool"])
def test_messages_of_others_are_no_messages(role: str) -> None:
    text = f"Yes<|end|><|start|>{role}<|message|>x"
    assert every_split(FINAL + text) == Read(text=text, order="t")


@pytest.mark.parametrize(
    "text",
    [
        "<|message|>",
        "a <|channel|>final<|message|> b",
        "a <|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
        "a <|end|> b <|return|> c <|call|> d",
        "<|end|><|start|>",
        "<|end|><|end|>.",
        "<|constrain|>json",
        "a <|end|><|sta",
        "a <|en",
    ],
)
def test_marks_within_a_message_are_text(text: str) -> None:
    expected = "" if text == "<|end|><|start|>" else text  # as the next message would begin
    assert every_split(FINAL + text) == Read(text=expected, order="t" if expected else "")
    found = every_split(THOUGHTS + text + NEXT + FINAL + "Yes")
    assert (found.thoughts, found.text, found.calls) == (text, "Yes", [])


def test_an_answer_that_goes_on() -> None:
    """Its header is in the prompt."""
    text = f" and so{NEXT}{CALL}{{}}"
    assert every_split(text, in_answer=True) == Read(text=" and so", calls=[("f", "{}")], order="tc")
    assert every_split(" to=functions.f", in_answer=True) == Read(text=" to=functions.f", order="t")


def test_random_outputs_are_read_the_same_however_they_are_cut() -> None:
    """And no word is lost."""
    pieces = [*MARKS, NEXT, THOUGHTS, FINAL, PREAMBLE, CALL, " to=functions.f", "<|st", "<|", " ", "\n"]
    words = ["{", "}", '{"a": 1}', "word", '"', "assistant", "final"]
    calls = thoughts = 0
    for seed in range(600):
        chooser = random.Random(seed)
        text = "".join(chooser.choices([*pieces, *words], k=chooser.randint(2, 12))) + "<|message|>x"
        options = {"tool_names": ["f"], "whole_calls": chooser.random() < 0.5, "in_answer": chooser.random() < 0.2}

        def read(*parts: str, options: Any = options) -> Read:
            return parse(HARMONY.parser(**options), list(parts))

        whole = read(text)
        place, second = sorted(chooser.randint(0, len(text)) for _ in range(2))
        assert read(text[:place], text[place:second], text[second:]) == whole, (text, place, second)
        assert read(*text) == whole, text
        told = whole.text + whole.thoughts + "".join(arguments for _, arguments in whole.calls)
        assert told.count("word") == text.count("word"), text
        calls += len(whole.calls)
        thoughts += bool(whole.thoughts)
    assert calls > 5
    assert thoughts > 20


def test_events_stream_as_they_are_written() -> None:
    parser = HARMONY.parser()
    assert parser.feed("<|channel|>analysis") == []
    assert parser.feed("<|message|>So") == [ReasoningDelta("So")]
    assert parser.feed(" it <") == [ReasoningDelta(" it ")]
    assert parser.feed("b><|end|>") == [ReasoningDelta("<b>")]
    assert parser.feed("<|start|>assistant<|channel|>final<|message|>Y") == [TextDelta("Y")]
    assert parser.feed("es" + NEXT + CALL) == [TextDelta("es")]
    assert parser.feed('{"a"') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a"')]
    assert parser.feed(": 1}") == [ToolCallArguments(0, ": 1}"), ToolCallEnd(0)]
    assert parser.finish() == []


def test_a_text_that_can_be_no_header_is_not_held_back() -> None:
    assert HARMONY.parser().feed("Hello") == [TextDelta("Hello")]


def test_with_the_parser_of_whole_outputs() -> None:
    text = f"{THOUGHTS}Hm{NEXT}{FINAL}Yes"
    assert parse(OutputParser(None, HARMONY.parser()), list(text)) == Read(text="Yes", thoughts="Hm", order="t")
    found = parse(OutputParser(REASONING_FORMATS["harmony"].parser(), None), list(text + "<|return|>"))
    assert found == Read(text="Yes", thoughts="Hm", order="t")


@pytest.mark.parametrize("size", [7, 1 << 12])
@pytest.mark.parametrize("body", ["{}, ", "<|end|> ", "<|", "word ", f"{NEXT}{FINAL}x", f'{NEXT}{CALL}{{"a": 1}}'])
def test_long_outputs_take_linear_time(body: str, size: int) -> None:
    """Four times the text may take little more than four times as long: at the square it would be sixteen."""

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            text, parser = FINAL + body * count, HARMONY.parser()
            began = time.thread_time()
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(8000) < 10 * seconds(2000)


@pytest.mark.parametrize(
    "begin", ["<|channel|>a", "<|channel|>a to=x", " to=x", "<|channel|>", "<|channel|>a <|constrain|>"]
)
@pytest.mark.parametrize("filler", [" ", "a", "to=x "])
def test_a_long_text_that_is_no_header_is_one_at_once(begin: str, filler: str) -> None:
    """A client may write one into a context. Where it could be cut at any place, its time grew with the cube of it."""
    with pytest.raises(NoHeader):
        read_header(f"<|start|>assistant{begin}{filler * 100_000}x y<|channel|>z y<|message|>")
    text = begin + filler * (900 // len(filler)) + "x y<|message|>Yes"
    assert parse(HARMONY.parser(), [text]) == parse(HARMONY.parser(), list(text)) == Read(text=text, order="t")
