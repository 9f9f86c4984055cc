"""Attention over a work list in plain JAX: the CPU path, and the yardstick of the kernels.

A loop over the items of a plan, as many as there are, carries per row the running maximum, sum and unnormalised output
in float32 and merges each item into them by log-sum-exp, exact in any order (FlashAttention, arXiv 2205.14135).
Rows are kept in the plan's order, in which the rows of an item are one slice; heads are never mixed, so that all of it
shards over the KV heads.

A mask narrows what the plan lets rows see: it says of every row and every index, the place of a token in its sequence's
chain of pages, whether the row sees it. Without one nothing is computed for it.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxctx_kernels.plan import ItemClass, PlanShape, split
from jaxctx_kernels.pool import Pool, numbers

Carry = TypeVar("Carry")
Mask = Bool[Array, "rows indices"]
FAR = -1e30  # below any score, and finite so that differences of two are defined


class AttentionPlan(NamedTuple):
    """A packed plan's parts, as traced arrays. See `plan` for what they mean."""

    ends: Int32[Array, " classes"]  # items of class c are ends[c - 1] .. ends[c] - 1
    order: Int32[Array, " rows"]  # batch row of each sorted row
    inverse: Int32[Array, " rows"]  # sorted row of each batch row
    length: Int32[Array, " rows"]  # tokens that each sorted row sees
    items: Int32[Array, "5 items"]
    pages: Int32[Array, " entries"]


class Round(NamedTuple):
    """A step of the loop: some rows of an item, and what they see of its pages. Shapes follow the class of the item."""

    kind: ItemClass
    row: Int32[Array, ""]  # first sorted row
    pages: Int32[Array, " pages"]
    start: Int32[Array, ""]  # index of the first token of the pages
    tokens: Int32[Array, ""]  # of the pages, how many any row of the item sees
    seen: Int32[Array, " rows"]  # of these, how many each row sees; 0 where it is not a row of the item


def unpack(shape: PlanShape, packed: Int32[Array, " size"]) -> AttentionPlan:
    """Split what `plan_attention` packed."""
    return AttentionPlan(*split(shape, packed))


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pool: Pool,
    v_pool: Pool,
    plan: AttentionPlan,
    *,
    shape: PlanShape,
    mask: Mask | None = None,
) -> Float32[Array, "rows heads head_dim"]:
    """See `attention.attend`."""
    rows, heads, dim = q.shape
    kv_heads = k_pool.shape[0] * (k_pool.shape[3] // dim)
    group = heads // kv_heads
    spare = max(c.rows for c in shape.classes)  # a round may reach past the last row
    query = q[plan.order].reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3)
    query = jnp.pad(query, ((0, 0), (0, spare), (0, 0), (0, 0)))
    allowed = None if mask is None else in_plan_order(mask, plan, shape)

    def visit(carry: tuple[jax.Array, jax.Array, jax.Array], at: Round) -> tuple[jax.Array, jax.Array, jax.Array]:
        taken = (jax.lax.dynamic_slice_in_dim(x, at.row, at.kind.rows, 1) for x in (query, *carry))
        mine, peak, total, out = (x.reshape(kv_heads, -1, *x.shape[3:]) for x in taken)
        known = jnp.arange(at.kind.pages * shape.page_size) < at.tokens
        k = apart(read(k_pool, at), dim)
        v = jnp.where(known[:, None], apart(read(v_pool, at), dim), 0)
        planned = jnp.arange(known.shape[0]) < jnp.repeat(at.seen, group, total_repeat_length=mine.shape[1])[:, None]
        seen, odd = planned, None
        if allowed is not None:
            seen &= jnp.repeat(allowed_in(allowed, at, shape), group, axis=0, total_repeat_length=mine.shape[1])
            odd = ~jnp.isfinite(v).all(-1)  # a row that does not see the slot must not get 0 * NaN
            v = jnp.where(jnp.isfinite(v), v, 0)
        score = jnp.where(seen, scores(mine.astype(k.dtype), k) * dim**-0.5, FAR)
        new_peak = jnp.maximum(peak, score.max(-1))
        weight = jnp.where(seen, jnp.exp(score - new_peak[..., None]), 0)
        shrink = jnp.exp(peak - new_peak)
        new_total = total * shrink + weight.sum(-1)
        new_out = out * shrink[..., None] + matmul("hms,hsd->hmd", weight.astype(v.dtype), v)
        if odd is not None:
            met = (seen & odd[:, None]).any(-1)
            new_out = jnp.where(met[..., None], jnp.nan, new_out)
        inside = planned[:, 0]
        new = (
            jnp.where(inside, new_peak, peak),
            jnp.where(inside, new_total, total),
            jnp.where(inside[:, None], new_out, out),
        )
        put = [
            jax.lax.dynamic_update_slice_in_dim(x, y.reshape(kv_heads, at.kind.rows, group, *y.shape[2:]), at.row, 1)
            for x, y in zip(carry, new, strict=True)
        ]
        return put[0], put[1], put[2]

    nothing = jnp.zeros_like(query[..., 0], jnp.float32)
    _, total, out = walk(plan, shape, (nothing + FAR, nothing, jnp.zeros_like(query, jnp.float32)), visit)
    out = jnp.where(total[..., None] == 0, 0, out / total[..., None])
    return out[:, plan.inverse].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def visible_sum(
    pool: Pool, plan: AttentionPlan, *, shape: PlanShape, mask: Mask | None = None
) -> UInt32[Array, " rows"]:
    """For each row the sum modulo 2**32 of the visible slots of a uint32 pool `[1, pages, page_size, 1]`."""
    spare = max(c.rows for c in shape.classes)
    allowed = None if mask is None else in_plan_order(mask, plan, shape)

    def visit(total: jax.Array, at: Round) -> jax.Array:
        values = read(pool, at).reshape(-1)
        seen = jnp.arange(values.shape[0]) < at.seen[:, None]
        if allowed is not None:
            seen &= allowed_in(allowed, at, shape)
        part = jnp.where(seen, values, jnp.uint32(0))
        new = jax.lax.dynamic_slice_in_dim(total, at.row, at.kind.rows) + part.sum(-1, dtype=jnp.uint32)
        return jax.lax.dynamic_update_slice_in_dim(total, new, at.row, 0)

    return walk(plan, shape, jnp.zeros(shape.rows + spare, jnp.uint32), visit)[plan.inverse]


