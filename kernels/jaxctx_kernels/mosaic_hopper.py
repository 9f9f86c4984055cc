"""Attention over a work list on NVIDIA Hopper, in Pallas Mosaic GPU.

Sorted rows are cut into *tiles*, whose query heads of a KV head fill the 64 rows of a tensor core product. A tile walks
the pages of every item that has rows in it, 64 tokens a *step*: pages that rows share are read once for all of them.
The steps of all tiles, one after the other, are cut into equal *work units*, one for each processor and KV head, with
no regard to where tiles or items end (stream-K, arXiv 2301.03598). So work is even whatever the tree, and partial
results are few: unit u writes one for each tile t that it meets, at slot u + t, which no other pair has.

    steps    | tile 0: prefix, suffixes  | tile 1  | tile 2: prompt chunk       |
    units    | unit 0       | unit 1       | unit 2       | unit 3              |
    slots      0              1      2       3    4         5

A unit is three warpgroups: a producer, which brings a page (at most 64 tokens of one) a copy into rings of buffers, and
two consumers. In steps of many rows each consumer has half of a tile; in others both have the same rows and take turns
at the steps. A second kernel merges partial results by log-sum-exp. All is float32 but what is multiplied.

    producer                 rings in shared memory                 consumers
    pages of K  ──copies──▶  [k0][k1][k2][k3]  full ▶ ◀ free  ──▶   scores = q · k, weights = 2**(scores - maximum)
    pages of V  ──copies──▶  [v0][v1][v2][v3]  full ▶ ◀ free  ──▶   output += weights · v

What is multiplied is bfloat16. Values of 8 bits stay so in the rings; consumers widen them, each those of its steps, or
both half of a step's that they share. Their scales multiply the scores, and the weights before they are rounded.

Most steps are *full*: all rows of a product belong to the item and see all 64 tokens. Their loop masks nothing, keeps
weights in registers and adds up outputs in place. The others follow in a loop of their own.

Heads are never mixed: under a mesh call this in `shard_map`, queries and pages split over heads, the metadata on all.

    attend ─┬─ build_schedule       what every unit does, by XLA
            ├─ attend_work_units    kernel: attend_unit ─┬─ produce
            │                                            └─ consume ── attend_tile ── attend_pair ── attend_step
            └─ merge_partials       kernel: merge_product
"""

from dataclasses import dataclass
from functools import partial
from math import e, log2
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32

from jaxctx_kernels.kv_cache import DTYPE_OF_BITS, KVPages, QuantizedKV, fits_hopper_kernel, kv_values
from jaxctx_kernels.metadata import AttentionMetadata, Item, MetadataShape
from jaxctx_kernels.reference import MASKED_SCORE

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Ref: TypeAlias = Any  # to memory of the device

CONSUMERS = 2  # warpgroups of a unit beside its producer
SPLIT_ROWS = 128  # rows of a step from which consumers split rows, not tokens
SIDE = 64  # rows of a product, and tokens of a step
MIN_STEPS = 4  # of a unit, so that small batches are not cut into too many partial results
MERGED_COLUMNS = 32  # of head_dim that one block of the second kernel merges
IN_REGISTERS = True  # see `TileConfig`; tests set it to False, for the interpreter
BY_PRODUCT = plgpu.Layout.WGMMA  # how a warpgroup's registers hold a product
BY_ROW, BY_COLUMN = BY_PRODUCT.reduce(1), BY_PRODUCT.reduce(0)  # a value for each of its rows, or columns
LOWEST_MAXIMUM = MASKED_SCORE / 100  # far above a masked score, which is scaled: its weight is 0 whatever else is seen
NO_STEP = 2**30  # begin and end of pairs that do not exist

