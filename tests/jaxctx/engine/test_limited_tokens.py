"""Outputs of certain tokens only, on the echo model: `allowed_token_ids` and `bad_words`. Neighbours are unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.grammar.mask_worker import MaskWorker
from jaxctx.engine.interface import Caller
from jaxctx.errors import FailedPrecondition, InvalidArgument
from jaxctx.types import CreateContextRequest, GenerateRequest, OutputFormat, SamplingParams
from tests.echo import EOS_ID
from tests.engines import SMALL, MakeEngine
from tests.jaxctx.engine.echo_generation import PROMPTS, fresh, greedy, oracle

ME = Caller()
PROMPT = PROMPTS[17]
X, Y, Q, Z = (ord(letter) for letter in "xyqz")  # which are in no other token
LETTERS = [X, Y, Q]


def limited(seed: int = 0, **limits: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "temperature": 5.0, "allowed_token_ids": LETTERS, **limits})


async def tokens_of(
    engine: LocalEngine, sampling: SamplingParams, prompt: Sequence[int] = PROMPT, priority: int = 0, **settings: Any
) -> list[int]:
    info = await engine.create(ME, CreateContextRequest(priority=priority))
    await engine.fill(ME, info.context_id, prompt, defer=True)
    request = GenerateRequest(context_id=info.context_id, sampling=sampling, **{"max_tokens": 40, **settings})
    return [token async for piece in engine.generate(ME, request) for token in piece.token_ids]


def has(tokens: Sequence[int], word: str) -> bool:
    return word in "".join(map(chr, tokens))


async def test_only_allowed_tokens_come(engine: LocalEngine) -> None:
    outputs = [await tokens_of(engine, limited(seed)) for seed in range(4)]
    assert {len(each) for each in outputs} == {40}
    assert {token for each in outputs for token in each} == set(LETTERS)
    assert await tokens_of(engine, limited(temperature=0.0, allowed_token_ids=[X], logit_bias={Y: 100.0})) == [X] * 40


async def test_an_end_of_sequence_comes_if_it_is_allowed(engine: LocalEngine) -> None:
    ends = limited(allowed_token_ids=[X, EOS_ID], logit_bias={EOS_ID: 100.0})
    assert await tokens_of(engine, ends) == [EOS_ID]
    assert await tokens_of(engine, ends, min_tokens=3) == [X, X, X, EOS_ID]
    assert await tokens_of(engine, ends, ignore_eos=True, max_tokens=3) == [EOS_ID] * 3
    never = limited(allowed_token_ids=[X], logit_bias={EOS_ID: 100.0})
    assert await tokens_of(engine, never, max_tokens=3) == [X] * 3


async def test_an_output_of_ends_alone_goes_on_until_min_tokens(engine: LocalEngine) -> None:
    assert await tokens_of(engine, limited(allowed_token_ids=[EOS_ID]), min_tokens=3) == [EOS_ID] * 4


async def test_a_bad_word_never_comes(engine: LocalEngine) -> None:
    free = [await tokens_of(engine, limited(seed)) for seed in range(4)]
    assert any(has(each, "xyq") for each in free)
    assert any(has(each, "yy") for each in free)
    held = [await tokens_of(engine, limited(seed, bad_words=["xyq", "yy"])) for seed in range(4)]
    assert not any(has(each, "xyq") or has(each, "yy") for each in held)
    assert any(has(each, "xy") for each in held)
    assert Q not in await tokens_of(engine, limited(bad_words=["q"]))


async def test_a_bad_word_that_the_prompt_begins_may_be_ended(engine: LocalEngine) -> None:
    """The rule is about the output, as in vLLM."""
    assert await tokens_of(engine, limited(allowed_token_ids=[Y], bad_words=["xy"]), [*PROMPT, X]) == [Y] * 40


async def test_tokens_that_may_come_anywhere_are_not_asked_for_again(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    submit = MaskWorker.submit

    def note(worker: MaskWorker, *call: Any) -> None:
        asked.append(call)
        submit(worker, *call)

    monkeypatch.setattr(MaskWorker, "submit", note)
    await tokens_of(engine, limited(bad_words=["q"]))
    assert not asked
    await tokens_of(engine, limited(bad_words=["xq"]))
    assert asked


async def test_neighbours_are_unchanged_and_nothing_is_compiled(engine: LocalEngine) -> None:
    neighbours = [asyncio.create_task(greedy(engine, await fresh(engine, PROMPTS[n]), 60)) for n in (15, 64)]
    settings = [limited(1), limited(2, bad_words=["xyq"]), limited(3, allowed_token_ids=[Q, Y])]
    mixed = await asyncio.gather(*[tokens_of(engine, each) for each in settings])
    assert [await each for each in neighbours] == [oracle(PROMPTS[n], 60) for n in (15, 64)]
    assert mixed == [await tokens_of(engine, each) for each in settings]
    assert (await engine.stats()).compilations_after_ready == 0


@pytest.mark.parametrize("words", [[], ["xyq"]], ids=["allowed", "bad words"])
async def test_an_output_that_is_cut_and_resumed_is_the_same(engine: LocalEngine, words: list[str]) -> None:
    whole = await tokens_of(engine, limited(2, bad_words=words))
    for cut in (1, 2, 17, 39):
        rest = await tokens_of(engine, limited(2, bad_words=words), [*PROMPT, *whole[:cut]], resume_tokens=cut)
        assert rest == whole[cut:], cut


@pytest.mark.parametrize("words", [[], ["xyq"]], ids=["allowed", "bad words"])
async def test_a_preempted_output_goes_on_as_it_was(make_engine: MakeEngine, words: list[str]) -> None:
    engine = make_engine(replace(SMALL, max_batch=2))
    settings = [limited(1, bad_words=words), limited(2, bad_words=words)]
    alone = [await tokens_of(engine, each, max_tokens=90) for each in settings]
    before = (await engine.stats()).preemptions
    running = [asyncio.create_task(tokens_of(engine, each, max_tokens=90)) for each in settings]
    for _ in range(8):
        await asyncio.sleep(0.02)
        urgent = await tokens_of(engine, limited(allowed_token_ids=[Z]), PROMPTS[15], 9, max_tokens=3)
        assert urgent == [Z] * 3  # its mask is in a slot that one of the others takes again
    assert [await each for each in running] == alone
    assert (await engine.stats()).preemptions > before


async def test_each_of_several_outputs_has_rules_of_its_own(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPT)
    sampling = limited(5, bad_words=["xyq"])
    request = GenerateRequest(context_id=context_id, n=5, sampling=sampling, max_tokens=40)
    outputs: list[list[int]] = [[] for _ in range(5)]
    async for piece in engine.generate(ME, request):
        outputs[piece.index] += piece.token_ids
    assert len({tuple(each) for each in outputs}) == 5
    assert not any(has(each, "xyq") for each in outputs)
    assert outputs[0] == await tokens_of(engine, sampling)


async def test_a_format_and_allowed_tokens_leave_what_both_allow(engine: LocalEngine) -> None:
    both = limited(allowed_token_ids=[X, Q], bad_words=["xx"])
    tokens = await tokens_of(engine, both, output_format=OutputFormat(regex="[xy]q(x|y){1}"))
    assert tokens == [X, Q, X, EOS_ID]


async def test_an_output_for_which_nothing_is_left_ends_alone(engine: LocalEngine) -> None:
    neighbour = asyncio.create_task(tokens_of(engine, limited(1)))
    with pytest.raises(FailedPrecondition, match="leave no token"):
        await tokens_of(engine, limited(allowed_token_ids=[X], bad_words=["xx"]))
    assert await neighbour == await tokens_of(engine, limited(1))


async def test_rules_that_allow_nothing_are_refused(engine: LocalEngine) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await tokens_of(engine, limited(allowed_token_ids=[X], bad_words=["x"]))
    assert [each.field for each in raised.value.violations] == ["sampling.allowed_token_ids"]
    assert (await engine.stats()).running == 0


async def test_a_slot_does_not_inherit_the_limits_of_its_former_owner(engine: LocalEngine) -> None:
    await tokens_of(engine, limited())
    assert await greedy(engine, await fresh(engine, PROMPTS[17]), 10) == oracle(PROMPTS[17], 10)
