"""The loops of `jaxctx.client.loops` for the asyncio client."""

from jaxctx.client.drive import asynchronous
from jaxctx.client.loops import search, speculation, windows
from jaxctx.client.loops.search import Beam, likelihood
from jaxctx.client.loops.speculation import prompt_lookup

windowed = asynchronous(windows.windowed)
speculative = asynchronous(speculation.speculative)
best_of = asynchronous(search.best_of)
beam_search = asynchronous(search.beam_search)

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
