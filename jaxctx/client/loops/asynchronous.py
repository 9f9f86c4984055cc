"""The loops of `jaxctx.client.loops` for the asyncio client."""

from jaxctx.client.loops.search import Beam, beam_search, best_of, likelihood
from jaxctx.client.loops.speculation import prompt_lookup, speculative
from jaxctx.client.loops.windows import windowed

__all__ = ["Beam", "beam_search", "best_of", "likelihood", "prompt_lookup", "speculative", "windowed"]
