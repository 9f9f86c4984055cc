"""A draft model changes nothing but the number of steps: tokens are those of echo's oracle, or of a run without it.

Echo's next token is a hash of every token before it, read from the pages. So a draft model that is the served model is
right each time, unless a page of its own is wrong, stale or lost.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.output_stream import ResultFuture
from jaxctx.engine.core.request import Request
from jaxctx.engine.drafting.draft_model import DraftRound
from jaxctx.engine.drafting.sizes import draft_config
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import DeadlineExceeded
from jaxctx.types import (
    CreateContextRequest,
    FinishReason,
    ForwardRequest,
    GeneratePiece,
    GenerateRequest,
    OpenRequest,
    SamplingParams,
    SaveRequest,
)
from tests.engines import SMALL, context_info, make_draft_model, on_demand, tokens_of
from tests.jaxctx.engine.drafting.lying_echo import lying_echo
from tests.jaxctx.engine.echo_generation import GREEDY, ME, PROMPTS, collect, fresh, greedy, oracle
from tests.jaxctx.engine.test_traces import Actor

TWIN, LIAR, ENEMY = lying_echo(0), lying_echo(5), lying_echo(1)
SAMPLED = SamplingParams(seed=5, temperature=0.7, top_p=0.9)


async def model_drafts(engine: LocalEngine) -> tuple[int, int]:
    """Tokens that the draft model guessed, and how many of them were right."""
    stats = await engine.stats()
    return stats.tokens_drafted_by_model, stats.tokens_accepted_by_model


async def held_pages(engine: LocalEngine) -> int:
    """Pages that sequences of the draft model hold."""
    assert engine.core.draft_model is not None
    stats = await engine.loop.call(engine.core.draft_model.sequences.block_manager.stats)
    return stats.pages_held


async def test_a_draft_model_that_is_the_served_model_is_always_right(make_engine) -> None:
    engine = make_engine(draft=TWIN)
    for length in PROMPTS:
        context_id = await fresh(engine, PROMPTS[length])
        assert await greedy(engine, context_id, 80) == oracle(PROMPTS[length], 80)
        assert await tokens_of(engine, context_id) == PROMPTS[length] + oracle(PROMPTS[length], 80)
    drafted, accepted = await model_drafts(engine)
    assert drafted == accepted > 60 * len(PROMPTS)
    stats = await engine.stats()
    assert stats.tokens_drafted == drafted  # echo repeats nothing
    assert stats.compilations_after_ready == 0
    assert stats.steps < 40 * len(PROMPTS)  # 80 without drafts, and more for the prompt
    assert await held_pages(engine) == 0


def told(pieces: Sequence[GeneratePiece]) -> tuple[object, ...]:
    """What a caller reads, however it was cut into pieces."""
    return tokens_in(pieces), "".join(piece.text for piece in pieces), pieces[-1].finish, pieces[-1].usage


def tokens_in(pieces: Sequence[GeneratePiece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def logprobs_in(pieces: Sequence[GeneratePiece]) -> list[float]:
    return [each.logprob for piece in pieces for each in piece.logprobs]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(seed=1, temperature=1.3),
        SamplingParams(seed=2, temperature=0.8, top_k=9),
        SamplingParams(seed=2**63 + 3, temperature=0.9, top_p=0.6),
        SamplingParams(seed=4, temperature=1.0, min_p=0.2),
        SamplingParams(seed=5, temperature=1.1, top_k=200, top_p=0.8, min_p=0.01),
    ],
    ids=map(str, range(6)),
)
@pytest.mark.parametrize("draft", [TWIN, LIAR, ENEMY], ids=["twin", "liar", "enemy"])
async def test_tokens_are_those_without_a_draft_model(make_engine, sampling, draft) -> None:
    request = GenerateRequest(context_id="", max_tokens=60, sampling=sampling, logprobs=True, top_logprobs=2)
    alone = make_engine()
    expected = await collect(alone, replace(request, context_id=await fresh(alone, PROMPTS[17])))
    drafting = make_engine(draft=draft)
    pieces = await collect(drafting, replace(request, context_id=await fresh(drafting, PROMPTS[17])))
    assert told(pieces) == told(expected)
    # A step of one row adds in another order than one of sixteen.
    assert logprobs_in(pieces) == pytest.approx(logprobs_in(expected), abs=1e-5)
    drafted, accepted = await model_drafts(drafting)
    if draft is TWIN:
        assert drafted == accepted > 40
    elif draft is LIAR:
        assert drafted > accepted > 10
    else:
        # A step or two for each pause: guesses that are never right become rare. Some are right by chance.
        assert accepted < 10
        assert 3 <= drafted < 30


async def test_forked_rewound_and_opened_by_another_engine_it_goes_on_as_if_nothing_were(make_engine, tmp_path) -> None:
    """The draft model's pages are of the process alone: a context that is opened is caught up with from its tokens."""
    store = tmp_path.as_uri()
    engine = make_engine(draft=LIAR, store=store)
    prompt, expected = PROMPTS[17], oracle(PROMPTS[17], 60)
    context_id = await fresh(engine, prompt)
    assert await greedy(engine, context_id, 30) == expected[:30]
    (fork,) = await engine.fork(ME, context_id)
    await engine.save(ME, SaveRequest(context_id=context_id, name="kept", durable=True))
    assert await greedy(engine, fork.context_id, 30) == expected[30:]
    await engine.rewind(ME, fork.context_id, len(prompt) + 10)
    assert await greedy(engine, fork.context_id, 50) == expected[10:]

    restarted = make_engine(draft=LIAR, store=store)
    opened = (await restarted.open(ME, OpenRequest(name="kept"))).context
    assert opened.context_id not in (context_id, fork.context_id)
    assert await greedy(restarted, opened.context_id, 30) == expected[30:]
    drafted, accepted = await model_drafts(restarted)
    assert drafted > accepted > 5
    for each in (engine, restarted):
        assert await held_pages(each) == 0


