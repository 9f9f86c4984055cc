"""Attention over a work list on NVIDIA GPUs since Ampere, in Pallas Mosaic GPU, where `mosaic_hopper` does not serve.

It uses only what all of them have: loads and stores, and products of a warp (`mma`). The work is cut as on a Hopper,
into units of steps of 64 tokens (`gpu_schedule`), and partial results are merged by the same second kernel
(`gpu_merge`). A unit is a single warpgroup that does one thing after the other; two of them on a processor hide each
other's waiting.

    pages of K ──registers──▶ buffer ──▶ scores = q · k ──▶ weights = 2**(scores - maximum)
    pages of V ──registers──────▶ the same buffer ───────────────────▶ output += weights · v

Pages go through registers into shared memory, since no asynchronous copy is the same on all of these GPUs. There values
of 8 bits are widened to bfloat16, so that both products are the same for all pages; float8 by its bits, as Ampere has
no instruction for it. A unit takes 74 KB of shared memory or less, where the smallest of these GPUs gives 99.

Heads are never mixed: under a mesh call this in `shard_map`, queries and pages split over heads, the metadata on all.

    attend ─┬─ gpu_schedule.build_schedule
            ├─ attend_work_units     kernel: attend_unit ── attend_tile ── attend_pair ── attend_step
            └─ gpu_merge.merge_partials
"""

from dataclasses import dataclass, replace
from functools import partial
from math import e, log2
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxctx_kernels.gpu_merge import (
    MAX_SCORE,
    MERGED_COLUMNS,
    WEIGHT_SUM,
    in_columns,
    merge_partials,
    sinks_of_products,
)
from jaxctx_kernels.gpu_schedule import (
    FIRST_ENTRY,
    FIRST_ROW,
    FIRST_TOKEN,
    HIDDEN,
    ROWS,
    SIDE,
    TOKENS,
    Schedule,
    TileConfig,
    Window,
    WorkUnit,
    build_schedule,
    gather_queries,
    load_work_unit,
    rows_of_products,
    scatter_outputs,
)
from jaxctx_kernels.gpu_scores import capped
from jaxctx_kernels.kv_cache import KVPages, QuantizedKV, fits_mma_kernel, kv_values, without_stored_bits
from jaxctx_kernels.metadata import AttentionMetadata, MetadataShape
from jaxctx_kernels.reference import MASKED_SCORE

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Ref: TypeAlias = Any  # to memory of the device

UNITS_PER_PROCESSOR = 2  # by their registers, which are nearly all that a thread may have
EARLY_VALUES_DIM = 128  # up to this head_dim registers hold a step's values while its scores are computed
INT_OFFSET, INT_OFFSET_BITS = 1.5 * 2**23, 0x4B400000  # a float32 and its bits
BY_PRODUCT = plgpu.Layout.MMA_ACC(jnp.bfloat16)  # how a warpgroup's registers hold a product
BY_ROW, BY_COLUMN = BY_PRODUCT.reduce(1), BY_PRODUCT.reduce(0)  # a value for each of its rows, or columns
LEFT, RIGHT = plgpu.Layout.MMA_LHS(jnp.bfloat16), plgpu.Layout.MMA_RHS(jnp.bfloat16)  # and its operands


class SharedMemory(NamedTuple):
    """The shared memory of a unit. All is bfloat16."""

    q: Ref  # [64, head_dim]
    kv: Ref  # [64, head_dim], keys, then values, of a step
    weights: Ref  # [64, 64], for the product with values


