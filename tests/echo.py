"""What the echo model says next, on the host: the truth for tests of everything around a model."""

from collections.abc import Collection, Sequence

import numpy as np

from jaxctx.model.echo import EOS_ID, VOCAB_SIZE, _order, _token_value


def echo_next(tokens: Sequence[int], suppress: Collection[int] = ()) -> int:
    """The token that greedy sampling picks after `tokens` (at least one) at positions 0, 1, …, on the host."""
    values = _token_value(np.array(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32))
    order = _order(values.sum(keepdims=True, dtype=np.uint32)).tolist()
    return max(set(range(VOCAB_SIZE)).difference(suppress), key=lambda token: (token != EOS_ID, order[token]))