# Columns of `Schedule.pairs`, in the order of the fields of `Pairs`.
STEP_BEGIN, STEP_END, FULL_STEPS, FIRST_ROW, ROWS, FIRST_ENTRY, TOKENS, FIRST_TOKEN = range(8)
# Columns of statistics: of each row the maximum of its scores (in base 2), and the sum of its weights.
MAX_SCORE, WEIGHT_SUM = range(2)
# Places of `SharedMemory.widened` where both consumers use them.
KEYS, VALUES = range(2)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How rows and work are cut: a tile is `parts` products of `rows` sorted rows; `ways` consumers share its steps."""

    group: int  # query heads of a KV head
    rows: int
    parts: int  # 2 where each consumer has a product of its own, else 1
    ways: int  # 2 where both consumers have the same product and take turns at steps, else 1
    tiles: int
    units: int
    in_registers: bool = False  # whether weights are multiplied and outputs added up there, which interpreters cannot

    @property
    def products(self) -> int:
        """Products of 64 rows, of all tiles."""
        return self.tiles * self.parts

    @property
    def tile_rows(self) -> int:
        """Sorted rows of a tile."""
        return self.rows * self.parts


class Pairs(NamedTuple):
    """A pair is an item within a tile. Of all pairs: their steps, and the item as the tile sees it, int32 `[pairs]`."""

    step_begin: jax.Array  # steps are counted over all tiles
    step_end: jax.Array
    full_steps: jax.Array  # how many steps from the first on every row of the tile sees in full, of rows in the item
    first_row: jax.Array  # of the item, counted from the tile's first row; may be negative
    rows: jax.Array
    first_entry: jax.Array
    tokens: jax.Array
    first_token: jax.Array


class Schedule(NamedTuple):
    """What every unit does. Pairs without steps are left out, pairs are in order of their tiles."""

    pairs: Int32[Array, "pairs 8"]  # see `Pairs`
    tiles: Int32[Array, " tiles_and_one"]  # first pair of each
    units: Int32[Array, "units 6"]  # steps, pairs and tiles, from .. to
    slots: Int32[Array, "tiles 2"]  # of partial results, from .. to
    visible_tokens: Int32[Array, "products 64"]  # of the row of each query head; 0 where a product has none


class Range(NamedTuple):
    """From `begin` up to, without, `end`."""

    begin: jax.Array
    end: jax.Array


class StepsOfPair(NamedTuple):
    """The steps that a unit has of a pair."""

    offset: jax.Array  # number within the unit of the pair's first step, negative if that is an earlier unit's
    first: jax.Array  # step of the pair
    end: jax.Array


class WorkUnit(NamedTuple):
    """Where a warpgroup is, and which steps, pairs and tiles its unit has."""

    head: jax.Array
    number: jax.Array
    warpgroup: jax.Array
    steps: Range
    pairs: Range
    tiles: Range

    def steps_of(self, pair: Ref) -> StepsOfPair:
        """`pair`: a row of `Schedule.pairs`."""
        begin = pair[STEP_BEGIN]
        return StepsOfPair(
            offset=begin - self.steps.begin,
            first=jnp.maximum(self.steps.begin - begin, 0),
            end=jnp.minimum(self.steps.end, pair[STEP_END]) - begin,
        )


class Ring(NamedTuple):
    """Buffers that the producer fills and consumers empty, in turn, and two barriers for each.

    `buffers` are `[stages, 64, head_dim]`; of 8 bits a QuantizedKV with scales `[stages, copies, at least 32]`, since
    what a copy brings has to start at a multiple of 128 bytes.
    """

    buffers: Ref
    full: Ref
    free: Ref


class SharedMemory(NamedTuple):
    """The shared memory of a unit."""

    q: Ref  # [consumers, 64, head_dim]
    q_full: Ref
    k: Ring
    v: Ring
    weights: Ref  # [consumers, 64, 64], for the product with values; None where registers hold them
    cleared: Ref
    widened: Ref  # [2, 64, head_dim], keys and values of 8 bits as they are multiplied, see `widen`; None for others
    both_widened: tuple[Ref, Ref]


class RunningSoftmax(NamedTuple):
    """What a consumer has merged of a tile, in registers."""

    outputs: tuple[jax.Array, ...]  # float32 [64, columns] for each range of columns; not divided by the sum
    max_score: Float32[Array, "64"]  # in base 2
    weight_sum: Float32[Array, "64"]


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer warpgroup: who it is, and what it works with at every step."""

    index: jax.Array  # among the consumers
    part: jax.Array | int  # which product of a tile it computes
    turn: jax.Array | int  # which of the `ways` turns at steps it has
    config: TileConfig
    shared: SharedMemory
    stages: int
    head_dim: int
    row_numbers: Int32[Array, "64"]

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are of 8 bits, so that consumers widen them."""
        return self.shared.widened is not None

    @property
    def shares_buffers(self) -> bool:
        """Whether both consumers multiply the same buffer at the same step."""
        return self.config.parts > 1

    @property
    def has_registers_to_spare(self) -> bool:
        """Whether outputs leave room for weights beside a product; else only full steps, without one, have them."""
        return self.head_dim <= 128

    @property
    def chunk(self) -> int:
        """Columns of a product with values; for a head_dim of 256 registers do not take more."""
        return 128 if self.head_dim == 128 else 64

    @property
    def columns(self) -> list[Any]:
        """The ranges of head_dim that are multiplied one after the other."""
        return [pl.ds(start, self.chunk) for start in range(0, self.head_dim, self.chunk)]


class ConsumedPair(NamedTuple):
    """What a consumer needs of a pair at each of its steps."""

    offset: jax.Array  # see `StepsOfPair`
    tokens: jax.Array
    inside: Bool[Array, "64"]  # which rows of the product belong to the item
    limit: Int32[Array, "64"]  # how many of the item's tokens each row sees


# What XLA computes before and after the kernels


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    shape: MetadataShape,
) -> Float32[Array, "rows heads head_dim"]:
    """See `dispatch.attend`. Raises ValueError for a dtype, head dim, group or page size that it is not made for."""
    k_pages, v_pages = without_stored_bits(k_pages), without_stored_bits(v_pages)
    rows, heads, dim = q.shape
    values = kv_values(k_pages)
    kv_heads, _, page_size, _ = values.shape
    group = heads // kv_heads
    if not fits_hopper_kernel(k_pages) or group > SIDE:
        raise ValueError(f"no kernel for {values.dtype}, heads of {dim}, groups of {group}, pages of {page_size}")
    config = tile_config(rows, kv_heads, group, shape.processors)
    row = rows_of_products(rows, config)
    query = gather_queries(q, metadata, row, kv_heads)
    visible_tokens = metadata.visible_tokens.at[row].get(mode="fill", fill_value=0)
    schedule = build_schedule(metadata, visible_tokens, config)
    outputs, statistics = attend_work_units(query, k_pages, v_pages, metadata.pages, schedule, config)
    merged = merge_partials(outputs, statistics, schedule.slots, config)
    return scatter_outputs(merged, metadata, config, rows, heads)


def without_stored_bits(pages: KVPages) -> KVPages:
    """Pages whose arrays have the dtype that they mean: what a CPU stores as bits is reinterpreted."""
    real: KVPages = jax.tree.map(lambda x: lax.bitcast_convert_type(x, DTYPE_OF_BITS.get(x.dtype, x.dtype)), pages)
    return real


def tile_config(rows: int, kv_heads: int, group: int, processors: int) -> TileConfig:
    """How a step of `rows` rows is cut, for a device of so many processors, each of which a unit fills."""
    parts = CONSUMERS if rows >= SPLIT_ROWS else 1
    product_rows = SIDE // group
    return TileConfig(
        group=group,
        rows=product_rows,
        parts=parts,
        ways=CONSUMERS // parts,
        tiles=-(-rows // (product_rows * parts)),
        units=max(1, processors // kv_heads),
        in_registers=IN_REGISTERS,
    )


def rows_of_products(rows: int, config: TileConfig) -> Int32[Array, "products 64"]:
    """The sorted row of each row of each product; `rows` where there is none."""
    row = jnp.arange(config.products)[:, None] * config.rows + jnp.arange(SIDE) // config.group
    return jnp.where(jnp.arange(SIDE) < config.rows * config.group, row, rows)


def gather_queries(
    q: Float[Array, "rows heads head_dim"],
    metadata: AttentionMetadata,
    row: Int32[Array, "products 64"],
    kv_heads: int,
) -> Float[Array, "kv_heads products 64 head_dim"]:
    """Queries in bfloat16 as the products take them: row r of a product is query head r % group of its sorted row."""
    rows, heads, dim = q.shape
    group = heads // kv_heads
    query = q.astype(jnp.bfloat16).reshape(rows, kv_heads, group, dim)
    batch_row = metadata.sorted_to_batch.at[row].get(mode="clip")
    return query[batch_row, :, jnp.arange(SIDE) % group].transpose(2, 0, 1, 3)


def scatter_outputs(
    merged: Float32[Array, "kv_heads products 64 head_dim"],
    metadata: AttentionMetadata,
    config: TileConfig,
    rows: int,
    heads: int,
) -> Float32[Array, "rows heads head_dim"]:
    """The inverse of `gather_queries`, for outputs."""
    row, dim = metadata.batch_to_sorted[:, None], merged.shape[3]
    of_rows = merged[:, row // config.rows, row % config.rows * config.group + jnp.arange(config.group)]
    return of_rows.transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def build_schedule(
    metadata: AttentionMetadata, visible_tokens: Int32[Array, "products 64"], config: TileConfig
) -> Schedule:
    """Lay out the steps and cut them into units. This is the same for all layers, so that XLA computes it once."""
    item = Item(*metadata.items)
    items = metadata.items.shape[1]
    steps, full_steps = count_steps(item, metadata.class_ends, visible_tokens, config)
    step_ends = steps.cumsum()
    pairs = list_pairs(item, steps, full_steps, step_ends, config)
    tile_ends = step_ends.reshape(config.tiles, items)[:, -1]
    tile_begins, total = jnp.pad(tile_ends[:-1], (1, 0)), tile_ends[-1]
    unit_steps = jnp.maximum(MIN_STEPS, -(-total // config.units))
    units = cut_into_units(pairs, tile_begins, tile_ends, unit_steps, total, config)
    # Unit u writes its partial result of tile t at slot u + t.
    slots = jnp.stack([tile_begins // unit_steps, -(-tile_ends // unit_steps)], 1) + jnp.arange(config.tiles)[:, None]
    slots *= (tile_begins < tile_ends)[:, None]
    first_pairs = jnp.pad((steps.reshape(config.tiles, items) > 0).sum(1).cumsum(), (1, 0))
    return Schedule(
        pairs=jnp.stack(pairs, 1).astype(jnp.int32),
        tiles=first_pairs.astype(jnp.int32),
        units=units.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        visible_tokens=visible_tokens.astype(jnp.int32),
    )


def count_steps(
    item: Item,
    class_ends: Int32[Array, " classes"],
    visible_tokens: Int32[Array, "products 64"],
    config: TileConfig,
) -> tuple[Int32[Array, " tiles_times_items"], Int32[Array, " tiles_times_items"]]:
    """How many steps each tile has over each item, most of them 0, and how many of them need no mask.

    Items past the last class's end do not exist. Steps without a mask come first: all rows of the tile that belong to
    the item see each of their 64 tokens.
    """
    items = item.first_row.shape[0]
    sees = visible_tokens[:, : config.rows * config.group : config.group].reshape(-1, 1)  # of each sorted row
    row = jnp.arange(sees.shape[0])[:, None]
    exists = jnp.arange(items) < class_ends[-1]
    in_item = exists & (row >= item.first_row) & (row < item.first_row + item.rows)
    seen = jnp.clip(sees - item.first_token, 0, item.tokens)
    of_tiles = config.tiles, config.tile_rows, items
    most = jnp.where(in_item, seen, 0).reshape(of_tiles).max(1)
    least = jnp.where(in_item, seen, NO_STEP).reshape(of_tiles).min(1)
    return (-(-most // SIDE)).reshape(-1), (least // SIDE).reshape(-1)


def list_pairs(
    item: Item,
    steps: Int32[Array, " tiles_times_items"],
    full_steps: Int32[Array, " tiles_times_items"],
    step_ends: Int32[Array, " tiles_times_items"],
    config: TileConfig,
) -> Pairs:
    """The pairs of a tile and an item that have steps, in order of tiles; behind them pairs at NO_STEP."""
    items = item.first_row.shape[0]
    (cell,) = jnp.nonzero(steps, size=steps.shape[0], fill_value=steps.shape[0])
    tile, number = cell // items, cell % items
    step_end = step_ends.at[cell].get(mode="fill", fill_value=NO_STEP)
    return Pairs(
        step_begin=step_end - steps.at[cell].get(mode="fill", fill_value=0),
        step_end=step_end,
        full_steps=full_steps.at[cell].get(mode="fill", fill_value=0),
        first_row=item.first_row[number] - tile * config.tile_rows,
        rows=item.rows[number],
        first_entry=item.first_entry[number],
        tokens=item.tokens[number],
        first_token=item.first_token[number],
    )


def cut_into_units(
    pairs: Pairs,
    tile_begins: Int32[Array, " tiles"],
    tile_ends: Int32[Array, " tiles"],
    unit_steps: Int32[Array, ""],
    total: Int32[Array, ""],
    config: TileConfig,
) -> Int32[Array, "units 6"]:
    """Of each unit: its steps, pairs and tiles, from .. to; zeros for units without steps. `total`: of all steps."""
    begin, end = (jnp.minimum((jnp.arange(config.units) + n) * unit_steps, total) for n in (0, 1))
    # The first pair or tile that ends after the unit begins, and the first that begins when or after it ends.
    pair_begin = (pairs.step_end <= begin[:, None]).sum(1)
    tile_begin = (tile_ends <= begin[:, None]).sum(1)
    pair_end = (pairs.step_begin < end[:, None]).sum(1)
    tile_end = (tile_begins < end[:, None]).sum(1)
    return jnp.stack([begin, end, pair_begin, pair_end, tile_begin, tile_end], 1) * (begin < end)[:, None]


# The first kernel: partial results of each unit


def attend_work_units(
    q: Float[Array, "kv_heads products 64 head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    page_list: Int32[Array, " entries"],
    schedule: Schedule,
    config: TileConfig,
) -> tuple[Float32[Array, "kv_heads partials 64 head_dim"], Float32[Array, "kv_heads partials 2 64"]]:
    """Partial results, `slot * CONSUMERS + consumer`: outputs not divided by sums; maxima and sums."""
    kv_heads, _, _, dim = q.shape
    partials = (config.units + config.tiles - 1) * CONSUMERS
    outputs = jax.ShapeDtypeStruct((kv_heads, partials, SIDE, dim), jnp.float32)
    statistics = jax.ShapeDtypeStruct((kv_heads, partials, 2, SIDE), jnp.float32)
    outputs, statistics = plgpu.kernel(
        partial(attend_unit, config=config),
        kernel_name="attend_unit",
        out_type=(outputs, statistics),
        grid=(kv_heads, config.units),
        grid_names=("head", "unit"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=(shared_memory(k_pages, config),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k_pages, v_pages, page_list, schedule)
    return outputs, statistics


def shared_memory(k_pages: KVPages, config: TileConfig) -> SharedMemory:
    """The types of a unit's shared memory."""
    dim = kv_values(k_pages).shape[3]
    return SharedMemory(
        q=swizzled((CONSUMERS, SIDE, dim), jnp.bfloat16),
        q_full=plgpu.Barrier(num_barriers=CONSUMERS),
        k=ring(k_pages, config),
        v=ring(k_pages, config),
        weights=None if config.in_registers and dim <= 128 else swizzled((CONSUMERS, SIDE, SIDE), jnp.bfloat16),
        cleared=plgpu.Barrier(num_arrivals=config.parts),
        widened=swizzled((CONSUMERS, SIDE, dim), jnp.bfloat16) if isinstance(k_pages, QuantizedKV) else None,
        both_widened=tuple(plgpu.Barrier(num_arrivals=config.parts) for _ in (KEYS, VALUES)),
    )