class RunningSoftmax(NamedTuple):
    """What a unit has merged of a tile, in registers."""

    outputs: tuple[jax.Array, ...]  # float32 [64, columns] for each range of columns; not divided by the sum
    max_score: Float32[Array, "64"]  # in base 2
    weight_sum: Float32[Array, "64"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a unit reads: the pages of its KV head, and the list of pages; and what it computes there."""

    k_pages: KVPages
    v_pages: KVPages
    page_list: Ref
    head: jax.Array
    config: TileConfig

    @property
    def head_dim(self) -> int:
        return cast(int, kv_values(self.k_pages).shape[3])


class ItemOfTile(NamedTuple):
    """What a unit needs of an item at each of its steps. The last two are None without a sliding window."""

    first_entry: jax.Array
    tokens: jax.Array
    inside: Bool[Array, "64"]  # which rows of the tile belong to the item, and see some of it
    limit: Int32[Array, "64"]  # at which of the item's tokens what each row sees ends
    begin: Int32[Array, "64"] | None  # and at which it begins, which may be negative
    hidden: jax.Array | None  # how many of the item's first tokens no row of the tile sees


class StepKV(NamedTuple):
    """Keys, or values, of a step in registers: of each page `[span, head_dim]` as they are stored, and scales."""

    numbers: list[jax.Array]
    scales: Float32[Array, "64"] | None


# What XLA computes before and after the kernels


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    shape: MetadataShape,
    soft_cap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
) -> Float32[Array, "rows heads head_dim"]:
    """See `dispatch.attend`. Raises ValueError for a dtype, head dim, group or page size that it is not made for."""
    k_pages, v_pages = without_stored_bits(k_pages), without_stored_bits(v_pages)
    rows, heads, dim = q.shape
    values = kv_values(k_pages)
    kv_heads, _, page_size, _ = values.shape
    group = heads // kv_heads
    if not fits_mma_kernel(k_pages) or group > SIDE:
        raise ValueError(f"no kernel for {values.dtype}, heads of {dim}, groups of {group}, pages of {page_size}")
    window = None if shape.window is None else Window(shape.window, page_size)
    config = replace(tile_config(rows, kv_heads, group, shape.processors), window=window, soft_cap=soft_cap)
    row = rows_of_products(rows, config)
    query = gather_queries(q, metadata, row, kv_heads)
    visible_tokens = metadata.visible_tokens.at[row].get(mode="fill", fill_value=0)
    schedule = build_schedule(metadata, visible_tokens, config)
    outputs, statistics = attend_work_units(query, k_pages, v_pages, metadata.pages, schedule, config)
    of_products = sinks_of_products(sinks, kv_heads, config)
    merged = merge_partials(outputs, statistics, schedule.slots, config, of_products)
    return scatter_outputs(merged[..., :dim], metadata, config, rows, heads)


def tile_config(rows: int, kv_heads: int, group: int, processors: int) -> TileConfig:
    """How a step of `rows` rows is cut: a tile is one product of 64 query heads, a unit does all of its steps."""
    product_rows = SIDE // group
    units = max(1, UNITS_PER_PROCESSOR * processors // kv_heads)
    return TileConfig(group=group, rows=product_rows, parts=1, ways=1, tiles=-(-rows // product_rows), units=units)


# The kernel: partial results of each unit


def attend_work_units(
    q: Float[Array, "kv_heads tiles 64 head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    page_list: Int32[Array, " entries"],
    schedule: Schedule,
    config: TileConfig,
) -> tuple[Float32[Array, "kv_heads partials 64 columns"], Float32[Array, "kv_heads partials 2 64"]]:
    """Partial results by slot: outputs not divided by sums; maxima and sums.

    `columns`: head_dim, and what the second kernel needs for a multiple of its columns, which stays undefined.
    """
    kv_heads, _, _, dim = q.shape
    partials = config.units + config.tiles - 1
    columns = -(-dim // MERGED_COLUMNS) * MERGED_COLUMNS
    outputs = jax.ShapeDtypeStruct((kv_heads, partials, SIDE, columns), jnp.float32)
    statistics = jax.ShapeDtypeStruct((kv_heads, partials, 2, SIDE), jnp.float32)
    shared = SharedMemory(q=tiled((SIDE, dim)), kv=tiled((SIDE, dim)), weights=tiled((SIDE, SIDE)))
    outputs, statistics = plgpu.kernel(
        partial(attend_unit, config=config),
        kernel_name="attend_unit",
        out_type=(outputs, statistics),
        grid=(kv_heads, config.units),
        grid_names=("head", "unit"),
        scratch_types=(shared,),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k_pages, v_pages, page_list, schedule)
    return outputs, statistics


def tile_columns(dim: int) -> int:
    """Columns that lie together in shared memory, so that products read and threads write it without conflicts."""
    return next(columns for columns in (64, 32, 16) if dim % columns == 0)


def tiled(shape: tuple[int, int]) -> Ref:
    """The type of a buffer in shared memory: swizzled tiles of 8 rows."""
    columns = tile_columns(shape[1])
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def in_vectors(dim: int) -> Any:
    """How registers hold rows on their way into shared memory: of 16 rows, four a warp, eight threads share a row.

    The threads of a row read 128 bytes of bfloat16 together, where `dim` is a multiple of 64.
    """
    columns = tile_columns(dim)
    tiling = plgpu.Tiling(((16, columns), (4, columns), (columns // 8,)))
    return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


def ranges_of(dim: int) -> list[Any]:
    """The ranges of columns that are multiplied one after the other."""
    return [pl.ds(start, tile_columns(dim)) for start in range(0, dim, tile_columns(dim))]


def attend_unit(
    q: Ref,
    k_pages: KVPages,
    v_pages: KVPages,
    page_list: Ref,
    schedule: Schedule,
    outputs: Ref,
    statistics: Ref,
    shared: SharedMemory,
    *,
    config: TileConfig,
) -> None:
    """Attend to one unit's steps; write a partial result for each of its tiles. Arguments are refs."""
    head, number = lax.axis_index("head"), lax.axis_index("unit")
    unit = load_work_unit(schedule.units, head, number, jnp.int32(0))
    source = Source(k_pages, v_pages, page_list, head, config)

    @pl.loop(unit.tiles.begin, unit.tiles.end)
    def write_tile(tile: jax.Array) -> None:
        result = attend_tile(source, shared, unit, q, schedule, tile)
        slot = number + tile
        for columns, output in zip(ranges_of(source.head_dim), result.outputs, strict=True):
            store_rows(outputs.at[head, slot, :, columns], output)
        statistics[head, slot, MAX_SCORE] = result.max_score
        statistics[head, slot, WEIGHT_SUM] = result.weight_sum


def store_rows(target: Ref, rows: jax.Array) -> None:
    """Write rows that may be shorter than a line of the cache. JAX 0.11 writes them as any others."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, rows, optimized=False)
    else:
        target[...] = rows


def attend_tile(
    source: Source,
    shared: SharedMemory,
    unit: WorkUnit,
    q: Ref,
    schedule: Schedule,
    tile: jax.Array,
) -> RunningSoftmax:
    """What the unit has of a tile."""
    shared.q[...] = plgpu.load(q.at[unit.head, tile], layout=in_vectors(source.head_dim), optimized=False)
    visible_tokens = plgpu.load(schedule.visible_tokens.at[tile], layout=BY_ROW, optimized=False)
    first = jnp.maximum(unit.pairs.begin, schedule.tiles[tile])
    end = jnp.minimum(unit.pairs.end, schedule.tiles[tile + 1])
    nothing = RunningSoftmax(
        outputs=tuple(zeros(tile_columns(source.head_dim)) for _ in ranges_of(source.head_dim)),
        max_score=plgpu.layout_cast(jnp.full((SIDE,), MASKED_SCORE, jnp.float32), BY_ROW),
        weight_sum=plgpu.layout_cast(jnp.zeros((SIDE,), jnp.float32), BY_ROW),
    )
    walk = partial(attend_pair, source, shared, unit, schedule, visible_tokens)
    return cast(RunningSoftmax, lax.fori_loop(first, end, walk, nothing))


def attend_pair(
    source: Source,
    shared: SharedMemory,
    unit: WorkUnit,
    schedule: Schedule,
    visible_tokens: Int32[Array, "64"],
    number: jax.Array,
    carry: RunningSoftmax,
) -> RunningSoftmax:
    """Merge the unit's steps of a pair of an item and a tile."""
    pair: Ref = schedule.pairs.at[number]
    steps, tokens = unit.steps_of(pair), pair[TOKENS]
    row_number = plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=BY_ROW)
    config = source.config
    row = pair[FIRST_ROW] * config.group  # the item's first row, of the tile's
    inside = (row_number >= row) & (row_number < row + pair[ROWS] * config.group)
    limit = jnp.where(inside, jnp.minimum(visible_tokens - pair[FIRST_TOKEN], tokens), 0)
    begin = hidden = None
    if config.window is not None:
        begin, hidden = visible_tokens - pair[FIRST_TOKEN] - config.window.tokens, pair[HIDDEN]
        inside &= limit > begin
    item = ItemOfTile(pair[FIRST_ENTRY], tokens, inside, limit, begin, hidden)
    return cast(
        RunningSoftmax, lax.fori_loop(steps.first, steps.end, partial(attend_step, source, shared, item), carry)
    )


