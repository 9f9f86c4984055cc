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
        gated = ACTIVATIONS[self.activation](self.gate_proj(x, columns, mesh)) * self.up_proj(x, columns, mesh)
        return self.down_proj.sum_over(mesh, gated, columns)
