"""What a caller may choose, by keyword: generated from the requests of protos/jaxctx/v1, but for what is two of them.

Times are in seconds; a `ttl_s` of `math.inf` is for ever, and None, like anything not given, leaves it to the server.
"""

from jaxctx.v1.options import *  # noqa: F403
from jaxctx.v1.options import Content, NewOptions


class CreateOptions(NewOptions, Content, total=False):
    """A new context, and what is in it at once."""