def attend_step(
    source: Source, shared: SharedMemory, item: ItemOfTile, step: jax.Array, carry: RunningSoftmax
) -> RunningSoftmax:
    """Merge 64 tokens of an item."""
    known = item.tokens - step * SIDE
    hidden = None if item.hidden is None else item.hidden - step * SIDE
    are_early = source.head_dim <= EARLY_VALUES_DIM
    keys = load_step(source, source.k_pages, item, step)
    values = load_step(source, source.v_pages, item, step) if are_early else None
    store_step(keys, shared.kv)
    score, seen = masked_scores(source, shared, item, step, keys.scales)
    max_score = jnp.maximum(carry.max_score, score.max(axis=1))
    weight = jnp.where(seen, jnp.exp2(score - in_columns(max_score, SIDE)), 0.0)
    shrink = jnp.exp2(carry.max_score - max_score)
    values = values or load_step(source, source.v_pages, item, step)
    shared.weights[...] = scale_columns(weight, values.scales, seen).astype(jnp.bfloat16)
    store_step(values, shared.kv)
    has_unseen = known < SIDE if hidden is None else (known < SIDE) | (hidden > 0)
    pl.when(has_unseen)(partial(clear_rows, shared.kv, known, hidden))
    outputs = add_values(source, shared, item.inside, carry.outputs, shrink)
    return RunningSoftmax(outputs, max_score, carry.weight_sum * shrink + weight.sum(axis=1))


