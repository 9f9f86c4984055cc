"""An output that is resumed behind tokens that it has: it becomes what it would have become, wherever it was cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jaxctx.engine.core.output import OutputText
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound
from jaxctx.types import CreateContextRequest, FinishReason, GeneratePiece, GenerateRequest, SamplingParams
from tests.echo import EOS_ID, echo_text
from tests.engines import context_info, tokens_of

ME = Caller()
PROMPT = [(7 * i + 3) % 256 for i in range(37)]
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, min_p=0.001, seed=11)
PENALISED = replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={7: 2.0})


@dataclass
class Told:
    """An output as its reader has it."""

    pieces: Sequence[GeneratePiece]

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def logprobs(self) -> list[Any]:
        return [logprob for piece in self.pieces for logprob in piece.logprobs]


async def told(engine: LocalEngine, tokens: Sequence[int], **settings: Any) -> Told:
    info = await engine.create(ME, CreateContextRequest())
    await engine.fill(ME, info.context_id, tokens, defer=True)
    request = GenerateRequest(context_id=info.context_id, **settings)
    return Told([piece async for piece in engine.generate(ME, request)])


def texts_by_token(whole: Told, **settings: Any) -> list[str]:
    """The text that came with each token. A stream does not tell: it joins what its reader has not taken yet."""
    text = OutputText(GenerateRequest(context_id="c", **settings), echo_text(), PROMPT)
    last = settings["max_tokens"]
    texts = [text.take(token, is_last=place == last)[0] for place, token in enumerate(whole.tokens, 1)]
    assert "".join(texts) == whole.text
    return texts


def cuts(length: int) -> list[int]:
    return sorted({1, 2, 3, 11, 12, 13, length // 2, length - 2, length - 1} & set(range(1, length)))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY, "max_tokens": 48, "ignore_eos": True},
    "seeded": {"sampling": DRAWN, "max_tokens": 48},
    "penalties and bias": {"sampling": PENALISED, "max_tokens": 48},
    "log probabilities": {"sampling": DRAWN, "max_tokens": 24, "logprobs": True, "top_logprobs": 3},
    "min_tokens": {"sampling": replace(DRAWN, logit_bias={EOS_ID: 60.0}), "max_tokens": 40, "min_tokens": 17},
    "stop tokens": {"sampling": DRAWN, "max_tokens": 64, "stop_token_ids": list(range(0, 512, 50)), "min_tokens": 15},
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_a_resumed_output_becomes_what_it_would_have_become(engine: LocalEngine, name: str) -> None:
    settings = SETTINGS[name]
    whole = await told(engine, PROMPT, **settings)
    texts, last = texts_by_token(whole, **settings), whole.pieces[-1]
    for cut in cuts(len(whole.tokens)):
        rest = await told(engine, PROMPT + whole.tokens[:cut], **settings, resume_tokens=cut)
        assert rest.tokens == whole.tokens[cut:], cut
        assert "".join(texts[:cut]) + rest.text == whole.text, cut
        end = rest.pieces[-1]
        assert (end.finish, end.stop_match) == (last.finish, last.stop_match)
        assert end.seed == last.seed or settings["sampling"].seed is None
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(PROMPT), len(whole.tokens))
        assert end.usage.cached_tokens + end.usage.computed_tokens == len(PROMPT)
        assert end.usage.restored_tokens == 0
        for mine, its in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
            assert mine.token_id == its.token_id
            assert mine.logprob == pytest.approx(its.logprob)
            assert [token for token, _ in mine.top] == [token for token, _ in its.top]


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_that_began_before_the_cut(engine: LocalEngine, include_stop: bool) -> None:
    """What was held back as its beginning comes with it, or once it can be none."""
    plain = await told(engine, PROMPT, sampling=DRAWN, max_tokens=48, ignore_eos=True)
    stop, almost = plain.text[20:26], plain.text[8:13] + "never said"
    assert plain.text.index(stop) == 20, "the test needs a text that says it once"
    settings: dict[str, Any] = {
        "sampling": DRAWN,
        "max_tokens": 48,
        "ignore_eos": True,
        "stop": [almost, stop],
        "include_stop": include_stop,
    }
    whole = await told(engine, PROMPT, **settings)
    texts = texts_by_token(whole, **settings)
    assert whole.text == plain.text[: 26 if include_stop else 20]
    for cut in range(1, len(whole.tokens)):
        rest = await told(engine, PROMPT + whole.tokens[:cut], **settings, resume_tokens=cut)
        assert (rest.tokens, "".join(texts[:cut]) + rest.text) == (whole.tokens[cut:], whole.text), cut
        assert rest.pieces[-1].stop_match == stop


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_character_that_began_before_the_cut(cut: int) -> None:
    """Tokens that are bytes of a character say nothing until it is whole, on whichever side of the cut they are."""
    text, request = echo_text(), GenerateRequest(context_id="c", stop=["!!"])
    before, ids = text.tokenizer.encode("Say: "), text.tokenizer.encode("a🙂b€!c🙂")
    assert len(ids) > 12
    alone = OutputText(request, text, before)
    parts = [alone.take(token, is_last=token == ids[-1] and n == len(ids) - 1)[0] for n, token in enumerate(ids)]
    assert "".join(parts) == "a🙂b€!c🙂"
    resumed = OutputText(request, text, before, ids[:cut])
    assert resumed.tokens == cut
    for n, token in enumerate(ids[cut:], cut):
        assert resumed.take(token, is_last=n == len(ids) - 1)[0] == parts[n]


async def test_max_tokens_counts_what_there_is(engine: LocalEngine) -> None:
    whole = await told(engine, PROMPT, sampling=GREEDY, max_tokens=20, ignore_eos=True)
    rest = await told(
        engine, PROMPT + whole.tokens[:19], sampling=GREEDY, max_tokens=20, ignore_eos=True, resume_tokens=19
    )
    assert (rest.tokens, rest.pieces[-1].finish) == (whole.tokens[19:], FinishReason.LENGTH)


async def test_what_cannot_be_resumed_is_refused_and_changes_nothing(engine: LocalEngine) -> None:
    info = await engine.create(ME, CreateContextRequest())
    await engine.fill(ME, info.context_id, PROMPT)
    before = await context_info(engine, ME, info.context_id)

    async def refused(kind: type[Exception], caller: Caller = ME, **settings: Any) -> Any:
        request = GenerateRequest(context_id=info.context_id, max_tokens=60, sampling=GREEDY, **settings)
        with pytest.raises(kind) as error:
            async for _ in engine.generate(caller, request):
                pass
        return error.value

    for tokens in (len(PROMPT), len(PROMPT) + 5):
        assert (await refused(InvalidArgument, resume_tokens=tokens)).violations[0].field == "resume_tokens"
    await refused(FailedPrecondition, resume_tokens=3, stop_token_ids=[PROMPT[-2]])
    await refused(NotFound, Caller("other"), resume_tokens=3)
    after = await context_info(engine, ME, info.context_id)
    assert replace(after, used_at=before.used_at) == before
    assert await tokens_of(engine, info.context_id) == PROMPT


async def test_a_context_that_changed_while_an_output_was_to_be_resumed(engine: LocalEngine) -> None:
    """Another call came between reading its tokens and going on behind them."""
    info = await engine.create(ME, CreateContextRequest())
    await engine.fill(ME, info.context_id, PROMPT)
    request = GenerateRequest(context_id=info.context_id, max_tokens=60, sampling=GREEDY, resume_tokens=5)
    so_far = await engine.loop.call(engine.core.output_so_far, ME, request)
    text = OutputText(request, engine.core.text, *so_far)
    await engine.fill(ME, info.context_id, [1, 2])
    with pytest.raises(Aborted):
        await engine.loop.call(engine.core.generate, ME, request, info.context_id, 0, None, text)
    assert await tokens_of(engine, info.context_id) == [*PROMPT, 1, 2]


async def test_many_outputs_resumed_at_once(engine: LocalEngine) -> None:
    """In one batch with others that are new."""
    settings: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    seeds = range(6)
    wholes = [await told(engine, PROMPT, sampling=replace(PENALISED, seed=seed), **settings) for seed in seeds]
    rests = await asyncio.gather(
        *[
            told(
                engine,
                PROMPT + whole.tokens[: 5 * seed],
                sampling=replace(PENALISED, seed=seed),
                resume_tokens=5 * seed,
                **settings,
            )
            for seed, whole in zip(seeds, wholes, strict=True)
        ]
    )
    for seed, whole, rest in zip(seeds, wholes, rests, strict=True):
        assert rest.tokens == whole.tokens[5 * seed :]


# --- The text of special tokens


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "ab"),
        ({"include_special_tokens": True}, "a<|startoftext|>b"),
        ({"include_special_tokens": True, "include_stop": True}, "a<|startoftext|>b<|endoftext|>"),
        ({"include_special_tokens": True, "stop": ["oftext"]}, "a<|start"),
        ({"stop": ["oftext"]}, "ab"),
    ],
)
def test_the_text_of_special_tokens_is_kept_where_it_is_asked_for(options: dict[str, Any], shown: str) -> None:
    """That of the token which ends the output goes with the stop."""
    text = OutputText(GenerateRequest(context_id="c", **options), echo_text(), PROMPT)
    told_text = ""
    for token in (ord("a"), EOS_ID + 1, ord("b"), EOS_ID):
        piece, finish, _ = text.take(token)
        told_text += piece
        if finish is not None:
            break
    assert told_text == shown
    assert finish is FinishReason.STOP
