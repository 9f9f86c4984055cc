"""The asyncio client: `jaxctx.aio.Client` is `jaxctx.Client` with `await`."""

from jaxctx.client import decoding
from jaxctx.client.client import Client
from jaxctx.client.context import Context, Stream
from jaxctx.client.session import Session, Variable

__all__ = ["Client", "Context", "Session", "Stream", "Variable", "decoding"]
