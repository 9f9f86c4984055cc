"""The asyncio client: `jaxctx.aio.Client` is `jaxctx.Client` with `await`."""

from jaxctx.client.aio import Client, Context, Stream, loops

__all__ = ["Client", "Context", "Stream", "loops"]
