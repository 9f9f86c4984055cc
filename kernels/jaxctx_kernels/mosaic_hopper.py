"""Attention over a work list on NVIDIA Hopper, in Pallas Mosaic GPU.

The work is cut into tiles, steps of 64 tokens and equal units as `gpu_schedule` says, a unit for each processor and KV
head. A unit is three warpgroups: a producer, which brings a page (at most 64 tokens of one) a copy into rings of
buffers, and two consumers. In steps of many rows each consumer has half of a tile; in others both have the same rows
and take turns at the steps. A second kernel merges partial results (`gpu_merge`). All is float32 but what is
multiplied.

    producer                 rings in shared memory                 consumers
    pages of K  ──copies──▶  [k0][k1][k2][k3]  full ▶ ◀ free  ──▶   scores = q · k, weights = 2**(scores - maximum)
    pages of V  ──copies──▶  [v0][v1][v2][v3]  full ▶ ◀ free  ──▶   output += weights · v

What is multiplied is bfloat16. Values of 8 bits stay so in the rings; consumers widen them, each those of its steps, or
both half of a step's that they share. Their scales multiply the scores, and the weights before they are rounded.

Most steps are *full*: all rows of a product belong to the item and see all 64 tokens. Their loop masks nothing, keeps
weights in registers and adds up outputs in place; where consumers share steps, while the next step's weights are
computed: see `attend_overlapped`. The others follow in a loop of their own. With a sliding window there
are also some before: these two loops are in one of two rounds, so that each is there once.

    first round    masked, where windows begin ▶ full          second round    masked, where rows end ▶ none

Heads are never mixed: under a mesh call this in `shard_map`, queries and pages split over heads, the metadata on all.

    attend ─┬─ gpu_schedule.build_schedule
            ├─ attend_work_units            kernel: attend_unit ─┬─ produce
            │                                                    └─ consume ── attend_tile ── attend_pair ── attend_step
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
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32

from jaxctx_kernels.gpu_merge import (
    BY_PRODUCT,
    BY_ROW,
    MAX_SCORE,
    WEIGHT_SUM,
    filled,
    in_columns,
    merge_partials,
    sinks_of_products,
)
from jaxctx_kernels.gpu_schedule import (
    FIRST_ENTRY,
    FIRST_ROW,
    FIRST_TOKEN,
    FULL_STEPS,
    HIDDEN,
    MASKED_STEPS,
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
from jaxctx_kernels.hopper_registers import INT8_UNIT, accumulated, overlapped, product, shrunk, widened_int8
from jaxctx_kernels.kv_cache import KVPages, QuantizedKV, fits_hopper_kernel, kv_values, without_stored_bits
from jaxctx_kernels.metadata import AttentionMetadata, MetadataShape
from jaxctx_kernels.reference import MASKED_SCORE

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Ref: TypeAlias = Any  # to memory of the device

CONSUMERS = 2  # warpgroups of a unit beside its producer
SPLIT_ROWS = 128  # rows of a step from which consumers split rows, not tokens
IN_REGISTERS = True  # see `TileConfig`; tests set it to False, for the interpreter
BY_COLUMN = BY_PRODUCT.reduce(0)  # how a warpgroup's registers hold a value for each column of a product
MAXIMUM_SLACK = 8.0  # how far scores may be above what weights are relative to: these are 2**8 at most
LOWEST_MAXIMUM = MASKED_SCORE / 100  # far above a masked score, which is scaled: its weight is 0 whatever else is seen

# Places of `SharedMemory.widened` where both consumers use them.
KEYS, VALUES = range(2)


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
    widened: Ref  # [2, 64, head_dim], keys and values of 8 bits as they are multiplied, see `widen`, or None
    both_widened: tuple[Ref, Ref]


class RunningSoftmax(NamedTuple):
    """What a consumer has merged of a tile, in registers."""

    output: Float32[Array, "64 head_dim"]  # not divided by the sum
    max_score: Float32[
        Array, "64"
    ]  # in base 2; what weights are relative to, which scores exceed by MAXIMUM_SLACK at most
    weight_sum: Float32[Array, "64"]


class WeighedStep(NamedTuple):
    """The softmax of a step's scores, merged with what came before."""

    weight: Float32[Array, "64 64"]
    max_score: Float32[Array, "64"]  # as in RunningSoftmax
    weight_sum: Float32[Array, "64"]
    shrink: Float32[Array, "64"]  # what outputs from before are to be multiplied by


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
    def widened_unit(self) -> int:
        """What widened keys and values are to be multiplied by."""
        return INT8_UNIT if kv_values(self.shared.k.buffers).dtype == jnp.int8 else 1

    @property
    def shares_buffers(self) -> bool:
        """Whether both consumers multiply the same buffer at the same step."""
        return self.config.parts > 1

    @property
    def has_registers_to_spare(self) -> bool:
        """Whether outputs leave room for weights beside a product; else only full steps, without one, have them."""
        return self.head_dim <= 128

    @property
    def overlaps(self) -> bool:
        """Whether a full step's values are multiplied while the next one's weights are computed.

        Where consumers take turns memory has more to do than either of them. Of 8 bits instructions are busiest, of
        which it takes more; and an output of head dim 256 leaves no registers for weights beside it.
        """
        return (
            self.config.in_registers and self.shares_buffers and self.has_registers_to_spare and not self.is_quantized
        )

    @property
    def holds_query(self) -> bool:
        """Whether queries stay in registers, where shared memory would have more to do than tensor cores or memory."""
        is_busy = self.is_quantized or self.shares_buffers
        return self.config.in_registers and self.has_registers_to_spare and is_busy

    @property
    def chunk(self) -> int:
        """Columns loaded or multiplied at once beside an output; of a head_dim of 256 registers take no more."""
        return 128 if self.head_dim == 128 else 64

    @property
    def columns(self) -> list[Any]:
        """The ranges of head_dim that are so one after the other."""
        return [pl.ds(start, self.chunk) for start in range(0, self.head_dim, self.chunk)]


