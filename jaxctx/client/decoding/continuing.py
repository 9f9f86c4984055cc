"""How every loop begins and ends: the last token is taken out, for a pass to compute, and in the end is buffered."""

from collections.abc import Sequence

from jaxctx.client.context import Context
from jaxctx.errors import FailedPrecondition


async def begin(context: Context) -> list[int]:
    """The context's tokens. The last of them is taken out of it: what follows it is told by the pass that computes it.

    Raises FailedPrecondition for a context without tokens.
    """
    tokens = await context.tokens()
    if not tokens:
        raise FailedPrecondition("the context has no token to continue from", reason="CONTEXT_EMPTY")
    await context.rewind(len(tokens) - 1)
    return tokens


async def end(context: Context, tokens: Sequence[int]) -> None:
    """Leave the context with these tokens, whatever became of the last pass."""
    await context.rewind(len(tokens) - 1)
    await context.fill(tokens=tokens[-1:], defer=True)
