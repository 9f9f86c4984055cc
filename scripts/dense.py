"""Dense causal attention over whole sequences: for training and as the plain truth in tests. Nothing is stored.

Not for serving: the scores of a sequence are materialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxctx_kernels import KernelName


@dataclass(slots=True)
class DenseCausal:
    """An `AttentionBackend` whose rows are `sequences` sequences of equal length, one after the other, each from its
    start.

    Row r of a sequence sees rows 0..r of the same sequence, or the last of these: `windows` and `soft_cap` are those of
    `KVSpec`. Rows are a multiple of `sequences`. Differentiable.
    """

    sequences: int = 1
    looped: bool = False
    pools: Any = None
    mesh: Mesh | None = None
    padding: jax.Array | None = None
    kernel: KernelName = "reference"
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None

    def attend(
        self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        rows, heads, head_dim = q.shape
        kv_heads, length = k.shape[1], rows // self.sequences
        q = q.reshape(self.sequences, length, kv_heads, heads // kv_heads, head_dim)
        k, v = (x.reshape(self.sequences, length, kv_heads, head_dim) for x in (k, v))
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, precision=precision, preferred_element_type=jnp.float32)
        seen = jnp.tril(jnp.ones((length, length), bool))
        window = self.windows[int(layer)] if self.windows else None
        if window is not None:
            seen &= jnp.triu(jnp.ones_like(seen), 1 - window)
        scores *= head_dim**-0.5
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is None:
            weights = jax.nn.softmax(scores, axis=-1)
        else:  # one more column, whose weight goes to no value
            column = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
            weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), axis=-1)[..., :-1]
        out = jnp.einsum(
            "bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return out.reshape(rows, heads, head_dim)