# Pages on their way


def load_step(source: Source, pages: KVPages, item: ItemOfTile, step: jax.Array) -> StepKV:
    """The 64 tokens of a step. Past the item's last page, that page again."""
    page_size, dim = kv_values(pages).shape[2:]
    span = min(page_size, SIDE)  # tokens of a page that are in one step
    numbers, scales = [], []
    for offset in range(0, SIDE, span):
        token = step * SIDE + offset
        entry = item.first_entry + lax.div(jnp.minimum(token, item.tokens - 1), page_size)
        page, slots = source.page_list[entry], pl.ds(lax.rem(token, page_size), span)
        of_page = kv_values(pages).at[source.head, page, slots]
        numbers.append(plgpu.load(of_page, layout=in_vectors(dim), optimized=False))
        if isinstance(pages, QuantizedKV):
            of_page = pages.scales.at[source.head, page, 0, slots]
            scales.append(plgpu.load(of_page, layout=BY_COLUMN, optimized=False))
    return StepKV(numbers, jnp.concatenate(scales) if scales else None)


def store_step(step: StepKV, buffer: Ref) -> None:
    """Write a step's keys or values into shared memory, of 8 bits as bfloat16. All threads wait for each other."""
    first = 0
    for numbers in step.numbers:
        buffer[pl.ds(first, numbers.shape[0])] = widen(numbers)
        first += numbers.shape[0]


