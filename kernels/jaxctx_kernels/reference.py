"""Attention over a work list in plain JAX: the CPU path, and the yardstick of the kernels.

A loop over the items of a plan, as many as there are, carries per row the running maximum, sum and unnormalised output
in float32 and merges each item into them by log-sum-exp, exact in any order (FlashAttention, arXiv 2205.14135).
Rows are kept in the plan's order, in which the rows of an item are one slice; heads are never mixed, so that all of it
shards over the KV heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

from jaxctx_kernels.plan import ITEM_FIELDS, ItemClass, PlanShape
from jaxctx_kernels.pool import Pool, numbers

Carry = TypeVar("Carry")
FAR = -1e30  # below any score, and finite so that differences of two are defined


class AttentionPlan(NamedTuple):
    """A packed plan's parts, as traced arrays. See `plan` for what they mean."""

    ends: Int32[Array, " classes"]  # items of class c are ends[c - 1] .. ends[c] - 1
    order: Int32[Array, " rows"]  # batch row of each sorted row
    inverse: Int32[Array, " rows"]  # sorted row of each batch row
    length: Int32[Array, " rows"]  # tokens that each sorted row sees
    items: Int32[Array, "5 items"]
    pages: Int32[Array, " entries"]


class Tile(NamedTuple):
    """One round of work: some pages, and some sorted rows that look at them."""

    first_row: Int32[Array, ""]
    rows: int
    pages: Int32[Array, " pages"]
    tokens: Int32[Array, " rows"]  # how many of the pages' tokens each row sees; 0 for rows that are not in the item


def unpack(shape: PlanShape, packed: Int32[Array, " size"]) -> AttentionPlan:
    """Split what `plan_attention` packed."""
    sizes = (len(shape.classes), shape.rows, shape.rows, shape.rows, ITEM_FIELDS * shape.items, shape.pages)
    parts, start = [], 0
    for size in sizes:
        parts.append(jax.lax.slice(packed, (start,), (start + size,)))
        start += size
    parts[4] = parts[4].reshape(ITEM_FIELDS, shape.items)
    return AttentionPlan(*parts)