async def test_neighbours_are_drafted_together(make_engine) -> None:
    engine = make_engine(draft=LIAR)
    lengths = (1, 15, 17, 63, 500)
    ids = [await fresh(engine, PROMPTS[length]) for length in lengths]
    results = await asyncio.gather(*[greedy(engine, context_id, 90) for context_id in ids])
    for length, result in zip(lengths, results, strict=True):
        assert result == oracle(PROMPTS[length], 90)
    drafted, accepted = await model_drafts(engine)
    assert drafted > accepted > 100


async def test_full_steps_leave_no_rows_for_guesses(make_engine) -> None:
    config = replace(SMALL, max_batch=16, max_batch_tokens=16)
    engine = make_engine(config, draft=TWIN)
    prompts = [[number, *PROMPTS[15]] for number in range(16)]
    ids = [await fresh(engine, prompt) for prompt in prompts]
    results = await asyncio.gather(*[greedy(engine, context_id, 40) for context_id in ids])
    assert results == [oracle(prompt, 40) for prompt in prompts]
    assert (await engine.stats()).compilations_after_ready == 0


async def test_a_prompt_is_caught_up_with_in_pieces_and_found_again(make_engine) -> None:
    engine = make_engine(draft=TWIN)
    prompt = [(11 * i) % 251 for i in range(400)]
    context_id = await fresh(engine, prompt)
    assert await greedy(engine, context_id, 40) == oracle(prompt, 40)
    assert engine.core.draft_model.sequences.block_manager.index.cached >= 25
    before = await model_drafts(engine)
    steps = (await engine.stats()).steps
    (fork,) = await engine.fork(ME, context_id)  # its pages are found by their tokens: guesses begin at once
    tokens = prompt + oracle(prompt, 40)
    assert await greedy(engine, fork.context_id, 40) == oracle(tokens, 40)
    drafted, accepted = await model_drafts(engine)
    assert drafted - before[0] == accepted - before[1] >= 30
    assert (await engine.stats()).steps - steps < 14


