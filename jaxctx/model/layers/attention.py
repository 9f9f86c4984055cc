"""The projections of attention. What attends is an `AttentionBackend`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from jaxctx.model.config import ModelConfig
from jaxctx.model.layers.linear import AdapterColumns, Create, Linear
from jaxctx.model.layers.norm import RMSNorm
from jaxctx.model.layers.rope import RopeCosSin, rotate


class Projected(NamedTuple):
    """What attention works on."""

    q: Float32[Array, "rows heads head_dim"]
    k: Float32[Array, "rows kv_heads head_dim"]
    v: Float32[Array, "rows kv_heads head_dim"]
    sinks: Float32[Array, " heads"] | None  # see `ModelConfig.attention_sinks`


class Attention(nnx.Module):
    """Projections before and after `AttentionBackend.attend`.

    The logical axes "heads" and "kv_heads" have heads × head_dim and kv_heads × head_dim elements.
    """

    def __init__(self, create: Create, config: ModelConfig) -> None:
        embed = (config.width, "embed")
        heads = (config.heads * config.head_dim, "heads")
        kv_heads = (config.kv_heads * config.head_dim, "kv_heads")
        self.q_proj = Linear(create, heads, embed, bias=config.qkv_bias, adapters=config.adapters)
        self.k_proj = Linear(create, kv_heads, embed, bias=config.qkv_bias, adapters=config.adapters)
        self.v_proj = Linear(create, kv_heads, embed, bias=config.qkv_bias, adapters=config.adapters)
        self.o_proj = Linear(create, embed, heads, bias=config.out_bias, adapters=config.adapters)
        self.sinks = nnx.Param(create((config.heads,), "bias"), axes=("heads",)) if config.attention_sinks else None
        self.q_norm = query_key_norm(create, config, heads)
        self.k_norm = query_key_norm(create, config, kv_heads)
        self.norm_over = config.query_key_norm
        self.head_dim = config.head_dim
        # Attention itself scales scores by head_dim ** -0.5.
        wanted = config.attention_scale
        self.query_scale = 1.0 if wanted is None else wanted * math.sqrt(config.head_dim)

    def __call__(
        self,
        x: Float32[Array, "rows embed"],
        rotation: RopeCosSin | None,
        columns: AdapterColumns | None = None,
        mesh: Mesh | None = None,
    ) -> Projected:
        """Query, key and value.

        `rotation`: None in a layer without. `columns`: of the rows' adapters. `mesh`: parameters are split over it.
        """
        q, k, v = (linear(x, columns, mesh) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm_over == "all_heads":
            q, k = self._normalize(q, k)
        q, k, v = (y.reshape(x.shape[0], -1, self.head_dim) for y in (q, k, v))
        if self.norm_over == "head":
            q, k = self._normalize(q, k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        q = q if self.query_scale == 1.0 else q * self.query_scale
        return Projected(q, k, v, None if self.sinks is None else self.sinks[...].astype(jnp.float32))

    def _normalize(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Over the last axis: of a head, or of all heads, whose squares XLA sums over the devices they are on."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def project_output(
        self,
        attended: Float32[Array, "rows heads head_dim"],
        mesh: Mesh | None,
        columns: AdapterColumns | None = None,
    ) -> Float32[Array, "rows embed"]:
        """What attention adds to the residual stream."""
        return self.o_proj.sum_over(mesh, attended.reshape(attended.shape[0], -1), columns)


def query_key_norm(create: Create, config: ModelConfig, all_heads: tuple[int, str]) -> RMSNorm | None:
    """A norm of queries, or of keys, if the model has one. `all_heads`: their elements together, and their axis."""
    if config.query_key_norm == "none":
        return None
    size, axis = all_heads if config.query_key_norm == "all_heads" else (config.head_dim, "head_dim")
    return RMSNorm(create, size, axis, config.norm_eps, adds_one=config.norm_adds_one)
