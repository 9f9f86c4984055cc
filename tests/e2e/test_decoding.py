"""The client's loops against a real engine, through gRPC, compared with the same on plain lists of tokens."""

import asyncio
import random

import pytest

from jaxctx.aio import decoding
from jaxctx.seeds import derive_seed
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, held, oracle
from tests.echo import echo_logprobs

PROMPT = THOUSAND[:45]
PLAIN = oracle(PROMPT, 40)  # to token 85: across three page boundaries
WRONG = next(token for token in range(256, 512) if token not in PLAIN)


@pytest.mark.parametrize("drafts", ["right", "wrong at first", "mixed"])
async def test_speculation_for_every_length_of_drafts(client, engine, monkeypatch, drafts) -> None:
    index, committed = engine.core.cache.block_manager.index, set[int]()
    commit = index.commit

    def watched(parent, owner, tokens, *rest):
        committed.update(memoryview(tokens).cast("i"))
        return commit(parent, owner, tokens, *rest)

    monkeypatch.setattr(index, "commit", watched)

    async def one(length: int) -> None:
        rng = random.Random(length)

        def guesses(tokens: list[int]) -> list[int]:
            guess = PLAIN[len(tokens) - len(PROMPT) :][:length]
            wrong_at = {"right": length, "wrong at first": 0, "mixed": rng.randrange(length + 1)}[drafts]
            if wrong_at < len(guess):
                guess[wrong_at] = WRONG
            return guess

        context = await client.create(salt=str(length))
        await context.fill(tokens=PROMPT)
        assert await decoding.speculative(context, guesses, max_tokens=len(PLAIN)) == PLAIN, length
        assert await context.tokens() == PROMPT + PLAIN
        assert await greedy(context, 3) == oracle(PROMPT + PLAIN, 3), length

    lengths = [0, 1, 16] if drafts == "wrong at first" else range(17)
    await asyncio.gather(*map(one, lengths))
    assert committed >= {*PROMPT[:32]}
    assert WRONG not in committed, "a draft was committed"


@pytest.mark.parametrize(("sinks", "window"), [(4, 16), (0, 7), (16, 16), (3, 1), (20, 40), (4, 500)])
async def test_windows(client, sinks, window) -> None:
    """The prompt saw all of itself; of what comes, each token sees the sinks and the window."""
    for length in (1, 15, 16, 17, 47):
        expected = THOUSAND[:length]
        for _ in range(20):
            first = max(len(expected) - window, 0)
            seen = sorted({*range(min(sinks, len(expected))), *range(first, len(expected))})
            expected = [*expected, int(echo_logprobs(expected, seen).argmax())]
        context = await filled(client, THOUSAND[:length])
        assert await decoding.windowed(context, max_tokens=20, sinks=sinks, window=window) == expected[length:], length
        assert await context.tokens() == expected
        again = await filled(client, THOUSAND[:length])
        stopped = await decoding.windowed(
            again, max_tokens=20, sinks=sinks, window=window, stop_token_ids=[expected[length + 5]]
        )
        assert stopped == expected[length : expected.index(expected[length + 5], length) + 1]
        for each in (context, again):
            await each.close()


async def test_best_of_n_is_the_likeliest_of_n_outputs(client, engine) -> None:
    for length in (31, 32, 45):
        prompt = THOUSAND[:length]
        context = await filled(client, prompt)
        outputs = []
        for index in range(5):  # one after the other, each with the seed that is its own among five
            (fork,) = await context.fork()
            outputs.append(list((await fork.complete(max_tokens=20, seed=derive_seed(7, index))).token_ids))
            await fork.close()
        assert len({*map(tuple, outputs)}) == 5
        likelihoods = [
            sum(echo_logprobs([*prompt, *output[:place]])[token] for place, token in enumerate(output))
            for output in outputs
        ]
        best = await decoding.best_of(context, 5, max_tokens=20, seed=7)
        likeliest = max(range(5), key=likelihoods.__getitem__)
        assert (best.index, list(best.token_ids)) == (likeliest, outputs[likeliest])
        assert decoding.likelihood(best) == pytest.approx(likelihoods[likeliest], abs=1e-4)
        assert await greedy(best.context, 3) == oracle([*prompt, *outputs[likeliest]], 3)
        assert {each.id async for each in client.contexts()} == {context.id, best.context.id}, "the others are closed"
        for each in (context, best.context):
            await each.close()
    assert await held(engine) == 0


def likeliest(prompt: list[int], width: int, steps: int, stops: list[int]) -> tuple[float, list[int]]:
    """Beam search over plain lists: of all continuations of the live ones, the `width` best go on or end."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(steps):
        longer = []
        for score, tokens in live:
            logprobs = echo_logprobs([*prompt, *tokens])
            longer += [(score + logprobs[token], [*tokens, int(token)]) for token in logprobs.argsort()[-width:]]
        longer = sorted(longer, reverse=True)[:width]
        ended += [each for each in longer if each[1][-1] in stops]
        live = [each for each in longer if each[1][-1] not in stops]
    ranked = sorted([*ended, *live], reverse=True)
    assert len(ranked) < 2 or ranked[0][0] > ranked[1][0] + 1e-9, "a tie: another prompt says more"
    return ranked[0]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [15, 31, 45])
async def test_beam_search(client, engine, width, length) -> None:
    prompt = THOUSAND[:length]
    _, unstopped = likeliest(prompt, width, 5, [])
    for steps, stops in ((1, []), (5, []), (5, unstopped[2:3])):
        context = await filled(client, prompt)
        beam = await decoding.beam_search(context, width=width, max_tokens=steps, stop_token_ids=stops)
        score, tokens = likeliest(prompt, width, steps, stops)
        assert list(beam.tokens) == tokens
        assert beam.logprob == pytest.approx(score, abs=1e-4)
        assert await beam.context.tokens() == prompt + tokens
        assert await context.tokens() == prompt
        assert await greedy(beam.context, 3) == oracle(prompt + tokens, 3)
        assert {each.id async for each in client.contexts()} == {context.id, beam.context.id}
        for each in (context, beam.context):
            await each.close()
    assert await held(engine) == 0


def test_the_oracle_finds_the_very_best_if_it_may_keep_everything() -> None:
    """Two tokens of a vocabulary of 512, exhaustively."""
    first = echo_logprobs(PROMPT)
    second = [echo_logprobs([*PROMPT, token]) for token in range(len(first))]
    pairs = [(first[token] + after.max(), [token, int(after.argmax())]) for token, after in enumerate(second)]
    assert likeliest(PROMPT, len(first), 2, []) == max(pairs)
