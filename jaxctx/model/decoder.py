"""The decoder: pre-norm transformer with grouped-query attention and a gated feed-forward block, in Flax NNX.

Attention is injected: the decoder projects, normalises and rotates, and hands query, key and value of each row to a
`AttentionBackend`. The same module therefore serves from pages, trains on whole sequences and runs in the parity tests.

Numbers. Weights are stored `[out, in]`, as in the checkpoints, and contracted on their last axis; products of bfloat16
accumulate in float32 and stay float32, in the residual stream too, until the next product needs them narrow. Norms and
RoPE are float32. With float32 weights every product runs at the highest precision. The layers' matrices may have 8 bits
with a scale for each output channel; the embedding, the head, norms and biases never have.

Attributes are named after the tensors of the checkpoint format, so that a parameter's path is its name in a file.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32

from jaxctx.model.config import ModelConfig
from jaxctx.model.interface import AttentionBackend
from jaxctx.model.products import QuantizedWeight, project, project_and_sum
from jaxctx.model.rope import RopeCosSin, cos_sin, inverse_frequencies, rotate

Axes = tuple[str, ...]  # logical axis names of a parameter, see `sharding`
Create = Callable[[tuple[int, ...], str], "jax.Array | jax.ShapeDtypeStruct | QuantizedWeight"]
"""Makes the value of a parameter from its shape and kind: "matrix", "embedding", "bias" (zeros) or "scale" (ones).

