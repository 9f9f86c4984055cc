"""Sums over what each row of a step sees, exact integers: what the echo model has in place of attention.

They walk the plan as the reference does, so that a wrong plan, page table or mask is a wrong number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from jaxctx.engine.runner.step import PagedAttention
from jaxctx_kernels import MetadataShape, write_kv
from jaxctx_kernels.kv_cache import KVPages
from jaxctx_kernels.metadata import AttentionMetadata
from jaxctx_kernels.reference import Mask, Round, allowed_in, in_plan_order, read, walk


def stored_sum(kv: PagedAttention, values: jax.Array) -> jax.Array:
    """Store uint32 `values` `[rows]` in layer 0; for each row the sum of all values that it sees, itself included."""
    pool = kv.pools[0]
    pool = pool._replace(k=write_kv(pool.k, values[:, None, None], kv.kv_slots))
    kv.pools = (pool,)
    return visible_sum(pool.k, kv.metadata, shape=kv.metadata_shape, mask=kv.mask)


def visible_sum(
    pool: KVPages, plan: AttentionMetadata, *, shape: MetadataShape, mask: Mask | None = None
) -> UInt32[Array, " rows"]:
    """For each row the sum modulo 2**32 of the visible slots of a uint32 pool `[1, pages, page_size, 1]`."""
    spare = max(c.rows for c in shape.classes)
    allowed = None if mask is None else in_plan_order(mask, plan, shape)

    def visit(total: jax.Array, at: Round) -> jax.Array:
        values = read(pool, at, 1)[0, :, None, :, 0]
        seen = jnp.arange(values.shape[-1]) < at.seen[..., None]
        if allowed is not None:
            seen &= allowed_in(allowed, at, shape)
        part = jnp.where(seen, values, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)
        return total.at[at.row[:, None] + jnp.arange(at.kind.rows)].add(part)

    return walk(plan, shape, jnp.zeros(shape.rows + spare, jnp.uint32), visit)[plan.inverse]
