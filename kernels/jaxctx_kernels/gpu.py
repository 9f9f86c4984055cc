"""Attention over a work list for NVIDIA Hopper, in Pallas Mosaic GPU."""

from functools import partial
from math import log2, e
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from jaxctx_kernels.plan import PlanShape
from jaxctx_kernels.pool import Pool
from jaxctx_kernels.reference import FAR, AttentionPlan

PROCESSORS = 132
M = 64
TILE = 64
STAGES = 3
LEAST = 4


class Work(NamedTuple):
    pairs: Int32[Array, "pairs fields"]
    tiles: Int32[Array, " tiles_and_one"]
    units: Int32[Array, "units 6"]
    spans: Int32[Array, "tiles 2"]
    lengths: Int32[Array, "tiles consumers 64"]


def schedule(plan: AttentionPlan, group: int, consumers: int, units: int) -> Work:
    per_wg = M // group
    rows = plan.length.shape[0]
    tiles = -(-rows // (per_wg * consumers))
    row, count, entry, tokens, start = plan.items
    items = row.shape[0]
    live = jnp.arange(items) < plan.ends[-1]
    length = jnp.pad(plan.length, (0, tiles * consumers * per_wg - rows))
    at = jnp.arange(length.shape[0])[:, None]
    seen = jnp.where(live & (at >= row) & (at < row + count), jnp.clip(length[:, None] - start, 0, tokens), 0)
    steps = -(-seen.reshape(tiles, consumers, per_wg, items).max(2) // TILE)
    cells = steps.max(1).reshape(-1)
    ends = cells.cumsum()
    total = ends[-1]
    (cell,) = jnp.nonzero(cells, size=cells.shape[0], fill_value=cells.shape[0])
    begin = (ends - cells).at[cell].get(mode="fill", fill_value=2**30)
    tile, item = cell // items, cell % items
    mine = steps.transpose(0, 2, 1).reshape(-1, consumers).at[cell].get(mode="fill", fill_value=0)
    pairs = jnp.stack([begin, row[item] - tile * (per_wg * consumers), count[item], entry[item], tokens[item], start[item], *mine.T], 1)
    first = (cell < jnp.arange(tiles + 1)[:, None] * items).sum(1)
    per = jnp.maximum(LEAST, -(-total // units))
    low = jnp.arange(units) * per
    high = jnp.minimum(low + per, total)
    ends_of_tiles = ends.reshape(tiles, items)[:, -1]
    begins_of_tiles = jnp.concatenate([jnp.zeros(1, jnp.int32), ends_of_tiles[:-1]])

    def find(edges, step):
        return (edges <= step[:, None]).sum(1) - 1

    last = jnp.maximum(high - 1, 0)
    unit = jnp.stack([low, jnp.maximum(high, low), find(begin, low), find(begin, last) + 1,
                      (ends_of_tiles <= low[:, None]).sum(1), (ends_of_tiles <= last[:, None]).sum(1) + 1], 1)
    unit = jnp.where((low < high)[:, None], unit, 0)
    numbers = jnp.arange(tiles)
    spans = jnp.stack([begins_of_tiles // per + numbers, -(-ends_of_tiles // per) + numbers], 1)
    spans = jnp.where((begins_of_tiles < ends_of_tiles)[:, None], spans, 0)
    lengths = jnp.repeat(length.reshape(-1, per_wg), group, axis=1)
    lengths = jnp.pad(lengths, ((0, 0), (0, M - per_wg * group))).reshape(tiles, consumers, M)
    return Work(*(x.astype(jnp.int32) for x in (pairs, first, unit, spans, lengths)))


def attend(q, k_pool, v_pool, plan, *, shape):
    rows, heads, dim = q.shape
    kv_heads, _, page_size, _ = k_pool.shape
    group = heads // kv_heads
    if k_pool.dtype == jnp.uint16:
        k_pool, v_pool = (lax.bitcast_convert_type(x, jnp.bfloat16) for x in (k_pool, v_pool))
    consumers = 2 if rows >= 128 else 1
    per_wg = M // group
    units = max(1, PROCESSORS * (2 if consumers == 1 else 1) // kv_heads)
    work = schedule(plan, group, consumers, units)
    tiles = work.lengths.shape[0]
    padded = tiles * consumers * per_wg
    query = q[plan.order].astype(k_pool.dtype).reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3)
    query = jnp.pad(query, ((0, 0), (0, padded - rows), (0, 0), (0, 0)))
    query = query.reshape(kv_heads, tiles * consumers, per_wg * group, dim)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, M - per_wg * group), (0, 0))).reshape(kv_heads, tiles, consumers, M, dim)
    parts = partial_sums(query, k_pool, v_pool, plan.pages, work, group)
    out = merge(*parts, work.spans)
    out = out.reshape(kv_heads, tiles * consumers, M, dim)[:, :, : per_wg * group].reshape(kv_heads, padded, group, dim)
    return out[:, plan.inverse].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def partial_sums(query, k_pool, v_pool, pages, work, group):
    kv_heads, tiles, consumers, _, dim = query.shape
    page_size = k_pool.shape[2]
    per_wg = M // group
    units = work.units.shape[0]
    slots = units + tiles - 1
    span = min(page_size, TILE)
    copies = TILE // span
    chunk = min(dim, 128)
    dtype = k_pool.dtype
    WG = plgpu.Layout.WGMMA
    ROW = WG.reduce(1)

    def kernel(q_ref, k_ref, v_ref, pages_ref, pairs_ref, tiles_ref, units_ref, lengths_ref, out_ref, stats_ref,
               q_s, k_s, v_s, p_s, q_bar, k_full, v_full, k_free, v_free, clean):
        head, unit, wg = lax.axis_index("head"), lax.axis_index("unit"), lax.axis_index("wg")
        low, high, pair_low, pair_high, tile_low, tile_high = (units_ref[unit, i] for i in range(6))

        def bounds(i):
            begin = pairs_ref[i, 0]
            steps = pairs_ref[i, 6]
            for c in range(1, consumers):
                steps = jnp.maximum(steps, pairs_ref[i, 6 + c])
            return begin, jnp.maximum(low, begin) - begin, jnp.minimum(high - begin, steps)

        @pl.when(wg == consumers)
        def produce():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(pair_low, pair_high)
            def pair(i):
                begin, first, last = bounds(i)
                entry, tokens = pairs_ref[i, 3], pairs_ref[i, 4]

                @pl.loop(first, last)
                def step(s):
                    n = begin + s - low
                    slot = lax.rem(n, STAGES)
                    for pool, buffer, full, free in ((k_ref, k_s, k_full, k_free), (v_ref, v_s, v_full, v_free)):
                        @pl.when(n >= STAGES)
                        def _():
                            plgpu.barrier_wait(free.at[slot])
                        for j in range(copies):
                            token = s * TILE + j * span
                            @pl.when(token < tokens)
                            def _():
                                page = pages_ref[entry + lax.div(token, page_size)]
                                plgpu.copy_gmem_to_smem(
                                    pool.at[head, page, pl.ds(lax.rem(token, page_size), span)],
                                    buffer.at[slot, pl.ds(j * span, span)], full.at[slot])
                            @pl.when(token >= tokens)
                            def _():
                                plgpu.barrier_arrive(full.at[slot])

        @pl.when(wg < consumers)
        def consume():
            plgpu.set_max_registers(216 if consumers == 1 else 232, action="increase")

            @pl.loop(tile_low, tile_high)
            def tile(t):
                plgpu.copy_gmem_to_smem(q_ref.at[head, t, wg], q_s.at[wg], q_bar.at[wg])
                length = plgpu.load(lengths_ref.at[t, wg], layout=ROW, optimized=False)
                number = plgpu.broadcasted_iota(jnp.int32, (M,), 0, layout=ROW)
                column = plgpu.broadcasted_iota(jnp.int32, (M, TILE), 1, layout=WG)
                plgpu.barrier_wait(q_bar.at[wg])

                def pair(i, carry):
                    begin, first, last = bounds(i)
                    row, count, tokens, start = pairs_ref[i, 1], pairs_ref[i, 2], pairs_ref[i, 4], pairs_ref[i, 5]
                    own = jnp.maximum(first, jnp.minimum(last, pairs_ref[i, 6 + wg]))
                    top = (row - wg * per_wg) * group
                    inside = (number >= top) & (number < top + count * group)
                    limit = jnp.where(inside, jnp.minimum(length - start, tokens), 0)

                    def tidy(s, slot):
                        @pl.when((s + 1) * TILE > tokens)
                        def _():
                            @pl.when(wg == 0)
                            def _():
                                v = plgpu.load(v_s.at[slot], layout=WG, optimized=False)
                                at = plgpu.broadcasted_iota(jnp.int32, (TILE, dim), 0, layout=WG)
                                v_s[slot] = jnp.where(at + s * TILE < tokens, v, jnp.zeros_like(v))
                                plgpu.commit_smem()
                            if consumers > 1:
                                plgpu.barrier_arrive(clean)
                                plgpu.barrier_wait(clean)

                    def step(s, carry):
                        accs, peak, total = carry
                        slot = lax.rem(begin + s - low, STAGES)
                        plgpu.barrier_wait(k_full.at[slot])

                        def qk(acc):
                            plgpu.wgmma(acc, q_s.at[wg], k_s.at[slot].transpose((1, 0)))
                            return acc[...]

                        score = pl.run_scoped(qk, plgpu.ACC((M, TILE), jnp.float32))
                        plgpu.barrier_arrive(k_free.at[slot])
                        seen = column + s * TILE < lax.broadcast_in_dim(limit, (M, TILE), [0])
                        score = jnp.where(seen, score * (dim**-0.5 * log2(e)), FAR)
                        higher = jnp.maximum(peak, score.max(axis=1))
                        shrink = jnp.exp2(peak - higher)
                        weight = jnp.where(seen, jnp.exp2(score - lax.broadcast_in_dim(higher, (M, TILE), [0])), 0.0)
                        total = total * shrink + weight.sum(axis=1)
                        p_s[wg] = weight.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.barrier_wait(v_full.at[slot])
                        tidy(s, slot)
                        new = []
                        for c, acc in enumerate(accs):
                            def pv(acc):
                                plgpu.wgmma(acc, p_s.at[wg], v_s.at[slot, :, pl.ds(c * chunk, chunk)])
                                return acc[...]
                            product = pl.run_scoped(pv, plgpu.ACC((M, chunk), jnp.float32))
                            product = jnp.where(lax.broadcast_in_dim(inside, (M, chunk), [0]), product, 0.0)
                            new.append(acc * lax.broadcast_in_dim(shrink, (M, chunk), [0]) + product)
                        plgpu.barrier_arrive(v_free.at[slot])
                        return tuple(new), higher, total

                    def skip(s, _):
                        slot = lax.rem(begin + s - low, STAGES)
                        plgpu.barrier_wait(k_full.at[slot])
                        plgpu.barrier_arrive(k_free.at[slot])
                        plgpu.barrier_wait(v_full.at[slot])
                        tidy(s, slot)
                        plgpu.barrier_arrive(v_free.at[slot])

                    carry = lax.fori_loop(first, own, step, carry)
                    if consumers > 1:
                        lax.fori_loop(own, last, skip, None)
                    return carry

                def constant(shape, value, layout):
                    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

                accs = tuple(constant((M, chunk), 0.0, WG) for _ in range(dim // chunk))
                pairs = jnp.maximum(pair_low, tiles_ref[t]), jnp.minimum(pair_high, tiles_ref[t + 1])
                accs, peak, total = lax.fori_loop(*pairs, pair, (accs, constant((M,), FAR, ROW), constant((M,), 0.0, ROW)))
                for c, acc in enumerate(accs):
                    out_ref[head, unit + t, wg, :, pl.ds(c * chunk, chunk)] = acc
                stats_ref[head, unit + t, wg, 0] = peak
                stats_ref[head, unit + t, wg, 1] = total

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((kv_heads, slots, consumers, M, dim), jnp.float32),
                  jax.ShapeDtypeStruct((kv_heads, slots, consumers, 2, M), jnp.float32)),
        grid=(kv_heads, units),
        grid_names=("head", "unit"),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((consumers, M, dim), dtype, transforms=tiled),
            plgpu.SMEM((STAGES, TILE, dim), dtype, transforms=tiled),
            plgpu.SMEM((STAGES, TILE, dim), dtype, transforms=tiled),
            plgpu.SMEM((consumers, M, TILE), dtype, transforms=tiled),
            plgpu.Barrier(num_barriers=consumers),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=consumers),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, k_pool, v_pool, pages, work.pairs, work.tiles, work.units, work.lengths)


def merge(out, stats, spans):
    kv_heads, _, consumers, _, dim = out.shape
    tiles = spans.shape[0]
    width = 32
    WG = plgpu.Layout.WGMMA
    ROW = WG.reduce(1)

    def kernel(out_ref, stats_ref, spans_ref, merged_ref):
        head, t, wg, column = (lax.axis_index(x) for x in ("head", "tile", "part", "column"))
        first, end = spans_ref[t, 0], spans_ref[t, 1]

        def stat(slot, which):
            return plgpu.load(stats_ref.at[head, slot, wg, which], layout=ROW, optimized=False)

        def top(slot, peak):
            return jnp.maximum(peak, stat(slot, 0))

        peak = lax.fori_loop(first, end, top, plgpu.layout_cast(jnp.full((M,), FAR, jnp.float32), ROW))

        def add(slot, carry):
            acc, total = carry
            weight = jnp.exp2(stat(slot, 0) - peak)
            part = plgpu.load(out_ref.at[head, slot, wg, :, pl.ds(column * width, width)], layout=WG, optimized=False)
            return acc + part * lax.broadcast_in_dim(weight, (M, width), [0]), total + stat(slot, 1) * weight

        zero = (plgpu.layout_cast(jnp.full((M, width), 0.0, jnp.float32), WG), plgpu.layout_cast(jnp.full((M,), 0.0, jnp.float32), ROW))
        acc, total = lax.fori_loop(first, end, add, zero)
        total = lax.broadcast_in_dim(total, (M, width), [0])
        merged_ref[head, t, wg, :, pl.ds(column * width, width)] = jnp.where(total == 0.0, 0.0, acc / total)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((kv_heads, tiles, consumers, M, dim), jnp.float32),
        grid=(kv_heads, tiles, consumers, dim // width),
        grid_names=("head", "tile", "part", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(out, stats, spans)
