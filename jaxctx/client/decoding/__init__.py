"""Loops: ways to generate that the server does not have, as programs over contexts. Examples to use or to copy.

    continuing.py    how every loop begins and ends
    windows.py       attention sinks and a sliding window
    speculation.py   drafts, verified many at a time
    search.py        best of n, beam search

These take contexts of the asyncio client.

Afterwards a context holds its prompt and all tokens that the loop returned, the last one buffered, as after `generate`;
also when the loop ends with an error. End-of-sequence tokens are known to the server only: a loop stops at
`stop_token_ids` and at no other token.
"""

from jaxctx.client.decoding.search import Beam, beam_search, best_of, likelihood
from jaxctx.client.decoding.speculation import prompt_lookup, speculative
from jaxctx.client.decoding.windows import windowed

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