async def test_tenants_do_not_find_each_others_pages(make_engine) -> None:
    engine = make_engine(draft=TWIN)
    sequences = engine.core.draft_model.sequences
    for tenant in ("a", "b"):
        caller = Caller(tenant)
        info = await engine.create(caller, CreateContextRequest())
        await engine.fill(caller, info.context_id, PROMPTS[500])
        request = GenerateRequest(context_id=info.context_id, max_tokens=40, sampling=GREEDY)
        assert len(tokens_in([piece async for piece in engine.generate(caller, request)])) == 40
    assert sequences.block_manager.index.cached >= 2 * (500 // 16)


async def test_a_full_pool_means_fewer_drafts_and_nothing_else(make_engine) -> None:
    engine = make_engine(draft=TWIN, draft_kv_tokens=7 * 16)  # for one of the requests, and not all of that
    lengths = (63, 64, 65)
    ids = [await fresh(engine, PROMPTS[length]) for length in lengths]
    results = await asyncio.gather(*[greedy(engine, context_id, 120) for context_id in ids])
    for length, result in zip(lengths, results, strict=True):
        assert result == oracle(PROMPTS[length], 120)
    drafted, accepted = await model_drafts(engine)
    assert drafted == accepted > 0
    assert await held_pages(engine) == 0


async def test_no_drafts_beyond_the_draft_models_positions(make_engine) -> None:
    engine = make_engine(draft=lying_echo(0, max_positions=100))
    assert engine.core.draft_model.sequences.config.max_context_tokens == 100
    context_id = await fresh(engine, PROMPTS[63])
    assert await greedy(engine, context_id, 30) == oracle(PROMPTS[63], 30)
    drafted, accepted = await model_drafts(engine)
    assert drafted == accepted >= 20
    tokens = PROMPTS[63] + oracle(PROMPTS[63], 30)
    assert await greedy(engine, context_id, 100) == oracle(tokens, 100)
    later = (await model_drafts(engine))[0]
    assert later - drafted <= 8  # from 93 to 101 tokens
    assert await greedy(engine, context_id, 50) == oracle([*tokens, *oracle(tokens, 100)], 50)
    assert (await model_drafts(engine))[0] == later


async def test_guesses_beyond_the_served_vocabulary_are_none(make_engine) -> None:
    """A draft model may have more rows than the served one; tokenizers are compared elsewhere."""
    engine = make_engine(draft=TWIN)
    engine.core.draft_model._vocab_size = 100
    context_id = await fresh(engine, PROMPTS[17])
    assert await greedy(engine, context_id, 60) == oracle(PROMPTS[17], 60)
    drafted, accepted = await model_drafts(engine)
    assert drafted == accepted < 40
    assert all(token >= 100 for token in oracle(PROMPTS[17], 60)) or drafted > 0


async def test_cancelled_while_guesses_are_made(make_engine) -> None:
    engine = make_engine(draft=LIAR)
    for count in range(1, 9):
        context_id = await fresh(engine, PROMPTS[15], salt=f"{count}")
        stream = engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=400, sampling=GREEDY))
        got = [token for _ in range(count) for token in (await anext(stream)).token_ids]
        await stream.aclose()
        kept = (await tokens_of(engine, context_id))[15:]
        assert kept[: len(got)] == got
        assert kept == oracle(PROMPTS[15], len(kept))
        assert await greedy(engine, context_id, 7) == oracle([*PROMPTS[15], *kept], 7)
        await engine.close(ME, context_id)
    assert await held_pages(engine) == 0
    assert (await engine.stats()).pages_held == 0


async def test_a_deadline_that_passes_while_guesses_are_made(make_engine, clock) -> None:
    engine = make_engine(draft=TWIN)
    context_id = await fresh(engine, PROMPTS[15])
    caller = Caller(deadline=clock() + 60)
    stream = engine.generate(caller, GenerateRequest(context_id=context_id, max_tokens=1000, sampling=GREEDY))
    await anext(stream)
    clock.offset += 100
    with pytest.raises(DeadlineExceeded):
        async for _ in stream:
            pass
    kept = (await tokens_of(engine, context_id))[15:]
    assert kept == oracle(PROMPTS[15], len(kept))
    assert await held_pages(engine) == 0


async def test_preempted_while_it_is_drafted_for_it_goes_on_exactly(make_engine) -> None:
    engine = make_engine(replace(SMALL, max_batch=2, pages=24), draft=TWIN)
    low = []
    for token in (1, 2):
        info = await engine.create(ME, CreateContextRequest(priority=-1))
        await engine.fill(ME, info.context_id, [token] * 20)
        low.append(info.context_id)
    tasks = [asyncio.create_task(greedy(engine, context_id, 150)) for context_id in low]
    while (await engine.stats()).tokens_drafted_by_model < 8:
        await asyncio.sleep(0.001)
    high = await engine.create(ME, CreateContextRequest(priority=5))
    await engine.fill(ME, high.context_id, [7] * 150)
    assert await greedy(engine, high.context_id, 10) == oracle([7] * 150, 10)
    assert await asyncio.gather(*tasks) == [oracle([token] * 20, 150) for token in (1, 2)]
    assert (await engine.stats()).preemptions > 0
    drafted, accepted = await model_drafts(engine)
    assert accepted > 50
    assert drafted - accepted <= 2 * 15  # what was in flight when a run ended counts for nobody
    assert await held_pages(engine) == 0


