# Generated from jaxctx/client/decoding/__init__.py by scripts/stubs. Not edited by hand.
"""Loops: ways to generate that the server does not have, as programs over contexts. Examples to use or to copy.

    continuing.py    how every loop begins and ends
    windows.py       attention sinks and a sliding window
    speculation.py   drafts, verified many at a time
    search.py        best of n, beam search

These take contexts of the blocking client.

Afterwards a context holds its prompt and all tokens that the loop returned, the last one buffered, as after `generate`;
also when the loop ends with an error. End-of-sequence tokens are known to the server only: a loop stops at
`stop_token_ids` and at no other token.
"""

from jaxctx.client._sync.decoding.search import Beam, beam_search, best_of, likelihood
from jaxctx.client._sync.decoding.speculation import prompt_lookup, speculative
from jaxctx.client._sync.decoding.windows import windowed

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
