"""Decoding algorithms that the server does not have, as programs over contexts. To use, or to copy and change.

    continuing.py    how every algorithm begins and ends
    windows.py       attention sinks and a sliding window
    speculation.py   drafts, verified many at a time
    search.py        best of n, beam search

These take contexts of the asyncio client.

Afterwards a context holds its prompt and all tokens that were returned, the last one buffered, as after `generate`;
also after an error. Only the server knows the model's end-of-sequence tokens: these functions stop at `stop_token_ids`
alone.
"""

from jaxctx.client.decoding.search import Beam, beam_search, best_of, likelihood
from jaxctx.client.decoding.speculation import prompt_lookup, speculative
from jaxctx.client.decoding.windows import windowed

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
