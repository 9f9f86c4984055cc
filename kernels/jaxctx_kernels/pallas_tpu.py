"""Attention over a work list on TPU (v5e, v6e): one Pallas kernel that walks the items and never leaves the chip.

A chip has one core, and a grid runs in sequence. So nothing is merged across cores: the running maximum, sum and output
of every sorted row stay in VMEM while the items of the plan pass by, in the order of the list and as many as there are.
The list itself is in SMEM. An item's pages come by DMA, the keys, or the values, of all heads of a page in one copy,
into a ring of buffers: the next items are on their way while one is computed. A page is read once for all its rows.

    sorted rows × group ──▶ VMEM: queries, maximum, sum, output       HBM: pool [kv_heads, pages, page_size, head_dim]
      ┌────────────┐                                                          │ one DMA per page, K and V
      │  window    │  q · k ─▶ mask ─▶ online softmax ─▶ · v  ◀── ring of items: i, i + 1, i + 2, i + 3
      └────────────┘

The query heads of one KV head are rows of one matrix, `row * group + head`, and an item looks at aligned windows of
them: what of a window is not the item's is masked, which costs nothing while the matrix unit is as high as a window.
If not all of this fits into VMEM, the outer grid takes a few KV heads at a time and walks the list for each.

Heads narrower than the 128 lanes lie side by side in a pool (`pool.pool_struct`): a query is zero but in the lanes of
its head, and takes those lanes of the output.

Numbers of 8 bits are multiplied as bfloat16. Scores are then scaled by the keys' scales, and weights, before they are
rounded, by the values': no key or value is written a second time.

Under a mesh this runs per shard of the KV heads, in `shard_map(…, check_vma=False)`: no head needs another, all have
the same plan. Where the ideas came from: ragged paged attention (arXiv 2604.15464), FlashAttention (arXiv 2205.14135).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from jaxctx_kernels.kv_cache import KVPages, QuantizedKV, kv_values
from jaxctx_kernels.metadata import ITEM_FIELDS, AttentionMetadata, ItemClass, MetadataShape
from jaxctx_kernels.reference import FAR, matmul

RING = 4  # items whose pages are on their way or being computed
ORDERS = 4  # pages ordered in one basic block
TILE = 16  # rows of a tile of bfloat16 in VMEM; windows start at multiples of it
LANES = 128
BLOCK_ROWS = 128  # of narrower windows, several heads are computed in one basic block
VMEM_BYTES = 112 * 2**20  # of 128 MiB
STATE_BYTES = 80 * 2**20  # of these, what `heads_at_once` counts; the rest is for intermediate results
SMEM_BYTES = 1000 * 2**10  # of 1 MiB


class Item(NamedTuple):
    """An entry of the work list, as scalars: see `plan`."""

    row: jax.Array
    rows: jax.Array
    entry: jax.Array
    tokens: jax.Array
    start: jax.Array


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pool: KVPages,
    v_pool: KVPages,
    plan: AttentionMetadata,
    *,
    shape: MetadataShape,
) -> Float32[Array, "rows heads head_dim"]:
    """See `attention.attend`.

    Pages hold a multiple of 16 tokens. Where neither head_dim is a multiple of 128 nor heads lie side by side in the
    pool, XLA copies the pool before every call. Raises ValueError if the plan is too large for SMEM; the compiler fails
    if the rows of a single KV head are too many for VMEM, see NOTES.md.
    """
    if 4 * (ITEM_FIELDS * shape.items + shape.pages) > SMEM_BYTES:
        raise ValueError(f"a list of {shape.pages} pages and {shape.items} items exceeds SMEM; take larger pages")
    rows, heads, dim = q.shape
    (stored, _, page_size, lanes), kind = kv_values(k_pool).shape, kv_values(k_pool).dtype
    kind = kind if kind.itemsize > 1 else jnp.bfloat16  # what is multiplied
    beside, group = lanes // dim, heads // stored  # KV heads side by side; query heads that read one row of lanes
    query = q[plan.order].astype(kind).reshape(rows, stored, beside, group // beside, 1, dim)
    mine = jnp.eye(beside, dtype=bool)[:, None, :, None]
    query = jnp.where(mine, query, 0).reshape(rows, stored, group, lanes)

    height = -(-rows * group // TILE) * TILE
    room = ((0, 0), (0, height - rows * group), (0, 0))
    query = jnp.pad(query.transpose(1, 0, 2, 3).reshape(stored, rows * group, lanes), room)
    length = jnp.pad(jnp.repeat(plan.length, group), room[1])[:, None]
    most = max(c.pages for c in shape.classes)
    together = heads_at_once(stored, height, lanes, most * page_size, jnp.dtype(kind).itemsize)
    of_heads = pl.BlockSpec((together, height, lanes), lambda block, *_: (block, 0, 0))
    pools = k_pool, v_pool
    rings = jax.tree.map(lambda array: pltpu.VMEM((RING, together, most, *array.shape[2:]), array.dtype), pools)
    anywhere = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools)
    scales = pltpu.VMEM((2, together, beside, most * page_size), jnp.float32)
    out = pl.pallas_call(
        partial(kernel, shape=shape, group=group, scale=dim**-0.5 / math.log(2)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(stored // together,),
            in_specs=[of_heads, pl.BlockSpec((height, 1), lambda *_: (0, 0)), anywhere],
            out_specs=of_heads,
            scratch_shapes=[
                pltpu.VMEM((together, height, LANES), jnp.float32),
                pltpu.VMEM((together, height, LANES), jnp.float32),
                rings,
                scales if isinstance(k_pool, QuantizedKV) else None,
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        # The host checked the page ids; on the chip a check takes longer than ordering the copy.
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
        name="attend",
    )(plan.ends, plan.items.reshape(-1), plan.pages, query, length, pools)
    parts = out[:, : rows * group].reshape(stored, rows, beside, group // beside, beside, dim)
    result = jnp.stack([parts[:, :, n, :, n] for n in range(beside)], 2)  # of each head its own lanes
    return result.transpose(1, 0, 2, 3, 4).reshape(rows, heads, dim)[plan.inverse]


def heads_at_once(stored: int, height: int, lanes: int, tokens: int, size: int) -> int:
    """How many of `stored` KV heads of numbers of `size` bytes fit into VMEM: the grid has two of each block."""
    wide = max(lanes, LANES)
    of_head = height * (2 * wide * (size + 4) + 2 * LANES * 4) + 2 * RING * tokens * wide * size
    most = (STATE_BYTES - 2 * height * LANES * 4) // of_head
    return next(n for n in range(stored, 0, -1) if n == 1 or (n <= most and stored % n == 0))


def kernel(
    ends: Any,
    items: Any,
    pages: Any,
    query: Any,
    length: Any,
    pools: Any,
    out: Any,
    peak: Any,
    total: Any,
    rings: Any,
    scales: Any,
    arrived: Any,
    *,
    shape: MetadataShape,
    group: int,
    scale: float,
) -> None:
    """The heads of one grid step, over all items.

    In SMEM: ends, items, pages. In VMEM: query and out `[heads, height, lanes]`, length `[height, 1]`, peak and total
    `[heads, height, 128]` (a row's number in all lanes), rings `[RING, heads, pages, page_size, lanes]`. In HBM: pools.
    Pools and rings are pairs, of 8 bits `QuantizedKV`; `scales` `[2, heads, beside, tokens]` those of an item's two.
    """
    heads, height, lanes = query.shape
    copied = list(zip(jax.tree.leaves(pools), jax.tree.leaves(rings), strict=True))
    k_ring, v_ring = map(kv_values, rings)
    page_size = k_ring.shape[3]
    count = ends[len(shape.classes) - 1]
    first_head = pl.program_id(0) * heads

    def item(index: jax.Array) -> Item:
        return Item(*(items[field * shape.items + index] for field in range(ITEM_FIELDS)))

    def fetch(index: jax.Array) -> None:
        """Order the pages of an item. K and V of a slot signal one semaphore."""
        at, slot = item(index), jax.lax.rem(index, RING)
        count = pl.cdiv(at.tokens, page_size)

        def order(n: jax.Array) -> None:
            page = pages[at.entry + n]
            for pool, ring in copied:
                source = pool.at[pl.ds(first_head, heads), page]
                pltpu.make_async_copy(source, ring.at[slot, :, n], arrived.at[slot]).start()

        @pl.loop(0, count // ORDERS)
        def _(n: jax.Array) -> None:
            for k in range(ORDERS):
                order(n * ORDERS + k)

        pl.loop(count // ORDERS * ORDERS, count)(order)

    def clear(tokens: jax.Array, slot: jax.Array, most: int) -> None:
        """Values past the item's tokens: anything may be there, and 0 * NaN is NaN."""
        if v_ring.dtype == jnp.int8:
            return

        @pl.loop(tokens // page_size, most)
        def _(n: jax.Array) -> None:
            values = v_ring[slot, :, n]
            token = n * page_size + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
            v_ring[slot, :, n] = jnp.where(token < tokens, values.astype(jnp.float32), 0).astype(values.dtype)

    def lay_out(slot: jax.Array, most: int) -> None:
        """The scales of an item's tokens, of each page by itself, side by side."""

        @pl.loop(0, heads)
        def _(h: jax.Array) -> None:
            for of, ring in enumerate(rings):
                for n in range(most):
                    scales[of, h, :, n * page_size : (n + 1) * page_size] = ring.scales[slot, h, n]

    def visit(kind: ItemClass, index: jax.Array) -> None:
        at, slot = item(index), jax.lax.rem(index, RING)
        for ring in jax.tree.leaves(rings):
            here = ring.at[slot, :, pl.ds(0, pl.cdiv(at.tokens, page_size))]
            pltpu.make_async_copy(here, here, arrived.at[slot]).wait()
        clear(at.tokens, slot, kind.pages)
        if scales is not None:
            lay_out(slot, kind.pages)
        wide, tokens = -(-kind.rows * group // TILE) * TILE, kind.pages * page_size
        first, last = at.row * group, (at.row + at.rows) * group
        base = first // TILE * TILE

        @pl.loop(0, pl.cdiv(last - base, wide))
        def _(n: jax.Array) -> None:
            begin = base + n * wide
            low = pl.multiple_of(jnp.minimum(begin, height - wide), TILE)  # the last window may reach back
            here = pl.ds(low, wide)
            row = low + jax.lax.broadcasted_iota(jnp.int32, (wide, 1), 0)
            inside = (row >= jnp.maximum(first, begin)) & (row < last)
            seen = jnp.where(inside, jnp.clip(length[here] - at.start, 0, at.tokens), 0)
            visible = jax.lax.broadcasted_iota(jnp.int32, (wide, tokens), 1) < seen

            def scaled(x: jax.Array, of: int, h: jax.Array) -> jax.Array:
                """Columns times their tokens' scales, in a row's own head of those that lie side by side."""
                if scales is None:
                    return x
                known = scales[of, h, :, :tokens]
                mine = known[:1]
                for n in range(1, scales.shape[2]):
                    mine = jnp.where(row % group // (group // scales.shape[2]) == n, known[n : n + 1], mine)
                return jnp.where(visible, x * mine, 0)

            def head(h: jax.Array) -> None:
                k, v = (r[slot, h, : kind.pages].reshape(tokens, lanes).astype(query.dtype) for r in (k_ring, v_ring))
                score = matmul("md,sd->ms", query[h, here], k) * scale
                score = jnp.where(visible, scaled(score, 0, h), FAR)
                old = peak[h, here]
                new = jnp.maximum(old, score.max(-1, keepdims=True))
                weight = jnp.exp2(score - new[:, :1])  # 0 where nothing is visible: no maximum is as low as FAR
                shrink = jnp.exp2(old - new)
                product = matmul("ms,sd->md", scaled(weight, 1, h).astype(query.dtype), v)
                more = out[h, here] * shrink[:, :1] + product
                peak[h, here] = new
                total[h, here] = total[h, here] * shrink + weight.sum(-1, keepdims=True)
                out[h, here] = jnp.where(inside, more, out[h, here])  # values may be NaN, of another sequence

            block = next(n for n in (8, 4, 2, 1) if heads % n == 0 and (n == 1 or n * wide <= BLOCK_ROWS))

            @pl.loop(0, heads, step=block)
            def _(h: jax.Array) -> None:
                for k in range(block):
                    head(h + k)

    peak[...] = jnp.full(peak.shape, FAR / 2)
    total[...] = jnp.zeros(total.shape)
    out[...] = jnp.zeros(out.shape)
    pl.loop(0, jnp.minimum(RING - 1, count))(fetch)
    start = 0
    for c, kind in enumerate(shape.classes):

        @pl.loop(start, ends[c])
        def _(index: jax.Array, kind: ItemClass = kind) -> None:
            pl.when(index + RING - 1 < count)(lambda: fetch(index + RING - 1))  # into the slot that is free since
            visit(kind, index)

        start = ends[c]
    sums = total[:, :, :1]
    out[...] = jnp.where(sums == 0, 0, out[...] / sums)
