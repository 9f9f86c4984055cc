"""Drafts: tokens that a sequence is expected to sample, computed beside its next one and kept if they were right.

A step costs the same for any number of rows up to its bucket's; only on a CPU has one alone a bucket that is cheaper.
Rows that would be padding take guesses: a sequence whose last tokens stood in it before is expected to go on as it did
then (prompt lookup decoding, A. Saxena 2023). Every row draws its own token, with the key of its own position; drafts
count for as long as they are what the row before them drew. So the tokens are those of a run without drafts, greedy or
not, and a wrong guess costs only its row, or that bucket.

A guess needs the tokens before it on the host. So no step is sent ahead while there is something to guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxctx.cache.context_cache import Context
from jaxctx.cache.prefix_index import TOKEN_BYTES

MIN_NGRAM, MIN_NGRAM_ALONE = (
    2,
    4,
)  # last tokens that must have stood there before; where rows are not free, as guesses cost twice then
ENOUGH = 8  # of more it makes no difference
WINDOW = 1 << 15  # last tokens that are looked through: some 20 µs
LONGEST_PAUSE = 16  # tokens without guesses after wrong ones, which cost little: a text may begin to repeat itself


@dataclass(slots=True)
class PromptLookup:
    """What one sequence is expected to go on with. It pauses after wrong guesses, twice as long after each."""

    _text: bytearray = field(default_factory=bytearray)  # the tokens of the context, int32
    _pause: int = 0
    _resume_at: int = 0  # tokens of the context

    def guess(self, context: Context, count: int, least: int = MIN_NGRAM) -> list[int]:
        """The next `count` tokens, or none: as after the latest of the places that agree with the end the longest."""
        if count <= 0 or context.length < max(self._resume_at, least + 1):
            return []
        self._text += context.tokens(len(self._text) // TOKEN_BYTES).tobytes()
        tokens = np.frombuffer(self._text, np.int32)[-WINDOW:]
        last = len(tokens) - 1
        places = np.flatnonzero(tokens[:last] == tokens[last])
        for agreeing in range(1, ENOUGH):
            longer = places[places >= agreeing]
            longer = longer[tokens[longer - agreeing] == tokens[last - agreeing]]
            if len(longer) == 0:
                if agreeing < least:
                    return []
                break
            places = longer
        period = last - int(places[-1])
        return [int(tokens[last - period + 1 + ahead % period]) for ahead in range(count)]

    def update_acceptance(self, context: Context, accepted: int) -> None:
        """So many of the last guesses were right."""
        self._pause = 0 if accepted else min(2 * self._pause + 1, LONGEST_PAUSE)
        self._resume_at = context.length + self._pause


def share_spare_rows(guesses: Sequence[list[int]], rows: int) -> list[list[int]]:
    """What of each fits into so many rows, of everybody about as much."""
    shared, guessing = list[list[int]](), sum(map(bool, guesses))
    for guess in guesses:
        shared.append(guess[: -(-rows // max(guessing, 1))])
        rows, guessing = rows - len(shared[-1]), guessing - bool(guess)
    return shared