def walk(plan: AttentionPlan, shape: PlanShape, carry: Carry, visit: Callable[[Carry, Round], Carry]) -> Carry:
    """Fold `visit` over the rounds of all items, class by class: as many rounds as there is work, none for padding."""
    length = jnp.pad(plan.length, (0, max(c.rows for c in shape.classes)))

    def rounds(kind: ItemClass, end: jax.Array, index: jax.Array, carry: Carry) -> Carry:
        def step(state: tuple[jax.Array, jax.Array, Carry]) -> tuple[jax.Array, jax.Array, Carry]:
            index, done, carry = state
            row, rows, entry, tokens, start = plan.items[:, index]
            ids = jax.lax.dynamic_slice(plan.pages, (entry,), (kind.pages,))
            seen = jax.lax.dynamic_slice(length, (row + done,), (kind.rows,)) - start
            seen = jnp.where(jnp.arange(kind.rows) < rows - done, jnp.clip(seen, 0, tokens), 0)
            carry = visit(carry, Round(kind, row + done, ids, start, tokens, seen))
            done += kind.rows
            return jnp.where(done < rows, index, index + 1), jnp.where(done < rows, done, 0), carry

        state = (index, jnp.zeros_like(index), carry)
        return jax.lax.while_loop(lambda state: state[0] < end, step, state)[2]

    start = jnp.zeros_like(plan.ends[0])
    for c, kind in enumerate(shape.classes):
        carry = rounds(kind, plan.ends[c], start, carry)
        start = plan.ends[c]
    return carry


def in_plan_order(mask: Mask, plan: AttentionPlan, shape: PlanShape) -> Bool[Array, "all_rows all_indices"]:
    """The mask, rows sorted as the plan's are, with room for a round that reaches past the last row or index."""
    spare = max(c.rows for c in shape.classes), shape.page_size * max(c.pages for c in shape.classes)
    return jnp.pad(mask[plan.order], ((0, spare[0]), (0, spare[1])))


def allowed_in(allowed: jax.Array, at: Round, shape: PlanShape) -> Bool[Array, "rows slots"]:
    """What of a round's slots the mask lets its rows see."""
    size = at.kind.rows, at.kind.pages * shape.page_size
    return jax.lax.dynamic_slice(allowed, (at.row, at.start), size)


def read(pool: Pool, at: Round) -> Float[Array, "kv_heads pages page_size head_dim"]:
    """The pages of a round."""
    return numbers(pool.at[:, at.pages].get(mode="promise_in_bounds"))


def apart(pages: jax.Array, dim: int) -> Float[Array, "kv_heads slots head_dim"]:
    """What `read` returns, with heads that lie side by side (`pool.pool_struct`) apart."""
    stored, _, _, lanes = pages.shape
    return pages.reshape(stored, -1, lanes // dim, dim).swapaxes(1, 2).reshape(stored * lanes // dim, -1, dim)


def scores(
    q: Float[Array, "kv_heads queries head_dim"], k: Float[Array, "kv_heads slots head_dim"]
) -> Float32[Array, "kv_heads queries slots"]:
    """q · k. On CPU few queries are twice as fast as right operand; the barrier keeps XLA from swapping them back."""
    if q.shape[1] > 8:
        return matmul("hmd,hsd->hms", q, k)
    score: jax.Array = jax.lax.optimization_barrier(matmul("hsd,hmd->hsm", k, q))
    return score.transpose(0, 2, 1)


def matmul(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of float32 exactly, of bfloat16 as they are; sums in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product: jax.Array = jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
    return product
