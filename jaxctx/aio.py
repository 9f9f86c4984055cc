"""The asyncio client: `jaxctx.aio.Client` is `jaxctx.Client` with `await`."""

from jaxctx.client.asynchronous import Client, Context, Stream
from jaxctx.client.loops import asynchronous as loops

__all__ = ["Client", "Context", "Stream", "loops"]