def ring(pages: KVPages, config: TileConfig) -> Ring:
    """The type of a ring for the values of such pages, and for their scales."""
    is_quantized, (_, _, page_size, dim) = isinstance(pages, QuantizedKV), kv_values(pages).shape
    stages = 4 if dim <= 128 else 2  # a multiple of the ways, so that each buffer is always one consumer's
    copies = max(1, SIDE // page_size)  # of a buffer's values, each of one page
    arrivals = copies * 2 if is_quantized else copies  # values, and their scales
    full = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=config.parts, num_barriers=stages)
    buffers = swizzled((stages, SIDE, dim), kv_values(pages).dtype)
    if is_quantized:
        scales = plgpu.SMEM((stages, copies, max(32, SIDE // copies)), jnp.float32)
        return Ring(QuantizedKV(buffers, scales), full, free)
    return Ring(buffers, full, free)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Ref:
    """The type of a buffer in shared memory, laid out as tensor cores read it: swizzled tiles of 8 rows."""
    swizzle = plgpu.SwizzleTransform(64 * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), swizzle))


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
    """One unit, a warpgroup of it at a time: the last is the producer. Arguments are refs to what callers pass."""
    head, number, warpgroup = (lax.axis_index(axis) for axis in ("head", "unit", "warpgroup"))
    unit = load_work_unit(schedule.units, head, number, warpgroup)

    @pl.when(warpgroup == CONSUMERS)
    def producer() -> None:
        produce(unit, k_pages, v_pages, page_list, schedule, shared)

    @pl.when(warpgroup < CONSUMERS)
    def consumer() -> None:
        consume(unit, q, schedule, outputs, statistics, shared, config)


def load_work_unit(units: Any, head: jax.Array, number: jax.Array, warpgroup: jax.Array) -> WorkUnit:
    """Read a unit's row of `Schedule.units`."""
    return WorkUnit(
        head,
        number,
        warpgroup,
        steps=Range(units[number, 0], units[number, 1]),
        pairs=Range(units[number, 2], units[number, 3]),
        tiles=Range(units[number, 4], units[number, 5]),
    )


# The producer


def produce(
    unit: WorkUnit, k_pages: KVPages, v_pages: KVPages, page_list: Ref, schedule: Schedule, shared: SharedMemory
) -> None:
    """Bring the pages of the unit's steps into the rings, as buffers become free."""
    plgpu.set_max_registers(48, action="decrease")
    stages = kv_values(shared.k.buffers).shape[0]

    @pl.loop(unit.pairs.begin, unit.pairs.end)
    def copy_pair(i: jax.Array) -> None:
        steps = unit.steps_of(schedule.pairs.at[i])
        first_entry, tokens = schedule.pairs[i, FIRST_ENTRY], schedule.pairs[i, TOKENS]

        @pl.loop(steps.first, steps.end)
        def copy(step: jax.Array) -> None:
            stage = lax.rem(steps.offset + step, stages)
            for pages, ring in ((k_pages, shared.k), (v_pages, shared.v)):
                # The first buffers are free from the start.
                pl.when(steps.offset + step >= stages)(partial(plgpu.barrier_wait, ring.free.at[stage]))
                copy_step(pages, ring, stage, page_list, unit.head, first_entry, tokens, step)


def copy_step(
    pages: KVPages,
    ring: Ring,
    stage: jax.Array,
    page_list: Ref,
    head: jax.Array,
    first_entry: jax.Array,
    tokens: jax.Array,
    step: jax.Array,
) -> None:
    """Start the copies of a step's 64 tokens of an item into a buffer. Past the item's last page, that page again."""
    page_size = kv_values(pages).shape[2]
    span = min(page_size, SIDE)  # tokens of a copy
    for offset in range(0, SIDE, span):
        token = step * SIDE + offset
        page = page_list[first_entry + lax.div(jnp.minimum(token, tokens - 1), page_size)]
        slots: Any = pl.ds(lax.rem(token, page_size), span)
        source = kv_values(pages).at[head, page, slots]
        target = kv_values(ring.buffers).at[stage, pl.ds(offset, span)]
        plgpu.copy_gmem_to_smem(source, target, ring.full.at[stage])
        if isinstance(pages, QuantizedKV):
            target = ring.buffers.scales.at[stage, offset // span, pl.ds(0, span)]
            plgpu.copy_gmem_to_smem(pages.scales.at[head, page, 0, slots], target, ring.full.at[stage])


# The consumers


def consume(
    unit: WorkUnit,
    q: Ref,
    schedule: Schedule,
    outputs: Ref,
    statistics: Ref,
    shared: SharedMemory,
    config: TileConfig,
) -> None:
    """Attend to the unit's steps, with this consumer's rows or at its turns; write a partial result for each tile."""
    plgpu.set_max_registers(232, action="increase")
    stages, _, dim = kv_values(shared.k.buffers).shape
    consumer = Consumer(
        index=unit.warpgroup,
        part=unit.warpgroup if config.parts > 1 else 0,
        turn=0 if config.parts > 1 else unit.warpgroup,
        config=config,
        shared=shared,
        stages=stages,
        head_dim=dim,
        row_numbers=plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=BY_ROW),
    )

    @pl.loop(unit.tiles.begin, unit.tiles.end)
    def write_tile(tile: jax.Array) -> None:
        result = attend_tile(consumer, unit, q, schedule, tile)
        slot = (unit.number + tile) * CONSUMERS + consumer.index
        for columns, output in zip(consumer.columns, result.outputs, strict=True):
            outputs[unit.head, slot, :, columns] = output
        statistics[unit.head, slot, MAX_SCORE] = result.max_score
        statistics[unit.head, slot, WEIGHT_SUM] = result.weight_sum


def attend_tile(consumer: Consumer, unit: WorkUnit, q: Ref, schedule: Schedule, tile: jax.Array) -> RunningSoftmax:
    """This consumer's part of what the unit has of a tile."""
    config, shared = consumer.config, consumer.shared
    q_full = shared.q_full.at[consumer.index]
    query = q.at[unit.head, tile * config.parts + consumer.part]
    plgpu.copy_gmem_to_smem(query, shared.q.at[consumer.index], q_full)
    of_product = schedule.visible_tokens.at[tile * config.parts + consumer.part]
    visible_tokens = plgpu.load(of_product, layout=BY_ROW, optimized=False)
    plgpu.barrier_wait(q_full)
    first = jnp.maximum(unit.pairs.begin, schedule.tiles[tile])
    end = jnp.minimum(unit.pairs.end, schedule.tiles[tile + 1])
    nothing = RunningSoftmax(
        outputs=tuple(filled(0.0, consumer.chunk) for _ in consumer.columns),
        max_score=filled(LOWEST_MAXIMUM),
        weight_sum=filled(0.0),
    )
    walk = partial(attend_pair, consumer, unit, schedule, visible_tokens)
    return cast(RunningSoftmax, lax.fori_loop(first, end, walk, nothing))


def attend_pair(
    consumer: Consumer,
    unit: WorkUnit,
    schedule: Schedule,
    visible_tokens: Int32[Array, "64"],
    number: jax.Array,
    carry: RunningSoftmax,
) -> RunningSoftmax:
    """Merge this consumer's steps of a pair."""
    config = consumer.config
    pair: Ref = schedule.pairs.at[number]
    steps = unit.steps_of(pair)
    tokens = pair[TOKENS]
    row = (pair[FIRST_ROW] - consumer.part * config.rows) * config.group  # the item's first row, of the product's
    inside = (consumer.row_numbers >= row) & (consumer.row_numbers < row + pair[ROWS] * config.group)
    limit = jnp.where(inside, jnp.minimum(visible_tokens - pair[FIRST_TOKEN], tokens), 0)
    consumed = ConsumedPair(steps.offset, tokens, inside, limit)
    first = steps.first + lax.rem(steps.offset + steps.first + consumer.turn, config.ways)  # this consumer's next turn
    full_turns = turns_until(jnp.minimum(steps.end, pair[FULL_STEPS]), first, config)
    is_whole = (row <= 0) & (row + pair[ROWS] * config.group >= config.rows * config.group)
    full_turns = jnp.where(is_whole, full_turns, 0)
    full, ragged = (partial(attend_step, consumer, consumed, first, is_full) for is_full in (True, False))
    carry = lax.fori_loop(0, full_turns, full, carry)
    return cast(RunningSoftmax, lax.fori_loop(full_turns, turns_until(steps.end, first, config), ragged, carry))


def turns_until(end: jax.Array, first: jax.Array, config: TileConfig) -> jax.Array:
    """How many turns a consumer has before step `end` whose first one is at step `first`."""
    return lax.div(jnp.maximum(end - first, 0) + config.ways - 1, config.ways)


def attend_step(
    consumer: Consumer, pair: ConsumedPair, first: jax.Array, is_full: bool, turn: jax.Array, carry: RunningSoftmax
) -> RunningSoftmax:
    """Merge 64 tokens of an item: step `first + turn * ways` of the pair.

    `is_full`: all rows of the product belong to the item and see all 64 tokens, so that nothing is masked.
    """
    step = first + turn * consumer.config.ways
    shared, stage = consumer.shared, lax.rem(pair.offset + step, consumer.stages)
    seen = None if is_full else tokens_seen(pair, step)
    score, unit = masked_scores(consumer, stage, seen)
    max_score = jnp.maximum(carry.max_score, score.max(axis=1) * unit)
    weight = jnp.exp2(score * unit - in_columns(max_score, SIDE))
    shrink = jnp.exp2(carry.max_score - max_score)
    weight_sum = weight.sum(axis=1)
    if consumer.is_quantized:
        plgpu.barrier_wait(shared.v.full.at[stage])  # the weights need the values' scales
    scale = load_scales(shared.v.buffers, stage)
    if scale is not None and not is_full:  # those of slots past the item's tokens may be NaN
        column = plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=BY_COLUMN)
        scale = jnp.where(column < pair.tokens - step * SIDE, scale, 0.0)
    weights = stage_weights(consumer, is_full, scale_columns(weight, scale).astype(jnp.bfloat16))
    if not consumer.is_quantized:
        plgpu.barrier_wait(shared.v.full.at[stage])
    value = widen(consumer, shared.v.buffers, stage, VALUES)
    if not is_full:
        is_last = (step + 1) * SIDE > pair.tokens
        pl.when(is_last)(partial(clear_rows, consumer, value, pair.tokens - step * SIDE))
    inside = None if is_full else pair.inside
    outputs = add_values(consumer, weights, value, carry.outputs, shrink, inside)
    plgpu.barrier_arrive(shared.v.free.at[stage])
    return RunningSoftmax(outputs, max_score, carry.weight_sum * shrink + weight_sum)


