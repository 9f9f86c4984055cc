"""The blocking client: `connection` calls, `context` is a context on the server, `client` is where one begins.

`jaxctx.client.aio` is the same with `await`; what the two share has no I/O and lies one folder up.
"""

from jaxctx.client.blocking import loops
from jaxctx.client.blocking.client import Client
from jaxctx.client.blocking.context import Context
from jaxctx.client.blocking.stream import Stream

__all__ = ["Client", "Context", "Stream", "loops"]
