"""Best of n and beam search, against a model whose next token depends on every token it sees."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.client.streams import Completion
from jaxctx.types import FinishReason, TokenLogprob, Usage
from tests.jaxctx.client.fake_server import VOCAB_SIZE, greedy_tokens, log_probabilities

PROMPT = [1, 5, 2, 6, 0, 3]


async def test_best_of_keeps_the_best_and_closes_the_rest(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    best = await either(
        either.decoding.best_of(context, 3, score=lambda each: each.context.id.endswith("fork1"), seed=4)
    )
    assert best.context.id == f"{context.id}-fork1"
    assert set(fake.contexts) == {context.id, best.context.id}
    (request,) = fake.requests["Generate"]
    assert (request.n, request.logprobs, request.sampling.seed) == (3, True, 4)
    assert either.decoding.likelihood(best) == -1.5
    with pytest.raises(errors.InvalidArgument):
        await either(either.decoding.best_of(context, 1))


async def test_best_of_closes_all_forks_if_the_score_raises(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))

    def score(_: Any) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await either(either.decoding.best_of(context, 3, score=score))
    assert set(fake.contexts) == {context.id}


def plain_beam_search(width: int, steps: int, stops: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Beam search over plain token lists, without any pruning but that of the width."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(steps):
        longer = [
            (score + logprob, (*tokens, token))
            for score, tokens in live
            for token, logprob in enumerate(log_probabilities([*PROMPT, *tokens]))
        ]
        longer = sorted(longer, reverse=True)[:width]
        ended += [each for each in longer if each[1][-1] in stops]
        live = [each for each in longer if each[1][-1] not in stops]
    return max(ended + live)


@pytest.mark.parametrize(
    ("width", "steps", "stops"),
    [(1, 6, []), (2, 6, []), (4, 6, []), (8, 3, []), (3, 6, [2]), (4, 6, [0, 1, 2, 3]), (2, 1, [])],
)
async def test_beam_search_equals_the_search_over_plain_lists(
    either: Any, client: Any, fake: Any, width: int, steps: int, stops: list[int]
) -> None:
    context = await either(client.create(tokens=PROMPT))
    beam = await either(either.decoding.beam_search(context, width=width, max_tokens=steps, stop_token_ids=stops))
    score, tokens = plain_beam_search(width, steps, stops)
    assert beam.tokens == tokens
    assert beam.logprob == pytest.approx(score)
    assert await either(beam.context.tokens()) == [*PROMPT, *tokens]
    assert await either(context.tokens()) == PROMPT
    assert set(fake.contexts) == {context.id, beam.context.id}


def test_a_beam_of_full_width_is_exact() -> None:
    """The search that the tests compare with finds the most likely output, if it may keep all beams."""
    every = (
        (sum(log_probabilities([*PROMPT, *tokens[:i]])[tokens[i]] for i in range(3)), tokens)
        for tokens in itertools.product(range(VOCAB_SIZE), repeat=3)
    )
    assert plain_beam_search(VOCAB_SIZE**2, 3, [])[1] == max(every)[1]


@pytest.mark.parametrize("method", ["Forward", "Fork", "Rewind"])
async def test_a_beam_search_that_fails_leaves_no_forks(either: Any, client: Any, fake: Any, method: str) -> None:
    context = await either(client.create(tokens=PROMPT))
    fake.fail_before[method] = [errors.Internal("broken")]
    with pytest.raises(errors.Internal):
        await either(either.decoding.beam_search(context, width=4, max_tokens=5))
    assert set(fake.contexts) == {context.id}
    assert await either(context.tokens()) == PROMPT


async def test_a_beam_search_that_cannot_fork_a_beam_leaves_no_forks(
    either: Any, client: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first fork fails, but one of those that several beams need."""
    context = await either(client.create(tokens=PROMPT))
    add_context = fake.add_context

    def add_up_to_two(context_id: str, tokens: list[int]) -> Any:
        if len(fake.contexts) > 2:
            raise errors.ResourceExhausted("full")
        return add_context(context_id, tokens)

    monkeypatch.setattr(fake, "add_context", add_up_to_two)
    with pytest.raises(errors.ResourceExhausted):
        await either(either.decoding.beam_search(context, width=4, max_tokens=5))
    assert set(fake.contexts) == {context.id}


