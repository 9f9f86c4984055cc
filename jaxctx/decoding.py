"""The decoding algorithms of `jaxctx.client.decoding`, for the blocking client."""

from jaxctx.client._sync.decoding import (
    Beam,
    beam_search,
    best_of,
    likelihood,
    prompt_lookup,
    speculative,
    windowed,
)

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