def widen(numbers: jax.Array) -> jax.Array:
    """Numbers of 8 bits as bfloat16, exactly, but for NaN of float8, which becomes 480: beside it is a scale of NaN.

    Both by their bits: Ampere converts neither, and JAX's conversion of int8 takes an instruction of Hopper's.
    """
    if numbers.dtype == jnp.bfloat16:
        return numbers
    if numbers.dtype == jnp.int8:  # added to the last bits of 1.5 * 2**23, whose step is 1
        bits = numbers.astype(jnp.int32) + INT_OFFSET_BITS
        number = lax.bitcast_convert_type(bits, jnp.float32) - INT_OFFSET
    else:  # at its place in a float16 it is the number times 2**-8, also where it is subnormal
        byte = lax.bitcast_convert_type(numbers, jnp.int8).astype(jnp.int16)
        bits = ((byte & 0x7F) << 7) | (byte & -0x8000)
        number = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256
    return number.astype(jnp.bfloat16)


def clear_rows(values: Ref, known: jax.Array, hidden: jax.Array | None) -> None:
    """Zero the rows of a buffer of values from `known` on, and the first `hidden` ones.

    Weights of 0 do not keep NaN out of a product.
    """
    layout = in_vectors(values.shape[1])
    number = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
    old = plgpu.load(values, layout=layout)
    is_kept = number < known if hidden is None else (number < known) & (number >= hidden)
    values[...] = jnp.where(is_kept, old, jnp.zeros_like(old))


# Products and registers


def masked_scores(
    source: Source,
    shared: SharedMemory,
    item: ItemOfTile,
    step: jax.Array,
    scales: Float32[Array, "64"] | None,
) -> tuple[Float32[Array, "64 64"], Bool[Array, "64 64"]]:
    """Scaled scores in base 2 of the tile's rows with the step's tokens, MASKED_SCORE where a row sees nothing.

    With a soft cap all are higher by a constant. Also returns where rows see tokens.
    """
    score = zeros(SIDE)
    for columns in ranges_of(source.head_dim):
        query = plgpu.load(shared.q.at[:, columns], layout=LEFT)
        key = plgpu.load(shared.kv.at[:, columns].transpose((1, 0)), layout=RIGHT)
        score = plgpu.mma(score, query, key)
    token = plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), 1, layout=BY_PRODUCT)
    seen = token < in_columns(item.limit - step * SIDE, SIDE)
    if item.begin is not None:
        seen &= token >= in_columns(item.begin - step * SIDE, SIDE)
    unit = source.head_dim**-0.5 * log2(e)
    score, unit = capped(scale_columns(score, scales, seen), unit, source.config.soft_cap)
    return jnp.where(seen, score * unit, MASKED_SCORE), seen


def add_values(
    source: Source,
    shared: SharedMemory,
    inside: Bool[Array, "64"],
    outputs: tuple[jax.Array, ...],
    shrink: Float32[Array, "64"],
) -> tuple[jax.Array, ...]:
    """Outputs times `shrink`, plus the product of weights and the step's values, in rows that are the item's."""
    results = []
    weights = plgpu.load(shared.weights, layout=LEFT)
    for columns, old in zip(ranges_of(source.head_dim), outputs, strict=True):
        value = plgpu.load(shared.kv.at[:, columns], layout=RIGHT)
        new = plgpu.mma(zeros(old.shape[1]), weights, value)
        # Weights of other rows are 0, but 0 * NaN of another sequence's values is not.
        new = jnp.where(in_columns(inside, old.shape[1]), new, 0.0)
        results.append(old * in_columns(shrink, old.shape[1]) + new)
    return tuple(results)


def scale_columns(
    x: Float32[Array, "64 64"], scale: Float32[Array, "64"] | None, seen: Bool[Array, "64 64"]
) -> Float32[Array, "64 64"]:
    """Columns times their tokens' scales, which may be NaN where nothing is seen."""
    if scale is None:
        return x
    return x * jnp.where(seen, lax.broadcast_in_dim(scale, (SIDE, SIDE), [1]), 0.0)


def zeros(columns: int) -> Float32[Array, "64 columns"]:
    """A product before anything is added."""
    nothing: jax.Array = plgpu.layout_cast(jnp.zeros((SIDE, columns), jnp.float32), BY_PRODUCT)
    return nothing