async def test_beam_search_asks_each_beam_for_no_more_tokens_than_beams(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(either.decoding.beam_search(context, width=3, max_tokens=3))
    assert len(fake.requests["Forward"]) == 1 + 3 + 3
    assert {output.top for request in fake.requests["Forward"] for output in request.outputs} == {3}
    assert fake.requests["Forward"][0].tokens == PROMPT[-1:]


async def test_the_last_token_of_the_best_beam_is_buffered(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    beam = await either(either.decoding.beam_search(context, width=2, max_tokens=3))
    buffered = fake.requests["Fill"][-1]
    assert (buffered.context_id, buffered.defer) == (beam.context.id, True)
    assert list(buffered.tokens.ids) == [beam.tokens[-1]]


async def test_when_every_token_stops_one_pass_finds_the_likeliest(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    beam = await either(either.decoding.beam_search(context, width=4, max_tokens=5, stop_token_ids=range(VOCAB_SIZE)))
    assert beam.tokens == tuple(greedy_tokens(PROMPT, 1))
    assert len(fake.requests["Forward"]) == 1


async def test_beams_that_can_no_longer_win_are_given_up(either: Any, client: Any, fake: Any) -> None:
    """The second likeliest token ends its beam; whatever follows the likeliest one makes that beam less likely."""
    first_step = log_probabilities(PROMPT)
    likeliest, second = sorted(range(VOCAB_SIZE), key=lambda token: -first_step[token])[:2]
    assert first_step[likeliest] + max(log_probabilities([*PROMPT, likeliest])) < first_step[second]
    context = await either(client.create(tokens=PROMPT))
    beam = await either(either.decoding.beam_search(context, width=4, max_tokens=6, stop_token_ids=[second]))
    assert beam.tokens == (second,)
    assert len(fake.requests["Forward"]) == 2


@pytest.mark.parametrize(("width", "max_tokens", "field"), [(0, 5, "width"), (2, 0, "max_tokens"), (-1, 0, "width")])
async def test_beam_search_refuses_numbers_below_one(
    either: Any, client: Any, fake: Any, width: int, max_tokens: int, field: str
) -> None:
    context = await either(client.create(tokens=PROMPT))
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(either.decoding.beam_search(context, width=width, max_tokens=max_tokens))
    assert [violation.field for violation in raised.value.violations] == [field]
    assert not fake.requests["Fork"]


def completion(*logprobs: float) -> Completion[None]:
    """An output whose tokens have these log probabilities."""
    return Completion(
        index=0,
        context_id="a",
        logprobs=tuple(TokenLogprob(token_id=1, logprob=each) for each in logprobs),
        finish=FinishReason.STOP,
        usage=Usage(prompt_tokens=0, cached_tokens=0, computed_tokens=0, completion_tokens=0, restored_tokens=0),
        context=None,
    )


@pytest.mark.parametrize("decoding", [jaxctx.decoding, jaxctx.aio.decoding], ids=["blocking", "aio"])
def test_likelihood_is_the_sum_of_the_log_probabilities(decoding: Any) -> None:
    assert decoding.likelihood(completion(-0.5, -1.25, -2.0)) == -3.75
    assert decoding.likelihood(completion()) == 0


async def test_best_of_asks_for_log_probabilities_whatever_its_options(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    await either(either.decoding.best_of(context, 2, logprobs=False, temperature=0.5, max_tokens=3))
    (request,) = fake.requests["Generate"]
    assert (request.logprobs, request.sampling.temperature, request.max_tokens) == (True, 0.5, 3)


@pytest.mark.parametrize("n", [1, 0, -2])
async def test_best_of_refuses_fewer_than_two_outputs(either: Any, client: Any, fake: Any, n: int) -> None:
    context = await either(client.create("hello"))
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(either.decoding.best_of(context, n))
    assert [violation.field for violation in raised.value.violations] == ["n"]
    assert not fake.requests["Generate"]