class ConsumedPair(NamedTuple):
    """What a consumer needs of a pair at each of its steps. The last two are None without a sliding window."""

    query: Any  # [64, head_dim], in registers or in shared memory
    offset: jax.Array  # see `StepsOfPair`
    tokens: jax.Array
    inside: Bool[Array, "64"]  # which rows of the product belong to the item, and see some of it
    limit: Int32[Array, "64"]  # at which of the item's tokens what each row sees ends
    begin: Int32[Array, "64"] | None  # and at which it begins, which may be negative
    hidden: jax.Array | None  # how many of the item's first tokens no row of the tile sees


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
    if not fits_hopper_kernel(k_pages) or group > SIDE:
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
    return scatter_outputs(merged, metadata, config, rows, heads)


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
        outputs[unit.head, slot] = result.output * consumer.widened_unit
        statistics[unit.head, slot, MAX_SCORE] = result.max_score
        statistics[unit.head, slot, WEIGHT_SUM] = result.weight_sum


def attend_tile(consumer: Consumer, unit: WorkUnit, q: Ref, schedule: Schedule, tile: jax.Array) -> RunningSoftmax:
    """This consumer's part of what the unit has of a tile."""
    config, shared = consumer.config, consumer.shared
    q_full = shared.q_full.at[consumer.index]
    of_tile = q.at[unit.head, tile * config.parts + consumer.part]
    plgpu.copy_gmem_to_smem(of_tile, shared.q.at[consumer.index], q_full)
    of_product = schedule.visible_tokens.at[tile * config.parts + consumer.part]
    visible_tokens = plgpu.load(of_product, layout=BY_ROW, optimized=False)
    plgpu.barrier_wait(q_full)
    query: Any = shared.q.at[consumer.index]
    if consumer.holds_query:
        query = plgpu.load(query, layout=BY_PRODUCT)
        plgpu.commit_smem()  # before the next tile's copy overwrites them
    first = jnp.maximum(unit.pairs.begin, schedule.tiles[tile])
    end = jnp.minimum(unit.pairs.end, schedule.tiles[tile + 1])
    nothing = RunningSoftmax(
        output=filled(0.0, consumer.head_dim),
        max_score=filled(LOWEST_MAXIMUM),
        weight_sum=filled(0.0),
    )
    walk = partial(attend_pair, consumer, unit, schedule, query, visible_tokens)
    return cast(RunningSoftmax, lax.fori_loop(first, end, walk, nothing))


