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
from jaxctx import programs as programs
from jaxctx.client.streams import Completion as Completion
from jaxctx.client.streams import Piece as Piece
from jaxctx.errors import JaxctxError as JaxctxError
from jaxctx.v1.answers import *  # noqa: F403
from jaxctx.v1.blocking.clients import Client as Client
from jaxctx.v1.blocking.contexts import Context as Context
from jaxctx.v1.blocking.contexts import Stream as Stream
from jaxctx.v1.blocking.sessions import Session as Session
from jaxctx.v1.blocking.sessions import Variable as Variable
from jaxctx.v1.options import GenerateOptions as GenerateOptions
from jaxctx.v1.options import Output as Output
from jaxctx.v1.options import SamplingOptions as SamplingOptions

try:
    __version__ = importlib.metadata.version("jaxctx")
except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"
