"""What the echo model says next, on the host: the truth for tests of everything around a model."""

from collections.abc import Collection, Sequence

import numpy as np

from jaxctx.model.echo import EOS_ID, EOS_LOGIT, VOCAB_SIZE, _order, _token_value


def echo_next(tokens: Sequence[int], suppress: Collection[int] = ()) -> int:
    """The token that greedy sampling picks after `tokens` (at least one) at positions 0, 1, …, on the host."""
    values = _token_value(np.array(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32))
    order = _order(values.sum(keepdims=True, dtype=np.uint32)).tolist()
    return max(set(range(VOCAB_SIZE)).difference(suppress), key=lambda token: (token != EOS_ID, order[token]))


def echo_logprobs(tokens: Sequence[int], seen: Sequence[int] | slice = slice(None)) -> np.ndarray:
    """Log probabilities, float64 `[VOCAB_SIZE]`, of what follows `tokens` if the last one sees those at `seen` only."""
    values = _token_value(np.array(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32))[seen]
    order = _order(values.sum(keepdims=True, dtype=np.uint32))
    logits = np.where(np.arange(VOCAB_SIZE) == EOS_ID, EOS_LOGIT, order / (VOCAB_SIZE / 8) - 4)
    logprobs: np.ndarray = logits - np.logaddexp.reduce(logits)
    return logprobs