def attend_pair(
    consumer: Consumer,
    unit: WorkUnit,
    schedule: Schedule,
    query: Any,
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
    begin = hidden = None
    if config.window is not None:
        begin, hidden = visible_tokens - pair[FIRST_TOKEN] - config.window.tokens, pair[HIDDEN]
        inside &= limit > begin
    consumed = ConsumedPair(query, steps.offset, tokens, inside, limit, begin, hidden)
    first = steps.first + lax.rem(steps.offset + steps.first + consumer.turn, config.ways)  # this consumer's next turn
    full_turns = turns_until(jnp.minimum(steps.end, pair[FULL_STEPS]), first, config)
    is_whole = (row <= 0) & (row + pair[ROWS] * config.group >= config.rows * config.group)
    full_turns = jnp.where(is_whole, full_turns, 0)
    full = partial(attend_full_steps, consumer, consumed, first)
    ragged = partial(attend_step, consumer, consumed, first, False)
    if config.window is None:
        carry = full(jnp.full_like(full_turns, 0), full_turns, carry)
        return cast(RunningSoftmax, lax.fori_loop(full_turns, turns_until(steps.end, first, config), ragged, carry))
    turns = turns_until(steps.end, first, config)
    masked_turns = jnp.minimum(turns_until(pair[MASKED_STEPS], first, config), full_turns)

    def walk_round(number: jax.Array, carry: RunningSoftmax) -> RunningSoftmax:
        """The masked steps before the full ones, and these; then the masked steps behind them."""
        is_first = number == 0
        begin, ragged_end = jnp.where(is_first, 0, full_turns), jnp.where(is_first, masked_turns, turns)
        carry = lax.fori_loop(begin, ragged_end, ragged, carry)
        return full(ragged_end, jnp.where(is_first, full_turns, turns), carry)

    return cast(RunningSoftmax, lax.fori_loop(0, 2, walk_round, carry))


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
    score, unit = masked_scores(consumer, pair.query, stage, seen)
    weight, max_score, weight_sum, shrink = weigh(score, unit, carry.max_score, carry.weight_sum)
    if consumer.is_quantized:
        plgpu.barrier_wait(shared.v.full.at[stage])  # the weights need the values' scales
    scale = load_scales(shared.v.buffers, stage)
    if scale is not None and not is_full:  # those of slots past the item's tokens may be NaN
        column = plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=BY_COLUMN)
        is_seen = column < pair.tokens - step * SIDE
        if pair.hidden is not None:
            is_seen &= column >= pair.hidden - step * SIDE
        scale = jnp.where(is_seen, scale, 0.0)
    weights = stage_weights(consumer, is_full, scale_columns(weight, scale).astype(jnp.bfloat16))
    if not consumer.is_quantized:
        plgpu.barrier_wait(shared.v.full.at[stage])
    value = widen(consumer, shared.v.buffers, stage, VALUES)
    if not is_full:
        has_unseen = (step + 1) * SIDE > pair.tokens
        hidden = None if pair.hidden is None else pair.hidden - step * SIDE
        if hidden is not None:
            has_unseen |= hidden > 0
        pl.when(has_unseen)(partial(clear_rows, consumer, value, pair.tokens - step * SIDE, hidden))
    inside = None if is_full else pair.inside
    output = add_values(consumer, weights, value, carry.output, shrink, inside)
    plgpu.barrier_arrive(shared.v.free.at[stage])
    return RunningSoftmax(output, max_score, weight_sum)


def attend_full_steps(
    consumer: Consumer, pair: ConsumedPair, first: jax.Array, begin: jax.Array, end: jax.Array, carry: RunningSoftmax
) -> RunningSoftmax:
    """Merge the full steps of the turns `begin` up to, without, `end`, of which there may be none."""
    if not consumer.overlaps:
        return cast(RunningSoftmax, lax.fori_loop(begin, end, partial(attend_step, consumer, pair, first, True), carry))
    merge = partial(attend_overlapped, consumer, pair, first, begin, end)
    return cast(RunningSoftmax, lax.cond(begin < end, merge, lambda unchanged: unchanged, carry))


