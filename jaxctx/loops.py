"""The loops of `jaxctx.client.loops`, for the blocking client."""

from jaxctx.v1.blocking.loops import *  # noqa: F403
