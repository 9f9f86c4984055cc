"""Outputs with a format, on the echo model: they have it, whatever else is asked for. Neighbours are unchanged."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.grammar.matcher import OutputMatcher
from jaxctx.engine.interface import Caller
from jaxctx.errors import FailedPrecondition, Internal, InvalidArgument, JaxctxError, ResourceExhausted
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.text import load_text
from jaxctx.model.weights import load_model
from jaxctx.types import (
    CreateContextRequest,
    FinishReason,
    GeneratePiece,
    GenerateRequest,
    OutputFormat,
    SamplingParams,
)
from tests.echo import EOS_ID, echo_logprobs, pairs_text
from tests.engines import SMALL, MakeEngine, context_info, tokens_of
from tests.jaxctx.engine.echo_generation import GREEDY, PROMPTS, fresh, greedy, oracle
from tests.jaxctx.engine.grammar.hostile import CRASHING, ENDLESS, WRONG

ME = Caller()
PROMPT = PROMPTS[17]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "kind": {"enum": ["a", "b", "ö"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}
BY_SCHEMA = OutputFormat(json_schema=json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}))
CHOICES = OutputFormat(choices=["yes", "no", "😀 maybe", "y"])
PATTERN = r"[a-f]{1,5}-[0-9]{3}(ü|\n)?"
ANYTHING = OutputFormat(grammar="start: <[*]>*")


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
    def finish(self) -> FinishReason | None:
        return self.pieces[-1].finish


async def told(
    engine: LocalEngine, tokens: Sequence[int] = PROMPT, caller: Caller = ME, priority: int = 0, **settings: Any
) -> Told:
    info = await engine.create(caller, CreateContextRequest(priority=priority))
    await engine.fill(caller, info.context_id, tokens, defer=True)
    request = GenerateRequest(context_id=info.context_id, **settings)
    return Told([piece async for piece in engine.generate(caller, request)])


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed)


async def of_seeds(engine: LocalEngine, output_format: OutputFormat, count: int = 24) -> list[Told]:
    """Outputs of different seeds, all at once, at temperature 1; those that ended by themselves."""
    asked = [told(engine, sampling=seeded(seed), output_format=output_format, max_tokens=150) for seed in range(count)]
    ended = [each for each in await asyncio.gather(*asked) if each.finish is FinishReason.STOP]
    assert len(ended) > count // 3  # else this tests nothing
    return ended


async def test_outputs_by_a_schema_are_valid(engine: LocalEngine) -> None:
    for output in await of_seeds(engine, BY_SCHEMA):
        jsonschema.validate(json.loads(output.text), SCHEMA)
        assert output.pieces[-1].stop_match == EOS_ID


async def test_json_objects_are_objects(engine: LocalEngine) -> None:
    for output in await of_seeds(engine, OutputFormat(json_object=True)):
        assert isinstance(json.loads(output.text), dict)


async def test_outputs_match_a_regex_as_a_whole(engine: LocalEngine) -> None:
    for output in await of_seeds(engine, OutputFormat(regex=PATTERN)):
        assert re.fullmatch(PATTERN, output.text)


async def test_outputs_are_one_of_the_choices(engine: LocalEngine) -> None:
    texts = {output.text for output in await of_seeds(engine, CHOICES)}
    assert texts <= set(CHOICES.choices or ())
    assert len(texts) > 1


async def test_outputs_follow_a_grammar(engine: LocalEngine) -> None:
    lark = 'start: "call " NAME <|im_start|> args\nNAME: /[xyz]{2}/\nargs: %json {"enum": [1, [true]]}'
    for output in await of_seeds(engine, OutputFormat(grammar=lark)):
        assert re.fullmatch(r"call [xyz]{2}(1|\[ *true *\])", re.sub(r"\s", " ", output.text))


async def test_neighbours_are_unchanged_and_nothing_is_compiled(engine: LocalEngine) -> None:
    neighbours = [asyncio.create_task(greedy(engine, await fresh(engine, PROMPTS[n]), 60)) for n in (15, 64)]
    constrained = [told(engine, sampling=seeded(n), output_format=BY_SCHEMA, max_tokens=100) for n in range(5)]
    free = [told(engine, sampling=seeded(n), max_tokens=40, ignore_eos=True) for n in range(5)]
    mixed = await asyncio.gather(*constrained, *free)
    assert [await each for each in neighbours] == [oracle(PROMPTS[n], 60) for n in (15, 64)]
    alone = [await told(engine, sampling=seeded(n), output_format=BY_SCHEMA, max_tokens=100) for n in range(5)]
    alone += [await told(engine, sampling=seeded(n), max_tokens=40, ignore_eos=True) for n in range(5)]
    assert [each.tokens for each in mixed] == [each.tokens for each in alone]
    assert (await engine.stats()).compilations_after_ready == 0


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(seed=3),
        SamplingParams(seed=4, temperature=0.7, top_p=0.8, top_k=50, repetition_penalty=1.3, frequency_penalty=0.5),
    ],
    ids=["greedy", "seeded", "penalties"],
)
async def test_a_grammar_that_allows_everything_changes_nothing(engine: LocalEngine, sampling: SamplingParams) -> None:
    for length in (1, 64):
        free = await told(engine, PROMPTS[length], sampling=sampling, max_tokens=60)
        held = await told(engine, PROMPTS[length], sampling=sampling, max_tokens=60, output_format=ANYTHING)
        assert (held.tokens, held.text, held.finish) == (free.tokens, free.text, free.finish)


async def test_log_probabilities_are_the_models_own(engine: LocalEngine) -> None:
    output = await told(engine, sampling=seeded(1), output_format=CHOICES, logprobs=True, top_logprobs=2)
    before = list(PROMPT)
    for token, logprob in zip(output.tokens, [each for piece in output.pieces for each in piece.logprobs], strict=True):
        expected = echo_logprobs(before)
        assert logprob.logprob == pytest.approx(float(expected[token]), abs=1e-3)
        assert logprob.top[0][0] == int(np.argmax(expected))
        before.append(token)


async def test_each_of_several_outputs_has_a_matcher_of_its_own(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPT)
    request = GenerateRequest(context_id=context_id, n=6, sampling=seeded(5), output_format=BY_SCHEMA, max_tokens=150)
    pieces = [piece async for piece in engine.generate(ME, request)]
    texts = ["".join(piece.text for piece in pieces if piece.index == index) for index in range(6)]
    assert len(set(texts)) == 6
    for index, text in enumerate(texts):
        last = [piece for piece in pieces if piece.index == index][-1]
        assert last.finish is FinishReason.STOP
        jsonschema.validate(json.loads(text), SCHEMA)
        assert last.seed is not None
        assert (await told(engine, sampling=seeded(last.seed), output_format=BY_SCHEMA, max_tokens=150)).text == text


async def test_an_output_that_is_cut_and_resumed_is_the_same(engine: LocalEngine) -> None:
    settings: dict[str, Any] = {"sampling": seeded(2), "output_format": BY_SCHEMA, "max_tokens": 120}
    whole = await told(engine, **settings)
    assert whole.finish is FinishReason.STOP
    for cut in range(1, len(whole.tokens)):
        rest = await told(engine, [*PROMPT, *whole.tokens[:cut]], resume_tokens=cut, **settings)
        assert (rest.tokens, rest.finish) == (whole.tokens[cut:], FinishReason.STOP), cut


async def test_tokens_that_do_not_have_the_format_are_not_resumed(engine: LocalEngine) -> None:
    tokens = [*PROMPT, ord("y"), ord("x")]
    with pytest.raises(FailedPrecondition, match="output_format"):
        await told(engine, tokens, resume_tokens=2, output_format=CHOICES, max_tokens=9)
    rest = await told(engine, tokens[:-1], resume_tokens=1, output_format=CHOICES, max_tokens=9)
    assert "y" + rest.text in ("yes", "y")


async def test_a_preempted_output_goes_on_as_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(SMALL, max_batch=2))
    settings: dict[str, Any] = {"output_format": OutputFormat(regex="[xyz]{90}"), "max_tokens": 100}
    alone = [await told(engine, sampling=seeded(n), **settings) for n in range(2)]
    before = (await engine.stats()).preemptions
    running = [asyncio.create_task(told(engine, sampling=seeded(n), **settings)) for n in range(2)]
    urgent = []
    for _ in range(8):
        await asyncio.sleep(0.02)
        urgent.append(await told(engine, PROMPTS[15], priority=9, sampling=GREEDY, max_tokens=3, ignore_eos=True))
    assert [(await each).tokens for each in running] == [each.tokens for each in alone]
    assert (await engine.stats()).preemptions > before
    assert {tuple(each.tokens) for each in urgent} == {tuple(oracle(PROMPTS[15], 3))}


HARD: dict[str, dict[str, Any]] = {
    "min_tokens beyond the end": {"min_tokens": 20},
    "ignored ends": {"ignore_eos": True},
    "both": {"min_tokens": 20, "ignore_eos": True},
    "biases against the format": {
        "sampling": SamplingParams(logit_bias={ord("x"): -100.0, ord("q"): 100.0, EOS_ID: -100.0})
    },
    "penalties": {"sampling": SamplingParams(repetition_penalty=10.0, frequency_penalty=2.0, presence_penalty=2.0)},
    "filters": {"sampling": SamplingParams(top_k=1, top_p=0.01, min_p=1.0)},
    "greedy": {"sampling": GREEDY},
    "a stop token that must come before min_tokens": {"min_tokens": 20, "stop_token_ids": [ord("x")]},
}


@pytest.mark.parametrize("name", HARD)
async def test_the_format_wins_where_nothing_else_can_follow(engine: LocalEngine, name: str) -> None:
    output = await told(engine, output_format=OutputFormat(choices=["xxq"]), max_tokens=30, **HARD[name])
    assert (output.text, output.finish) == ("xxq", FinishReason.STOP)
    assert output.tokens == [ord("x"), ord("x"), ord("q"), EOS_ID]


async def test_an_ignored_end_comes_only_where_the_text_cannot_go_on(engine: LocalEngine) -> None:
    for seed in range(5):
        output = await told(
            engine,
            output_format=OutputFormat(regex="[xyz]{0,9}"),
            sampling=seeded(seed),
            ignore_eos=True,
            max_tokens=30,
        )
        assert (len(output.text), output.finish) == (9, FinishReason.STOP)
        early = await told(
            engine, output_format=OutputFormat(regex="[xyz]{0,9}"), sampling=seeded(seed), min_tokens=5, max_tokens=30
        )
        assert 5 <= len(early.text) <= 9


async def test_other_ends_leave_the_beginning_of_a_text(engine: LocalEngine) -> None:
    cut = await told(engine, output_format=OutputFormat(choices=["xyzq"]), max_tokens=2)
    assert (cut.text, cut.finish) == ("xy", FinishReason.LENGTH)
    stopped = await told(engine, output_format=OutputFormat(choices=["xyzq"]), stop=["yz"])
    assert (stopped.text, stopped.finish, stopped.pieces[-1].stop_match) == ("x", FinishReason.STOP, "yz")
    by_token = await told(engine, output_format=OutputFormat(choices=["xyzq"]), stop_token_ids=[ord("z")])
    assert (by_token.text, by_token.finish, by_token.pieces[-1].stop_match) == ("xy", FinishReason.STOP, ord("z"))


@pytest.mark.parametrize("name", [*list(WRONG)[::4], *CRASHING])
async def test_a_wrong_format_changes_nothing(engine: LocalEngine, name: str) -> None:
    output_format = CRASHING[name] if name in CRASHING else WRONG[name][0]
    context_id = await fresh(engine, PROMPT)
    before = await context_info(engine, ME, context_id)
    for n in (1, 3):
        with pytest.raises(InvalidArgument) as refused:
            async for _ in engine.generate(
                ME, GenerateRequest(context_id=context_id, n=n, output_format=output_format)
            ):
                pass
        assert refused.value.violations[0].field.startswith("output_format.")
    after = await context_info(engine, ME, context_id)
    assert replace(after, used_at=before.used_at) == before
    assert await greedy(engine, context_id, 5) == oracle(PROMPT, 5)


async def test_a_format_that_is_never_done_stops_no_stream(engine: LocalEngine) -> None:
    engine.grammars._trials._timeout_s = 5.0  # a hundred steps take longer than one second where others want the cores
    slow = asyncio.create_task(told(engine, caller=Caller("other"), output_format=ENDLESS["a conjunction of many"]))
    await asyncio.sleep(0.05)
    assert await greedy(engine, await fresh(engine, PROMPT), 100) == oracle(PROMPT, 100)
    assert (await told(engine, output_format=CHOICES)).text in (CHOICES.choices or ())
    assert not slow.done()
    with pytest.raises(InvalidArgument, match="too much memory"):
        await slow


async def test_cancelling_while_a_format_is_read(engine: LocalEngine) -> None:
    engine.grammars._trials._timeout_s = 1.0
    slow = asyncio.create_task(told(engine, output_format=ENDLESS["a conjunction of many"]))
    await asyncio.sleep(0.1)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert (await engine.stats()).running == (await engine.stats()).waiting == 0


async def test_leaving_in_the_middle_frees_everything(engine: LocalEngine) -> None:
    for length in (1, 2, 7):
        context_id = await fresh(engine, PROMPT)
        request = GenerateRequest(context_id=context_id, output_format=OutputFormat(regex="[xyz]{500}"), max_tokens=600)
        pieces = engine.generate(ME, request)
        tokens: list[int] = []
        async for piece in pieces:
            tokens += piece.token_ids
            if len(tokens) >= length:
                break
        await pieces.aclose()  # type: ignore[attr-defined]
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.pages_reserved) == (0, 0, 0)


@pytest.mark.parametrize(
    "error",
    [ResourceExhausted("too much", reason="GRAMMAR_LIMIT"), RuntimeError("a defect")],
    ids=["a limit", "a defect"],
)
async def test_a_matcher_that_fails_ends_its_output_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    mask = OutputMatcher.mask

    def failing(matcher: OutputMatcher) -> np.ndarray:
        if matcher._tokens == 4 and matcher._end_rules.min_tokens == 1:
            raise error
        return mask(matcher)

    monkeypatch.setattr(OutputMatcher, "mask", failing)
    context_id = await fresh(engine, PROMPT)
    others = [asyncio.create_task(told(engine, sampling=seeded(n), output_format=BY_SCHEMA)) for n in range(3)]
    request = GenerateRequest(context_id=context_id, min_tokens=1, output_format=OutputFormat(regex="[xyz]{9}"))
    tokens: list[int] = []
    with pytest.raises(JaxctxError) as failed:
        async for piece in engine.generate(ME, request):
            tokens += piece.token_ids
    assert isinstance(failed.value, Internal if isinstance(error, RuntimeError) else ResourceExhausted)
    assert await tokens_of(engine, context_id) == PROMPT + tokens
    assert len(tokens) == 4
    for other in others:
        jsonschema.validate(json.loads((await other).text), SCHEMA)
    await greedy(engine, context_id, 3)


async def test_a_model_that_allows_no_formats_says_so(make_engine: MakeEngine, echo_served: Any) -> None:
    engine = make_engine(served=replace(echo_served, text=pairs_text()))
    with pytest.raises(FailedPrecondition) as refused:
        await told(engine, output_format=CHOICES)
    assert refused.value.reason == "NO_OUTPUT_FORMAT"
    assert await greedy(engine, await fresh(engine, PROMPT), 5) == oracle(PROMPT, 5)


async def test_a_stop_ends_outputs_whose_masks_are_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    running = [
        asyncio.create_task(told(engine, output_format=OutputFormat(regex="[xyz]{900}"), max_tokens=1000))
        for _ in range(4)
    ]
    await asyncio.sleep(0.3)
    await asyncio.to_thread(engine.stop)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, JaxctxError) and result.code == "UNAVAILABLE" for result in results)


@pytest.mark.slow
async def test_the_bundled_model_keeps_to_formats_in_its_own_tokens(make_engine: MakeEngine, echo_served: Any) -> None:
    loaded, text = load_model(BUNDLED, dtype="float32"), load_text(BUNDLED)
    served = replace(
        echo_served, model=loaded.model, params=loaded.params, text=text, revision="bundled", dtype="float32"
    )
    engine = make_engine(served=served, device_config=SMALL, whole=False)
    prompt = text.tokenizer.encode("Once upon a time")
    schema, regex = (
        [told(engine, prompt, sampling=seeded(seed), output_format=each, max_tokens=200) for seed in range(8)]
        for each in (BY_SCHEMA, OutputFormat(regex=PATTERN))
    )
    ended = 0
    for output in await asyncio.gather(*schema):
        if output.finish is FinishReason.STOP:
            jsonschema.validate(json.loads(output.text), SCHEMA)
            ended += 1
    assert ended >= 6
    for output in await asyncio.gather(*regex):
        assert re.fullmatch(PATTERN, output.text)
        assert output.pieces[-1].stop_match in text.eos_ids