def attend_overlapped(
    consumer: Consumer, pair: ConsumedPair, first: jax.Array, begin: jax.Array, end: jax.Array, carry: RunningSoftmax
) -> RunningSoftmax:
    """Merge at least one full step, of bfloat16. Its values are multiplied while the next one's weights are computed.

    tensor cores    scores 0             scores 1, values 0 ▶            scores 2, values 1 ▶
    instructions              weights 0                     weights 1                       weights 2
    """
    shared = consumer.shared

    def stage_of(turn: jax.Array) -> jax.Array:
        return lax.rem(pair.offset + first + turn, consumer.stages)

    def weigh_step(
        stage: jax.Array,
        max_score: Float32[Array, "64"],
        weight_sum: Float32[Array, "64"],
        product: Float32[Array, "64 64"],
    ) -> WeighedStep:
        """Of a step whose keys were multiplied. Its values are there then."""
        plgpu.barrier_arrive(shared.k.free.at[stage])
        score, unit = capped(product, score_unit(consumer), consumer.config.soft_cap)
        weighed: WeighedStep = lax.optimization_barrier(weigh(score, unit, max_score, weight_sum))
        # Compilers do not move what is above beyond this: a wait for values that are multiplied now stays below.
        plgpu.barrier_wait(shared.v.full.at[stage])
        return weighed

    def merge_step(turn: jax.Array, carry: tuple[RunningSoftmax, Any]) -> tuple[RunningSoftmax, Any]:
        """The weights of a turn's step, and the product of those of the step before with its values."""
        before, weights = carry
        stage, last = stage_of(turn), stage_of(turn - 1)
        plgpu.barrier_wait(shared.k.full.at[stage])
        output, weighed = overlapped(
            pair.query,
            shared.k.buffers.at[stage].transpose((1, 0)),
            before.output,
            weights,
            shared.v.buffers.at[last],
            partial(weigh_step, stage, before.max_score, before.weight_sum),
            WeighedStep(in_columns(before.max_score, SIDE), before.max_score, before.weight_sum, before.max_score),
        )
        plgpu.barrier_arrive(shared.v.free.at[last])
        output = shrunk(output, weighed.shrink, in_registers=True)
        return RunningSoftmax(output, weighed.max_score, weighed.weight_sum), weighed.weight.astype(jnp.bfloat16)

    stage = stage_of(begin)
    plgpu.barrier_wait(shared.k.full.at[stage])
    score = product(pair.query, shared.k.buffers.at[stage].transpose((1, 0)), SIDE)
    weighed = weigh_step(stage, carry.max_score, carry.weight_sum, score)
    output = shrunk(carry.output, weighed.shrink, in_registers=True)
    carry = RunningSoftmax(output, weighed.max_score, weighed.weight_sum)
    carry, weights = lax.fori_loop(begin + 1, end, merge_step, (carry, weighed.weight.astype(jnp.bfloat16)))
    last = stage_of(end - 1)
    output = accumulated(carry.output, weights, shared.v.buffers.at[last])
    plgpu.barrier_arrive(shared.v.free.at[last])
    return carry._replace(output=output)


def weigh(
    score: Float32[Array, "64 64"],
    unit: float,
    max_score: Float32[Array, "64"],
    weight_sum: Float32[Array, "64"],
) -> WeighedStep:
    """The weights of scores times `unit`. `max_score` and `weight_sum`: of what came before."""
    highest = score.max(axis=1) * unit
    new_max = jnp.where(highest > max_score + MAXIMUM_SLACK, highest, max_score)
    weight = jnp.exp2(score * unit - in_columns(new_max, SIDE))
    shrink = jnp.exp2(max_score - new_max)
    return WeighedStep(weight, new_max, weight_sum * shrink + weight.sum(axis=1), shrink)


def score_unit(consumer: Consumer) -> float:
    """What products of queries and keys are to be multiplied by to be scores in base 2."""
    unit: float = consumer.head_dim**-0.5 * log2(e) * consumer.widened_unit
    return unit


def tokens_seen(pair: ConsumedPair, step: jax.Array) -> Bool[Array, "64 64"]:
    """Which of a step's tokens each row of the product sees."""
    token: jax.Array = plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), 1, layout=BY_PRODUCT)
    seen = token < in_columns(pair.limit - step * SIDE, SIDE)
    return seen if pair.begin is None else seen & (token >= in_columns(pair.begin - step * SIDE, SIDE))


def masked_scores(
    consumer: Consumer, query: Any, stage: jax.Array, seen: Bool[Array, "64 64"] | None
) -> tuple[Float32[Array, "64 64"], float]:
    """Scores of the product's rows with a step's tokens, far below any where a row does not see the token.

    Times the second result they are scaled and capped, in base 2; with a cap all are higher by a constant.
    Waits for the keys and gives their buffer back.
    """
    ring = consumer.shared.k
    plgpu.barrier_wait(ring.full.at[stage])
    scale, key = load_scales(ring.buffers, stage), widen(consumer, ring.buffers, stage, KEYS)
    score = product(late_query(consumer, query), key.transpose((1, 0)), SIDE)
    plgpu.barrier_arrive(ring.free.at[stage])
    soft_cap = consumer.config.soft_cap
    score, unit = capped(scale_columns(score, scale), score_unit(consumer), soft_cap)
    masked = MASKED_SCORE if soft_cap is None else MASKED_SCORE / unit  # a cap may be so small that it were too high
    return score if seen is None else jnp.where(seen, score, masked), unit


