"""The loops of `jaxctx.client.loops`, for the blocking client."""

from jaxctx.client.drive import blocking
from jaxctx.client.loops import search, speculation, windows
from jaxctx.client.loops.search import Beam, likelihood
from jaxctx.client.loops.speculation import prompt_lookup

windowed = blocking(windows.windowed)
speculative = blocking(speculation.speculative)
best_of = blocking(search.best_of)
beam_search = blocking(search.beam_search)

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
