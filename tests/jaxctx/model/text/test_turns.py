"""Messages behind a context: which end is missing. tests/server/test_conversation_turns.py has all families."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text import ModelText
from jaxctx.model.text.tool_calls.harmony import MARKS
from jaxctx.model.text.turns import NEAR, Continuation, continuation, encode_behind
from tests.jaxctx.model.text.own_templates import TEMPLATES
from tests.templates import ALTERNATE, BOS, CHATML, EOS, IM_END, MISTRAL, QWEN, byte_level

TEXT = byte_level(CHATML, QWEN, eos=IM_END)
INST = byte_level(MISTRAL, [BOS, EOS], eos=EOS, bos=BOS)  # "[INST] question [/INST]answer</s>"
OPENING = "<|im_start|>assistant"
QUESTION = "<|im_start|>user\nnext<|im_end|>\n"
ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
NEXT = [{"role": "user", "content": "next"}]


def tokens_of(text: str, model: ModelText = TEXT) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


def continued(before: str, messages: Any = NEXT, *, asks: bool = False, model: ModelText = TEXT) -> Continuation:
    """What goes behind a context with this text."""
    assert model.chat_template is not None
    return continuation(model.chat_template, model.tokenizer, tokens_of(before, model), messages, asks=asks)


@pytest.mark.parametrize(
    ("answer", "end", "anchor"),
    [
        ("b", "<|im_end|>\n", ""),
        ("b<|im_end|>", "\n", "<|im_end|>"),
        ("b<|im_end|>\n", "", "<|im_end|>\n"),
        ("b<|im_end|>\nno turn", "", ""),
        ("", "<|im_end|>\n", ""),
        ("b<", "<|im_end|>\n", ""),
    ],
    ids=["open", "closed by the model", "closed by the template", "text behind", "nothing said", "looks like an end"],
)
def test_of_an_answers_end_what_is_missing_goes_first(answer: str, end: str, anchor: str) -> None:
    found = continued(ASKED + answer)
    assert found == Continuation(end=end, text=QUESTION, anchor=anchor, is_anew=False)


def test_asking_opens_an_answer_behind_the_messages() -> None:
    assert continued(ASKED + "b", asks=True).text == QUESTION + OPENING + "\n"


def test_text_without_an_answer_needs_no_end() -> None:
    assert continued("Some text.") == Continuation(end="", text=QUESTION, anchor="", is_anew=False)


def test_an_answer_that_comes_next_goes_behind_its_opening() -> None:
    """The opening and the space behind it are there already."""
    found = continued(ASKED, [{"role": "assistant", "content": "b"}, *NEXT])
    assert found.text == "b<|im_end|>\n" + QUESTION
    assert (found.end, found.anchor) == ("", OPENING + "\n")


def test_an_opening_without_its_line_is_completed_by_the_answer() -> None:
    found = continued(ASKED.removesuffix("\n"), [{"role": "assistant", "content": "b"}])
    assert (found.text, found.anchor) == ("\nb<|im_end|>\n", OPENING)


def test_where_a_question_opens_the_answer_a_second_question_needs_no_end() -> None:
    found = continued("<s>[INST] a [/INST]", model=INST)
    assert found.end == ""
    assert found.anchor.startswith("[/INST]")
    assert "[INST] next [/INST]" in found.text


def test_an_answer_that_ends_by_a_special_token_alone() -> None:
    assert continued("<s>[INST] a [/INST]b", model=INST).end == EOS
    closed = continued("<s>[INST] a [/INST]b</s>", model=INST)
    assert (closed.end, closed.anchor) == ("", EOS)


def test_the_opening_of_a_very_long_answer_is_found() -> None:
    assert len(tokens_of("word " * NEAR)) > NEAR
    assert continued(ASKED + "word " * NEAR).end == "<|im_end|>\n"


def test_a_template_that_cannot_go_on_writes_the_messages_anew() -> None:
    refuses = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + CHATML
    found = continued("a", model=byte_level(refuses, QWEN, eos=IM_END))
    assert found == Continuation(end="", text=QUESTION, anchor="", is_anew=True)


def test_messages_that_the_template_refuses_are_named() -> None:
    refuses = "{% for message in messages %}" + ALTERNATE + "{{ message.content }}{% endfor %}"
    with pytest.raises(InvalidArgument) as raised:
        continued("a", [*NEXT, *NEXT], model=byte_level(refuses, QWEN, eos=IM_END))
    assert [violation.field for violation in raised.value.violations] == ["messages"]


# --- The tokens of a text behind others


class PairTokenizer:
    """A character is a token, its code point; "xy" is one token, 1, wherever it stands."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [1 if each == "\0" else ord(each) for each in text.replace("xy", "\0")]


