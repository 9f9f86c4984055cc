#!/usr/bin/env python3
"""Temporaries of a product with a weight of 4 bits and a scale for each group of inputs, compiled for chips.

    .venv/bin/python scripts/compile_int4.py [--target v5e v6e h200] [--rows 1 16 64] [--out 14336] [--in 4096]
                                             [--group 128]

Needs the compilers of `scripts/environment tpu` and `cuda13`, and no chip. Two forms are compiled: the scale after
a product for each group, and the scale inside of one product. Temporaries as large as the weight in bfloat16 tell that
it, or its scales, are widened in memory.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxctx.engine.plan.memory_planner import compiling_for
from jaxctx.engine.runner.compiler_options import compiler_options


def scaled_after(x: jax.Array, values: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """x `[rows, in]`, values int4 `[groups, out, size]`, scale and shift float32 `[groups, out]` → `[rows, out]`."""
    groups, _, size = values.shape
    grouped = x.reshape(len(x), groups, size)
    batched = (((2,), (2,)), ((1,), (0,)))
    parts = lax.dot_general(grouped, values.astype(x.dtype), batched, preferred_element_type=jnp.float32)
    sums = grouped.astype(jnp.float32).sum(2)
    return (parts * scale[:, None, :]).sum(0) - jnp.matmul(sums, shift, precision="highest")


def scaled_inside(x: jax.Array, values: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """The same numbers, rounded otherwise."""
    wide = values.astype(jnp.float32) * scale[:, :, None] - shift[:, :, None]
    weight = wide.astype(x.dtype).transpose(1, 0, 2).reshape(values.shape[1], -1)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", default=["v5e", "v6e", "h200"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--out", type=int, default=14336)
    parser.add_argument("--in", type=int, default=4096, dest="inside")
    parser.add_argument("--group", type=int, default=128)
    options = parser.parse_args()
    groups = options.inside // options.group
    for target in options.target:
        with compiling_for(target) as (devices, _):
            struct = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
            weight = struct((groups, options.out, options.group), jnp.int4)
            scale = struct((groups, options.out), jnp.float32)
            for form in (scaled_after, scaled_inside):
                for rows in options.rows:
                    lowered = jax.jit(form).lower(struct((rows, options.inside), jnp.bfloat16), weight, scale, scale)
                    compiled = lowered.compile(compiler_options=compiler_options(devices[0].platform))
                    memory: Any = compiled.memory_analysis()
                    print(f"{target}: {form.__name__}, {rows} rows: {memory.temp_size_in_bytes:,} bytes", flush=True)


if __name__ == "__main__":
    main()
