"""The draw: one token per row from a truncated distribution, without sorting the vocabulary.

The noise of Gumbel-max depends on (seed, position, token id) alone, so a row's token depends on nothing but the row:
not on the batch around it, nor on whether 64 candidates or the whole vocabulary were looked at.

Truncation keeps a prefix of the vocabulary sorted by (descending logit, ascending id), so ties for `top_k` are cut at
exactly k. Sorting 152k logits costs 20 ms a row on a CPU. Nearly always the prefix ends within the best 64, which cost
0.4 ms; rows where it does not find their cut by bisection. Which of the two a row takes is decided by the row alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32

from jaxctx.model.sampling_options import SamplingBatch
from jaxctx.model.top_k import top_k

CANDIDATES = 64  # best tokens looked at before the whole vocabulary is


def draw_tokens(
    distance: Float32[Array, "rows vocab"], batch: SamplingBatch, mesh: Mesh | None = None
) -> Int32[Array, " rows"]:
    """Tokens of the rows with a temperature; those of others mean nothing.

    `distance` is how far each logit is below its row's best, in units of temperature. `mesh`: the vocabulary is split
    over it.
    """
    sampled, seeds = batch.temperature > 0, jax.random.wrap_key_data(batch.seed, impl="threefry2x32")
    keys = jax.random.key_data(jax.vmap(jax.random.fold_in)(seeds, batch.position))  # uint32 [rows, 2]
    truncated = sampled & ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0))
    nothing = jnp.zeros_like(batch.top_k), jnp.zeros_like(sampled)
    draw_from_candidates = partial(_draw_from_candidates, mesh=mesh)
    short, exact = lax.cond(truncated.any(), draw_from_candidates, lambda *_: nothing, distance, batch, keys)
    exact &= truncated
    unsettled = truncated & ~exact

    def draw_from_all() -> jax.Array:
        kept = lax.cond(
            unsettled.any(),
            lambda: _kept(distance, batch) | ~unsettled[:, None],
            lambda: jnp.ones(distance.shape, jnp.bool_),
        )
        ids = jnp.arange(distance.shape[1], dtype=jnp.int32)[None]
        # Stored, because an argmax that computes its operand as it goes is 10 times slower on CPU.
        score = lax.optimization_barrier(jnp.where(kept, _gumbel(keys, ids) - distance, -jnp.inf))
        return jnp.argmax(score, -1).astype(jnp.int32)

    return jnp.where(exact, short, lax.cond((sampled & ~exact).any(), draw_from_all, lambda: short))


def _draw_from_candidates(
    distance: jax.Array, batch: SamplingBatch, keys: jax.Array, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    """Tokens drawn from the best candidates, and the rows for which that is all that truncation keeps."""
    top, ids = top_k(-distance, min(CANDIDATES, distance.shape[1]), mesh)  # sorted, ties by lowest id
    weight = jnp.exp(top)
    rank = jnp.arange(top.shape[1])[None]
    few = (batch.top_k > 0) & (batch.top_k <= top.shape[1])
    in_top_k = (batch.top_k[:, None] == 0) | (rank < batch.top_k[:, None])
    mass = jnp.where(few, (weight * in_top_k).sum(-1), jnp.exp(-distance).sum(-1))
    before = jnp.cumsum(weight, axis=-1) - weight
    in_top_p = (before < (batch.top_p * mass)[:, None]) | (batch.top_p >= 1)[:, None]
    kept = (in_top_k & in_top_p & (-top <= -jnp.log(batch.min_p)[:, None])) | (rank == 0)
    # The last candidate was cut, so all after it are too. With a larger top_k the mass that top_p shares is unknown.
    exact = few | (~kept[:, -1] & ((batch.top_k == 0) | (batch.top_p >= 1)))
    score = jnp.where(kept, _gumbel(keys, ids) + top, -jnp.inf)
    return jnp.take_along_axis(ids, jnp.argmax(score, -1)[:, None], axis=1)[:, 0], exact


def _kept(distance: jax.Array, batch: SamplingBatch) -> jax.Array:
    """What truncation keeps of the whole vocabulary, `[rows, vocab]`, without sorting it."""
    whole = jnp.ones_like(distance)
    top_k = jnp.where(batch.top_k > 0, batch.top_k, distance.shape[1]).astype(jnp.float32)
    kept: jax.Array = lax.cond(
        (batch.top_k > 0).any(), lambda: _smallest(distance, whole, top_k), lambda: whole.astype(jnp.bool_)
    )
    weight = jnp.where(kept, jnp.exp(-distance), 0)
    by_mass = _smallest(distance, weight, batch.top_p * weight.sum(-1))
    return kept & (by_mass | (batch.top_p >= 1)[:, None]) & (distance <= -jnp.log(batch.min_p)[:, None])


def _smallest(distance: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """Mask of the shortest prefix, in order of (distance, id), whose weight reaches `target` (at least one token)."""
    target = jnp.maximum(target, np.finfo(np.float32).tiny)
    # The bits of floats that are not negative are ordered as the floats are: bisect over them as integers.
    level = lax.bitcast_convert_type(jnp.abs(distance), jnp.int32)
    ids = jnp.arange(distance.shape[1], dtype=jnp.int32)[None]

    def bisect(members: jax.Array, inside: jax.Array, upper: int) -> jax.Array:
        """Smallest `c` up to `upper` for which what is inside, or a member of value ≤ c, weighs `target`."""

        def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            reached = jnp.where(inside | (members <= middle[:, None]), weight, 0).sum(-1) >= target
            return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

        zero = jnp.zeros(distance.shape[0], jnp.int32)
        return lax.while_loop(lambda b: (b[0] < b[1]).any(), halve, (zero, jnp.full_like(zero, upper)))[1][:, None]

    edge = bisect(level, jnp.zeros_like(level, jnp.bool_), 0x7F800000)
    nearer = level < edge
    never = np.iinfo(np.int32).max
    last = bisect(jnp.where(level == edge, ids, never), nearer, distance.shape[1] - 1)
    return nearer | ((level == edge) & (ids <= last))


def _gumbel(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise of each (row key, token id), `[rows, ids]`.

    Threefry makes the row keys; from there to one number per token id two rounds of a 32-bit mixer are enough, at a
    twentieth of the cost of threefry over the vocabulary (0.4 against 11 ms for 8 × 152k on two CPU cores).
    """
    bits = _mix(_mix(ids.astype(jnp.uint32) ^ keys[:, :1]) + keys[:, 1:])
    # log1p keeps the resolution of 2**-32 where it matters: at the small values that win.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(h: jax.Array) -> jax.Array:
    """A bijective mixer of 32 bits ("lowbias32", C. Wellons, Hash Prospector, public domain)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
