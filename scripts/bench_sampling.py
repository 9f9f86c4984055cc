#!/usr/bin/env python3
"""Time of one call of `sample` for the batch sizes and options that stand in `jaxctx/model/sampling.py`."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.model.sampling import sample, slot_state
from jaxctx.model.sampling_options import SamplingBatch, row_words

CASES: dict[str, tuple[float, dict[str, Any]]] = {  # name: spread of the logits, options
    "greedy": (3.0, {}),
    "temperature": (3.0, {"temperature": 0.8}),
    "temperature, top_k 20, top_p 0.95": (3.0, {"temperature": 0.8, "top_k": 20, "top_p": 0.95}),
    "top_p 0.95 of a flat row": (1.0, {"temperature": 1.0, "top_p": 0.95}),
    "greedy, penalties": (3.0, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "greedy, logprobs": (3.0, {"logprobs": True}),
}


def measure(rows: int, vocab_size: int, spread: float, options: dict[str, Any], repeats: int = 15) -> float:
    """Median milliseconds, state donated as the step does."""
    step = jax.jit(lambda x, words, slots, state: sample(x, SamplingBatch(words), slots, state), donate_argnums=3)
    logits = jax.random.normal(jax.random.key(0), (rows, vocab_size)) * spread
    words = jnp.asarray(np.stack([row_words(seed=i, position=i, **options) for i in range(rows)]))
    slots, state = jnp.arange(rows), slot_state(rows, vocab_size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        _, state = jax.block_until_ready(step(logits, words, slots, state))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for rows, vocab_size in ((8, 152_000), (16, 8_192)):
        for name, (spread, options) in CASES.items():
            print(f"{rows:3d} x {vocab_size:7d}  {name:36s} {measure(rows, vocab_size, spread, options):8.2f} ms")


if __name__ == "__main__":
    main()