def tokens_seen(pair: ConsumedPair, step: jax.Array) -> Bool[Array, "64 64"]:
    """Which of a step's tokens each row of the product sees."""
    token: jax.Array = plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), 1, layout=BY_PRODUCT)
    return token < in_columns(pair.limit - step * SIDE, SIDE)


def masked_scores(
    consumer: Consumer, stage: jax.Array, seen: Bool[Array, "64 64"] | None
) -> tuple[Float32[Array, "64 64"], float]:
    """Scores of the product's rows with a step's tokens, far below any where a row does not see the token.

    Times the second result they are scaled, in base 2. Waits for the keys and gives their buffer back.
    """
    ring, unit = consumer.shared.k, consumer.head_dim**-0.5 * log2(e)
    plgpu.barrier_wait(ring.full.at[stage])
    scale, key = load_scales(ring.buffers, stage), widen(consumer, ring.buffers, stage, KEYS)
    score = product(consumer.shared.q.at[consumer.index], key.transpose((1, 0)), SIDE)
    plgpu.barrier_arrive(ring.free.at[stage])
    score = scale_columns(score, scale)
    return score if seen is None else jnp.where(seen, score, MASKED_SCORE), unit


def stage_weights(consumer: Consumer, is_full: bool, weights: BFloat16[Array, "64 64"]) -> Any:
    """Weights as an operand of a product: registers as they are, or a buffer in shared memory."""
    if consumer.config.in_registers and (is_full or consumer.has_registers_to_spare):
        return weights
    staged = consumer.shared.weights.at[consumer.index]
    staged[...] = weights
    plgpu.commit_smem()
    return staged


