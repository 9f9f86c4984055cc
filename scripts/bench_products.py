#!/usr/bin/env python3
"""Products of rows with weights of 8 bits beside those with bfloat16, on the device found here.

    scripts/bench_products.py [--rows 1 4 16 64 512] [--rounds 12] [--out 4096] [--inside 1024]

Times a chain of products with a dozen weights, more than caches hold. The types take turns, and the fastest of the
rounds counts, so that whatever else the machine does meets all of them: read the ratios. "int8 as float32" is int8
weights with `--matmul-dtype float32`; "int8 as int8" and "as int16" round the activations, a scale for each row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.products import INTEGERS, QuantizedWeight, project
from jaxctx.model.weights.quantize import quantize

WEIGHTS = 12


def chain(inside: int) -> Callable[[jax.Array, list[Any]], jax.Array]:
    """A function of rows and weights whose products wait for one another."""

    def run(x: jax.Array, weights: list[Any]) -> jax.Array:
        for weight in weights:
            y = project(x, weight)
            x = x + jnp.resize(y, (x.shape[0], inside)) * 1e-6
        return x

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--inside", type=int, default=1024)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    wide = [rng.normal(size=(options.out, options.inside)).astype(np.float32) for _ in range(WEIGHTS)]

    def narrow(dtype: str) -> list[tuple[jax.Array, jax.Array]]:
        made = (quantize(weight, dtype) for weight in wide)
        return [(jnp.asarray(values.view(EIGHT_BITS[dtype])), jnp.asarray(scale)) for values, scale in made]

    int8, float8 = narrow("int8"), narrow("float8_e4m3fn")
    kinds: dict[str, list[Any]] = {"bfloat16": [jnp.asarray(weight, jnp.bfloat16) for weight in wide]}
    for name, parts in (("int8", int8), ("float8_e4m3fn", float8)):
        for matmul_dtype in ("bfloat16", "float32", *INTEGERS)[: None if name == "int8" else 2]:
            kinds[f"{name} as {matmul_dtype}"] = [QuantizedWeight(*each, matmul_dtype) for each in parts]
    platform = jax.devices()[0].platform
    print(f"JAX {jax.__version__} on {platform}, weights [{options.out}, {options.inside}]")
    for rows in options.rows:
        x = jnp.asarray(rng.normal(size=(rows, options.inside)), jnp.float32)
        compiled = {
            name: jax.jit(chain(options.inside)).lower(x, weights).compile(compiler_options=compiler_options(platform))
            for name, weights in kinds.items()
        }
        fastest = dict.fromkeys(kinds, float("inf"))
        for _ in range(options.rounds):
            for name, weights in kinds.items():
                start = time.perf_counter()
                compiled[name](x, weights).block_until_ready()
                fastest[name] = min(fastest[name], time.perf_counter() - start)
        base = fastest["bfloat16"]
        told = ", ".join(f"{name} {seconds / base:.2f}" for name, seconds in fastest.items())
        print(f"{rows} rows: {base / WEIGHTS * 1e3:.2f} ms a product of bfloat16; {told}", flush=True)


if __name__ == "__main__":
    main()
