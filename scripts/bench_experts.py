#!/usr/bin/env python3
"""The experts of a sparse layer beside dense feed-forward blocks that read as many bytes, on the device found here.

    scripts/bench_experts.py [--rows 1 4 16 64 512] [--rounds 12] [--experts 16] [--taken 2] [--width 2048] [--ffn 1408]
                             [--weights-dtype int8] [--processor-time]

A dense block has as many outputs as all experts together that the rows chose: it reads the same weights, and multiplies
all rows with each. Both take turns, and the fastest of the rounds counts, so that whatever else the machine does meets
both: read the ratio. Rows choose at random, and differently. On a busy machine take --processor-time, and one core
(`taskset -c 0`): with several, threads that wait for one another count too.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.model.expert_products import ExpertWeights, feed_experts
from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.layers.feed_forward import plain_gate
from jaxctx.model.products import QuantizedWeight, Weight, project
from jaxctx.model.weights.quantize import quantize


def make(rng: np.random.Generator, shape: tuple[int, ...], weights_dtype: str) -> Weight:
    """Random weights, `[out, in]` or of experts that are all alike `[experts, out, in]`."""
    wide = rng.normal(size=shape[-2:]).astype(np.float32) / np.sqrt(shape[-1])
    if weights_dtype == "bfloat16":
        return jnp.broadcast_to(jnp.asarray(wide, jnp.bfloat16), shape).copy()
    values, scale = quantize(wide, weights_dtype)
    held = jnp.asarray(values.view(EIGHT_BITS[weights_dtype]))
    return QuantizedWeight(jnp.broadcast_to(held, shape).copy(), jnp.broadcast_to(scale, shape[:-1]).copy(), "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--taken", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--weights-dtype", default="bfloat16", choices=["bfloat16", *EIGHT_BITS])
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    rng = np.random.default_rng(0)
    width, ffn, kind = options.width, options.ffn, options.weights_dtype
    into, back = (options.experts, ffn, width), (options.experts, width, ffn)
    experts = ExpertWeights(make(rng, into, kind), make(rng, into, kind), make(rng, back, kind))
    platform = jax.devices()[0].platform
    compile_with = compiler_options(platform)

    def sparse(x: jax.Array, chosen: jax.Array, scores: jax.Array, weights: ExpertWeights) -> jax.Array:
        return feed_experts(x, chosen, scores, weights, partial(plain_gate, "silu"))

    def dense(x: jax.Array, blocks: list[ExpertWeights]) -> jax.Array:
        for gate, up, down in (block.matrices for block in blocks):
            x = x + project(jax.nn.silu(project(x, gate)) * project(x, up), down) * 1e-6
        return x

    of_experts = f"{options.experts} experts [{ffn}, {width}] of {kind}, {options.taken} a row"
    print(f"JAX {jax.__version__} on {platform}, {of_experts}")
    blocks = [
        ExpertWeights(make(rng, into[1:], kind), make(rng, into[1:], kind), make(rng, back[1:], kind))
        for _ in range(options.experts)
    ]
    for rows in options.rows:
        x = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
        chosen = jnp.asarray(np.argsort(rng.random((rows, options.experts)))[:, : options.taken], jnp.int32)
        scores = jnp.full(chosen.shape, 1 / options.taken, jnp.float32)
        asked = len(np.unique(chosen))
        runs = {
            "experts": (jax.jit(sparse), (x, chosen, scores, experts)),
            "dense": (jax.jit(dense), (x, blocks[:asked])),
        }
        compiled = {
            name: run.lower(*given).compile(compiler_options=compile_with) for name, (run, given) in runs.items()
        }
        fastest = dict.fromkeys(runs, float("inf"))
        for _ in range(options.rounds):
            for name, (_, given) in runs.items():
                start = clock()
                compiled[name](*given).block_until_ready()
                fastest[name] = min(fastest[name], clock() - start)
        ratio = fastest["experts"] / fastest["dense"]
        taken = fastest["experts"] * 1e3
        print(f"{rows} rows, {asked} experts asked: {taken:.2f} ms, of the dense blocks' time {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