def attend(
    q: Float[Array, "rows heads head_dim"], k_pool: Pool, v_pool: Pool, plan: AttentionPlan, *, shape: PlanShape
) -> Float32[Array, "rows heads head_dim"]:
    """Softmax attention, scale head_dim**-0.5, of every row over the tokens its plan lets it see.

    Query heads `h * group .. h * group + group - 1` read KV head h. Rows that see no token return zeros. No value of a
    slot that no row sees reaches the result, not even NaN.
    """
    rows, heads, dim = q.shape
    kv_heads = k_pool.shape[0]
    group = heads // kv_heads
    dtype = numbers(k_pool[:0]).dtype
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    spare = max(c.rows for c in shape.classes)
    query = q[plan.order].reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3).astype(dtype)
    query = jnp.pad(query, ((0, 0), (0, spare), (0, 0), (0, 0)))
    base = jnp.zeros_like(query[..., 0], jnp.float32)

    def visit(carry: tuple[jax.Array, jax.Array, jax.Array], tile: Tile) -> tuple[jax.Array, jax.Array, jax.Array]:
        slots = tile.pages.shape[0] * shape.page_size
        k = numbers(k_pool[:, tile.pages]).reshape(kv_heads, slots, dim)
        v = numbers(v_pool[:, tile.pages]).reshape(kv_heads, slots, dim)
        v = jnp.where((jnp.arange(slots) < tile.tokens.max())[:, None], v, 0)
        mine, best, total, out = (
            jax.lax.dynamic_slice_in_dim(x, tile.first_row, tile.rows, 1) for x in (query, *carry)
        )
        score = jnp.einsum("hrgd,hsd->hrgs", mine, k, precision=exact, preferred_element_type=jnp.float32)
        seen = (jnp.arange(slots) < tile.tokens[:, None])[None, :, None]
        score = jnp.where(seen, score * dim**-0.5, FAR)
        peak = jnp.maximum(best, score.max(-1))
        weight = jnp.where(seen, jnp.exp(score - peak[..., None]), 0)
        part = jnp.einsum(
            "hrgs,hsd->hrgd", weight.astype(dtype), v, precision=exact, preferred_element_type=jnp.float32
        )
        shrink = jnp.exp(best - peak)
        inside = (tile.tokens > 0)[None, :, None]
        new = (
            jnp.where(inside, peak, best),
            jnp.where(inside, total * shrink + weight.sum(-1), total),
            jnp.where(inside[..., None], out * shrink[..., None] + part, out),
        )
        best, total, out = (
            jax.lax.dynamic_update_slice_in_dim(x, y, tile.first_row, 1) for x, y in zip(carry, new, strict=True)
        )
        return best, total, out

    start = (base + FAR, base, jnp.zeros_like(query, jnp.float32))
    _, total, out = walk(plan, shape, start, visit)
    out = jnp.where(total[..., None] > 0, out / jnp.where(total > 0, total, 1)[..., None], 0)
    return out[:, plan.inverse].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def visible_sum(pool: Pool, plan: AttentionPlan, *, shape: PlanShape) -> UInt32[Array, " rows"]:
    """For each row the sum modulo 2**32 of the visible slots of a uint32 pool `[1, pages, page_size, 1]`."""
    spare = max(c.rows for c in shape.classes)

    def visit(total: jax.Array, tile: Tile) -> jax.Array:
        values = pool[0, tile.pages, :, 0].reshape(-1)
        seen = jnp.arange(values.shape[0]) < tile.tokens[:, None]
        part = jnp.where(seen, values, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)
        old = jax.lax.dynamic_slice_in_dim(total, tile.first_row, tile.rows)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, tile.first_row, 0)

    return walk(plan, shape, jnp.zeros(shape.rows + spare, jnp.uint32), visit)[plan.inverse]


def walk(plan: AttentionPlan, shape: PlanShape, carry: Carry, visit: Callable[[Carry, Tile], Carry]) -> Carry:
    """Fold `visit` over all tiles of the plan, class by class: as many rounds as there is work, none for padding."""
    spare = max(c.rows for c in shape.classes)
    length = jnp.pad(plan.length, (0, spare))
    start: jax.Array | int = 0
    for c, kind in enumerate(shape.classes):
        carry = jax.lax.fori_loop(start, plan.ends[c], item_visitor(plan, shape, kind, length, visit), carry)
        start = plan.ends[c]
    return carry


def item_visitor(
    plan: AttentionPlan,
    shape: PlanShape,
    kind: ItemClass,
    length: Shaped[Array, " spare_rows"],
    visit: Callable[[Carry, Tile], Carry],
) -> Callable[[jax.Array, Carry], Carry]:
    """The body of the loop over items of one class: `visit` in rounds of `kind.rows` rows."""

    def item(index: jax.Array, carry: Carry) -> Carry:
        first_row, rows, first_page, pages, token = plan.items[:, index]
        ids = jax.lax.dynamic_slice(plan.pages, (first_page,), (kind.pages,))

        def block(b: jax.Array, carry: Carry) -> Carry:
            at = first_row + b * kind.rows
            seen = jax.lax.dynamic_slice(length, (at,), (kind.rows,)) - token
            inside = jnp.arange(kind.rows) < rows - b * kind.rows
            seen = jnp.where(inside, jnp.clip(seen, 0, pages * shape.page_size), 0)
            return visit(carry, Tile(at, kind.rows, ids, seen))

        if kind.rows == 1:
            return block(jnp.int32(0), carry)
        rounds = (rows + kind.rows - 1) // kind.rows
        carry = jax.lax.fori_loop(0, rounds, block, carry)
        return carry

    return item
