"""The second kernel of attention on NVIDIA GPUs: partial results of units merged by log-sum-exp, all in float32.

    outputs     [kv_heads, partials, 64, head_dim]   not divided by the sums of weights
    statistics  [kv_heads, partials, 2, 64]          of each row: the maximum that weights are relative to, their sum

Which partial results belong together is in `Schedule.slots` of `gpu_schedule`. Attention sinks come in here, as one
more partial result of every row, of weight 1 and without a value: the first kernel knows nothing of them. Called by
`mosaic_hopper` and `mosaic_mma` behind their own kernels; it uses loads and stores only, so it is the same on every
GPU.
"""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float32, Int32

from jaxctx_kernels.gpu_schedule import SIDE, TileConfig
from jaxctx_kernels.reference import LOG2_E, MASKED_SCORE

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Ref: TypeAlias = Any  # to memory of the device

MERGED_COLUMNS = 32  # of head_dim that one block merges
BY_PRODUCT = plgpu.Layout.WGMMA  # how a warpgroup's registers hold a product
BY_ROW = BY_PRODUCT.reduce(1)  # a value for each of its rows

# Columns of statistics: of each row the maximum of its scores (in base 2), and the sum of its weights.
MAX_SCORE, WEIGHT_SUM = range(2)


def merge_partials(
    outputs: Float32[Array, "kv_heads partials 64 head_dim"],
    statistics: Float32[Array, "kv_heads partials 2 64"],
    slots: Int32[Array, "tiles 2"],
    config: TileConfig,
    sinks: Float32[Array, "kv_heads 64"] | None = None,
) -> Float32[Array, "kv_heads products 64 head_dim"]:
    """Merge each tile's partial results, in order of slots. Rows that saw nothing become zeros.

    `sinks`: of each row of a product, see `sinks_of_products`.
    """
    kv_heads, _, _, dim = outputs.shape
    merged: jax.Array = plgpu.kernel(
        partial(merge_product, config=config),
        kernel_name="merge_product",
        out_type=jax.ShapeDtypeStruct((kv_heads, config.products, SIDE, dim), jnp.float32),
        grid=(kv_heads, config.products, dim // MERGED_COLUMNS),
        grid_names=("head", "product", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(outputs, statistics, slots, sinks)
    return merged


def sinks_of_products(
    sinks: Float32[Array, " heads"] | None, kv_heads: int, config: TileConfig
) -> Float32[Array, "kv_heads 64"] | None:
    """The sink of each row of a product, whose query heads `gather_queries` lays out, as the first kernel has scores.

    Those are in base 2, and with a soft cap all are higher by it (`gpu_scores`).
    """
    if sinks is None:
        return None
    raised = sinks.astype(jnp.float32) + (config.soft_cap or 0.0)
    of_heads = jnp.maximum(raised * LOG2_E, MASKED_SCORE).reshape(kv_heads, config.group)
    return of_heads[:, jnp.arange(SIDE) % config.group]


def merge_product(
    outputs: Ref, statistics: Ref, slots: Ref, sinks: Ref | None, merged: Ref, *, config: TileConfig
) -> None:
    """Some columns of one product."""
    head, number, column = (lax.axis_index(axis) for axis in ("head", "product", "column"))
    columns = pl.ds(column * MERGED_COLUMNS, MERGED_COLUMNS)
    tile, part = lax.div(number, config.parts), lax.rem(number, config.parts)
    # A slot has a partial result of each consumer: of the same product if they took turns, else of one part each.
    begin, end = slots[tile, 0] * config.ways, slots[tile, 1] * config.ways
    take_max = partial(merge_max, statistics, head, part, config)
    sink = None if sinks is None else plgpu.load(sinks.at[head], layout=BY_ROW, optimized=False)
    max_score = lax.fori_loop(begin, end, take_max, filled(MASKED_SCORE) if sink is None else sink)
    add = partial(merge_partial, outputs, statistics, head, part, config, columns, max_score)
    nothing = filled(0.0, MERGED_COLUMNS)
    weight_sum = filled(0.0) if sink is None else jnp.exp2(sink - max_score)
    output, total = lax.fori_loop(begin, end, add, (nothing, weight_sum))
    is_empty = in_columns(total, MERGED_COLUMNS) == 0.0
    merged[head, number, :, columns] = jnp.where(is_empty, 0.0, output / in_columns(total, MERGED_COLUMNS))


def merge_max(
    statistics: Ref, head: jax.Array, part: jax.Array, config: TileConfig, i: jax.Array, max_score: jax.Array
) -> jax.Array:
    """The maximum of each row, partial result `i` included."""
    of_partial = statistics.at[head, i * config.parts + part, MAX_SCORE]
    return jnp.maximum(max_score, plgpu.load(of_partial, layout=BY_ROW, optimized=False))


def merge_partial(
    outputs: Ref,
    statistics: Ref,
    head: jax.Array,
    part: jax.Array,
    config: TileConfig,
    columns: Any,
    max_score: Float32[Array, "64"],
    i: jax.Array,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Output and sum of weights, both relative to `max_score`, with partial result `i` added."""
    output, total = carry
    of_partial = statistics.at[head, i * config.parts + part, MAX_SCORE]
    weight = jnp.exp2(plgpu.load(of_partial, layout=BY_ROW, optimized=False) - max_score)
    source = outputs.at[head, i * config.parts + part, :, columns]
    values = plgpu.load(source, layout=BY_PRODUCT, optimized=False)
    output = output + values * in_columns(weight, MERGED_COLUMNS)
    of_partial = statistics.at[head, i * config.parts + part, WEIGHT_SUM]
    return output, total + plgpu.load(of_partial, layout=BY_ROW, optimized=False) * weight


def filled(value: float, columns: int | None = None) -> jax.Array:
    """A constant for each row of a product, `[64]`, or for each column of each row, `[64, columns]`."""
    shape, layout = ((SIDE,), BY_ROW) if columns is None else ((SIDE, columns), BY_PRODUCT)
    constant: jax.Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    return constant


def in_columns(by_row: jax.Array, columns: int) -> jax.Array:
    """Each row's value in every column: `[64]` to `[64, columns]`."""
    return lax.broadcast_in_dim(by_row, (SIDE, columns), [0])
