"""Attention over a work list: in plain JAX, or by the kernel that the plan's shape names.

The reference, in plain JAX, is the CPU path and the yardstick of the kernels: a loop over the items of a plan, as many
as there are, carries per row the running maximum, sum and unnormalised output in float32 and merges each item into them
by log-sum-exp, exact in any order (FlashAttention, arXiv 2205.14135). Rows are kept in the plan's order, in which the
rows of an item are one slice; heads are never mixed, so that all of it shards over the KV heads.

A mask narrows what the plan lets rows see: it says of every row and every index, the place of a token in its sequence's
chain of pages, whether the row sees it. Without one nothing is computed for it. Kernels know nothing of masks, which
only passes have: under a mask the reference serves every platform.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxctx_kernels.kv_cache import KVPages, QuantizedKV, kv_values, numbers
from jaxctx_kernels.metadata import ITEM_FIELDS, AttentionMetadata, ItemClass, MetadataShape

Carry = TypeVar("Carry")
Mask = Bool[Array, "rows indices"]
Sums: TypeAlias = tuple[jax.Array, ...]  # of every row: greatest score, sum of weights, output
FAR = -1e30  # below any score, and finite so that differences of two are defined


class Round(NamedTuple):
    """A step of the loop: some rows of an item, or several items of a row each, and what they see of their pages.

    Shapes follow the class: `lanes` items at once, all of the class's rows and pages. Lanes may be of one row.
    """

    kind: ItemClass
    row: Int32[Array, " lanes"]  # first sorted row
    pages: Int32[Array, "lanes pages"]
    start: Int32[Array, " lanes"]  # index of the first token of the pages
    tokens: Int32[Array, " lanes"]  # of the pages, how many any row of the item sees; 0 in lanes without an item
    seen: Int32[Array, "lanes rows"]  # of these, how many each row sees; 0 where it is not a row of the item


@partial(jax.jit, static_argnames="shape")  # layers of a step, and programs of one shape, share a trace; XLA inlines it
def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pool: KVPages,
    v_pool: KVPages,
    plan: AttentionMetadata,
    mask: Mask | None = None,
    *,
    shape: MetadataShape,
) -> Float32[Array, "rows heads head_dim"]:
    """Softmax attention, scale head_dim**-0.5, of every row over the tokens that its plan and `mask` let it see.

    Query heads `h * group .. h * group + group - 1` read KV head h. Rows that see no token return zeros. No value of a
    slot that no row sees reaches the result, not even NaN, and no row's NaN reaches a row of another sequence. Under a
    mask a value that is not finite reaches only the rows that see it, as NaN. `mask` covers every index of the plan.
    """
    if shape.kernel == "gpu" and mask is None:
        from jaxctx_kernels.mosaic_hopper import attend as on_gpu

        return on_gpu(q, k_pool, v_pool, plan, shape=shape)
    if shape.kernel == "tpu" and mask is None:
        from jaxctx_kernels.pallas_tpu import attend as on_tpu

        return on_tpu(q, k_pool, v_pool, plan, shape=shape)
    rows, heads, dim = q.shape
    stored, _, _, lanes = kv_values(k_pool).shape
    kv_heads = stored * (lanes // dim)
    group = heads // kv_heads
    spare = max(c.rows for c in shape.classes)  # a round may reach past the last row
    query = q[plan.order].reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3)
    query = jnp.pad(query, ((0, 0), (0, spare), (0, 0), (0, 0)))
    allowed = None if mask is None else in_plan_order(mask, plan, shape)

    def visit(carry: Sums, at: Round) -> Sums:
        mine, peak, total, out = (take_rows(x, at) for x in (query, *carry))
        known = jnp.arange(at.kind.pages * shape.page_size) < at.tokens[:, None]
        k, v = read(k_pool, at, dim), jnp.where(known[..., None], read(v_pool, at, dim), 0)
        k_scale, v_scale = read_scales(k_pool, at), read_scales(v_pool, at)
        planned = jnp.arange(known.shape[1]) < jnp.repeat(at.seen, group, 1)[..., None]
        seen, odd = planned, None
        if allowed is not None:
            seen &= jnp.repeat(allowed_in(allowed, at, shape), group, 1)
            odd = ~jnp.isfinite(v).all(-1)  # a row that does not see the slot must not get 0 * NaN
            v = jnp.where(jnp.isfinite(v), v, 0)
            if v_scale is not None:
                odd |= ~jnp.isfinite(v_scale[:, :, 0])
                v_scale = jnp.where(jnp.isfinite(v_scale), v_scale, 0)
        score = scores(mine.astype(k.dtype), k) * (dim**-0.5 * math.log2(math.e))
        score = jnp.where(seen, score if k_scale is None else score * k_scale, FAR)
        top = score.max(-1)
        same = at.row[:, None] == at.row  # lanes of one row end with the same sums
        if len(at.row) > 1:
            top = jnp.where(same[..., None], top[:, None], FAR).max(2)
        new_peak = jnp.maximum(peak, top)
        weight = (exp2 if v.dtype == jnp.bfloat16 else jnp.exp2)(score - new_peak[..., None])
        if allowed is not None:  # else a row that is inside sees something, and FAR below its peak is 0
            weight = jnp.where(seen, weight, 0)
        scaled = weight if v_scale is None else weight * jnp.where(known[:, None], v_scale, 0)
        scaled = jax.lax.optimization_barrier(scaled.astype(v.dtype))
        # Without scales narrow weights are summed as they are multiplied: what rounding does to them cancels.
        new_total = (scaled if v_scale is None else weight).sum(-1, dtype=jnp.float32)
        new_out = matmul("hnms,hnsd->hnmd", scaled, v)
        if odd is not None:
            new_out = jnp.where((seen & odd[:, :, None]).any(-1)[..., None], jnp.nan, new_out)
        if len(at.row) > 1:
            new_total, new_out = add_lanes(same, new_total, new_out)
        shrink = jnp.exp2(peak - new_peak)
        inside = planned[..., 0]
        new = (
            new_peak,
            jnp.where(inside, total * shrink + new_total, total),
            jnp.where(inside[..., None], out * shrink[..., None] + new_out, out),
        )
        return tuple(put_rows(x, y, at) for x, y in zip(carry, new, strict=True))

    nothing = jnp.zeros_like(query[..., 0], jnp.float32)
    start: Sums = (nothing + FAR, nothing, jnp.zeros_like(query, jnp.float32))
    _, total, out = walk(plan, shape, start, visit)
    out = jnp.where(total[..., None] == 0, 0, out / total[..., None])
    return out[:, plan.inverse].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def exp2(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """2^x for x up to 0, within 1.1e-4, a twentieth of what narrowing it to bfloat16 loses; 0 below -127.

    A cubic polynomial takes half as long as XLA's exponential, which is a sixth of a long prompt's attention.
    """
    x = jnp.maximum(x, -127)
    whole = jnp.floor(x)
    part = x - whole
    power = 1 + part * (0.6954244 + part * (0.2263077 + part * 0.0782679))
    bits = jax.lax.bitcast_convert_type(power, jnp.int32) + (whole.astype(jnp.int32) << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def add_lanes(
    same: Bool[Array, "lanes lanes"], total: Float32[Array, "h lanes m"], out: Float32[Array, "h lanes m d"]
) -> tuple[jax.Array, jax.Array]:
    """Sum each lane's total and output with those of the lanes of its row. A row's NaN stays its own."""
    odd = ~(jnp.isfinite(total) & jnp.isfinite(out).all(-1))
    out = matmul("nk,hkmd->hnmd", same.astype(jnp.float32), jnp.where(odd[..., None], 0, out))
    met = (same[..., None] & odd[:, None]).any(2)
    return jnp.where(same[..., None], total[:, None], 0).sum(2), jnp.where(met[..., None], jnp.nan, out)


def take_rows(x: jax.Array, at: Round) -> jax.Array:
    """Of `x` `[kv_heads, rows, group, …]` the rows of a round, as `[kv_heads, lanes, rows * group, …]`."""
    if len(at.row) > 1:
        return x.at[:, at.row].get(mode="promise_in_bounds")
    taken = jax.lax.dynamic_slice_in_dim(x, at.row[0], at.kind.rows, 1)
    return taken.reshape(x.shape[0], -1, *x.shape[3:])[:, None]


def put_rows(x: jax.Array, y: jax.Array, at: Round) -> jax.Array:
    """The inverse of `take_rows`."""
    if len(at.row) > 1:
        return x.at[:, at.row].set(y, mode="promise_in_bounds")
    return jax.lax.dynamic_update_slice_in_dim(x, y[:, 0].reshape(x.shape[0], at.kind.rows, *x.shape[2:]), at.row[0], 1)


def walk(plan: AttentionMetadata, shape: MetadataShape, carry: Carry, visit: Callable[[Carry, Round], Carry]) -> Carry:
    """Fold `visit` over the rounds of all items, class by class: as many rounds as there is work, none for padding.

    Items of one row are taken by the class's lanes, as long as there are so many; the fewest lanes take the rest.
    """
    length = jnp.pad(plan.length, (0, max(c.rows for c in shape.classes)))

    def rounds(kind: ItemClass, lanes: int, stop: jax.Array, index: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        def step(state: tuple[jax.Array, jax.Array, Carry]) -> tuple[jax.Array, jax.Array, Carry]:
            index, done, carry = state
            row, rows, entry, tokens, start = jax.lax.dynamic_slice(plan.items, (0, index), (ITEM_FIELDS, lanes))
            missing = index + jnp.arange(lanes) >= stop
            row, rows = jnp.where(missing, shape.rows, row + done), jnp.where(missing, 0, rows - done)
            tokens, entry = jnp.where(missing, 0, tokens), jnp.where(missing, 0, entry)
            ids = plan.pages.at[entry[:, None] + jnp.arange(kind.pages)].get(mode="promise_in_bounds")
            seen = length.at[row[:, None] + jnp.arange(kind.rows)].get(mode="promise_in_bounds") - start[:, None]
            seen = jnp.where(jnp.arange(kind.rows) < rows[:, None], jnp.clip(seen, 0, tokens[:, None]), 0)
            carry = visit(carry, Round(kind, row, ids, start, tokens, seen))
            if kind.rows == 1:
                return index + lanes, done, carry
            more = rows[0] > kind.rows
            return jnp.where(more, index, index + 1), jnp.where(more, done + kind.rows, 0), carry

        most = stop - (lanes - 1 if lanes > kind.lanes[-1] else 0)
        index, _, carry = jax.lax.while_loop(lambda state: state[0] < most, step, (index, jnp.zeros_like(index), carry))
        return index, carry

    index = jnp.zeros_like(plan.ends[0])
    for c, kind in enumerate(shape.classes):
        for lanes in kind.lanes:
            index, carry = rounds(kind, lanes, plan.ends[c], index, carry)
        index = plan.ends[c]
    return carry


def in_plan_order(mask: Mask, plan: AttentionMetadata, shape: MetadataShape) -> Bool[Array, "all_rows all_indices"]:
    """The mask, rows sorted as the plan's are, with room for a round that reaches past the last row or index."""
    spare = max(c.rows for c in shape.classes), shape.page_size * max(c.pages for c in shape.classes)
    return jnp.pad(mask[plan.order], ((0, spare[0]), (0, spare[1])))