def test_a_round_whose_request_has_ended_takes_no_time_of_later_steps(echo_served, devices) -> None:
    """Else the idle time since then would count as a step's, and deadlines would be refused for it."""
    now = [0.0]
    sizes = draft_config(SMALL, TWIN.model)
    draft_model = make_draft_model(TWIN, sizes, echo_served, devices)
    identity = Identity(namespace="", model_revision="", kv_dtype="")
    deps = RuntimeDeps(clock=lambda: now[0], wall_clock=lambda: now[0])
    runner = on_demand(echo_served, SMALL)
    core = EngineCore(SMALL, runner, echo_served.text, identity, "echo", deps, draft_model)

    def submit() -> Request:
        context_id = core.contexts.create(ME, CreateContextRequest()).id
        core.fill(ME, context_id, np.arange(10, dtype=np.int32), True, Ignored())
        request = GenerateRequest(context_id=context_id, max_tokens=40, sampling=GREEDY)
        return core.generate(ME, request, context_id, 0, Ignored())

    def turn() -> tuple[DraftRound, Any] | None:
        """Send and process a step, or send a round and return it."""
        if flight := core.dispatch():
            now[0] += 0.01
            core.process_output(flight[0], jax.tree.map(np.asarray, flight[1]))
        return core.dispatch_drafts()

    def until_drafting() -> tuple[DraftRound, Any]:
        return next(sent for _ in range(40) if (sent := turn()) is not None)

    request = submit()
    drafting = until_drafting()
    core.end(request)
    core.process_drafts(drafting[0], jax.tree.map(np.asarray, drafting[1]))
    assert turn() is None
    now[0] += 1000
    request = submit()
    drafting = until_drafting()
    now[0] += 5
    core.process_drafts(drafting[0], jax.tree.map(np.asarray, drafting[1]))
    turn()
    core.end(request)
    assert 5 < core.stats().step_seconds < 6  # the time of guesses is that of the step that has them
    core.close()


class Ignored(ResultFuture):
    """A reply that nobody reads."""

    def __init__(self) -> None:
        pass

    def set_result(self, value: object) -> None:
        pass

    def add_piece(self, piece: GeneratePiece) -> None:
        pass

    def backpressured(self) -> bool:
        return False


async def test_penalties_and_least_lengths_are_not_drafted(make_engine) -> None:
    requests = (
        GenerateRequest(context_id="", max_tokens=20, sampling=SamplingParams(temperature=0.0, frequency_penalty=0.5)),
        GenerateRequest(context_id="", max_tokens=20, sampling=SAMPLED, min_tokens=5),
    )
    answers = []
    for draft in (None, TWIN):
        engine = make_engine(draft=draft)
        for request in requests:
            pieces = await collect(engine, replace(request, context_id=await fresh(engine, PROMPTS[17])))
            answers.append(told(pieces))
    assert answers[:2] == answers[2:]
    assert await model_drafts(engine) == (0, 0)


async def test_positions_and_masks_of_ones_own_are_not_drafted(make_engine) -> None:
    engine = make_engine(draft=TWIN)
    context_id = await fresh(engine, PROMPTS[15])
    await engine.forward(ME, ForwardRequest(context_id=context_id, tokens=(1, 2), positions=(20, 21)))
    pieces = await collect(engine, GenerateRequest(context_id=context_id, max_tokens=30, sampling=GREEDY))
    assert len(tokens_in(pieces)) == 30
    assert (await model_drafts(engine))[0] == 0


async def test_a_stop_token_among_the_guesses_ends_the_output(make_engine) -> None:
    engine = make_engine(draft=TWIN)
    context_id = await fresh(engine, PROMPTS[17])
    future = oracle(PROMPTS[17], 30)
    place = next(place for place in range(8, 30) if future[place] not in future[:place])
    request = GenerateRequest(context_id=context_id, max_tokens=300, sampling=GREEDY, stop_token_ids=(future[place],))
    pieces = await collect(engine, request)
    assert tokens_in(pieces) == future[: place + 1]
    assert [piece.finish for piece in pieces if piece.finish] == [FinishReason.STOP]
    assert (await context_info(engine, ME, context_id)).seq_len == 17 + place


async def test_random_traces_with_a_draft_model_equal_solo_runs(make_engine) -> None:
    """Forks, rewinds, cancellations and suspensions, with too few pages for all in both pools."""
    config = EngineConfig(pages=48, max_batch=8, max_batch_tokens=32, max_context_tokens=200, draft_tokens=6)
    engine = make_engine(config, draft=LIAR, draft_kv_tokens=400)
    rng = random.Random(16)
    prefixes = [[rng.randrange(256) for _ in range(60)] for _ in range(3)]
    actors = [Actor(engine, seed, prefixes, 200) for seed in range(10)]
    await asyncio.gather(*[actor.run(50) for actor in actors])
    stats = await engine.stats()
    assert (stats.pages_held, stats.contexts, stats.running, stats.waiting) == (0, 0, 0, 0)
    assert stats.suspensions > 0  # or this proves less than it says
    assert stats.tokens_drafted_by_model > stats.tokens_accepted_by_model > 0
    assert stats.compilations_after_ready == 0
    assert await held_pages(engine) == 0
