"""Sums over what each row of a step sees, exact integers: what the echo model has in place of attention.

They walk the plan as the reference does, so that a wrong plan, page table or mask is a wrong number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from jaxctx.engine.runner.step import PagedAttention
from jaxctx_kernels import AttentionMetadata, KVPages, MetadataShape, write_kv
from jaxctx_kernels.reference import Mask, Tile, fold_tiles, read_values, sort_mask, tile_mask, widest_tile


def stored_sum(kv: PagedAttention, values: jax.Array, layer: int = 0) -> jax.Array:
    """Store uint32 `values` `[rows]` in a layer; for each row the sum of all values that it sees, itself included.

    All layers are in one pool.
    """
    pool = kv.pools[0]
    slots = kv.kv_slots + layer * kv.shapes[0].pool_pages * kv.shapes[0].page_size
    pool = pool._replace(k=write_kv(pool.k, values[:, None, None], slots))
    kv.pools = (pool,)
    return layer_sum(kv, pool.k, layer)


def layer_sum(kv: PagedAttention, pages: KVPages, layer: int = 0) -> jax.Array:
    """For each row the sum of all values of `pages` that it sees in a layer."""
    number = kv.kind_of_layer[layer]
    metadata, mask = kv.kinds[number].from_page(layer * kv.shapes[0].pool_pages)
    return visible_sum(pages, metadata, shape=kv.shapes[number], mask=mask)


def visible_sum(
    pages: KVPages, metadata: AttentionMetadata, *, shape: MetadataShape, mask: Mask | None = None
) -> UInt32[Array, " rows"]:
    """For each row the sum modulo 2**32 of the visible slots of uint32 pages `[1, pages, page_size, 1]`."""
    allowed = None if mask is None else sort_mask(mask, metadata, shape)

    def visit(total: jax.Array, tile: Tile) -> jax.Array:
        values = read_values(pages, tile, 1)[0, :, None, :, 0]
        slot = jnp.arange(values.shape[-1])
        seen = slot < tile.seen[..., None]
        if tile.hidden is not None:
            seen &= slot >= tile.hidden[..., None]
        if allowed is not None:
            seen &= tile_mask(allowed, tile, shape.page_size)
        part = jnp.where(seen, values, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)
        return total.at[tile.first_row[:, None] + jnp.arange(tile.item_class.rows)].add(part)

    total = jnp.zeros(shape.rows + widest_tile(shape), jnp.uint32)
    return fold_tiles(metadata, shape, total, visit)[metadata.batch_to_sorted]
