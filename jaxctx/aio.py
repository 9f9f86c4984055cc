"""The asyncio client: `jaxctx.aio.Client` is `jaxctx.Client` with `await`."""

from jaxctx.client import loops
from jaxctx.client.asynchronous import Client, Context, Session, Stream, Variable

__all__ = ["Client", "Context", "Session", "Stream", "Variable", "loops"]
