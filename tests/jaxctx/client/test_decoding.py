"""Loops over contexts, through both clients, against a model whose next token depends on every token that is seen."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.client.decoding.windows import mask
from jaxctx.seeds import derive_seed

from .conftest import PAGE_SIZE, VOCABULARY, distribution, greedy

PROMPT = [1, 5, 2, 6, 0, 3]


def oracle(tokens: list[int], length: int, wrong: int | None) -> list[int]:
    """Drafts that are right but for the one at `wrong`."""
    drafts = greedy(tokens, length)
    if wrong is not None and wrong < length:
        drafts[wrong] = (drafts[wrong] + 1) % VOCABULARY
    return drafts


# --- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(17))
async def test_speculation_gives_the_greedy_output_for_any_drafts(
    either: Any, client: Any, fake: Any, length: int
) -> None:
    expected = greedy(PROMPT, 24)
    rng = random.Random(length)

    def noise(tokens: list[int]) -> list[int]:
        return oracle(tokens, length, rng.randrange(length + 1))

    for drafts in (lambda tokens: oracle(tokens, length, None), lambda tokens: oracle(tokens, length, 0), noise):
        fake.commits.clear()
        fake.requests.clear()
        context = await either(client.create(tokens=PROMPT))
        tokens = await either(either.loops.speculative(context, drafts, max_tokens=24))
        assert tokens == expected
        assert await either(context.tokens()) == PROMPT + expected
        buffered = fake.requests["Fill"][-1]
        assert (buffered.defer, list(buffered.tokens.ids)) == (True, expected[-1:])
        # Whatever was committed, whenever, was right.
        assert all(pages == (PROMPT + expected)[: len(pages)] for pages in fake.commits)
        assert all(request.keep_working for request in fake.requests["Forward"])


async def test_right_drafts_save_passes(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(either.loops.speculative(context, lambda tokens: oracle(tokens, 5, None), max_tokens=20))
    assert not fake.requests["Truncate"]
    assert [len(request.tokens) for request in fake.requests["Forward"]] == [6, 6, 6, 2]  # none past the end


@pytest.mark.parametrize("start", range(1, 2 * PAGE_SIZE + 1))
async def test_speculation_from_anywhere_in_a_page(either: Any, client: Any, start: int) -> None:
    prompt = (PROMPT * 2)[:start]
    context = await either(client.create(tokens=prompt))
    for wrong in (None, 0, 2, 4):
        tokens = await either(
            either.loops.speculative(context, lambda t, wrong=wrong: oracle(t, 5, wrong), max_tokens=7)
        )
        assert tokens == greedy(prompt, 7)
        prompt = prompt + tokens  # goes on where the last one ended
    assert await either(context.tokens()) == prompt


@pytest.mark.parametrize("length", [0, 3, 16])
async def test_speculation_stops_where_the_greedy_output_does(either: Any, client: Any, length: int) -> None:
    expected = greedy(PROMPT, 24)
    for stop in set(expected[4:]):
        context = await either(client.create(tokens=PROMPT))
        tokens = await either(
            either.loops.speculative(
                context, lambda t: oracle(t, length, None), max_tokens=24, stop_token_ids=[stop, 99]
            )
        )
        assert tokens == expected[: expected.index(stop) + 1]
        assert await either(context.tokens()) == PROMPT + tokens


async def test_speculation_by_prompt_lookup(either: Any, client: Any) -> None:
    prompt = PROMPT + greedy(PROMPT, 12) + PROMPT
    context = await either(client.create(tokens=prompt))
    tokens = await either(either.loops.speculative(context, either.loops.prompt_lookup, max_tokens=12))
    assert tokens == greedy(prompt, 12)


def test_prompt_lookup_finds_the_latest_occurrence() -> None:
    tokens = [1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3]
    assert jaxctx.decoding.prompt_lookup(tokens) == [8, 9, 1, 2, 3]
    assert jaxctx.decoding.prompt_lookup(tokens, length=2) == [8, 9]
    assert jaxctx.decoding.prompt_lookup(tokens, ngram=5) == []
    assert jaxctx.decoding.prompt_lookup([4, 4, 4, 4], ngram=2) == [4]
    assert jaxctx.decoding.prompt_lookup([1, 2]) == jaxctx.decoding.prompt_lookup([]) == []


# --- windows ----------------------------------------------------------------------------------------------------------


def test_masks_of_windows() -> None:
    assert mask(3, 2, 2) == [(0, 4)]  # nothing is left out
    assert mask(4, 2, 2) == [(0, 2), (3, 5)]
    assert mask(9, 0, 3) == [(7, 10)]
    assert mask(0, 4, 1) == [(0, 1)]


@pytest.mark.parametrize(("sinks", "window"), [(2, 3), (0, 1), (4, 100)])
async def test_windows(either: Any, client: Any, fake: Any, sinks: int, window: int) -> None:
    expected = list(PROMPT)
    for _ in range(9):
        start = max(len(expected) - window, 0)
        seen = expected if start <= sinks else expected[:sinks] + expected[start:]
        expected.append(max(range(VOCABULARY), key=distribution(seen).__getitem__))
    context = await either(client.create(tokens=PROMPT))
    tokens = await either(either.loops.windowed(context, max_tokens=9, sinks=sinks, window=window))
    assert tokens == expected[len(PROMPT) :]
    assert await either(context.tokens()) == expected
    assert fake.requests["Fill"][-1].defer
    again = await either(client.create(tokens=PROMPT))
    stop = tokens[3]
    stopped = await either(
        either.loops.windowed(again, max_tokens=9, sinks=sinks, window=window, stop_token_ids=[stop])
    )
    assert stopped == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize(("sinks", "window", "most"), [(2, 3, 6), (0, 1, 2), (3, 4, 11)])
async def test_windows_without_end(either: Any, client: Any, fake: Any, sinks: int, window: int, most: int) -> None:
    """The context never has more than `most` tokens and the next one, whatever comes out."""
    kept, expected = list(PROMPT), list[int]()
    for _ in range(40):
        kept = kept[:sinks] + kept[-window:] if len(kept) > most else kept
        start = max(len(kept) - window, 0)
        seen = kept if start <= sinks else kept[:sinks] + kept[start:]
        expected.append(max(range(VOCABULARY), key=distribution(seen).__getitem__))
        kept.append(expected[-1])
    context = await either(client.create(tokens=PROMPT))
    assert (
        await either(either.loops.windowed(context, max_tokens=40, sinks=sinks, window=window, most=most)) == expected
    )
    assert await either(context.tokens()) == kept
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(either.loops.windowed(context, max_tokens=1, sinks=sinks, window=window, most=sinks + window))
    assert raised.value.violations[0].field == "most"
    assert await either(context.tokens()) == kept


async def test_windows_draw_each_token_with_a_seed_of_its_own(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    sample: jaxctx.SamplingOptions = {"temperature": 0.5, "seed": 40}
    await either(either.loops.windowed(context, max_tokens=3, sample=sample))
    assert [request.outputs[0].sample.seed for request in fake.requests["Forward"]] == [
        derive_seed(40, index) for index in range(3)
    ]
    assert sample["seed"] == 40


# --- what all loops promise -------------------------------------------------------------------------------------------


async def test_an_empty_context_is_refused(either: Any, client: Any) -> None:
    context = await either(client.create())
    for call in (
        lambda: either.loops.speculative(context, lambda _: [], max_tokens=1),
        lambda: either.loops.windowed(context, max_tokens=1),
        lambda: either.loops.beam_search(context, width=2, max_tokens=1),
    ):
        with pytest.raises(errors.FailedPrecondition) as raised:
            await either(call())
        assert raised.value.reason == "CONTEXT_EMPTY"


async def test_no_tokens_change_nothing(either: Any, client: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    assert await either(either.loops.speculative(context, lambda _: [1], max_tokens=0)) == []
    assert await either(either.loops.windowed(context, max_tokens=0)) == []
    assert await either(context.tokens()) == PROMPT


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
async def test_an_error_leaves_what_is_known_to_be_right(either: Any, client: Any, fake: Any, lost: bool) -> None:
    script = fake.fail_after if lost else fake.fail_before
    context = await either(client.create(tokens=PROMPT))

    def drafts(tokens: list[int]) -> list[int]:
        if len(tokens) > 10:
            script["Forward"] = [errors.Internal("broken")]
        return oracle(tokens, 3, 2)

    with pytest.raises(errors.Internal):
        await either(either.loops.speculative(context, drafts, max_tokens=20))
    tokens = await either(context.tokens())
    assert len(tokens) > 10
    assert tokens == PROMPT + greedy(PROMPT, len(tokens) - len(PROMPT))


async def test_cancelling_a_loop_leaves_what_is_known_to_be_right(serving: Any) -> None:
    async with jaxctx.aio.Client(serving.target) as client:
        context = await client.create(tokens=PROMPT)
        task = asyncio.create_task(jaxctx.aio.decoding.windowed(context, max_tokens=100_000))
        while len(serving.fake.requests["Forward"]) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tokens = await context.tokens()
        assert len(tokens) >= len(PROMPT) + 4
        assert tokens == PROMPT + greedy(PROMPT, len(tokens) - len(PROMPT))


# --- search -----------------------------------------------------------------------------------------------------------


async def test_best_of_keeps_the_best_and_closes_the_rest(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    best = await either(either.loops.best_of(context, 3, score=lambda each: each.context.id.endswith("fork1"), seed=4))
    assert best.context.id == f"{context.id}-fork1"
    assert set(fake.contexts) == {context.id, best.context.id}
    (request,) = fake.requests["Generate"]
    assert (request.n, request.logprobs, request.sampling.seed) == (3, True, 4)
    assert either.loops.likelihood(best) == -1.5
    with pytest.raises(errors.InvalidArgument):
        await either(either.loops.best_of(context, 1))


def likeliest(width: int, steps: int, stops: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Beam search over plain token lists, without any pruning but that of the width."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(steps):
        longer = [
            (score + logprob, (*tokens, token))
            for score, tokens in live
            for token, logprob in enumerate(distribution([*PROMPT, *tokens]))
        ]
        longer = sorted(longer, reverse=True)[:width]
        ended += [each for each in longer if each[1][-1] in stops]
        live = [each for each in longer if each[1][-1] not in stops]
    return max(ended + live)


@pytest.mark.parametrize(
    ("width", "steps", "stops"),
    [(1, 6, []), (2, 6, []), (4, 6, []), (8, 3, []), (3, 6, [2]), (4, 6, [0, 1, 2, 3]), (2, 1, [])],
)
async def test_beam_search(either: Any, client: Any, fake: Any, width: int, steps: int, stops: list[int]) -> None:
    context = await either(client.create(tokens=PROMPT))
    beam = await either(either.loops.beam_search(context, width=width, max_tokens=steps, stop_token_ids=stops))
    score, tokens = likeliest(width, steps, stops)
    assert beam.tokens == tokens
    assert beam.logprob == pytest.approx(score)
    assert await either(beam.context.tokens()) == [*PROMPT, *tokens]
    assert await either(context.tokens()) == PROMPT
    assert set(fake.contexts) == {context.id, beam.context.id}


def test_a_beam_of_full_width_is_exact() -> None:
    """The oracle above finds the very best, if it may keep everything."""
    every = (
        (sum(distribution([*PROMPT, *tokens[:i]])[tokens[i]] for i in range(3)), tokens)
        for tokens in itertools.product(range(VOCABULARY), repeat=3)
    )
    assert likeliest(VOCABULARY**2, 3, [])[1] == max(every)[1]


async def test_a_beam_search_that_fails_leaves_no_forks(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    for name in ("Forward", "Fork", "Rewind"):
        fake.requests[name].clear()
        if name == "Fork":  # not the first
            fake.fail_before["Fork"] = []
            original = fake.add

            def add(context_id: str, tokens: list[int], original: Any = original) -> Any:
                if len(fake.contexts) > 2:
                    raise errors.ResourceExhausted("full")
                return original(context_id, tokens)

            fake.add = add
        else:
            fake.fail_before[name] = [errors.Internal("broken")]
        with pytest.raises(errors.JaxctxError):
            await either(either.loops.beam_search(context, width=4, max_tokens=5))
        assert set(fake.contexts) == {context.id}, name
        if name == "Fork":
            fake.add = original
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(either.loops.beam_search(context, width=0, max_tokens=5))
    assert raised.value.violations[0].field == "width"
