"""One layer of a decoder: attention and feed-forward, normalised and added to the residual stream.

Attention lies between the two methods of a layer: `before_attention` gives query, key and value, `after_attention`
takes what was attended. Families differ in where they normalise, and name the norms accordingly.
"""

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32

from jaxctx.model.config import ModelConfig, NormPlacement
from jaxctx.model.layers.attention import Attention, Projected
from jaxctx.model.layers.experts import SparseFeedForward
from jaxctx.model.layers.feed_forward import FeedForward
from jaxctx.model.layers.linear import AdapterColumns, Create
from jaxctx.model.layers.norm import RMSNorm
from jaxctx.model.layers.rope import RopeCosSin
from jaxctx_kernels import KernelName


class DecoderLayer(nnx.Module):
    """What layers have in common. The blocks read what `_attention_input` and `_mlp_input` make of the residual stream,
    and it grows by what `_attention_output` and `_mlp_output` make of theirs.
    """

    def __init__(self, create: Create, config: ModelConfig, layer: int) -> None:
        experts = config.experts_of(layer)
        self.self_attn = Attention(create, config)
        self.mlp = FeedForward(create, config) if experts is None else SparseFeedForward(create, config, experts)
        self.residual_scale = config.residual_scale

    def before_attention(
        self,
        x: Float32[Array, "rows embed"],
        rotation: RopeCosSin | None,
        mesh: Mesh | None = None,
        columns: AdapterColumns | None = None,
    ) -> Projected:
        """Query, key and value of the rows.

        `rotation`: None in a layer that rotates nothing. `mesh`: parameters are split over it. `columns`: of the rows'
        adapters.
        """
        return self.self_attn(self._attention_input(x), rotation, columns, mesh)

    def after_attention(
        self,
        x: Float32[Array, "rows embed"],
        attended: Float32[Array, "rows heads head_dim"],
        mesh: Mesh | None,
        padding: Bool[Array, " rows"] | None = None,
        kernel: KernelName = "reference",
        columns: AdapterColumns | None = None,
    ) -> Float32[Array, "rows embed"]:
        """The residual stream after attention and feed-forward. `mesh`: parameters and `attended` are split over it.

        `padding` and `kernel` are those of the `AttentionBackend`; `columns`: of the rows' adapters.
        """
        x = self._add(x, self._attention_output(self.self_attn.project_output(attended, mesh, columns)))
        given = self._mlp_input(x)
        if isinstance(self.mlp, SparseFeedForward):
            fed = self.mlp(given, mesh, padding, kernel)
        else:
            fed = self.mlp(given, mesh, columns)
        return self._add(x, self._mlp_output(fed))

    def _add(self, x: jax.Array, block: jax.Array) -> jax.Array:
        return x + (block if self.residual_scale == 1.0 else block * self.residual_scale)

    def _attention_input(self, x: jax.Array) -> jax.Array:
        return x

    def _attention_output(self, attended: jax.Array) -> jax.Array:
        return attended

    def _mlp_input(self, x: jax.Array) -> jax.Array:
        return x

    def _mlp_output(self, fed: jax.Array) -> jax.Array:
        return fed


class NormBeforeLayer(DecoderLayer):
    """What goes into a block is normalised: Llama and most others."""

    def __init__(self, create: Create, config: ModelConfig, layer: int) -> None:
        self.input_layernorm = block_norm(create, config)
        super().__init__(create, config, layer)
        self.post_attention_layernorm = block_norm(create, config)

    def _attention_input(self, x: jax.Array) -> jax.Array:
        return self.input_layernorm(x)

    def _mlp_input(self, x: jax.Array) -> jax.Array:
        return self.post_attention_layernorm(x)


class NormAfterLayer(DecoderLayer):
    """What comes out of a block is normalised: OLMo 2 and 3."""

    def __init__(self, create: Create, config: ModelConfig, layer: int) -> None:
        super().__init__(create, config, layer)
        self.post_attention_layernorm = block_norm(create, config)
        self.post_feedforward_layernorm = block_norm(create, config)

    def _attention_output(self, attended: jax.Array) -> jax.Array:
        return self.post_attention_layernorm(attended)

    def _mlp_output(self, fed: jax.Array) -> jax.Array:
        return self.post_feedforward_layernorm(fed)


class NormAroundLayer(DecoderLayer):
    """What goes into a block is normalised, and what comes out: Gemma 2 and 3."""

    def __init__(self, create: Create, config: ModelConfig, layer: int) -> None:
        self.input_layernorm = block_norm(create, config)
        super().__init__(create, config, layer)
        self.post_attention_layernorm = block_norm(create, config)
        self.pre_feedforward_layernorm = block_norm(create, config)
        self.post_feedforward_layernorm = block_norm(create, config)

    def _attention_input(self, x: jax.Array) -> jax.Array:
        return self.input_layernorm(x)

    def _attention_output(self, attended: jax.Array) -> jax.Array:
        return self.post_attention_layernorm(attended)

    def _mlp_input(self, x: jax.Array) -> jax.Array:
        return self.pre_feedforward_layernorm(x)

    def _mlp_output(self, fed: jax.Array) -> jax.Array:
        return self.post_feedforward_layernorm(fed)


def block_norm(create: Create, config: ModelConfig) -> RMSNorm:
    """A norm of the residual stream's width."""
    return RMSNorm(create, config.width, "embed", config.norm_eps, adds_one=config.norm_adds_one)


LAYERS: dict[NormPlacement, type[DecoderLayer]] = {
    "before": NormBeforeLayer,
    "after": NormAfterLayer,
    "around": NormAroundLayer,
}
