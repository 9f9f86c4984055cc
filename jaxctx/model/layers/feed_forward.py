"""The gated feed-forward block."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from jaxctx.model.config import Activation, ModelConfig
from jaxctx.model.layers.linear import Create, Linear

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(self, create: Create, config: ModelConfig, size: int | None = None) -> None:
        """`size`: of what is between; None: that of the model's blocks."""
        embed, ffn = (config.width, "embed"), (size or config.ffn, "ffn")
        self.gate_proj = Linear(create, ffn, embed, bias=config.ffn_bias)
        self.up_proj = Linear(create, ffn, embed, bias=config.ffn_bias)
        self.down_proj = Linear(create, embed, ffn, bias=config.ffn_bias)
        self.activation = config.activation

    def __call__(self, x: Float32[Array, "rows embed"], mesh: Mesh | None) -> Float32[Array, "rows embed"]:
        gated = ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj.sum_over(mesh, gated)
