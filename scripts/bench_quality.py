#!/usr/bin/env python3
"""What precision costs in quality: the bundled model on its hold-out text, for each type of weights and of KV.

    scripts/bench_quality.py [--windows N] [--model DIR]

Prints a table. Differences are those of the log probability of the token that does come next, from the same weights
computed in float32. Each window of 2,048 tokens of the text is read from its start, by attention over whole sequences;
keys and values are rounded as the engine's pages round them. "int8 and head" also rounds the embedding, which here is
the head too and which `--weights-dtype` leaves as it is; "int8, as int8" rounds activations too, by `--matmul-dtype
int8`. The text is that of this Python's standard library.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from bundled_corpus import encode, standard_library
from dense import DenseCausal
from tokenizers import Tokenizer

from jaxctx.model.bundled import BUNDLED
from jaxctx.model.functional import DecoderModel, FlatParams
from jaxctx.model.weights import load_model
from jaxctx.model.weights.quantize import quantize
from jaxctx_kernels.kv_cache import LARGEST_FLOAT8, LARGEST_INT8

WINDOW = 2048
WEIGHTS = ("float32", "bfloat16", "int8", "float8_e4m3fn")
KV = ("float32", "bfloat16", "int8", "float8_e4m3fn")
EMBEDDING = "model.embed_tokens.weight"
LogProbs = npt.NDArray[np.float32]


@dataclass(slots=True)
class RoundedKV(DenseCausal):
    """Dense attention over keys and values that were stored in 8 bits, with a scale for each token and head."""

    kv_dtype: str = "int8"

    def attend(
        self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        return DenseCausal.attend(self, layer, q, rounded(k, self.kv_dtype), rounded(v, self.kv_dtype), sinks)


def rounded(rows: jax.Array, dtype: str) -> jax.Array:
    """Rows as they come back from pages of 8 bits."""
    scale = jnp.abs(rows).max(-1, keepdims=True) / (LARGEST_INT8 if dtype == "int8" else LARGEST_FLOAT8)
    scale = jnp.where(scale == 0, 1, scale)
    numbers = rows / scale
    return (jnp.round(numbers) if dtype == "int8" else numbers.astype(dtype).astype(jnp.float32)) * scale


def log_probs(model: DecoderModel, params: FlatParams, windows: npt.NDArray[np.int32]) -> LogProbs:
    """Of each token that comes next, `[windows, WINDOW - 1]`."""
    eight_bits = jnp.dtype(model.kv.dtype).itemsize == 1

    @jax.jit
    def forward(params: FlatParams, tokens: jax.Array) -> jax.Array:
        kv = RoundedKV(kv_dtype=model.kv.dtype) if eight_bits else DenseCausal()
        hidden = model.hidden(params, tokens, jnp.arange(WINDOW, dtype=jnp.int32), kv)
        scores = jax.nn.log_softmax(model.logits(params, hidden))
        return jnp.take_along_axis(scores[:-1], tokens[1:, None], 1)[:, 0]

    return np.stack([np.asarray(forward(params, window)) for window in windows])


def combinations(path: Path) -> Iterator[tuple[str, str, DecoderModel, FlatParams]]:
    """Weights, KV, and the model that has both."""
    for weights in WEIGHTS:
        for kv_dtype in KV if weights == "float32" else KV[1:]:
            loaded = load_model(path, weights_dtype=weights, kv_dtype=kv_dtype)
            yield weights, kv_dtype, loaded.model, loaded.params
    for matmul_dtype, kv_dtype in (("int16", "bfloat16"), ("int8", "bfloat16"), ("int8", "int8")):
        loaded = load_model(path, weights_dtype="int8", kv_dtype=kv_dtype, matmul_dtype=matmul_dtype)
        yield f"int8, as {matmul_dtype}", kv_dtype, loaded.model, loaded.params
    loaded = load_model(path, weights_dtype="int8", kv_dtype="bfloat16")
    yield "int8 and head", "bfloat16", loaded.model, with_rounded_embedding(loaded.model, loaded.params)


def with_rounded_embedding(model: DecoderModel, params: FlatParams) -> FlatParams:
    """The parameters, the embedding as int8 would hold it."""
    place = [spec.name for spec in model.specs].index(EMBEDDING)
    values, scale = quantize(np.asarray(params[place]), "int8")
    rounded_embedding = jnp.asarray(values * scale[:, None], params[place].dtype)
    return (*params[:place], rounded_embedding, *params[place + 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--windows", type=int, default=62, help="of the text's beginning; it has 62")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = encode(tokenizer, standard_library().validation)
    count = min(options.windows, len(ids) // WINDOW)
    windows = ids[: count * WINDOW].reshape(count, WINDOW).astype(np.int32)
    print(f"{count} windows of {WINDOW:,} tokens, JAX {jax.__version__} on {jax.devices()[0].platform}\n")
    print("| weights | KV | mean difference | largest difference | nats per token | perplexity |")
    print("|---|---|---|---|---|---|")
    truth: LogProbs | None = None
    for weights, kv_dtype, model, params in combinations(options.model):
        found = log_probs(model, params, windows)
        truth = found if truth is None else truth
        apart, nats = np.abs(found - truth), -float(found.mean(dtype=np.float64))
        numbers = f"{apart.mean():.5f} | {apart.max():.3f} | {nats:.4f} | {math.exp(nats):.3f}"
        print(f"| {weights} | {kv_dtype} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
