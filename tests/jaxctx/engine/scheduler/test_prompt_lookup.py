"""What is guessed by what followed the same tokens before, and when a lookup pauses."""

import random

import numpy as np
import pytest

from jaxctx.engine.scheduler.prompt_lookup import MAX_PAUSE, MIN_NGRAM, WINDOW, PromptLookup


class Text:
    """As much of a context as a lookup needs."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = np.array(tokens, np.int32)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def tokens(self, start: int = 0) -> np.ndarray:
        return self._tokens[start:]

    def __iadd__(self, tokens):
        self._tokens = np.append(self._tokens, np.array(tokens, np.int32))
        return self


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((), []),
        ((1,), []),
        ((1, 2), []),
        ((1, 2, 3, 4), []),
        ((2, 5, 3, 2), []),  # one token alone says nothing
        ((1, 2, 3, 1, 2), [3, 1, 2, 3]),  # beyond the end it goes on as before
        ((1, 2, 1, 2, 1, 2), [1, 2, 1, 2]),
        ((5, 5, 5), [5, 5, 5, 5]),
        ((1, 2, 3, 4, 9, 1, 2, 7, 7, 1, 2), [7, 7, 1, 2]),  # the latest of equals
        ((0, 1, 2, 3, 4, 9, 1, 2, 7, 7, 0, 1, 2), [3, 4, 9, 1]),  # the longest before the latest
    ],
)
def test_what_is_guessed(tokens, expected) -> None:
    assert PromptLookup().guess(Text(*tokens), 4) == expected
    assert PromptLookup().guess(Text(*tokens), 0) == []


def test_a_lookup_follows_its_context() -> None:
    text, lookup, rng = Text(), PromptLookup(), random.Random(1)
    for _ in range(400):
        text += [rng.randrange(3) for _ in range(rng.randrange(9))]
        assert lookup.guess(text, 5) == PromptLookup().guess(text, 5)


def test_a_lookup_looks_back_so_far_and_no_further() -> None:
    phrase, noise = [7] * MIN_NGRAM + [1, 2], np.arange(10, 10 + WINDOW - 2 * MIN_NGRAM - 2)
    assert PromptLookup().guess(Text(*phrase, *noise, *[7] * MIN_NGRAM), 2) == [1, 2]
    assert PromptLookup().guess(Text(*phrase, *noise, 8, 9, *[7] * MIN_NGRAM), 2) == []


def test_more_must_have_stood_there_where_guesses_are_not_free() -> None:
    assert PromptLookup().guess(Text(5, 7, 7, 1, 2, 9, 7, 7), 2, 2) == [1, 2]
    assert PromptLookup().guess(Text(5, 7, 7, 1, 2, 9, 7, 7), 2, 3) == []
    assert PromptLookup().guess(Text(5, 7, 7, 1, 2, 9, 7, 7, 1), 1, 3) == [2]


def test_wrong_guesses_make_it_pause() -> None:
    text, lookup, pauses = Text(1, 2, 1, 2), PromptLookup(), []
    for _ in range(9):
        lookup.update_acceptance(text, 0)
        pause = 0
        while not lookup.guess(text, 1):
            text += [text.tokens()[-2]]
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 3, 7, 15, *[MAX_PAUSE] * 5]
    lookup.update_acceptance(text, 1)
    assert lookup.guess(text, 1)