Only a matrix may be a `QuantizedWeight`.
"""


class Linear(nnx.Module):
    """`x @ weight.T + bias`, in float32. `weight` `[out, in]`; `weight_scale` `[out]` where that has 8 bits."""

    def __init__(
        self, create: Create, out: tuple[int, str], inside: tuple[int, str], *, bias: bool, kind: str = "matrix"
    ) -> None:
        weight = create((out[0], inside[0]), kind)
        quantized = weight if isinstance(weight, QuantizedWeight) else None
        self.weight = nnx.Param(weight if quantized is None else quantized.values, axes=(out[1], inside[1]))
        self.weight_scale = None if quantized is None else nnx.Param(quantized.scale, axes=(out[1],))
        self.matmul_dtype = "" if quantized is None else quantized.matmul_dtype
        self.bias = nnx.Param(create((out[0],), "bias"), axes=(out[1],)) if bias else None

    def __call__(self, x: Float[Array, "rows in"]) -> Float32[Array, "rows out"]:
        return self._add_bias(project(x, self._read_weight()))

    def sum_over(self, mesh: Mesh | None, x: Float[Array, "rows in"]) -> Float32[Array, "rows out"]:
        """The same where `in` is split over `mesh`, see `project_and_sum`."""
        return self._add_bias(project_and_sum(x, self._read_weight(), mesh))

    def _read_weight(self) -> "jax.Array | QuantizedWeight":
        weight: jax.Array = self.weight[...]
        if self.weight_scale is None:
            return weight
        return QuantizedWeight(weight, self.weight_scale[...], self.matmul_dtype)

    def _add_bias(self, y: Float32[Array, "rows out"]) -> Float32[Array, "rows out"]:
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class RMSNorm(nnx.Module):
    """Divide by the root mean square over the last axis, then scale; float32."""

    def __init__(self, create: Create, size: int, axis: str, epsilon: float) -> None:
        self.weight = nnx.Param(create((size,), "scale"), axes=(axis,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*rows size"]) -> Float32[Array, "*rows size"]:
        x = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scale: jax.Array = self.weight[...].astype(jnp.float32)
        return x * inverse * scale


class Attention(nnx.Module):
    """Projections before and after `AttentionBackend.attend`.

    The logical axes "heads" and "kv_heads" have heads × head_dim and kv_heads × head_dim elements.
    """

    def __init__(self, create: Create, config: ModelConfig) -> None:
        embed = (config.width, "embed")
        heads = (config.heads * config.head_dim, "heads")
        kv_heads = (config.kv_heads * config.head_dim, "kv_heads")
        self.q_proj = Linear(create, heads, embed, bias=config.qkv_bias)
        self.k_proj = Linear(create, kv_heads, embed, bias=config.qkv_bias)
        self.v_proj = Linear(create, kv_heads, embed, bias=config.qkv_bias)
        self.o_proj = Linear(create, embed, heads, bias=config.out_bias)
        norm = (config.head_dim, "head_dim", config.norm_eps)
        self.q_norm = RMSNorm(create, *norm) if config.qk_norm else None
        self.k_norm = RMSNorm(create, *norm) if config.qk_norm else None
        self.head_dim = config.head_dim

    def __call__(self, x: Float32[Array, "rows embed"], rotation: RopeCosSin) -> tuple[jax.Array, ...]:
        """Query, key and value, float32 `[rows, heads or kv_heads, head_dim]`."""
        rows = x.shape[0]
        q, k, v = (p(x).reshape(rows, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        return rotate(q, *rotation), rotate(k, *rotation), v


class FeedForward(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, create: Create, config: ModelConfig) -> None:
        embed, ffn = (config.width, "embed"), (config.ffn, "ffn")
        self.gate_proj = Linear(create, ffn, embed, bias=config.ffn_bias)
        self.up_proj = Linear(create, ffn, embed, bias=config.ffn_bias)
        self.down_proj = Linear(create, embed, ffn, bias=config.ffn_bias)

    def __call__(self, x: Float32[Array, "rows embed"], mesh: Mesh | None) -> Float32[Array, "rows embed"]:
        return self.down_proj.sum_over(mesh, jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, create: Create, config: ModelConfig) -> None:
        self.input_layernorm = RMSNorm(create, config.width, "embed", config.norm_eps)
        self.self_attn = Attention(create, config)
        self.post_attention_layernorm = RMSNorm(create, config.width, "embed", config.norm_eps)
        self.mlp = FeedForward(create, config)

    def before_attention(self, x: Float32[Array, "rows embed"], rotation: RopeCosSin) -> tuple[jax.Array, ...]:
        """Query, key and value of each row, rotated; float32 `[rows, heads or kv_heads, head_dim]`."""
        return self.self_attn(self.input_layernorm(x), rotation)

    def after_attention(
        self, x: Float32[Array, "rows embed"], attended: Float32[Array, "rows heads head_dim"], mesh: Mesh | None
    ) -> Float32[Array, "rows embed"]:
        """The residual stream `x` with the attention output and the feed-forward output added.

        Both end in a sum over the devices of `mesh`.
        """
        x = x + self.self_attn.o_proj.sum_over(mesh, attended.reshape(x.shape[0], -1))
        return x + self.mlp(self.post_attention_layernorm(x), mesh)


class Decoder(nnx.Module):
    """The whole model.

    Layers are unrolled unless the `AttentionBackend` is looped. Then they are a loop around one trace of attention, in
    which each layer selects its own products: a scan over stacked weights would copy the weights at every step, which
    takes as long as the products do.
    """

    def __init__(self, config: ModelConfig, create: Create) -> None:
        self.config = config
        vocab, embed = (config.vocab_size, "vocab"), (config.width, "embed")
        # Its rows by token id, and where tied the head.
        self.embed_tokens = Linear(create, vocab, embed, bias=False, kind="embedding")
        self.layers = nnx.List([Layer(create, config) for _ in range(config.layers)])
        self.norm = RMSNorm(create, config.width, "embed", config.norm_eps)
        self.lm_head = None if config.tied else Linear(create, vocab, embed, bias=False, kind="embedding")

    def hidden(
        self, tokens: Int32[Array, " rows"], positions: Int32[Array, " rows"], kv: AttentionBackend, kv_dtype: str
    ) -> Float32[Array, "rows embed"]:
        """Hidden states after the final norm. Query, key and value reach `kv` as `kv_dtype`."""
        # The barrier keeps XLA from computing sines and cosines anew in every layer, fused into what uses them.
        rotation: RopeCosSin = lax.optimization_barrier(cos_sin(inverse_frequencies(self.config), positions))
        x = jnp.take(self.embed_tokens.weight[...], tokens, axis=0, mode="clip").astype(jnp.float32)

        split_layers = [nnx.split(layer) for layer in self.layers]
        before = [partial(layer_before_attention, graph, state) for graph, state in split_layers]
        after = [partial(layer_after_attention, graph, kv.mesh, state) for graph, state in split_layers]

        def run_layer(layer: int | jax.Array, x: jax.Array) -> jax.Array:
            q, k, v = select_and_call(layer, before, x, rotation)
            attended = kv.attend(layer, q.astype(kv_dtype), k.astype(kv_dtype), v.astype(kv_dtype))
            output: jax.Array = select_and_call(layer, after, x, attended)
            return output

        def loop_body(layer: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            x, kv.pools = carry
            return run_layer(layer, x), kv.pools

        if kv.looped:
            x, kv.pools = lax.fori_loop(0, len(self.layers), loop_body, (x, kv.pools))
        else:
            for layer in range(len(self.layers)):
                x = run_layer(layer, x)
        return self.norm(x)

    def logits(self, hidden: Float32[Array, "rows embed"]) -> Float32[Array, "rows vocab"]:
        """Logits of each row over the vocabulary; the embedding is the head of a model with tied embeddings."""
        return (self.lm_head or self.embed_tokens)(hidden)


def select_and_call(index: int | jax.Array, functions: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Call the function at `index`: now if that is a number, else on the device, which knows it at run time."""
    return functions[index](*operands) if isinstance(index, int) else lax.switch(index, functions, *operands)


# A layer travels as graph and state of `nnx.split`: layers of equal graphs share one trace, which XLA inlines.
@partial(jax.jit, static_argnums=0)
def layer_before_attention(graph: Any, state: Any, x: jax.Array, rotation: RopeCosSin) -> tuple[jax.Array, ...]:
    """See `Layer.before_attention`."""
    layer: Layer = nnx.merge(graph, state)
    return layer.before_attention(x, rotation)


@partial(jax.jit, static_argnums=(0, 1))
def layer_after_attention(graph: Any, mesh: Mesh | None, state: Any, x: jax.Array, attended: jax.Array) -> jax.Array:
    """See `Layer.after_attention`."""
    layer: Layer = nnx.merge(graph, state)
    return layer.after_attention(x, attended, mesh)
