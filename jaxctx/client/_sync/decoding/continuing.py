# Generated from jaxctx/client/decoding/continuing.py by scripts/stubs. Not edited by hand.
"""How every decoding algorithm begins and ends: with the last token removed, for a pass to compute; and buffered."""

from collections.abc import Sequence

from jaxctx.client._sync.context import Context
from jaxctx.errors import FailedPrecondition


def begin(context: Context) -> list[int]:
    """The context's tokens. The last one is removed from the context: the first pass computes it and what follows.

    Raises FailedPrecondition for a context without tokens.
    """
    tokens = context.tokens()
    if not tokens:
        raise FailedPrecondition("the context has no token to continue from", reason="CONTEXT_EMPTY")
    context.rewind(len(tokens) - 1)
    return tokens


def end(context: Context, tokens: Sequence[int]) -> None:
    """Leave the context with these tokens, the last one buffered, whatever became of the last pass."""
    context.rewind(len(tokens) - 1)
    context.fill(tokens=tokens[-1:], defer=True)
