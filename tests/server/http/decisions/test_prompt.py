"""The prompts of a request: the input once, each question behind it, and the same tokens as the whole text has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers

from jaxctx.errors import FailedPrecondition, InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import ChatTemplate, ModelText, Tokenizer
from jaxctx.model.text.load import load_text
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
from jaxctx.model.text.tool_calls.harmony import MARKS
from jaxctx.v1.content_pb2 import ChatMessage
from jaxctx_server.auth import LOCAL
from jaxctx_server.http.decisions.prompt import DecisionPrompt, make_prompt, question_text, with_question
from jaxctx_server.http.decisions.request import parse_decision_request, parse_question
from jaxctx_server.http.errors import json_text
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.echo import CHATML, echo_text
from tests.jaxctx.model.text.own_templates import TEMPLATES
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.calls import call_of
from tests.server.http.decisions.harness import (
    COLOUR,
    COLOUR_TEXT,
    DEPTH,
    DEPTH_TEXT,
    WHY,
    WIDE,
    WIDE_TEXT,
    body,
    chat_prompt,
)
from tests.templates import byte_level


@pytest.fixture(scope="module")
def bundled_text() -> ModelText:
    return load_text(BUNDLED)


@pytest.fixture
def text() -> ModelText:
    return echo_text()


def backend_of(text: ModelText, *, longest: int = 1536) -> Backend:
    lifecycle, engine = ServerLifecycle(), FakeEngine()
    engine.info = replace(INFO, max_context_tokens=longest, vocab_size=1 << 16)
    lifecycle.set_ready(ServingState.of(engine, text, Limits.of(engine.info, queue_limit=64)))
    return Backend.make(lifecycle, None, max_calls=16)


async def prompt_of(backend: Backend, *questions: dict[str, Any], **fields: Any) -> DecisionPrompt:
    request = parse_decision_request(json_text(body(*questions, **fields, model="")).encode())
    try:
        return await make_prompt(call_of(backend, LOCAL), request)
    finally:
        backend.lifecycle.stop()


@pytest.mark.parametrize(
    ("question", "expected"), [(WIDE, WIDE_TEXT), (COLOUR, COLOUR_TEXT), (DEPTH, DEPTH_TEXT), (WHY, "Why?")]
)
def test_what_the_user_asks(question: dict[str, Any], expected: str) -> None:
    assert question_text(parse_question(question)) == expected


def test_braces_are_left_as_they_are() -> None:
    asked = {**COLOUR, "instructions": "{options} {0}", "choices": [{"value": "{x}"}, {"value": "{instructions}"}]}
    text = question_text(parse_question(asked))
    assert text.startswith("{options} {0}\n\nChoices:\n- {x}\n- {instructions}\n\n")


async def test_tokens_are_those_of_the_whole_prompt(text: ModelText) -> None:
    prompt = await prompt_of(backend_of(text), WIDE, WHY, COLOUR)
    for each, asked in zip(prompt.questions, (WIDE_TEXT, "Why?", COLOUR_TEXT), strict=True):
        expected = text.tokenizer.encode(chat_prompt(asked), add_special_tokens=False)
        assert [*prompt.input, *each.tokens] == expected
    colour = prompt.questions[2]
    assert [list(each) for each in colour.choices] == [
        text.tokenizer.encode(value, add_special_tokens=False) for value in ("blue", "blue-green", "black", "true")
    ]
    assert colour.tree is not None
    assert colour.computed_tokens == len(colour.tokens) + len(colour.tree.nodes)
    assert prompt.questions[1].tree is None


@pytest.mark.parametrize("given", ["A text.", "A text\n", "def f(n):\n    ", 'x = "\n\n', "", "1"])
@pytest.mark.parametrize("instructions", ["Which?", "1 + 1", "  indented", "<b>", "Über"])
async def test_tokens_are_those_of_the_whole_prompt_for_a_real_tokenizer(
    bundled_text: ModelText, given: str, instructions: str
) -> None:
    messages = [{"role": "user", "content": given}]
    prompt = await prompt_of(backend_of(bundled_text), {**WHY, "instructions": instructions}, COLOUR, input=messages)
    assert bundled_text.chat_template is not None
    content = f"{given}\n\nQuestion: {instructions}" if given else f"Question: {instructions}"
    whole = bundled_text.chat_template.render([{"role": "user", "content": content}])
    expected = bundled_text.tokenizer.encode(whole, add_special_tokens=False)
    assert [*prompt.input, *prompt.questions[0].tokens] == expected
    colour = bundled_text.chat_template.render(
        [{"role": "user", "content": content.replace(instructions, COLOUR_TEXT)}]
    )
    for choice, value in zip(prompt.questions[1].choices, ("blue", "blue-green", "black", "true"), strict=True):
        expected = bundled_text.tokenizer.encode(colour + value, add_special_tokens=False)
        assert [*prompt.input, *prompt.questions[1].tokens, *choice] == expected


async def test_an_answer_is_in_the_final_channel() -> None:
    """Behind its header: there are no thoughts."""
    text = byte_level(TEMPLATES["channels"], list(MARKS), eos="<|return|>")
    text = replace(text, tool_call_format=TOOL_CALL_FORMATS["harmony"])
    prompt = await prompt_of(backend_of(text), WHY, input="A text.")
    whole = text.tokenizer.decode([*prompt.input, *prompt.questions[0].tokens], skip_special_tokens=False)
    assert whole.endswith("Why?<|end|><|start|>assistant<|channel|>final<|message|>")


def prefixing_text() -> ModelText:
    """Text of a tokenizer that writes a space before each text that it gets, as those of SentencePiece do."""
    special = ["<|im_start|>", "<|im_end|>"]
    entries = [*special, "▁", *map(chr, [10, *range(33, 127)])]
    backend = tokenizers.Tokenizer(models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=[]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([tokenizers.AddedToken(entry, special=True, normalized=False) for entry in special])
    return replace(echo_text(), tokenizer=Tokenizer(backend))


async def test_no_space_comes_where_the_text_has_none() -> None:
    text = prefixing_text()
    prompt = await prompt_of(backend_of(text), WIDE, input="A text.")
    (wide,) = prompt.questions
    whole = text.tokenizer.encode(chat_prompt(WIDE_TEXT, "A text.") + "yes", add_special_tokens=False)
    assert [*prompt.input, *wide.tokens, *wide.choices[0]] == whole
    assert len(wide.choices[0]) == 3


@pytest.mark.parametrize("role", ["assistant", "system", "tool"])
def test_a_question_is_a_message_of_its_own_behind_others_than_the_users(role: str) -> None:
    last = ChatMessage(role=role, content="a")
    assert with_question([last], "Q") == [last, ChatMessage(role="user", content="Q")]


def test_a_question_is_in_the_last_message_of_the_user() -> None:
    first, last = ChatMessage(role="user", content="a"), ChatMessage(role="user", content="b")
    assert with_question([first, last], "Q") == [first, ChatMessage(role="user", content="b\n\nQ")]
    assert with_question([ChatMessage(role="user")], "Q") == [ChatMessage(role="user", content="Q")]


@pytest.mark.parametrize("template", ["fixed", CHATML + "{{ messages[-1].content }}"])
async def test_a_template_must_write_the_question_once(text: ModelText, template: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await prompt_of(backend_of(replace(text, chat_template=ChatTemplate(template))), WIDE)
    assert refused.value.violations[0].field == "input"


async def test_a_template_is_needed(text: ModelText) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        await prompt_of(backend_of(replace(text, chat_template=None)), WIDE)
    assert refused.value.reason == "NO_CHAT_TEMPLATE"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": "~" * 300}, "input"),
        ({"questions": [WHY, {**WHY, "instructions": "~" * 250}]}, "questions[1].instructions"),
        (
            {"questions": [WIDE, {**COLOUR, "choices": [{"value": "~" * 61}, {"value": "a"}]}]},
            "questions[1].choices[0]",
        ),
        ({"questions": [{**DEPTH, "levels": [{"label": "a"}, {"label": "~" * 61}]}]}, "questions[0].levels[1]"),
    ],
)
async def test_what_is_too_long(text: ModelText, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        questions = fields.pop("questions", [WIDE])
        await prompt_of(backend_of(text, longest=256), *questions, **{"input": "Short.", **fields})
    assert [each.field for each in refused.value.violations] == [field]


async def test_a_text_needs_room_for_a_token(text: ModelText) -> None:
    length = len(text.tokenizer.encode(chat_prompt("Why?", "Short."), add_special_tokens=False))
    await prompt_of(backend_of(text, longest=length + 1), WHY, input="Short.")
    with pytest.raises(InvalidArgument):
        await prompt_of(backend_of(text, longest=length), WHY, input="Short.")
