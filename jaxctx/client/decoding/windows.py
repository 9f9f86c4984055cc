"""Attention sinks and a sliding window: each new token attends to the first tokens and the latest ones only.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). Tokens outside
the window are masked but stay in the context, as KV belongs to its position. With `most`, the context is now and then
cut back to sinks and window, and the window computed again at the positions after the sinks: so output may be endless
while the number of pages stays bounded.
"""

from collections.abc import Sequence

from jaxctx.client.context import Context
from jaxctx.client.decoding import continuing
from jaxctx.client.options import ForwardOutputOptions, SamplingOptions
from jaxctx.errors import InvalidArgument
from jaxctx.seeds import derive_seed


def mask(index: int, sinks: int, window: int) -> list[tuple[int, int]]:
    """The ranges that the token at `index` attends to: the first `sinks` tokens and the `window` latest, itself too."""
    start = max(index + 1 - window, 0)
    if start <= sinks:
        return [(0, index + 1)]
    return [(0, sinks), (start, index + 1)] if sinks else [(start, index + 1)]


async def windowed(
    context: Context,
    *,
    max_tokens: int,
    sinks: int = 4,
    window: int = 1024,
    most: int | None = None,
    sample: SamplingOptions | None = None,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """Continue a context; returns the new tokens. The prompt was filled before, with full attention to itself.

    At most `most` tokens, which is more than sinks and window together, are in the context at once; afterwards it has
    those that are left. `sample` is as in `ForwardOutputOptions`, by default greedy. With a seed, the first token is
    sampled with it and each other one with a hash of it and the token's number, as after a cut all tokens are sampled
    at the same few positions.
    """
    if most is not None and most <= sinks + window:
        raise InvalidArgument.field("most", f"must be more than {sinks} + {window}")
    tokens = await continuing.begin(context)
    new: list[int] = []
    sampling: SamplingOptions = {"temperature": 0.0} if sample is None else sample
    ended = max_tokens < 1
    try:
        while not ended:
            if most is not None and len(tokens) > most:
                tokens = tokens[:sinks] + tokens[-window:]
                await context.rewind(sinks)
                if window > 1:
                    await context.fill(tokens=tokens[sinks:-1], defer=True)
            drawn = sampling.copy()
            if (seed := sampling.get("seed")) is not None:
                drawn["seed"] = derive_seed(seed, len(new))
            seen = mask(len(tokens) - 1, sinks, window)
            result = await context.forward(tokens[-1:], masks=[seen], outputs=[ForwardOutputOptions(sample=drawn)])
            new.append(result.outputs[0].token_id)  # type: ignore[arg-type]  # a sample was asked for
            tokens.append(new[-1])
            ended = len(new) == max_tokens or new[-1] in stop_token_ids
    finally:
        await continuing.end(context, tokens)
    return new