def add_values(
    consumer: Consumer,
    weights: Any,
    value: Ref,
    outputs: tuple[jax.Array, ...],
    shrink: Float32[Array, "64"],
    inside: Bool[Array, "64"] | None,
) -> tuple[jax.Array, ...]:
    """Outputs times `shrink`, plus the product of weights and the step's values, in rows that are the item's.

    `inside` tells which rows are; None: all.
    """
    results = []
    for columns, old in zip(consumer.columns, outputs, strict=True):
        values, shrunk = value.at[:, columns], old * in_columns(shrink, consumer.chunk)
        if inside is None and consumer.config.in_registers:
            results.append(accumulated(shrunk, weights, values))
            continue
        new = shrunk + product(weights, values, consumer.chunk)
        if inside is not None:
            new = jnp.where(in_columns(inside, consumer.chunk), new, old)
        results.append(new)
    return tuple(results)


def load_scales(buffers: Any, stage: jax.Array) -> Float32[Array, "64"] | None:
    """The scales of a buffer's tokens, if it has some, by column of a product.

    They have to be read before a commit, after which copies may overwrite them.
    """
    if not isinstance(buffers, QuantizedKV):
        return None
    copies = buffers.scales.shape[1]
    of_pages = [buffers.scales.at[stage, n, pl.ds(0, SIDE // copies)] for n in range(copies)]
    return jnp.concatenate([plgpu.load(page, layout=BY_COLUMN, optimized=False) for page in of_pages])


def scale_columns(x: Float32[Array, "64 64"], scale: Float32[Array, "64"] | None) -> Float32[Array, "64 64"]:
    """Columns times their tokens' scales, if there are some."""
    return x if scale is None else x * lax.broadcast_in_dim(scale, (SIDE, SIDE), [1])


def widen(consumer: Consumer, buffers: Any, stage: jax.Array, place: int) -> Ref:
    """A buffer as it is multiplied, `[64, head_dim]`. All numbers of 8 bits are numbers of bfloat16.

    Consumers that multiply the same buffer widen half of its rows each and wait for the other's, in the shared buffer
    `place`: KEYS or VALUES. A consumer overwrites it a step later, behind the barrier of the other place, at which the
    other consumer arrives when its product with this one is done.
    """
    if not isinstance(buffers, QuantizedKV):
        return buffers.at[stage]
    shares = consumer.shares_buffers
    # Without the barrier addresses for all products are computed early and wait in registers. `accumulated` takes no
    # index that is a Python number.
    index = lax.optimization_barrier(consumer.index)
    widened: Ref = consumer.shared.widened.at[index * 0 + place if shares else index]
    rows = SIDE // CONSUMERS if shares else SIDE
    part: Any = pl.ds(consumer.index * rows, rows) if shares else slice(None)
    vectors = plgpu.Layout.SMEM_GMEM_COPY((rows, consumer.chunk), jnp.bfloat16, 128)
    for columns in consumer.columns:
        number = plgpu.load(buffers.values.at[stage, part, columns], layout=vectors)
        if number.dtype != jnp.int8:
            number = number.astype(jnp.float32)  # a Hopper converts float8 to bfloat16 in no other way
        widened[part, columns] = number.astype(jnp.bfloat16)
    plgpu.commit_smem()
    if shares:
        plgpu.barrier_arrive(consumer.shared.both_widened[place])
        plgpu.barrier_wait(consumer.shared.both_widened[place])
    return widened


def clear_rows(consumer: Consumer, value: Ref, known: jax.Array) -> None:
    """Zero the rows of a buffer of values from `known` on. Weights of 0 do not keep NaN out of a product."""

    @pl.when((consumer.index == 0) | (not consumer.shares_buffers))
    def clear() -> None:
        number = plgpu.broadcasted_iota(jnp.int32, (SIDE, consumer.chunk), 0, layout=BY_PRODUCT)
        for columns in consumer.columns:
            old = plgpu.load(value.at[:, columns], layout=BY_PRODUCT, optimized=False)
            value[:, columns] = jnp.where(number < known, old, jnp.zeros_like(old))
        plgpu.commit_smem()

    if consumer.shares_buffers:
        plgpu.barrier_arrive(consumer.shared.cleared)
        plgpu.barrier_wait(consumer.shared.cleared)


# The second kernel: partial results merged


def merge_partials(
    outputs: Float32[Array, "kv_heads partials 64 head_dim"],
    statistics: Float32[Array, "kv_heads partials 2 64"],
    slots: Int32[Array, "tiles 2"],
    config: TileConfig,
) -> Float32[Array, "kv_heads products 64 head_dim"]:
    """Merge each tile's partial results, in order of slots. Rows that saw nothing become zeros."""
    kv_heads, _, _, dim = outputs.shape
    merged: jax.Array = plgpu.kernel(
        partial(merge_product, config=config),
        kernel_name="merge_product",
        out_type=jax.ShapeDtypeStruct((kv_heads, config.products, SIDE, dim), jnp.float32),
        grid=(kv_heads, config.products, dim // MERGED_COLUMNS),
        grid_names=("head", "product", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(outputs, statistics, slots)
    return merged


def merge_product(outputs: Ref, statistics: Ref, slots: Ref, merged: Ref, *, config: TileConfig) -> None:
    """Some columns of one product."""
    head, number, column = (lax.axis_index(axis) for axis in ("head", "product", "column"))
    columns = pl.ds(column * MERGED_COLUMNS, MERGED_COLUMNS)
    tile, part = lax.div(number, config.parts), lax.rem(number, config.parts)
    # A slot has a partial result of each consumer: of the same product if they took turns, else of one part each.
    begin, end = slots[tile, 0] * config.ways, slots[tile, 1] * config.ways
    take_max = partial(merge_max, statistics, head, part, config)
    max_score = lax.fori_loop(begin, end, take_max, filled(MASKED_SCORE))
    add = partial(merge_partial, outputs, statistics, head, part, config, columns, max_score)
    output, total = lax.fori_loop(begin, end, add, (filled(0.0, MERGED_COLUMNS), filled(0.0)))
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


# Products and registers


def accumulated(start: Float32[Array, "64 columns"], a: Any, b: Ref) -> Float32[Array, "64 columns"]:
    """`start` plus the product of `a` and `b`, added up in place. Interpreters know no accumulator with a value."""

    def add(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, a, b)

    result: jax.Array = pl.run_state(add)(plgpu.ACC.init(start))
    return result


def product(a: Any, b: Ref, columns: int) -> Float32[Array, "64 columns"]:
    """The product of two matrices, `[64, k]` and `[k, columns]`, in shared memory; the first also in registers."""
    result: jax.Array = pl.run_scoped(partial(multiply, a, b), plgpu.ACC((SIDE, columns), jnp.float32))
    return result


def multiply(a: Ref, b: Ref, accumulator: Ref) -> jax.Array:
    """Read the accumulator, which starts as zeros, after the product."""
    plgpu.wgmma(accumulator, a, b)
    product: jax.Array = accumulator[...]
    return product


def filled(value: float, columns: int | None = None) -> jax.Array:
    """A constant for each row of a product, `[64]`, or for each column of each row, `[64, columns]`."""
    shape, layout = ((SIDE,), BY_ROW) if columns is None else ((SIDE, columns), BY_PRODUCT)
    constant: jax.Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    return constant


def in_columns(by_row: jax.Array, columns: int) -> jax.Array:
    """Each row's value in every column: `[64]` to `[64, columns]`."""
    return lax.broadcast_in_dim(by_row, (SIDE, columns), [0])
