"""Attention over a work list on NVIDIA Hopper, in Pallas Mosaic GPU.

Sorted rows are cut into *tiles*, whose query heads of a KV head fill the 64 rows of the tensor cores' product. A tile
walks the pages of every item that has rows in it, 64 tokens a *step*: pages that rows share are read once for all of
them. All steps of all tiles lie in one row, which is cut into equal *units*, one for each processor and KV head, with
no regard to where tiles or items end (stream-K, arXiv 2301.03598). So work is even whatever the tree, and partial
results are few: unit u writes one for each tile t that it meets, at slot u + t, which no other pair has.

    steps    | tile 0: prefix, suffixes | tile 1 | tile 2: prompt chunk            |
    units    | unit 0       | unit 1       | unit 2       | unit 3       |
    slots      0              1     2        3   4          5

A unit is a producer warpgroup, which brings one page (or 64 tokens of one) per copy into a ring of buffers, and two
consumers. For prompt chunks they take a half of the tile's rows each; for decoding they have the same rows and take
turns at the steps. A second kernel merges partials by log-sum-exp. All of it is float32 but the products' operands.

Under a mesh nothing of this changes: call it in `shard_map` with queries and pools split over their heads and the plan
replicated; heads are never mixed.
"""

from dataclasses import dataclass
from functools import partial
from math import e, log2
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from jaxctx_kernels.plan import PlanShape
from jaxctx_kernels.pool import Pool
from jaxctx_kernels.reference import FAR, AttentionPlan

PROCESSORS = 132  # of an H100 or H200; one unit fills one
CONSUMERS = 2
WIDE = 128  # rows of a step from which consumers split rows instead of tokens
SIDE = 64  # rows of a warpgroup's product, and tokens of a step
LEAST = 4  # steps of a unit, so that small batches are not cut to shreds
LAYOUT = plgpu.Layout.WGMMA
BY_ROW = LAYOUT.reduce(1)
BEGIN, END, ROW, ROWS, ENTRY, TOKENS, START, OWN = range(8)  # of a pair; OWN and after it: for each part
Carry: TypeAlias = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]  # outputs by columns, maxima, sums
Ref: TypeAlias = Any  # a reference to memory, which JAX does not type


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are laid out: `parts` warpgroups' products make a tile, `ways` warpgroups take turns at one product."""

    group: int  # query heads of a KV head
    rows: int  # sorted rows of a product
    parts: int
    ways: int
    tiles: int
    units: int


class Work(NamedTuple):
    """What every unit does. A pair is an item within a tile: there are no more than have steps, in order of tiles."""

    pairs: Int32[Array, "pairs fields"]  # first step, the last's next; item but for its first row, which is the tile's
    tiles: Int32[Array, " tiles_and_one"]  # first pair of each tile
    units: Int32[Array, "units 6"]  # steps, pairs and tiles, from .. to
    slots: Int32[Array, "tiles 2"]  # partial results of each tile, from .. to
    length: Int32[Array, "tiles parts 64"]  # tokens that each row of a product sees


class Shared(NamedTuple):
    """A unit's shared memory. Barriers of a ring: one for each buffer."""

    q: Ref  # [consumers, 64, head_dim]
    k: Ref  # [stages, 64, head_dim]
    v: Ref
    p: Ref  # [consumers, 64, 64]: weights, as operand of the second product
    q_full: Ref
    k_full: Ref
    v_full: Ref
    k_free: Ref
    v_free: Ref
    tidied: Ref


