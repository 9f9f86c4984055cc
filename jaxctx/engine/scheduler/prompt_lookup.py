"""PromptLookup: guesses how a request goes on, by what followed the same tokens earlier in its context.

Prompt lookup decoding, A. Saxena 2023. `drafts` says when drafts are proposed, and how they are verified.
"""

from dataclasses import dataclass, field

import numpy as np

from jaxctx.cache.context_cache import Context
from jaxctx.cache.prefix_index import TOKEN_BYTES

MIN_NGRAM = 2  # last tokens that must have stood in the context before
MIN_NGRAM_ALONE = 4  # the same where rows are not free, so that a wrong guess costs a larger bucket
MAX_NGRAM = 8  # longer matches make no difference
WINDOW = 1 << 15  # last tokens that are searched: some 20 µs
MAX_PAUSE = 16  # tokens without guesses after wrong ones, which cost little: a text may begin to repeat itself


@dataclass(slots=True)
class PromptLookup:
    """Guesses how one request goes on. It pauses after wrong guesses, twice as long after each."""

    _text: bytearray = field(default_factory=bytearray)  # the tokens of the context, int32
    _pause: int = 0
    _resume_at: int = 0  # tokens of the context

    def guess(self, context: Context, count: int, min_ngram: int = MIN_NGRAM) -> list[int]:
        """The next `count` tokens, or none.

        Of the places where the context's last tokens stood before, those with the longest match count, and of these the
        latest: the guess is what followed there. None if the longest match is shorter than `min_ngram`.
        """
        if count <= 0 or context.length < max(self._resume_at, min_ngram + 1):
            return []
        self._text += context.tokens(len(self._text) // TOKEN_BYTES).tobytes()
        tokens = np.frombuffer(self._text, np.int32)[-WINDOW:]
        last = len(tokens) - 1
        places = np.flatnonzero(tokens[:last] == tokens[last])
        for matching in range(1, MAX_NGRAM):
            longer = places[places >= matching]
            longer = longer[tokens[longer - matching] == tokens[last - matching]]
            if len(longer) == 0:
                if matching < min_ngram:
                    return []
                break
            places = longer
        period = last - int(places[-1])
        return [int(tokens[last - period + 1 + ahead % period]) for ahead in range(count)]

    def update_acceptance(self, context: Context, accepted: int) -> None:
        """Note how many of the last drafts were right."""
        self._pause = 0 if accepted else min(2 * self._pause + 1, MAX_PAUSE)
        self._resume_at = context.length + self._pause