def allowed_in(allowed: jax.Array, at: Round, shape: MetadataShape) -> Bool[Array, "lanes rows slots"]:
    """What of a round's slots the mask lets its rows see."""
    size = at.kind.rows, at.kind.pages * shape.page_size
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice(allowed, (row, start), size))(at.row, at.start)


def read(pool: KVPages, at: Round, dim: int) -> Float[Array, "kv_heads lanes slots head_dim"]:
    """The pages of a round, heads that lie side by side (`pool.pool_struct`) taken apart. Not yet scaled."""
    plain = kv_values(pool)
    pages = numbers(plain.at[:, at.pages].get(mode="promise_in_bounds"))
    if plain.shape[3] == dim:  # JAX 0.10 cannot take apart what is split over a mesh, and need not
        return pages.reshape(plain.shape[0], len(at.row), -1, dim)
    pages = pages.reshape(plain.shape[0], len(at.row), -1, plain.shape[3] // dim, dim)
    return jnp.moveaxis(pages, 3, 1).reshape(-1, len(at.row), pages.shape[2], dim)


def read_scales(pool: KVPages, at: Round) -> Float32[Array, "kv_heads lanes one slots"] | None:
    """What scores of keys, or weights of values, are multiplied by: less than all the numbers that these scale."""
    if not isinstance(pool, QuantizedKV):
        return None
    scales = pool.scales.at[:, at.pages].get(mode="promise_in_bounds")
    return jnp.moveaxis(scales, 3, 1).reshape(-1, len(at.row), 1, at.kind.pages * scales.shape[-1])


def scores(
    q: Float[Array, "kv_heads lanes queries head_dim"], k: Float[Array, "kv_heads lanes slots head_dim"]
) -> Float32[Array, "kv_heads lanes queries slots"]:
    """q · k. On CPU few queries are faster as right operand; the barrier keeps XLA from swapping them back."""
    if q.shape[2] > 8:
        return matmul("hnmd,hnsd->hnms", q, k)
    score: jax.Array = jax.lax.optimization_barrier(matmul("hnsd,hnmd->hnsm", k, q))
    return score.swapaxes(2, 3)


def matmul(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of float32 exactly, of bfloat16 as they are; sums in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product: jax.Array = jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
    return product
