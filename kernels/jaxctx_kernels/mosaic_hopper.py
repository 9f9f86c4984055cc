"""Attention over a work list on NVIDIA Hopper, in Pallas Mosaic GPU.

Sorted rows are cut into *tiles*, whose query heads of a KV head fill the 64 rows of a tensor core product. A tile walks
the pages of every item that has rows in it, 64 tokens a *step*: pages that rows share are read once for all of them.
The steps of all tiles, one after the other, are cut into equal *units*, one for each processor and KV head, with no
regard to where tiles or items end (stream-K, arXiv 2301.03598). So work is even whatever the tree, and partial results
are few: unit u writes one for each tile t that it meets, at slot u + t, which no other pair has.

    steps    | tile 0: prefix, suffixes  | tile 1  | tile 2: prompt chunk       |
    units    | unit 0       | unit 1       | unit 2       | unit 3              |
    slots      0              1      2       3    4         5

A unit is a producer warpgroup, which brings a page (at most 64 tokens of one) a copy into rings of buffers, and two
consumers. In steps of many rows each consumer has half of a tile; in others both have the same rows and take turns at
the steps. A second kernel merges partial results by log-sum-exp. All is float32 but what is multiplied.

What is multiplied is bfloat16. Numbers of 8 bits stay so in the rings; each consumer widens those of its steps into a
buffer of its own. Their scales multiply the scores, and the weights before they are rounded.

Heads are never mixed: under a mesh call this in `shard_map`, queries and pools split over heads, the plan on all.
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
from jaxtyping import Array, Float, Float32, Int32

from jaxctx_kernels.kv_cache import BITS_OF, KVPages, QuantizedKV, kv_values, select_kernel
from jaxctx_kernels.metadata import AttentionMetadata, MetadataShape
from jaxctx_kernels.reference import FAR

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Ref: TypeAlias = Any  # to memory of the device
Bounds: TypeAlias = tuple[jax.Array, jax.Array]  # from .. to
Carry: TypeAlias = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]  # outputs, rows' maxima (of log2) and sums

PROCESSORS = 132  # of an H100 or H200; a unit fills one
CONSUMERS = 2
WIDE = 128  # rows of a step from which consumers split rows, not tokens
SIDE = 64  # rows of a product, and tokens of a step
LEAST = 4  # steps of a unit, lest small batches be cut to shreds
GRID = plgpu.Layout.WGMMA  # how a warpgroup holds a product
BY_ROW, BY_COLUMN = GRID.reduce(1), GRID.reduce(0)  # and a value for each of its rows, or columns
BEGIN, END, ROW, ROWS, ENTRY, TOKENS, START = range(7)  # fields of a pair


@dataclass(frozen=True, slots=True)
class Cut:
    """`parts` products of `rows` sorted rows make a tile; `ways` consumers take turns at each."""

    group: int  # query heads of a KV head
    rows: int
    parts: int
    ways: int
    tiles: int
    units: int


class Work(NamedTuple):
    """What every unit does. A pair is an item within a tile; pairs without steps are left out, tiles are in order."""

    pairs: Int32[Array, "pairs fields"]  # steps from .. to; the item, its first row counted from the tile's
    tiles: Int32[Array, " tiles_and_one"]  # first pair of each
    units: Int32[Array, "units 6"]  # steps, pairs and tiles, from .. to
    slots: Int32[Array, "tiles 2"]  # of partial results, from .. to
    length: Int32[Array, "products 64"]  # tokens that each row sees


class Shared(NamedTuple):
    """The shared memory of a unit. A ring is buffers `[stages, 64, head_dim]` and barriers: they are full, are free.

    Those of 8 bits are `QuantizedKV`, with scales `[stages, copies, room]`: what a copy brings has to start at 128 bytes.
    """

    q: Ref  # [consumers, 64, head_dim]
    q_full: Ref
    k: tuple[Ref, Ref, Ref]
    v: tuple[Ref, Ref, Ref]
    p: Ref  # [consumers, 64, 64], weights for the product with values
    cleared: Ref
    wide: Ref  # [consumers, 64, head_dim], keys, then values, of 8 bits as they are multiplied; None for others


class Unit(NamedTuple):
    """Where a warpgroup is, and the steps, pairs and tiles, from .. to, of its unit."""

    head: jax.Array
    number: jax.Array
    wg: jax.Array
    steps: Bounds
    pairs: Bounds
    tiles: Bounds

    def own(self, pair: Ref) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Number within the unit of a pair's first step, and which of the pair's steps, from .. to, the unit has."""
        (low, high), begin = self.steps, pair[BEGIN]
        return begin - low, jnp.maximum(low - begin, 0), jnp.minimum(high, pair[END]) - begin


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pool: KVPages,
    v_pool: KVPages,
    plan: AttentionMetadata,
    *,
    shape: MetadataShape,
) -> Float32[Array, "rows heads head_dim"]:
    """See `attention.attend`. Raises ValueError for a dtype, head dim, group or page size that it is not made for."""
    pools = k_pool, v_pool  # what CPUs keep as bits becomes numbers
    k_pool, v_pool = jax.tree.map(lambda x: lax.bitcast_convert_type(x, BITS_OF.get(x.dtype, x.dtype)), pools)
    (rows, heads, dim), (kv_heads, _, page_size, _), kind = q.shape, kv_values(k_pool).shape, kv_values(k_pool).dtype
    group = heads // kv_heads
    if select_kernel("gpu", k_pool) != "gpu" or group > SIDE:
        raise ValueError(f"no kernel for {kind}, heads of {dim}, groups of {group}, pages of {page_size}")
    parts, size = CONSUMERS if rows >= WIDE else 1, SIDE // group
    cut = Cut(group, size, parts, CONSUMERS // parts, -(-rows // (size * parts)), max(1, PROCESSORS // kv_heads))
    row = jnp.arange(cut.tiles * parts)[:, None] * size + jnp.arange(SIDE) // group
    row = jnp.where(jnp.arange(SIDE) < size * group, row, rows)  # sorted row of a product's row, or none
    query = q.astype(jnp.bfloat16).reshape(rows, kv_heads, group, dim)
    query = query[plan.order.at[row].get(mode="clip"), :, jnp.arange(SIDE) % group].transpose(2, 0, 1, 3)
    work = schedule(plan, plan.length.at[row].get(mode="fill", fill_value=0), cut)
    out = merge(*attend_units(query, k_pool, v_pool, plan.pages, work, cut), work.slots, cut)
    at = plan.inverse[:, None]
    return out[:, at // size, at % size * group + jnp.arange(group)].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def schedule(plan: AttentionMetadata, length: Int32[Array, "products 64"], cut: Cut) -> Work:
    """Lay out the steps and cut them into units. This is the same for all layers, so that XLA computes it once."""
    row, count, entry, tokens, start = plan.items
    items, tile_rows = row.shape[0], cut.rows * cut.parts
    sees = length[:, : cut.rows * cut.group : cut.group].reshape(-1, 1)
    at = jnp.arange(sees.shape[0])[:, None]
    mine = (jnp.arange(items) < plan.ends[-1]) & (at >= row) & (at < row + count)
    seen = jnp.where(mine, jnp.clip(sees - start, 0, tokens), 0).reshape(cut.tiles, tile_rows, items).max(1)
    cells = (-(-seen // SIDE)).reshape(-1)  # steps of each tile over each item, most of them 0
    ends = cells.cumsum()
    (cell,) = jnp.nonzero(cells, size=cells.shape[0], fill_value=cells.shape[0])
    tile, item = cell // items, cell % items
    end = ends.at[cell].get(mode="fill", fill_value=2**30)
    begin = end - cells.at[cell].get(mode="fill", fill_value=0)
    fields = begin, end, row[item] - tile * tile_rows, count[item], entry[item], tokens[item], start[item]
    tile_end = ends.reshape(cut.tiles, items)[:, -1]
    tile_begin, total = jnp.pad(tile_end[:-1], (1, 0)), tile_end[-1]
    each = jnp.maximum(LEAST, -(-total // cut.units))
    low, high = (jnp.minimum((jnp.arange(cut.units) + n) * each, total) for n in (0, 1))
    of_low = ((edges <= low[:, None]).sum(1) for edges in (end, tile_end))
    of_high = ((edges < high[:, None]).sum(1) for edges in (begin, tile_begin))
    (low_pair, low_tile), (high_pair, high_tile) = of_low, of_high
    units = jnp.stack([low, high, low_pair, high_pair, low_tile, high_tile], 1) * (low < high)[:, None]
    slots = jnp.stack([tile_begin // each, -(-tile_end // each)], 1) + jnp.arange(cut.tiles)[:, None]
    slots *= (tile_begin < tile_end)[:, None]
    firsts = jnp.pad((cells.reshape(cut.tiles, items) > 0).sum(1).cumsum(), (1, 0))
    return Work(*(x.astype(jnp.int32) for x in (jnp.stack(fields, 1), firsts, units, slots, length)))


def attend_units(
    q: jax.Array, k: KVPages, v: KVPages, pages: jax.Array, work: Work, cut: Cut
) -> tuple[jax.Array, jax.Array]:
    """Of each slot's consumers: outputs `[kv_heads, partials, 64, head_dim]` not divided by sums; maxima and sums."""
    (kv_heads, _, _, dim), scaled = q.shape, isinstance(k, QuantizedKV)
    stages = 4 if dim <= 128 else 2  # a multiple of the ways, so that each buffer is always one consumer's
    copies, partials = max(1, SIDE // kv_values(k).shape[2]), (cut.units + cut.tiles - 1) * CONSUMERS

    def kernel(q: Ref, k: KVPages, v: KVPages, pages: Ref, *refs: Ref) -> None:
        listed, out, stats, shared = Work(*refs[:5]), refs[5], refs[6], Shared(*refs[7:])
        head, number, wg = (lax.axis_index(axis) for axis in ("head", "unit", "wg"))
        unit = Unit(head, number, wg, *((listed.units[number, i], listed.units[number, i + 1]) for i in (0, 2, 4)))
        pl.when(wg == CONSUMERS)(lambda: produce(unit, k, v, pages, listed, shared))
        pl.when(wg < CONSUMERS)(lambda: consume(unit, q, listed, out, stats, shared, cut))

    def tiled(*shape: int, dtype: Any = jnp.bfloat16) -> Ref:
        swizzle = plgpu.SwizzleTransform(64 * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), swizzle))

    def ring() -> tuple[Ref, Ref, Ref]:
        full, free = (plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (copies * (1 + scaled), cut.parts))
        buffers = tiled(stages, SIDE, dim, dtype=kv_values(k).dtype)
        scales = plgpu.SMEM((stages, copies, max(32, SIDE // copies)), jnp.float32)
        return QuantizedKV(buffers, scales) if scaled else buffers, full, free

    per_consumer = tiled(CONSUMERS, SIDE, dim), plgpu.Barrier(num_barriers=CONSUMERS)
    rest = ring(), ring(), tiled(CONSUMERS, SIDE, SIDE), plgpu.Barrier(num_arrivals=cut.parts)
    wide = tiled(CONSUMERS, SIDE, dim) if scaled else None
    shapes = (kv_heads, partials, SIDE, dim), (kv_heads, partials, 2, SIDE)
    outputs, stats = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=(kv_heads, cut.units),
        grid_names=("head", "unit"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=Shared(*per_consumer, *rest, wide),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, pages, *work)
    return outputs, stats


def produce(unit: Unit, k: KVPages, v: KVPages, pages: Ref, work: Work, shared: Shared) -> None:
    """Bring the pages of the unit's steps into the rings, as buffers become free. Past an item's last, that again."""
    plgpu.set_max_registers(40, action="decrease")
    page_size, stages = kv_values(k).shape[2], kv_values(shared.k[0]).shape[0]
    span = min(page_size, SIDE)  # tokens of a copy

    @pl.loop(*unit.pairs)
    def pair(i: jax.Array) -> None:
        begin, first, last = unit.own(work.pairs.at[i])
        entry, tokens = work.pairs[i, ENTRY], work.pairs[i, TOKENS]

        @pl.loop(first, last)
        def step(s: jax.Array) -> None:
            slot = lax.rem(begin + s, stages)
            for pool, (buffers, full, free) in ((k, shared.k), (v, shared.v)):
                pl.when(begin + s >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                for offset in range(0, SIDE, span):
                    token = s * SIDE + offset
                    page = pages[entry + lax.div(jnp.minimum(token, tokens - 1), page_size)]
                    here: Any = pl.ds(lax.rem(token, page_size), span)
                    source = kv_values(pool).at[unit.head, page, here]
                    plgpu.copy_gmem_to_smem(source, kv_values(buffers).at[slot, pl.ds(offset, span)], full.at[slot])
                    if isinstance(pool, QuantizedKV):
                        target = buffers.scales.at[slot, offset // span, pl.ds(0, span)]
                        plgpu.copy_gmem_to_smem(pool.scales.at[unit.head, page, 0, here], target, full.at[slot])


def consume(unit: Unit, q: Ref, work: Work, out: Ref, stats: Ref, shared: Shared, cut: Cut) -> None:
    """Attend to the unit's steps, with this consumer's rows or at its turns; write a partial result for each tile."""
    plgpu.set_max_registers(232, action="increase")
    wg, (keys, k_full, k_free), (values, v_full, v_free) = unit.wg, shared.k, shared.v
    (stages, _, dim), (part, turn) = kv_values(keys).shape, (wg, 0) if cut.parts > 1 else (0, wg)
    chunk = 128 if dim == 128 else 64  # columns of a product with values; registers do not take more for 256
    chunks = [pl.ds(at, chunk) for at in range(0, dim, chunk)]
    numbers = plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=BY_ROW)
    eight = shared.wide is not None  # bits
    shares = cut.parts > 1 and not eight  # what it multiplies, with the other consumer

    def scales(buffers: Any, slot: jax.Array) -> jax.Array | None:
        """Of a buffer's tokens, if it has some. Read before a commit, after which copies may overwrite them."""
        if not isinstance(buffers, QuantizedKV):
            return None
        copies = buffers.scales.shape[1]
        of_pages = [buffers.scales.at[slot, n, pl.ds(0, SIDE // copies)] for n in range(copies)]
        return jnp.concatenate([plgpu.load(page, layout=BY_COLUMN, optimized=False) for page in of_pages])

    def scaled(x: jax.Array, scale: jax.Array | None, seen: jax.Array) -> jax.Array:
        """Columns times their tokens' scales, which may be NaN where nothing is seen."""
        return x if scale is None else x * jnp.where(seen, lax.broadcast_in_dim(scale, (SIDE, SIDE), [1]), 0.0)

    def widened(buffers: Any, slot: jax.Array) -> Ref:
        """A buffer as it is multiplied. All numbers of 8 bits are numbers of bfloat16."""
        if not isinstance(buffers, QuantizedKV):
            return buffers.at[slot]
        mine: Ref = shared.wide.at[lax.optimization_barrier(wg)]  # or addresses for all products wait in registers
        vectors = plgpu.Layout.SMEM_GMEM_COPY((SIDE, chunk), jnp.bfloat16, 128)
        for columns in chunks:
            number = plgpu.load(buffers.numbers.at[slot, :, columns], layout=vectors)
            if number.dtype != jnp.int8:
                number = number.astype(jnp.float32)  # a Hopper has no other way
            mine[:, columns] = number.astype(jnp.bfloat16)
        plgpu.commit_smem()
        return mine

    def clear(known: jax.Array, value: Ref) -> None:  # weights of 0 do not keep NaN out of a product
        @pl.when((wg == 0) | (not shares))
        def once() -> None:
            number = plgpu.broadcasted_iota(jnp.int32, (SIDE, chunk), 0, layout=GRID)
            for columns in chunks:
                old = plgpu.load(value.at[:, columns], layout=GRID, optimized=False)
                value[:, columns] = jnp.where(number < known, old, jnp.zeros_like(old))
            plgpu.commit_smem()

        if shares:
            plgpu.barrier_arrive(shared.cleared)
            plgpu.barrier_wait(shared.cleared)

    @pl.loop(*unit.tiles)
    def tile(t: jax.Array) -> None:
        plgpu.copy_gmem_to_smem(q.at[unit.head, t * cut.parts + part], shared.q.at[wg], shared.q_full.at[wg])
        length = plgpu.load(work.length.at[t * cut.parts + part], layout=BY_ROW, optimized=False)
        plgpu.barrier_wait(shared.q_full.at[wg])

        def pair(i: jax.Array, carry: Carry) -> Carry:
            item: Ref = work.pairs.at[i]
            begin, first, last = unit.own(item)
            tokens, row = item[TOKENS], (item[ROW] - part * cut.rows) * cut.group
            inside = (numbers >= row) & (numbers < row + item[ROWS] * cut.group)
            limit = jnp.where(inside, jnp.minimum(length - item[START], tokens), 0)

            def step(s: jax.Array, carry: Carry) -> Carry:
                (outs, peak, total), slot = carry, lax.rem(begin + s, stages)
                plgpu.barrier_wait(k_full.at[slot])
                scale, key = scales(keys, slot), widened(keys, slot)
                score = product(shared.q.at[wg], key.transpose((1, 0)), SIDE)
                plgpu.barrier_arrive(k_free.at[slot])
                number = plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), 1, layout=GRID)
                seen = number < over(limit - s * SIDE, SIDE)
                score = jnp.where(seen, scaled(score, scale, seen) * (dim**-0.5 * log2(e)), FAR)
                new_peak = jnp.maximum(peak, score.max(axis=1))
                weight = jnp.where(seen, jnp.exp2(score - over(new_peak, SIDE)), 0.0)
                shrink = jnp.exp2(peak - new_peak)
                if eight:
                    plgpu.barrier_wait(v_full.at[slot])
                shared.p[wg] = scaled(weight, scales(values, slot), seen).astype(jnp.bfloat16)
                plgpu.commit_smem()
                if not eight:
                    plgpu.barrier_wait(v_full.at[slot])
                value = widened(values, slot)
                pl.when((s + 1) * SIDE > tokens)(partial(clear, tokens - s * SIDE, value))
                new_outs = []
                for columns, old in zip(chunks, outs, strict=True):
                    new = product(shared.p.at[wg], value.at[:, columns], chunk)
                    new = jnp.where(over(inside, chunk), new, 0.0)  # NaN of another sequence's values
                    new_outs.append(old * over(shrink, chunk) + new)
                plgpu.barrier_arrive(v_free.at[slot])
                return tuple(new_outs), new_peak, total * shrink + weight.sum(axis=1)

            first += lax.rem(begin + first + turn, cut.ways)  # to the next of this consumer's turns
            turns = lax.div(jnp.maximum(last - first, 0) + cut.ways - 1, cut.ways)
            return cast(Carry, lax.fori_loop(0, turns, lambda n, carry: step(first + n * cut.ways, carry), carry))

        low, high = jnp.maximum(unit.pairs[0], work.tiles[t]), jnp.minimum(unit.pairs[1], work.tiles[t + 1])
        nothing = tuple(full(0.0, chunk) for _ in chunks), full(FAR), full(0.0)
        outs, peak, total = lax.fori_loop(low, high, pair, nothing)
        slot = (unit.number + t) * CONSUMERS + wg
        for columns, result in zip(chunks, outs, strict=True):
            out[unit.head, slot, :, columns] = result
        stats[unit.head, slot, 0], stats[unit.head, slot, 1] = peak, total


def merge(out: jax.Array, stats: jax.Array, slots: jax.Array, cut: Cut) -> Float32[Array, "kv_heads products 64 dim"]:
    """Merge each tile's partial results, in order of slots. Rows that saw nothing become zeros."""
    kv_heads, _, _, dim = out.shape
    width = 32  # columns of a block

    def kernel(out: Ref, stats: Ref, slots: Ref, merged: Ref) -> None:
        head, number, column = (lax.axis_index(axis) for axis in ("head", "product", "column"))
        columns, t, part = pl.ds(column * width, width), lax.div(number, cut.parts), lax.rem(number, cut.parts)
        bounds = slots[t, 0] * cut.ways, slots[t, 1] * cut.ways

        def stat(i: jax.Array, which: int) -> Any:
            return plgpu.load(stats.at[head, i * cut.parts + part, which], layout=BY_ROW, optimized=False)

        peak = lax.fori_loop(*bounds, lambda i, peak: jnp.maximum(peak, stat(i, 0)), full(FAR))

        def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weight = jnp.exp2(stat(i, 0) - peak)
            values = plgpu.load(out.at[head, i * cut.parts + part, :, columns], layout=GRID, optimized=False)
            return carry[0] + values * over(weight, width), carry[1] + stat(i, 1) * weight

        acc, total = lax.fori_loop(*bounds, add, (full(0.0, width), full(0.0)))
        merged[head, number, :, columns] = jnp.where(over(total, width) == 0.0, 0.0, acc / over(total, width))

    merged: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((kv_heads, cut.tiles * cut.parts, SIDE, dim), jnp.float32),
        grid=(kv_heads, cut.tiles * cut.parts, dim // width),
        grid_names=("head", "product", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(out, stats, slots)
    return merged


def product(a: Ref, b: Ref, columns: int) -> Any:
    def multiply(acc: Ref) -> Any:  # a and b are in shared memory: interpreters do not take registers
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((SIDE, columns), jnp.float32))


def full(value: float, columns: int | None = None) -> Any:
    """A constant for each row, or for each column of each row."""
    shape, layout = ((SIDE,), BY_ROW) if columns is None else ((SIDE, columns), GRID)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def over(by_row: jax.Array, columns: int) -> jax.Array:
    """Each row's value in every column."""
    return lax.broadcast_in_dim(by_row, (SIDE, columns), [0])