def behind(before: list[int], anchor: str, text: str) -> list[int]:
    tokenizer: Any = PairTokenizer()
    return encode_behind(tokenizer, before, anchor, text)


def test_a_text_without_an_anchor_is_encoded_alone() -> None:
    assert behind([ord("x")], "", "ya") == [ord("y"), ord("a")]


def test_a_text_behind_an_anchor_has_the_tokens_of_both_less_those_of_the_anchor() -> None:
    assert behind([7, ord("a")], "a", "xyb") == [1, ord("b")]


def test_an_anchor_whose_tokens_the_text_would_change_is_left_as_it_is() -> None:
    """Together they would be the one token of "xy", but the context has "x" already."""
    assert behind([ord("x")], "x", "yb") == [ord("y"), ord("b")]


def test_an_anchor_that_the_context_has_by_other_tokens_is_not_used() -> None:
    """The context has "xy" letter by letter."""
    assert behind([ord("x"), ord("y")], "xy", "b") == [ord("b")]


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_behind_an_anchor() -> None:
    class SpacePrefix(PairTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [ord(" "), *super().encode(text, add_special_tokens=add_special_tokens)]

    tokenizer: Any = SpacePrefix()
    assert encode_behind(tokenizer, [ord(" "), ord("a")], "a", "b") == [ord("b")]
    assert encode_behind(tokenizer, [ord("c")], "a", "b") == [ord(" "), ord("b")]


CHANNELS = byte_level(TEMPLATES["channels"], list(MARKS), eos="<|return|>")
FINAL = "<|channel|>final<|message|>"
OPENED = "<|start|>user<|message|>a<|end|><|start|>assistant"
USER = "<|start|>user<|message|>next<|end|>"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}"
RESULT = '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"7"<|end|>'


@pytest.mark.parametrize(
    ("answer", "end", "anchor"),
    [
        ("b", "<|end|>", ""),
        ("b<|return|>", "", "<|return|>"),
        ("b<|end|>", "", "<|end|>"),
        ("b<|end|><|start|>user<|message|>c<|end|>", "", "<|end|>"),
        ("b<|retu", "<|end|>", ""),
    ],
)
def test_of_an_answer_in_channels(answer: str, end: str, anchor: str) -> None:
    """The template ends the last answer with <|return|>, and earlier ones as it ends a question."""
    found = continued(
        f"{OPENED}<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{FINAL}{answer}", model=CHANNELS
    )
    assert found == Continuation(end=end, text=USER, anchor=anchor, is_anew=False)


@pytest.mark.parametrize("call", [CALL, " to=functions.look<|channel|>commentary json<|message|>{}"])
@pytest.mark.parametrize(("end", "missing"), [("<|call|>", ""), ("", "<|end|>"), ("<|return|>", "")])
def test_the_result_of_a_call_has_the_name_that_the_context_says(call: str, end: str, missing: str) -> None:
    result = {"role": "tool", "tool_call_id": "x", "content": "7"}
    found = continued(f"{OPENED}{call}{end}", [result], asks=True, model=CHANNELS)
    assert (found.end, found.text, found.is_anew) == (missing, RESULT + "<|start|>assistant", False)
    named = continued(f"{OPENED}{call}{end}", [{**result, "name": "other"}], model=CHANNELS)
    assert named.text == RESULT.replace("look", "other")


@pytest.mark.parametrize(
    "answer", [f"{FINAL}Yes<|return|>", "<|channel|>commentary to=browser<|message|>", "Yes", "<|cha"]
)
def test_a_result_behind_no_call_has_a_made_up_name(answer: str) -> None:
    result = {"role": "tool", "tool_call_id": "x", "content": "7"}
    found = continued(OPENED + answer, [result], model=CHANNELS)
    assert found.text == RESULT.replace("look", "made-up-answer")
