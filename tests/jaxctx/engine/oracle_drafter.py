"""Drafts for the echo model, whose text never repeats: guesses by one who knows the future, and sometimes lies."""

import random
from collections.abc import Callable

from jaxctx.cache.context_cache import Context
from jaxctx.engine.scheduler.prompt_lookup import PromptLookup
from tests.echo import echo_next

Guess = Callable[..., list[int]]


def oracle_drafter(rng: random.Random, *, right: float) -> Guess:
    """In place of `PromptLookup.guess`: what greedy sampling draws next, each token true with this probability."""

    def guess(self: PromptLookup, context: Context, count: int, min_ngram: int = 0) -> list[int]:
        tokens = context.tokens().tolist()
        for _ in range(count):
            tokens.append(echo_next(tokens) if rng.random() < right else rng.randrange(256))
        return tokens[context.length :]

    return guess
