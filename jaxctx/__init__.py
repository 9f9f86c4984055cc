"""jaxctx: an inference server whose first-class object is the context; this is its Python client.

    with jaxctx.Client() as client, client.create("def fib(n):") as context:
        for piece in context.generate(max_tokens=64, temperature=0.8):
            print(piece.text, end="")

`import jaxctx` needs neither JAX nor numpy. The server is `jaxctx-serve`; its parts are the packages beside this file.
"""

import importlib.metadata

from jaxctx import aio as aio
from jaxctx import errors as errors
from jaxctx import loops as loops
from jaxctx.answers import Change as Change
from jaxctx.answers import Comparison as Comparison
from jaxctx.answers import ContextEvent as ContextEvent
from jaxctx.answers import ContextInfo as ContextInfo
from jaxctx.answers import ContextPages as ContextPages
from jaxctx.answers import ContextState as ContextState
from jaxctx.answers import Engine as Engine
from jaxctx.answers import EngineInfo as EngineInfo
from jaxctx.answers import EngineStats as EngineStats
from jaxctx.answers import Expiry as Expiry
from jaxctx.answers import FillResult as FillResult
from jaxctx.answers import FinishReason as FinishReason
from jaxctx.answers import ForwardResult as ForwardResult
from jaxctx.answers import Model as Model
from jaxctx.answers import PassResult as PassResult
from jaxctx.answers import PlanResult as PlanResult
from jaxctx.answers import Publication as Publication
from jaxctx.answers import RenderedChat as RenderedChat
from jaxctx.answers import Snapshot as Snapshot
from jaxctx.answers import Tier as Tier
from jaxctx.answers import TokenLogprob as TokenLogprob
from jaxctx.answers import Usage as Usage
from jaxctx.client.blocking import Client as Client
from jaxctx.client.blocking import Context as Context
from jaxctx.client.blocking import Stream as Stream
from jaxctx.client.options import GenerateOptions as GenerateOptions
from jaxctx.client.options import Output as Output
from jaxctx.client.options import SamplingOptions as SamplingOptions
from jaxctx.client.streams import Completion as Completion
from jaxctx.client.streams import Piece as Piece
from jaxctx.errors import JaxctxError as JaxctxError

try:
    __version__ = importlib.metadata.version("jaxctx")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"