class Unit(NamedTuple):
    """Where a warpgroup is, and from .. to which step, pair and tile it has work."""

    head: jax.Array
    number: jax.Array
    wg: jax.Array
    low: jax.Array
    high: jax.Array
    low_pair: jax.Array
    high_pair: jax.Array
    low_tile: jax.Array
    high_tile: jax.Array

    def steps(self, pairs: Ref, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of pair i: its first step's number within the unit, and its steps, from .. to, that the unit has."""
        begin = pairs[i, BEGIN]
        return begin - self.low, jnp.maximum(self.low - begin, 0), jnp.minimum(self.high, pairs[i, END]) - begin


def attend(
    q: Float[Array, "rows heads head_dim"], k_pool: Pool, v_pool: Pool, plan: AttentionPlan, *, shape: PlanShape
) -> Float32[Array, "rows heads head_dim"]:
    """See `attention.attend`. Raises ValueError for pools, head dims, groups or page sizes that it is not made for."""
    (rows, heads, dim), kv_heads, page_size = q.shape, k_pool.shape[0], shape.page_size
    group = heads // kv_heads
    if k_pool.dtype == jnp.uint16:  # bfloat16 as CPUs keep it
        k_pool, v_pool = (lax.bitcast_convert_type(pool, jnp.bfloat16) for pool in (k_pool, v_pool))
    if k_pool.dtype != jnp.bfloat16 or dim not in (64, 128, 256) or group > SIDE or page_size not in (16, 32, 64, 128):
        raise ValueError(f"no kernel for {k_pool.dtype}, head_dim {dim}, {group} heads a KV head, pages of {page_size}")
    parts = CONSUMERS if rows >= WIDE else 1
    tile = SIDE // group
    cut = Cut(group, tile, parts, CONSUMERS // parts, -(-rows // (tile * parts)), max(1, PROCESSORS // kv_heads))
    work = schedule(plan, cut)
    query = q[plan.order].astype(jnp.bfloat16).reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3)
    padded = cut.tiles * parts * tile
    query = jnp.pad(query, ((0, 0), (0, padded - rows), (0, 0), (0, 0))).reshape(kv_heads, -1, tile * group, dim)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, SIDE - tile * group), (0, 0)))
    query = query.reshape(kv_heads, cut.tiles, parts, SIDE, dim)
    out = merge(*attend_units(query, k_pool, v_pool, plan.pages, work, cut), work.slots, cut)
    out = out.reshape(kv_heads, -1, SIDE, dim)[:, :, : tile * group].reshape(kv_heads, padded, group, dim)
    return out[:, plan.inverse].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def schedule(plan: AttentionPlan, cut: Cut) -> Work:
    """Lay out the steps and cut them into units. It is the same for all layers of a step: XLA computes it once."""
    row, count, entry, tokens, start = plan.items
    items, tile_rows = row.shape[0], cut.rows * cut.parts
    length = jnp.pad(plan.length, (0, cut.tiles * tile_rows - plan.length.shape[0]))
    at = jnp.arange(length.shape[0])[:, None]
    mine = (jnp.arange(items) < plan.ends[-1]) & (at >= row) & (at < row + count)
    seen = jnp.where(mine, jnp.clip(length[:, None] - start, 0, tokens), 0)
    steps = -(-seen.reshape(cut.tiles, cut.parts, cut.rows, items).max(2) // SIDE)
    cells = steps.max(1)  # steps of each tile over each item; most are 0
    ends = cells.reshape(-1).cumsum()
    (cell,) = jnp.nonzero(cells.reshape(-1), size=ends.shape[0], fill_value=ends.shape[0])
    tile, item = cell // items, cell % items
    end = ends.at[cell].get(mode="fill", fill_value=2**30)
    begin = end - cells.reshape(-1).at[cell].get(mode="fill", fill_value=0)
    own = steps.transpose(0, 2, 1).reshape(-1, cut.parts).at[cell].get(mode="fill", fill_value=0)
    fields = (begin, end, row[item] - tile * tile_rows, count[item], entry[item], tokens[item], start[item])

    tile_end = ends.reshape(cut.tiles, items)[:, -1]
    tile_begin = jnp.pad(tile_end[:-1], (1, 0))
    total = tile_end[-1]
    each = jnp.maximum(LEAST, -(-total // cut.units))
    low = jnp.minimum(jnp.arange(cut.units) * each, total)
    high = jnp.minimum(low + each, total)
    last = high[:, None] - 1
    low_pair, low_tile = ((edges <= low[:, None]).sum(1) for edges in (end, tile_end))
    high_pair, high_tile = ((edges <= last).sum(1) for edges in (begin, tile_begin))
    units = jnp.stack([low, high, low_pair, high_pair, low_tile, high_tile], 1) * (low < high)[:, None]
    number = jnp.arange(cut.tiles)
    slots = jnp.stack([tile_begin // each + number, -(-tile_end // each) + number], 1)
    lengths = jnp.repeat(length.reshape(cut.tiles, cut.parts, -1), cut.group, 2)
    work = Work(
        jnp.stack([*fields, *own.T], 1),
        jnp.pad((cells > 0).sum(1).cumsum(), (1, 0)),
        units,
        slots * (tile_begin < tile_end)[:, None],
        jnp.pad(lengths, ((0, 0), (0, 0), (0, SIDE - cut.rows * cut.group))),
    )
    return Work(*(x.astype(jnp.int32) for x in work))


def attend_units(
    query: BFloat16[Array, "kv_heads tiles parts 64 head_dim"],
    k_pool: Pool,
    v_pool: Pool,
    pages: Int32[Array, " entries"],
    work: Work,
    cut: Cut,
) -> tuple[Float32[Array, "kv_heads partials 64 head_dim"], Float32[Array, "kv_heads partials 2 64"]]:
    """Of every slot and each of its consumers: unnormalised outputs, and rows' maxima (of base 2) and sums."""
    kv_heads, dim = query.shape[0], query.shape[-1]
    stages = 4 if dim <= 128 else 2  # a multiple of the ways, so that each buffer is always one consumer's
    copies = max(1, SIDE // k_pool.shape[2])
    partials = (cut.units + cut.tiles - 1) * CONSUMERS

    def kernel(q: Ref, k: Ref, v: Ref, pages: Ref, *refs: Ref) -> None:
        listed, out, stats, shared = Work(*refs[:5]), refs[5], refs[6], Shared(*refs[7:])
        head, number, wg = (lax.axis_index(axis) for axis in ("head", "unit", "wg"))
        unit = Unit(head, number, wg, *(listed.units[number, i] for i in range(6)))
        pl.when(wg == CONSUMERS)(lambda: produce(unit, k, v, pages, listed, shared, stages))
        pl.when(wg < CONSUMERS)(lambda: consume(unit, q, listed, out, stats, shared, stages, cut))

    def tiled(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    def ring(arrivals: int) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)

    shared = Shared(
        q=tiled(CONSUMERS, SIDE, dim),
        k=tiled(stages, SIDE, dim),
        v=tiled(stages, SIDE, dim),
        p=tiled(CONSUMERS, SIDE, SIDE),
        q_full=plgpu.Barrier(num_barriers=CONSUMERS),
        k_full=ring(copies),
        v_full=ring(copies),
        k_free=ring(cut.parts),
        v_free=ring(cut.parts),
        tidied=plgpu.Barrier(num_arrivals=cut.parts),
    )
    out_type = (
        jax.ShapeDtypeStruct((kv_heads, partials, SIDE, dim), jnp.float32),
        jax.ShapeDtypeStruct((kv_heads, partials, 2, SIDE), jnp.float32),
    )
    parts: tuple[jax.Array, jax.Array] = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(kv_heads, cut.units),
        grid_names=("head", "unit"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=shared,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, k_pool, v_pool, pages, *work)
    return parts


def produce(unit: Unit, k: Ref, v: Ref, pages: Ref, work: Work, shared: Shared, stages: int) -> None:
    """Bring the pages of the unit's steps into the ring, as buffers become free. Pages past an item's are left out."""
    plgpu.set_max_registers(40, action="decrease")
    page_size = k.shape[2]
    span = min(page_size, SIDE)  # tokens of a copy
    k_ring, v_ring = (k, shared.k, shared.k_full, shared.k_free), (v, shared.v, shared.v_full, shared.v_free)

    @pl.loop(unit.low_pair, unit.high_pair)
    def pair(i: jax.Array) -> None:
        begin, first, last = unit.steps(work.pairs, i)
        entry, tokens = work.pairs[i, ENTRY], work.pairs[i, TOKENS]

        @pl.loop(first, last)
        def step(s: jax.Array) -> None:
            slot = lax.rem(begin + s, stages)
            for pool, buffers, full, free in (k_ring, v_ring):
                pl.when(begin + s >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                for offset in range(0, SIDE, span):
                    token = s * SIDE + offset
                    target = buffers.at[slot, pl.ds(offset, span)]

                    def bring(pool: Ref, token: jax.Array, target: Ref, arrived: Ref) -> None:
                        page = pages[entry + lax.div(token, page_size)]
                        source = pool.at[unit.head, page, pl.ds(lax.rem(token, page_size), span)]
                        plgpu.copy_gmem_to_smem(source, target, arrived)

                    pl.when(token < tokens)(partial(bring, pool, token, target, full.at[slot]))
                    pl.when(token >= tokens)(partial(plgpu.barrier_arrive, full.at[slot]))


def consume(unit: Unit, q: Ref, work: Work, out: Ref, stats: Ref, shared: Shared, stages: int, cut: Cut) -> None:
    """Attend to the unit's steps, with this warpgroup's rows or at its turns, and write a partial result a tile."""
    plgpu.set_max_registers(232, action="increase")
    pairs, wg, dim = work.pairs, unit.wg, q.shape[-1]
    part, turn = (wg, 0) if cut.parts > 1 else (0, wg)
    chunk = min(dim, 128)  # columns of a product with values: two of 256 do not fit into registers
    number = plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=BY_ROW)
    column = plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), 1, layout=LAYOUT)

    def product(a: Ref, b: Ref, columns: int) -> jax.Array:
        def multiply(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]

        result: jax.Array = pl.run_scoped(multiply, plgpu.ACC((SIDE, columns), jnp.float32))
        return result

    def tidy(s: jax.Array, tokens: jax.Array, slot: jax.Array) -> None:
        """Clear values past the item's last token: weights of 0 do not keep NaN out of the product."""

        def clear() -> None:
            value = plgpu.load(shared.v.at[slot], layout=LAYOUT, optimized=False)
            token = plgpu.broadcasted_iota(jnp.int32, (SIDE, dim), 0, layout=LAYOUT) + s * SIDE
            shared.v[slot] = jnp.where(token < tokens, value, jnp.zeros_like(value))
            plgpu.commit_smem()

        def together() -> None:
            pl.when(wg == 0)(clear)
            plgpu.barrier_arrive(shared.tidied)
            plgpu.barrier_wait(shared.tidied)

        pl.when((s + 1) * SIDE > tokens)(together if cut.parts > 1 else clear)

    @pl.loop(unit.low_tile, unit.high_tile)
    def tile(t: jax.Array) -> None:
        plgpu.copy_gmem_to_smem(q.at[unit.head, t, part], shared.q.at[wg], shared.q_full.at[wg])
        length = plgpu.load(work.length.at[t, part], layout=BY_ROW, optimized=False)
        plgpu.barrier_wait(shared.q_full.at[wg])

        def pair(i: jax.Array, carry: Carry) -> Carry:
            begin, first, last = unit.steps(pairs, i)
            tokens = pairs[i, TOKENS]
            row = (pairs[i, ROW] - part * cut.rows) * cut.group
            inside = (number >= row) & (number < row + pairs[i, ROWS] * cut.group)
            limit = jnp.where(inside, jnp.minimum(length - pairs[i, START], tokens), 0)

            def step(s: jax.Array, carry: Carry) -> Carry:
                outs, peak, total = carry
                slot = lax.rem(begin + s, stages)
                plgpu.barrier_wait(shared.k_full.at[slot])
                score = product(shared.q.at[wg], shared.k.at[slot].transpose((1, 0)), SIDE)
                plgpu.barrier_arrive(shared.k_free.at[slot])
                seen = column + s * SIDE < over(limit, SIDE)
                score = jnp.where(seen, score * (dim**-0.5 * log2(e)), FAR)
                new_peak = jnp.maximum(peak, score.max(axis=1))
                weight = jnp.where(seen, jnp.exp2(score - over(new_peak, SIDE)), 0.0)
                shrink = jnp.exp2(peak - new_peak)
                shared.p[wg] = weight.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.barrier_wait(shared.v_full.at[slot])
                tidy(s, tokens, slot)
                new_outs = []
                for at, old in zip(range(0, dim, chunk), outs, strict=True):
                    new = product(shared.p.at[wg], shared.v.at[slot, :, pl.ds(at, chunk)], chunk)
                    new = jnp.where(over(inside, chunk), new, 0.0)  # NaN of others' values
                    new_outs.append(old * over(shrink, chunk) + new)
                plgpu.barrier_arrive(shared.v_free.at[slot])
                return tuple(new_outs), new_peak, total * shrink + weight.sum(axis=1)

            def skip(s: jax.Array, _: None) -> None:
                """Another warpgroup's rows see the step, but none of this one's."""
                slot = lax.rem(begin + s, stages)
                plgpu.barrier_wait(shared.k_full.at[slot])
                plgpu.barrier_arrive(shared.k_free.at[slot])
                plgpu.barrier_wait(shared.v_full.at[slot])
                tidy(s, tokens, slot)
                plgpu.barrier_arrive(shared.v_free.at[slot])

            if cut.parts == 1:
                first += lax.rem(begin + first + turn, cut.ways)  # to a step of this warpgroup's turn
                turns = lax.div(jnp.maximum(last - first, 0) + cut.ways - 1, cut.ways)
                return lax.fori_loop(0, turns, lambda n, carry: step(first + n * cut.ways, carry), carry)
            own = jnp.clip(pairs[i, OWN + part], first, last)
            carry = lax.fori_loop(first, own, step, carry)
            lax.fori_loop(own, last, skip, None)
            return carry

        nothing = tuple(full((SIDE, chunk), 0.0) for _ in range(dim // chunk)), full((SIDE,), FAR), full((SIDE,), 0.0)
        low, high = jnp.maximum(unit.low_pair, work.tiles[t]), jnp.minimum(unit.high_pair, work.tiles[t + 1])
        outs, peak, total = lax.fori_loop(low, high, pair, nothing)
        to = (unit.number + t) * CONSUMERS + wg
        for c, values in enumerate(outs):
            out[unit.head, to, :, pl.ds(c * chunk, chunk)] = values
        stats[unit.head, to, 0] = peak
        stats[unit.head, to, 1] = total


def merge(
    out: Float32[Array, "kv_heads partials 64 head_dim"],
    stats: Float32[Array, "kv_heads partials 2 64"],
    slots: Int32[Array, "tiles 2"],
    cut: Cut,
) -> Float32[Array, "kv_heads tiles parts 64 head_dim"]:
    """Merge each tile's partial results, in order of slots. Rows that saw nothing become zeros."""
    kv_heads, _, _, dim = out.shape
    width = 32  # columns of a block

    def kernel(out: Ref, stats: Ref, slots: Ref, merged: Ref) -> None:
        head, t, part, column = (lax.axis_index(axis) for axis in ("head", "tile", "part", "column"))
        columns = pl.ds(column * width, width)
        first, last = slots[t, 0] * cut.ways, slots[t, 1] * cut.ways

        def stat(i: jax.Array, which: int) -> jax.Array:
            ref = stats.at[head, i * cut.parts + part, which]
            return plgpu.load(ref, layout=BY_ROW, optimized=False)

        peak = lax.fori_loop(first, last, lambda i, peak: jnp.maximum(peak, stat(i, 0)), full((SIDE,), FAR))

        def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            acc, total = carry
            weight = jnp.exp2(stat(i, 0) - peak)
            ref = out.at[head, i * cut.parts + part, :, columns]
            values = plgpu.load(ref, layout=LAYOUT, optimized=False)
            return acc + values * over(weight, width), total + stat(i, 1) * weight

        acc, total = lax.fori_loop(first, last, add, (full((SIDE, width), 0.0), full((SIDE,), 0.0)))
        total = over(total, width)
        merged[head, t, part, :, columns] = jnp.where(total == 0.0, 0.0, acc / total)

    result: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((kv_heads, cut.tiles, cut.parts, SIDE, dim), jnp.float32),
        grid=(kv_heads, cut.tiles, cut.parts, dim // width),
        grid_names=("head", "tile", "part", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(out, stats, slots)
    return result


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """A constant, laid out as a product's result or as its rows."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), LAYOUT if len(shape) == 2 else BY_ROW)


def over(by_row: jax.Array, columns: int) -> jax.Array:
    """A value of each row, in every column."""
    return lax.broadcast_in_dim(by_row, (SIDE, columns), [0])
