"""Attention sinks with a sliding window, against a model whose next token depends on every token it sees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.client.decoding.windows import mask
from jaxctx.seeds import derive_seed
from tests.jaxctx.client.fake_server import VOCAB_SIZE, greedy_tokens, log_probabilities

PROMPT = [1, 5, 2, 6, 0, 3]


def test_masks_are_the_first_tokens_and_the_latest() -> None:
    assert mask(3, 2, 2) == [(0, 4)]  # nothing is left out
    assert mask(4, 2, 2) == [(0, 2), (3, 5)]
    assert mask(9, 0, 3) == [(7, 10)]
    assert mask(0, 4, 1) == [(0, 1)]


@pytest.mark.parametrize(("sinks", "window"), [(2, 3), (0, 1), (4, 100)])
async def test_windowed_output_is_greedy_over_sinks_and_window(
    either: Any, client: Any, fake: Any, sinks: int, window: int
) -> None:
    expected = list(PROMPT)
    for _ in range(9):
        start = max(len(expected) - window, 0)
        seen = expected if start <= sinks else expected[:sinks] + expected[start:]
        expected.append(max(range(VOCAB_SIZE), key=log_probabilities(seen).__getitem__))
    context = await either(client.create(tokens=PROMPT))
    tokens = await either(either.decoding.windowed(context, max_tokens=9, sinks=sinks, window=window))
    assert tokens == expected[len(PROMPT) :]
    assert await either(context.tokens()) == expected
    assert fake.requests["Fill"][-1].defer
    again = await either(client.create(tokens=PROMPT))
    stop = tokens[3]
    stopped = await either(
        either.decoding.windowed(again, max_tokens=9, sinks=sinks, window=window, stop_token_ids=[stop])
    )
    assert stopped == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize(("sinks", "window", "most"), [(2, 3, 6), (0, 1, 2), (3, 4, 11)])
async def test_with_most_the_context_stays_bounded(
    either: Any, client: Any, fake: Any, sinks: int, window: int, most: int
) -> None:
    """The context never has more than `most` tokens and the next one, whatever comes out."""
    kept, expected = list(PROMPT), list[int]()
    for _ in range(40):
        kept = kept[:sinks] + kept[-window:] if len(kept) > most else kept
        start = max(len(kept) - window, 0)
        seen = kept if start <= sinks else kept[:sinks] + kept[start:]
        expected.append(max(range(VOCAB_SIZE), key=log_probabilities(seen).__getitem__))
        kept.append(expected[-1])
    context = await either(client.create(tokens=PROMPT))
    assert (
        await either(either.decoding.windowed(context, max_tokens=40, sinks=sinks, window=window, most=most))
        == expected
    )
    assert await either(context.tokens()) == kept
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(either.decoding.windowed(context, max_tokens=1, sinks=sinks, window=window, most=sinks + window))
    assert raised.value.violations[0].field == "most"
    assert await either(context.tokens()) == kept


async def test_each_token_is_sampled_with_a_seed_of_its_own(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    sample: jaxctx.SamplingOptions = {"temperature": 0.5, "seed": 40}
    await either(either.decoding.windowed(context, max_tokens=3, sample=sample))
    assert [request.outputs[0].sample.seed for request in fake.requests["Forward"]] == [
        derive_seed(40, index) for index in range(3)
    ]
    assert sample["seed"] == 40


async def test_each_pass_masks_its_token_to_sinks_and_window(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(either.decoding.windowed(context, max_tokens=3, sinks=1, window=2))
    assert [list(request.masks[0].bounds) for request in fake.requests["Forward"]] == [
        [0, 1, 4, 6],
        [0, 1, 5, 7],
        [0, 1, 6, 8],
    ]


async def test_the_default_is_greedy_and_without_a_seed_none_is_sent(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(either.decoding.windowed(context, max_tokens=1))
    await either(either.decoding.windowed(context, max_tokens=1, sample={"temperature": 0.5}))
    samples = [request.outputs[0].sample for request in fake.requests["Forward"]]
    assert [sample.temperature for sample in samples] == [0.0, 0.5]
    assert [sample.HasField("seed") for sample in samples] == [False, False]


async def test_a_cut_computes_the_window_again_behind_the_sinks(either: Any, client: Any, fake: Any) -> None:
    """Six tokens are more than `most`: the first and the latest two stay, the last of which the pass computes."""
    context = await either(client.create(tokens=PROMPT))
    fake.requests["Fill"].clear()
    await either(either.decoding.windowed(context, max_tokens=1, sinks=1, window=2, most=5))
    window = fake.requests["Fill"][0]
    assert (window.defer, list(window.tokens.ids)) == (True, PROMPT[-2:-1])
    assert [list(request.tokens) for request in fake.requests["Forward"]] == [PROMPT[-1:]]
    assert (await either(context.tokens()))[:-1] == [PROMPT[0], *PROMPT[-2:]]


async def test_a_stop_token_is_the_last_one(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    tokens = await either(either.decoding.windowed(context, max_tokens=5, stop_token_ids=range(VOCAB_SIZE)))
    assert tokens == greedy_tokens(PROMPT, 1)
    assert len(fake.requests["Forward"]) == 1


async def test_cancelling_leaves_the_tokens_that_were_generated(serving: Any) -> None:
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
        assert tokens == PROMPT + greedy_tokens(PROMPT, len(tokens) - len(PROMPT))
