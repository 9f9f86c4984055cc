"""Speculative decoding through both clients, against a model whose next token depends on every token it sees."""

from __future__ import annotations

import random
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from tests.jaxctx.client.fake_server import PAGE_SIZE, VOCAB_SIZE, greedy_tokens

PROMPT = [1, 5, 2, 6, 0, 3]


def drafts_with_error(tokens: list[int], length: int, wrong: int | None) -> list[int]:
    """So many drafts that are right, except for the one at index `wrong`."""
    drafts = greedy_tokens(tokens, length)
    if wrong is not None and wrong < length:
        drafts[wrong] = (drafts[wrong] + 1) % VOCAB_SIZE
    return drafts


@pytest.mark.parametrize("length", range(17))
async def test_speculation_gives_the_greedy_output_for_any_drafts(
    either: Any, client: Any, fake: Any, length: int
) -> None:
    expected = greedy_tokens(PROMPT, 24)
    rng = random.Random(length)

    def noise(tokens: list[int]) -> list[int]:
        return drafts_with_error(tokens, length, rng.randrange(length + 1))

    for drafts in (
        lambda tokens: drafts_with_error(tokens, length, None),
        lambda tokens: drafts_with_error(tokens, length, 0),
        noise,
    ):
        fake.commits.clear()
        fake.requests.clear()
        context = await either(client.create(tokens=PROMPT))
        tokens = await either(either.decoding.speculative(context, drafts, max_tokens=24))
        assert tokens == expected
        assert await either(context.tokens()) == PROMPT + expected
        buffered = fake.requests["Fill"][-1]
        assert (buffered.defer, list(buffered.tokens.ids)) == (True, expected[-1:])
        # Whatever was committed, whenever, was right.
        assert all(pages == (PROMPT + expected)[: len(pages)] for pages in fake.commits)
        assert all(request.keep_working for request in fake.requests["Forward"])


async def test_right_drafts_save_passes(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(either.decoding.speculative(context, lambda tokens: drafts_with_error(tokens, 5, None), max_tokens=20))
    assert not fake.requests["Truncate"]
    assert [len(request.tokens) for request in fake.requests["Forward"]] == [6, 6, 6, 2]  # none past the end


@pytest.mark.parametrize("start", range(1, 2 * PAGE_SIZE + 1))
async def test_speculation_from_anywhere_in_a_page(either: Any, client: Any, start: int) -> None:
    prompt = (PROMPT * 2)[:start]
    context = await either(client.create(tokens=prompt))
    for wrong in (None, 0, 2, 4):
        tokens = await either(
            either.decoding.speculative(context, lambda t, wrong=wrong: drafts_with_error(t, 5, wrong), max_tokens=7)
        )
        assert tokens == greedy_tokens(prompt, 7)
        prompt = prompt + tokens  # goes on where the last one ended
    assert await either(context.tokens()) == prompt


@pytest.mark.parametrize("length", [0, 3, 16])
async def test_speculation_stops_where_the_greedy_output_does(either: Any, client: Any, length: int) -> None:
    expected = greedy_tokens(PROMPT, 24)
    for stop in set(expected[4:]):
        context = await either(client.create(tokens=PROMPT))
        tokens = await either(
            either.decoding.speculative(
                context, lambda t: drafts_with_error(t, length, None), max_tokens=24, stop_token_ids=[stop, 99]
            )
        )
        assert tokens == expected[: expected.index(stop) + 1]
        assert await either(context.tokens()) == PROMPT + tokens


async def test_speculation_by_prompt_lookup(either: Any, client: Any) -> None:
    prompt = PROMPT + greedy_tokens(PROMPT, 12) + PROMPT
    context = await either(client.create(tokens=prompt))
    tokens = await either(either.decoding.speculative(context, either.decoding.prompt_lookup, max_tokens=12))
    assert tokens == greedy_tokens(prompt, 12)


async def test_drafts_are_asked_for_with_all_tokens_so_far(either: Any, client: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    calls: list[list[int]] = []

    def drafts(tokens: list[int]) -> list[int]:
        calls.append(list(tokens))
        tokens.clear()  # the list is the function's own
        return []

    expected = greedy_tokens(PROMPT, 3)
    assert await either(either.decoding.speculative(context, drafts, max_tokens=3)) == expected
    assert calls == [PROMPT, PROMPT + expected[:1], PROMPT + expected[:2]]


async def test_speculation_without_drafts_is_one_pass_for_each_token(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(either.decoding.speculative(context, lambda _: (), max_tokens=4))
    assert [list(request.tokens) for request in fake.requests["Forward"]] == [
        [token] for token in [PROMPT[-1], *greedy_tokens(PROMPT, 3)]
    ]


async def test_a_wrong_draft_and_those_after_it_are_removed(either: Any, client: Any, fake: Any) -> None:
    """Of five drafts the third is wrong: two are right, and the pass itself gives the token in place of the third."""
    context = await either(client.create(tokens=PROMPT))
    tokens = await either(
        either.decoding.speculative(context, lambda tokens: drafts_with_error(tokens, 5, 2), max_tokens=6)
    )
    assert tokens == greedy_tokens(PROMPT, 6)
    assert [request.tokens for request in fake.requests["Truncate"]] == [3]
    assert [len(request.tokens) for request in fake.requests["Forward"]] == [6, 3]


async def test_a_stop_token_among_the_drafts_ends_the_output(either: Any, client: Any, fake: Any) -> None:
    expected = greedy_tokens(PROMPT, 8)
    stop = expected[1]
    context = await either(client.create(tokens=PROMPT))
    tokens = await either(
        either.decoding.speculative(
            context, lambda tokens: drafts_with_error(tokens, 7, None), max_tokens=8, stop_token_ids=[stop]
        )
    )
    assert tokens == expected[: expected.index(stop) + 1]
    assert len(fake.requests["Forward"]) == 1
    assert await either(context.tokens()) == PROMPT + tokens


@pytest.mark.parametrize("decoding", [jaxctx.decoding, jaxctx.aio.decoding], ids=["blocking", "aio"])
def test_prompt_lookup_finds_the_latest_occurrence(decoding: Any) -> None:
    tokens = [1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3]
    assert decoding.prompt_lookup(tokens) == [8, 9, 1, 2, 3]
    assert decoding.prompt_lookup(tokens, length=2) == [8, 9]
    assert decoding.prompt_lookup(tokens, length=0) == []
    assert decoding.prompt_lookup(tokens, ngram=5) == []
    assert decoding.prompt_lookup([4, 4, 4, 4], ngram=2) == [4]
    assert decoding.prompt_lookup([1, 2]) == decoding.prompt_lookup([]) == []


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "answer lost"])
async def test_an_error_leaves_the_tokens_that_were_verified(either: Any, client: Any, fake: Any, lost: bool) -> None:
    script = fake.fail_after if lost else fake.fail_before
    context = await either(client.create(tokens=PROMPT))

    def drafts(tokens: list[int]) -> list[int]:
        if len(tokens) > 10:
            script["Forward"] = [errors.Internal("broken")]
        return drafts_with_error(tokens, 3, 2)

    with pytest.raises(errors.Internal):
        await either(either.decoding.speculative(context, drafts, max_tokens=20))
    tokens = await either(context.tokens())
    assert len(tokens) > 10
    assert tokens == PROMPT + greedy_tokens(PROMPT, len(tokens) - len(PROMPT))
