"""Conversations that are built turn by turn: the same tokens as the template writes over all messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jaxctx.model.text import ModelText
from jaxctx.v1 import context_service_pb2 as pb
from tests.templates import CHATML, EOS, IM_END, QWEN, Family, byte_level, families

FAMILIES = families()
QUESTIONS = ["Who is there?", "Say it again.", "And now?"]
ANSWERS = ["Nobody.", "Nobody, again", "Still <nobody>!"]


class Conversation:
    """One context of a server in front of a fake engine."""

    def __init__(self, grpc_server: Any, text: ModelText) -> None:
        self._door = grpc_server
        self._text = text

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = next(iter(self._door.engine.contexts.values())).tokens
        return tokens

    @property
    def written(self) -> str:
        return self._text.tokenizer.decode(self.tokens, skip_special_tokens=False)

    async def fill(self, *messages: tuple[str, str], asks: bool | None = None) -> None:
        """Plan and fill these; both are about the same tokens."""
        chat: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in messages]}
        if asks is not None:
            chat["add_generation_prompt"] = asks
        await self._door.contexts.Plan(pb.PlanRequest(context_id="c", messages=chat))
        await self._door.contexts.Fill(pb.FillRequest(context_id="c", messages=chat))
        assert self._door.last("plan")[1][0] == self._door.last("fill")[1][1]

    async def draw(self, text: str) -> None:
        """What a model would: tokens that end up in the context."""
        await self._door.contexts.Fill(pb.FillRequest(context_id="c", text=text, add_special_tokens=False))

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)


@pytest.fixture
def open_conversation(open_grpc_server: Any) -> Any:
    @asynccontextmanager
    async def opened(text: ModelText) -> AsyncIterator[Conversation]:
        async with open_grpc_server(text=text) as grpc_server:
            await grpc_server.contexts.CreateContext(pb.CreateContextRequest(context_id="c"))
            yield Conversation(grpc_server, text)

    return opened


def over_all(text: ModelText, messages: Sequence[tuple[str, str]], *, asks: bool) -> list[int]:
    """The tokens of the template over all messages."""
    assert text.chat_template is not None
    told = [{"role": role, "content": content} for role, content in messages]
    rendered = text.chat_template.render(told, add_generation_prompt=asks)
    return text.tokenizer.encode(rendered, add_special_tokens=False)


def answer_ids(family: Family, messages: Sequence[tuple[str, str]], answer: str) -> list[int]:
    """The tokens that a model draws for an answer: those of the template behind these messages, up to its end."""
    asked = over_all(family.text, messages, asks=True)
    whole = over_all(family.text, [*messages, ("assistant", answer), ("user", "x")], asks=False)
    end = whole.index(family.text.eos_ids[0], len(asked))
    assert whole[: len(asked)] == asked
    return whole[len(asked) : end]


@pytest.mark.parametrize("end", ["ended", "cut off", "closed by the client"])
@pytest.mark.parametrize("name", FAMILIES)
async def test_turn_by_turn_is_the_template_over_all(open_conversation: Any, name: str, end: str) -> None:
    family = FAMILIES[name]
    async with open_conversation(family.text) as conversation:
        said = [("system", "Be brief.")] if family.has_system else []
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
            new = [*said, ("user", question)] if len(said) < 2 else [("user", question)]
            said.append(("user", question))
            await conversation.fill(*new)
            assert conversation.tokens == over_all(family.text, said, asks=True), conversation.written
            conversation.extend(answer_ids(family, said, answer))
            if end != "cut off":
                conversation.extend(family.text.eos_ids)
            if end == "closed by the client" and family.ending == IM_END:
                await conversation.draw("\n")
            said.append(("assistant", answer))


@pytest.mark.parametrize("name", FAMILIES)
async def test_an_answer_that_the_client_gives(open_conversation: Any, name: str) -> None:
    """It goes where the one of the model would have gone."""
    family = FAMILIES[name]
    async with open_conversation(family.text) as conversation:
        said = [("user", QUESTIONS[0])]
        await conversation.fill(*said)
        await conversation.fill(("assistant", ANSWERS[0]))
        await conversation.fill(("user", QUESTIONS[1]))
        said += [("assistant", ANSWERS[0]), ("user", QUESTIONS[1])]
        expected = over_all(family.text, said, asks=True)
        if name == "qwen3":  # which takes empty thoughts away again once another question is asked
            written = conversation.written.replace("<think>\n\n</think>\n\n", "")
            assert written == family.text.tokenizer.decode(expected, skip_special_tokens=False)
        else:
            assert conversation.tokens == expected, conversation.written


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.has_system])
async def test_messages_that_ask_for_nothing_need_no_end(open_conversation: Any, name: str) -> None:
    family = FAMILIES[name]
    async with open_conversation(family.text) as conversation:
        said = [("system", "Be brief.")]
        await conversation.fill(*said)
        for question in QUESTIONS:
            said.append(("user", question))
            await conversation.fill(("user", question), asks=False)
            assert conversation.tokens == over_all(family.text, said, asks=False), conversation.written


async def test_messages_that_end_with_an_answer_need_no_end(open_conversation: Any) -> None:
    for family in FAMILIES.values():
        async with open_conversation(family.text) as conversation:
            said = [("user", QUESTIONS[0]), ("assistant", ANSWERS[0])]
            await conversation.fill(*said)
            before = list(conversation.tokens)
            await conversation.fill(("user", QUESTIONS[1]))
            expected = over_all(family.text, [*said, ("user", QUESTIONS[1])], asks=True)
            beginning = over_all(family.text, said, asks=False)
            if expected[: len(beginning)] == beginning:  # not of qwen3, which writes those anew
                assert conversation.tokens == expected, conversation.written
            ends = [each for each in family.text.eos_ids if conversation.tokens[len(before) - 1 :].count(each) > 1]
            assert family.ending != EOS or not ends


@pytest.mark.parametrize("before", ["Some text.", "[INST] text\n", "a <|im_end|", "\n"])
@pytest.mark.parametrize("name", FAMILIES)
async def test_plain_text_before_messages_needs_no_end(open_conversation: Any, name: str, before: str) -> None:
    family = FAMILIES[name]
    async with open_conversation(family.text) as conversation:
        await conversation.draw(before)
        held = list(conversation.tokens)
        await conversation.fill(("user", QUESTIONS[0]))
        added = conversation.tokens[len(held) :]
        assert conversation.tokens[: len(held)] == held
        assert added[0] not in family.text.eos_ids
        assert added.count(family.text.eos_ids[0]) == (0 if family.ending == EOS else 1)


async def test_text_behind_a_closed_answer_needs_no_end(open_conversation: Any) -> None:
    family = FAMILIES["chatml"]
    async with open_conversation(family.text) as conversation:
        await conversation.fill(("user", "a"))
        await conversation.draw("b<|im_end|>\nSome text that is no turn.\n")
        held = conversation.written
        await conversation.fill(("user", "c"))
        assert conversation.written == held + "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("drawn", ["", "<", "<|im_end|", "no|im_end|>", "\n", "<|endoftext|>"])
async def test_whatever_an_open_answer_holds_it_gets_its_end(open_conversation: Any, drawn: str) -> None:
    """Nothing; what only looks like the beginning of the end; another token that ends an output."""
    family = FAMILIES["chatml"]
    async with open_conversation(family.text) as conversation:
        await conversation.fill(("user", "a"))
        await conversation.draw(drawn or "x")
        if not drawn:
            conversation.tokens.pop()
        held = conversation.written
        await conversation.fill(("user", "c"))
        turn = "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        assert conversation.written == held + "<|im_end|>\n" + turn


async def test_a_long_answer_is_found_as_a_short_one(open_conversation: Any) -> None:
    family = FAMILIES["chatml"]
    async with open_conversation(family.text) as conversation:
        await conversation.fill(("user", "a"))
        await conversation.draw("word " * 1000)
        held = conversation.written
        await conversation.fill(("user", "c"), asks=False)
        assert conversation.written == held + "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"


async def test_thoughts_of_earlier_answers_stay_as_they_were_drawn(open_conversation: Any) -> None:
    """Qwen3 writes earlier turns without them; the tokens of a context are never taken back."""
    family = FAMILIES["qwen3"]
    async with open_conversation(family.text) as conversation:
        await conversation.fill(("user", "a"))
        await conversation.draw("<think>\nhm\n</think>\n\nb<|im_end|>")
        await conversation.fill(("user", "c"))
        assert conversation.written == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    "source",
    [
        "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + CHATML,  # no next turn at all
        CHATML.replace("{{ message.content }}", "{{ messages | length }}"),  # no answer to be seen
        "{{ messages[-1].content }}\n",  # nothing of the turns before
    ],
    ids=["refuses", "hides", "forgets"],
)
async def test_templates_that_cannot_go_on_write_the_messages_as_they_stand(
    open_conversation: Any, source: str
) -> None:
    text = byte_level(source, QWEN, eos=IM_END)
    async with open_conversation(text) as conversation:
        await conversation.fill(("user", "a"))
        await conversation.draw("b")
        held = list(conversation.tokens)
        await conversation.fill(("user", "c"))
        assert conversation.tokens == held + over_all(text, [("user", "c")], asks=True)
