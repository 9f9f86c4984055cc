"""The gated feed-forward block."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from jaxctx.model.config import Activation, ModelConfig
from jaxctx.model.layers.linear import AdapterColumns, Create, Linear

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, create: Create, config: ModelConfig) -> None:
        embed, ffn = (config.width, "embed"), (config.ffn, "ffn")
        self.gate_proj = Linear(create, ffn, embed, bias=config.ffn_bias, adapters=config.adapters)
        self.up_proj = Linear(create, ffn, embed, bias=config.ffn_bias, adapters=config.adapters)
        self.down_proj = Linear(create, embed, ffn, bias=config.ffn_bias, adapters=config.adapters)
        self.activation = config.activation

    def __call__(
        self, x: Float32[Array, "rows embed"], mesh: Mesh | None, columns: AdapterColumns | None = None
    ) -> Float32[Array, "rows embed"]:
        """What feed-forward adds to the residual stream. `columns`: of the rows' adapters."""
        gated = ACTIVATIONS[self.activation](self.gate_proj(x, columns)) * self.up_proj(x, columns)
        return self.down_proj.sum_over(mesh, gated, columns)
