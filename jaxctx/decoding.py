"""The loops of `jaxctx.client.decoding`, for the blocking client."""

from jaxctx.client._sync.decoding import *
