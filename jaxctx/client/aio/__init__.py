"""The asyncio client: `connection` calls, `context` is a context on the server, `client` is where one begins.

`jaxctx.client.blocking` is the same without `await`; what the two share has no I/O and lies one folder up.
"""

from jaxctx.client.aio import loops
from jaxctx.client.aio.client import Client
from jaxctx.client.aio.context import Context
from jaxctx.client.aio.stream import Stream

__all__ = ["Client", "Context", "Stream", "loops"]
