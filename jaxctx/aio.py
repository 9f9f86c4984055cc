"""The asyncio client: `jaxctx.aio.Client` is `jaxctx.Client` with `await`."""

from jaxctx.client import loops
from jaxctx.client.asynchronous import Client, Context, Stream

__all__ = ["Client", "Context", "Stream", "loops"]