def late_query(consumer: Consumer, query: Any) -> Any:
    """The query of a product, of which addresses are computed beside it if registers cannot hold them all the time.

    Compilers compute those of all 16 parts of a query before the loop, else. In bfloat16, where consumers share steps,
    they do better so: without these registers ptxas finds too few for products, and waits after each.
    """
    if consumer.has_registers_to_spare or (consumer.shares_buffers and not consumer.is_quantized):
        return query
    return consumer.shared.q.at[lax.optimization_barrier(consumer.index)]


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
    output: Float32[Array, "64 head_dim"],
    shrink: Float32[Array, "64"],
    inside: Bool[Array, "64"] | None,
) -> Float32[Array, "64 head_dim"]:
    """Outputs times `shrink`, plus the product of weights and the step's values, in rows that are the item's.

    `inside` tells which rows are; None: all.
    """
    if inside is None and consumer.config.in_registers:
        return accumulated(shrunk(output, shrink, in_registers=True), weights, value)
    results = []
    for columns in consumer.columns:
        old = lax.slice(output, (0, columns.start), (SIDE, columns.start + columns.size))
        new = old * in_columns(shrink, consumer.chunk) + product(weights, value.at[:, columns], consumer.chunk)
        if inside is not None:
            new = jnp.where(in_columns(inside, consumer.chunk), new, old)
        results.append(new)
    return lax.concatenate(results, 1)


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
    """A buffer as it is multiplied, `[64, head_dim]`, divided by `widened_unit`. All are exact in bfloat16.

    Consumers that multiply the same buffer widen half of its rows each and wait for the other's, in a shared buffer
    for `place`: KEYS or VALUES. A consumer overwrites it a step later, behind the barrier of the other place, at which
    the other consumer arrives when its product with this one is done.
    """
    if not isinstance(buffers, QuantizedKV):
        return buffers.at[stage]
    shares = consumer.shares_buffers
    index = consumer.index * 0 + place if shares else consumer.index  # `accumulated` takes no number
    widened = consumer.shared.widened.at[index if consumer.has_registers_to_spare else lax.optimization_barrier(index)]
    rows = SIDE // CONSUMERS if shares else SIDE
    part: Any = pl.ds(consumer.index * rows, rows) if shares else slice(None)
    vectors = plgpu.Layout.SMEM_GMEM_COPY((rows, consumer.head_dim), jnp.bfloat16, 128)
    number = plgpu.load(buffers.values.at[stage, part], layout=vectors)
    if number.dtype == jnp.int8:
        widened[part] = widened_int8(number, vectors, in_registers=consumer.config.in_registers)
    else:  # a Hopper converts float8 to bfloat16 in no other way
        widened[part] = number.astype(jnp.float32).astype(jnp.bfloat16)
    plgpu.commit_smem()
    if shares:
        plgpu.barrier_arrive(consumer.shared.both_widened[place])
        plgpu.barrier_wait(consumer.shared.both_widened[place])
    return widened


def clear_rows(consumer: Consumer, value: Ref, known: jax.Array, hidden: jax.Array | None) -> None:
    """Zero the rows of a buffer of values from `known` on, and the first `hidden` ones.

    Weights of 0 do not keep NaN out of a product.
    """

    @pl.when((consumer.index == 0) | (not consumer.shares_buffers))
    def clear() -> None:
        number = plgpu.broadcasted_iota(jnp.int32, (SIDE, consumer.chunk), 0, layout=BY_PRODUCT)
        for columns in consumer.columns:
            old = plgpu.load(value.at[:, columns], layout=BY_PRODUCT, optimized=False)
            is_kept = number < known if hidden is None else (number < known) & (number >= hidden)
            value[:, columns] = jnp.where(is_kept, old, jnp.zeros_like(old))
        plgpu.commit_smem()

    if consumer.shares_buffers:
        plgpu.barrier_arrive(consumer.shared.cleared)
        plgpu.barrier_wait(consumer.shared.cleared)
