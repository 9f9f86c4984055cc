"""The asyncio client: `jaxctx.aio.Client` is `jaxctx.Client` with `await`."""

from jaxctx.client import loops
from jaxctx.client.clients import Client
from jaxctx.client.contexts import Context, Stream
from jaxctx.client.sessions import Session, Variable

__all__ = ["Client", "Context", "Session", "Stream", "Variable", "loops"]
