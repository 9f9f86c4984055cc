"""Products with weights of 4 bits on TPU: words are brought to VMEM as they are stored and widened in registers.

    grid: rows ▸ outputs ▸ inputs      words ──copy──▶ VMEM ── four times (shift, and, or) ──▶ 128 inputs in bfloat16
                                       x      ──copy──▶ VMEM ──────────────── product ───────────────┘
                                                                    │  scaled, added
                                                                    ▼
                                                             float32 outputs in VMEM

Copies of the next block go on while one is multiplied. With groups of 128 inputs the scale comes after the product of a
chunk, which is of exact numbers: 11 operations for 8 codes. Smaller groups would leave most of the matrix unit idle;
their scales come before, and weights are rounded to bfloat16, as if they had been widened when they were loaded.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float32, Int32

from jaxctx_kernels.int4_weights import CHUNK, MIDDLE, OFFSET, TWO_CODES, TWO_OFFSETS, UNIT, UNITS, WORDS
from jaxctx_kernels.pallas_tpu import VMEM_BYTES, Ref

ROWS = 256  # of a block at most
ROW_TILE = 16  # rows of bfloat16 in a register
OUTPUTS = (512, 256, 128)  # of a block
CHUNKS = 64  # of a block at most


def multiply(
    x: BFloat16[Array, "rows in"],
    words: Int32[Array, "words out"],
    scales: Float32[Array, "parts groups out"],
) -> Float32[Array, "rows out"]:
    """See `int4_weights.multiply`."""
    rows, (inside, out) = x.shape[0], (x.shape[1], words.shape[1])
    parts, groups, _ = scales.shape
    of_rows = min(ROWS, -(-rows // ROW_TILE) * ROW_TILE)
    of_out = next(size for size in OUTPUTS if out % size == 0)
    chunks = most_chunks(inside // CHUNK)
    x = jnp.pad(x, ((0, -rows % of_rows), (0, 0)))
    product: jax.Array = pl.pallas_call(
        partial(kernel, group=inside // groups, chunks=chunks),
        out_shape=jax.ShapeDtypeStruct((len(x), out), jnp.float32),
        grid=(len(x) // of_rows, out // of_out, inside // CHUNK // chunks),
        in_specs=[
            pl.BlockSpec((of_rows, chunks * CHUNK), lambda row, column, k: (row, k)),
            pl.BlockSpec((chunks * WORDS, of_out), lambda row, column, k: (k, column)),
            pl.BlockSpec((parts, groups, of_out), lambda row, column, k: (0, 0, column)),
        ],
        out_specs=pl.BlockSpec((of_rows, of_out), lambda row, column, k: (row, column)),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        name="multiply_int4",
    )(x, words, scales)
    return product[:rows]


def most_chunks(chunks: int) -> int:
    """How many of a weight's chunks a block has: as many as divide them."""
    return max(n for n in range(1, min(chunks, CHUNKS) + 1) if chunks % n == 0)


def kernel(x: Ref, words: Ref, scales: Ref, product: Ref, *, group: int, chunks: int) -> None:
    """Add a block of inputs to a block of the product."""
    step = pl.program_id(2)

    @pl.when(step == 0)
    def clear() -> None:
        product[...] = jnp.zeros_like(product)

    groups = CHUNK // group  # of a chunk

    def add(chunk: jax.Array, _: None) -> None:
        taken = x[:, pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)]
        packed = words[pl.ds(pl.multiple_of(chunk * WORDS, WORDS), WORDS), :]
        first = (step * chunks + chunk) * groups
        if groups == 1:
            wide = jnp.concatenate([widened(packed, unit) for unit in range(UNITS)])
            scale, zero = scale_and_zero(scales, first)
            sums = taken.astype(jnp.float32).sum(1, keepdims=True)
            product[...] += (dot(taken, wide) - sums * (zero + OFFSET)) * scale
            return
        scaled = []
        for unit in range(UNITS):
            scale, zero = scale_and_zero(scales, first + unit * UNIT // group)
            numbers = widened(packed, unit).astype(jnp.float32)
            scaled.append(((numbers - (zero + OFFSET)) * scale).astype(jnp.bfloat16))
        product[...] += dot(taken, jnp.concatenate(scaled))

    lax.fori_loop(0, chunks, add, None)


def scale_and_zero(scales: Ref, group: jax.Array) -> tuple["jax.Array", "jax.Array | float"]:
    """Of a group, `[1, outputs]` each."""
    scale = scales[0, pl.ds(group, 1), :]
    return scale, scales[1, pl.ds(group, 1), :] if scales.shape[0] == 2 else float(MIDDLE)


def widened(packed: Int32[Array, "16 outputs"], unit: int) -> BFloat16[Array, "32 outputs"]:
    """Inputs 32 * unit … 32 * unit + 31 of a chunk: 128 + code each."""
    two = (lax.shift_right_logical(packed, 4 * unit) & TWO_CODES) | TWO_OFFSETS
    return as_pairs(two)


def as_pairs(two: Int32[Array, "16 outputs"]) -> BFloat16[Array, "32 outputs"]:
    """Two bfloat16 from each word, the one in the lower bits first: what a register has them as."""
    return pltpu.bitcast(two, jnp.bfloat16)


def dot(x: BFloat16[Array, "rows 128"], wide: BFloat16[Array, "128 outputs"]) -> Float32[Array, "rows outputs"]:
    """The product of a chunk."""
    return jnp.dot(x, wide, preferred_element_type=jnp.float32)
