"""jaxctx: an inference server whose first-class object is the context; this is its Python client.

    with jaxctx.Client() as client, client.create("def fib(n):") as context:
        for piece in context.generate(max_tokens=64, temperature=0.8):
            print(piece.text, end="")

`import jaxctx` needs neither JAX nor numpy. The server is `jaxctx-serve`; its parts are the packages beside this file.
"""

from importlib.metadata import PackageNotFoundError, version

from jaxctx import aio, errors
from jaxctx.answers import (
    Change,
    Comparison,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    Engine,
    EngineInfo,
    EngineStats,
    Expiry,
    FillResult,
    FinishReason,
    ForwardResult,
    Model,
    PassResult,
    PlanResult,
    Publication,
    RenderedChat,
    Snapshot,
    Tier,
    TokenLogprob,
    Usage,
)
from jaxctx.client.blocking import Client, Context, Stream
from jaxctx.client.loops import blocking as loops
from jaxctx.client.options import GenerateOptions, Output, SamplingOptions
from jaxctx.client.streams import Completion, Piece
from jaxctx.errors import JaxctxError

try:
    __version__ = version("jaxctx")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Change",
    "Client",
    "Comparison",
    "Completion",
    "Context",
    "ContextEvent",
    "ContextInfo",
    "ContextPages",
    "ContextState",
    "Engine",
    "EngineInfo",
    "EngineStats",
    "Expiry",
    "FillResult",
    "FinishReason",
    "ForwardResult",
    "GenerateOptions",
    "JaxctxError",
    "Model",
    "Output",
    "PassResult",
    "Piece",
    "PlanResult",
    "Publication",
    "RenderedChat",
    "SamplingOptions",
    "Snapshot",
    "Stream",
    "Tier",
    "TokenLogprob",
    "Usage",
    "__version__",
    "aio",
    "errors",
    "loops",
]
