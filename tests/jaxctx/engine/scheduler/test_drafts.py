"""Drafts change nothing but the number of steps: every test compares with runs that have none."""

import asyncio
import random
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.compiled_model import ONE_ROW
from jaxctx.engine.scheduler.drafts import share_spare_rows
from jaxctx.engine.scheduler.prompt_lookup import MIN_NGRAM, MIN_NGRAM_ALONE, PromptLookup
from jaxctx.types import FinishReason, GeneratePiece, GenerateRequest, SamplingParams
from tests.engines import SMALL, context_info, tokens_of
from tests.jaxctx.engine.echo_generation import GREEDY, ME, PROMPTS, collect, fresh, greedy, oracle
from tests.jaxctx.engine.oracle_drafter import oracle_drafter

NONE = replace(SMALL, draft_tokens=0)


async def test_guesses_are_not_free_for_a_row_that_is_cheaper_alone(make_engine, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(PromptLookup, "guess", lambda self, context, count, least: asked.append((count, least)) or [])
    engine = make_engine()
    one, other = [await fresh(engine, PROMPTS[length]) for length in (15, 17)]
    await greedy(engine, one, 9)
    assert {least for _, least in asked} == {MIN_NGRAM_ALONE if ONE_ROW else MIN_NGRAM}
    await asyncio.gather(greedy(engine, one, 40), greedy(engine, other, 40))
    assert {least for _, least in asked} == ({MIN_NGRAM, MIN_NGRAM_ALONE} if ONE_ROW else {MIN_NGRAM})


@pytest.mark.parametrize(
    ("guesses", "rows", "expected"),
    [
        ([], 3, []),
        ([[1, 2, 3, 4]], 3, [[1, 2, 3]]),
        ([[1, 2, 3], [], [4, 5, 6]], 3, [[1, 2], [], [4]]),
        ([[1], [2, 3, 4, 5]], 4, [[1], [2, 3, 4]]),
        ([[1], [2], [3]], 2, [[1], [2], []]),
    ],
)
def test_rows_are_shared(guesses, rows, expected) -> None:
    assert share_spare_rows(guesses, rows) == expected


@pytest.mark.parametrize("drafts", range(17))
async def test_greedy_equals_the_oracle_for_any_number_of_drafts(make_engine, monkeypatch, drafts: int) -> None:
    monkeypatch.setattr(PromptLookup, "guess", oracle_drafter(random.Random(drafts), right=0.8))
    monkeypatch.setattr(EngineConfig, "padding", lambda self, rows: 24 - rows)
    engine = make_engine(replace(SMALL, draft_tokens=drafts))
    for length in PROMPTS:
        context_id = await fresh(engine, PROMPTS[length])
        assert await greedy(engine, context_id, 37) == oracle(PROMPTS[length], 37)
        assert await tokens_of(engine, context_id) == PROMPTS[length] + oracle(PROMPTS[length], 37)
        info = await context_info(engine, ME, context_id)
        assert (info.seq_len, info.buffered_tokens) == (length + 36, 1)
        assert await greedy(engine, context_id, 5) == oracle([*PROMPTS[length], *oracle(PROMPTS[length], 37)], 5)
    stats = await engine.stats()
    assert stats.tokens_drafted >= stats.tokens_accepted >= min(drafts, 1)
    assert stats.tokens_computed + stats.tokens_cached >= sum(PROMPTS) + 41 * len(PROMPTS) - 2


async def test_right_guesses_save_steps_and_fill_only_padding(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(PromptLookup, "guess", oracle_drafter(random.Random(1), right=1))
    engine = make_engine()
    context_id = await fresh(engine, PROMPTS[17])
    before = await engine.stats()
    assert await greedy(engine, context_id, 41) == oracle(PROMPTS[17], 41)
    after = await engine.stats()
    assert after.steps - before.steps == 4  # of one row for the prompt's last token, then of sixteen, sixteen and eight
    assert after.tokens_accepted == after.tokens_drafted == 37
    assert after.compilations_after_ready == 0


async def test_neighbours_have_their_own_tokens(make_engine, monkeypatch) -> None:
    """Some are guessed right, some wrong, some not at all; the steps of all are shared."""
    foresee = oracle_drafter(random.Random(2), right=0.7)
    monkeypatch.setattr(
        PromptLookup,
        "guess",
        lambda self, context, count, least: foresee(self, context, count if context.length % 3 else 0),
    )
    engine = make_engine()
    ids = [await fresh(engine, PROMPTS[length]) for length in (1, 15, 17, 63, 65)]
    results = await asyncio.gather(*[greedy(engine, context_id, 40) for context_id in ids])
    for length, result in zip((1, 15, 17, 63, 65), results, strict=True):
        assert result == oracle(PROMPTS[length], 40)
    assert (await engine.stats()).tokens_accepted > 10


def told(pieces: list[GeneratePiece]) -> list[object]:
    """What a caller reads, however it was cut into pieces."""
    tokens, logprobs = [t for p in pieces for t in p.token_ids], [one for p in pieces for one in p.logprobs]
    last = pieces[-1]
    return ["".join(p.text for p in pieces), tokens, logprobs, last.finish, last.stop_match, last.usage]


REQUESTS = {
    "greedy": GenerateRequest(context_id="", max_tokens=30, sampling=GREEDY),
    "sampled": GenerateRequest(
        context_id="", max_tokens=30, sampling=SamplingParams(seed=5, temperature=0.7, top_p=0.9)
    ),
    "logprobs": GenerateRequest(context_id="", max_tokens=9, sampling=GREEDY, logprobs=True, top_logprobs=3),
    "one token": GenerateRequest(context_id="", max_tokens=1, sampling=GREEDY),
    "two tokens": GenerateRequest(context_id="", max_tokens=2, sampling=GREEDY),
    "stop token": GenerateRequest(
        context_id="", max_tokens=30, sampling=GREEDY, stop_token_ids=(oracle(PROMPTS[15], 12)[-1],)
    ),
    "penalties": GenerateRequest(
        context_id="", max_tokens=30, sampling=SamplingParams(temperature=0.0, frequency_penalty=0.5)
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_answers_are_those_of_a_run_without_drafts(make_engine, monkeypatch, name: str) -> None:
    undisturbed = make_engine(NONE)
    request = replace(REQUESTS[name], context_id=await fresh(undisturbed, PROMPTS[15]))
    expected = await collect(undisturbed, request)
    future = PROMPTS[15] + [token for piece in expected for token in piece.token_ids]
    rng = random.Random(3)

    def guess(self: PromptLookup, context, count: int, least: int) -> list[int]:
        """The future as it was, with a lie now and then, and too far."""
        return [t if rng.random() < 0.8 else t ^ 1 for t in [*future, 1, 2, 3][context.length :][:count]]

    monkeypatch.setattr(PromptLookup, "guess", guess)
    engine = make_engine()
    request = replace(request, context_id=await fresh(engine, PROMPTS[15]))
    pieces = await collect(engine, request)
    assert told(pieces) == told(expected)
    accepted = (await engine.stats()).tokens_accepted
    assert accepted == 0 if name in ("one token", "two tokens", "penalties") else accepted > 0


async def test_what_the_prompt_seems_to_promise_may_be_wrong(make_engine) -> None:
    engine = make_engine()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6] * 8
    told = oracle(tokens, 30)
    for known in range(6):  # the last tokens of the prompt begin what stood there before; echo goes on otherwise
        context_id = await fresh(engine, [*tokens, *told[:known], *tokens[:3]], salt=f"{known}")
        expected = oracle([*tokens, *told[:known], *tokens[:3]], 30)
        assert await greedy(engine, context_id, 30) == expected
    stats = await engine.stats()
    assert stats.tokens_accepted == 0


async def test_cancelled_between_drafts(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(PromptLookup, "guess", oracle_drafter(random.Random(4), right=0.5))
    engine = make_engine()
    for count in range(1, 12):
        context_id = await fresh(engine, PROMPTS[15], salt=f"{count}")
        request = GenerateRequest(context_id=context_id, max_tokens=400, sampling=GREEDY)
        stream = engine.generate(ME, request)
        got = [token for _ in range(count) for token in (await anext(stream)).token_ids]
        await stream.aclose()
        kept = (await tokens_of(engine, context_id))[15:]
        assert kept[: len(got)] == got == oracle(PROMPTS[15], len(got))
        assert kept == oracle(PROMPTS[15], len(kept))
        assert await greedy(engine, context_id, 7) == oracle([*PROMPTS[15], *kept], 7)
        await engine.close(ME, context_id)
    assert (await engine.stats()).pages_held == 0


async def test_a_fork_of_what_is_being_drafted(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(PromptLookup, "guess", oracle_drafter(random.Random(5), right=0.6))
    engine = make_engine()
    context_id = await fresh(engine, PROMPTS[15])
    task = asyncio.create_task(greedy(engine, context_id, 300))
    lengths = set()
    for _ in range(12):
        await asyncio.sleep(0.002)
        (fork,) = await engine.fork(ME, context_id)
        tokens = await tokens_of(engine, fork.context_id)
        assert tokens[15:] == oracle(PROMPTS[15], len(tokens) - 15) if len(tokens) > 15 else True
        assert await greedy(engine, fork.context_id, 6) == oracle(tokens, 6)
        lengths.add(len(tokens))
    assert await task == oracle(PROMPTS[15], 300)
    assert len(lengths) > 1


async def test_the_finish_is_told_once(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(PromptLookup, "guess", oracle_drafter(random.Random(6), right=1))
    engine = make_engine()
    context_id = await fresh(engine, PROMPTS[17])
    stop = oracle(PROMPTS[17], 6)[-1]
    request = GenerateRequest(context_id=context_id, max_tokens=50, sampling=GREEDY, stop_token_ids=(stop,))
    pieces = await collect(engine, request)
    assert [p.finish for p in pieces if p.finish] == [FinishReason.STOP]
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == oracle(PROMPTS[17], len(tokens))
    assert tokens[-1] == stop
    assert (await context_info(engine, ME, context_id)).seq_len == 17 + len(tokens) - 1
