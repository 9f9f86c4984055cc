# Generated from jaxctx/client/decoding/__init__.py by scripts/stubs. Not edited by hand.
"""Decoding algorithms that the server does not have, as programs over contexts. To use, or to copy and change.

    continuing.py    how every algorithm begins and ends
    windows.py       attention sinks and a sliding window
    speculation.py   drafts, verified many at a time
    search.py        best of n, beam search

These take contexts of the blocking client.

Afterwards a context holds its prompt and all tokens that were returned, the last one buffered, as after `generate`;
also after an error. Only the server knows the model's end-of-sequence tokens: these functions stop at `stop_token_ids`
alone.
"""

from jaxctx.client._sync.decoding.search import Beam, beam_search, best_of, likelihood
from jaxctx.client._sync.decoding.speculation import prompt_lookup, speculative
from jaxctx.client._sync.decoding.windows import windowed

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
