"""Speculative decoding: a caller's function drafts the next tokens, and one pass verifies all of them at once.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), greedy. Right drafts save
passes; wrong ones are removed before any page with them is committed, and cost only their computation.
"""

from collections.abc import Callable, Sequence

from jaxctx.client.context import Context
from jaxctx.client.decoding import continuing
from jaxctx.client.options import ForwardOutputOptions


async def speculative(
    context: Context,
    drafts: Callable[[list[int]], Sequence[int]],
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """Continue a context greedily; returns the new tokens, which are the same for any drafts.

    `drafts` is called with all tokens so far, prompt included, and returns what may come next: none, one or more.
    """
    tokens = await continuing.begin(context)
    prompt = len(tokens)
    ended = max_tokens < 1
    try:
        while not ended:
            remaining = prompt + max_tokens - len(tokens)
            guessed = list(drafts(list(tokens)))[: remaining - 1]
            asked = [ForwardOutputOptions(index=row, sample={"temperature": 0.0}) for row in range(1 + len(guessed))]
            # Nothing is committed before it is known to be right.
            result = await context.forward([tokens[-1], *guessed], keep_working=True, outputs=asked)
            # Of each output a sample was asked for.
            greedy: list[int] = [output.token_id for output in result.outputs]  # type: ignore[misc]
            right = next((row for row, guess in enumerate(guessed) if guess != greedy[row]), len(guessed))
            stop = next((row for row in range(right) if greedy[row] in stop_token_ids), right)
            accepted = greedy[: stop + 1]
            ended = len(accepted) == remaining or accepted[-1] in stop_token_ids
            if wrong := 1 + len(guessed) - len(accepted):  # all but the last accepted token are in the context
                await context.truncate(wrong)
            tokens += accepted
    finally:
        await continuing.end(context, tokens)
    return tokens[prompt:]


def prompt_lookup(tokens: Sequence[int], *, ngram: int = 3, length: int = 8) -> list[int]:
    """Drafts without a model: what followed the last time that the latest `ngram` tokens occurred.

    Source: Saxena, "Prompt Lookup Decoding" (2023).
    """
    latest = list(tokens[-ngram:])
    for start in range(len(tokens) - ngram - 1, -1, -1):
        if tokens[start] == latest[0] and list(tokens[start : start + ngram]) == latest:
            return list(tokens[start + ngram : start + ngram + length])
    return []
