"""The gated feed-forward block."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from jaxctx.model.config import Activation, ClampedGate, ModelConfig
from jaxctx.model.layers.linear import AdapterColumns, Create, Linear

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}

Gate: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""What goes on of the products with `gate_proj` and `up_proj`."""


def plain_gate(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """`activation(gate) * up`."""
    return ACTIVATIONS[activation](gate) * up


def clamped_gate(shape: ClampedGate, gate: jax.Array, up: jax.Array) -> jax.Array:
    """See `ClampedGate`."""
    gate, up = jnp.minimum(gate, shape.limit), jnp.clip(up, -shape.limit, shape.limit)
    return (up + 1) * (gate * jax.nn.sigmoid(shape.slope * gate))


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, create: Create, config: ModelConfig, size: int | None = None) -> None:
        """`size`: of what is between, of a block that all experts have beside them; None: one that is alone.

        Adapters change only blocks that are alone.
        """
        embed, ffn = (config.width, "embed"), (size or config.ffn, "ffn")
        adapters = config.adapters if size is None else None
        self.gate_proj = Linear(create, ffn, embed, bias=config.ffn_bias, adapters=adapters)
        self.up_proj = Linear(create, ffn, embed, bias=config.ffn_bias, adapters=adapters)
        self.down_proj = Linear(create, embed, ffn, bias=config.ffn_bias, adapters=adapters)
        self.activation = config.activation

    def __call__(
        self, x: Float32[Array, "rows embed"], mesh: Mesh | None, columns: AdapterColumns | None = None
    ) -> Float32[Array, "rows embed"]:
        """What feed-forward adds to the residual stream. `columns`: of the rows' adapters."""
        gated = plain_gate(self.activation, self.gate_proj(x, columns, mesh), self.up_proj(x, columns, mesh))
        return self.down_proj.sum_over(mesh, gated, columns)
