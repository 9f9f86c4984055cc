"""Attention sinks and a sliding window: each new token sees the first tokens and the latest ones, and nothing between.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). Positions stay those of the
context, so that it can be no longer than the model allows; what a window leaves out is skipped, not given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxctx.client.drive import Steps
from jaxctx.client.loops import continuing
from jaxctx.client.options import Output, SamplingOptions


def mask(index: int, sinks: int, window: int) -> list[tuple[int, int]]:
    """What the token at `index` sees: the first `sinks` tokens, and the `window` latest ones, itself included."""
    start = max(index + 1 - window, 0)
    if start <= sinks:
        return [(0, index + 1)]
    return [(0, sinks), (start, index + 1)] if sinks else [(start, index + 1)]


def windowed(
    context: Any,
    *,
    max_tokens: int,
    sinks: int = 4,
    window: int = 1024,
    sample: SamplingOptions | None = None,
    stop_token_ids: Sequence[int] = (),
) -> Steps[list[int]]:
    """Continue a context; returns the new tokens. The prompt is as it was filled: it saw all of itself.

    `sample` is as in `Output`, by default greedy; with a seed, the i-th token is drawn with `seed + i`.
    """
    tokens = yield from continuing.begin(context)
    prompt = len(tokens)
    sampling: SamplingOptions = {"temperature": 0.0} if sample is None else sample
    ended = max_tokens < 1
    try:
        while not ended:
            drawn = sampling.copy()
            if "seed" in sampling:
                drawn["seed"] = sampling["seed"] + len(tokens) - prompt
            seen = mask(len(tokens) - 1, sinks, window)
            result = yield context.forward(tokens[-1:], masks=[seen], outputs=[Output(sample=drawn)])
            tokens.append(result.outputs[0].token_id)
            ended = len(tokens) == prompt + max_tokens or tokens[-1] in stop_token_ids
    finally:
        yield from continuing.end(context, tokens)
    return tokens[prompt:]
