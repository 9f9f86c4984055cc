"""The decoder: a transformer that a `ModelConfig` describes, of the layers in `layers/`, in Flax NNX.

Attention is injected: the decoder projects, normalises and rotates, and hands query, key and value of each row to a
`AttentionBackend`. The same module therefore serves from pages, trains on whole sequences and runs in the parity tests.

Numbers. Weights are stored `[out, in]`, as in the checkpoints, and contracted on their last axis; products of bfloat16
accumulate in float32 and stay float32, in the residual stream too, until the next product needs them narrow. Norms and
RoPE are float32. With float32 weights every product runs at the highest precision. The layers' matrices may have 8 bits
with a scale for each output channel, or 4 with one for each group of inputs; the embedding, the head, norms and biases
never have.

Attributes are named after the tensors of the checkpoint format, so that a parameter's path is its name in a file, where
the family has no other names (`Family.parts_of`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32

from jaxctx.model.config import AdapterSlots, ModelConfig
from jaxctx.model.interface import AttentionBackend
from jaxctx.model.layers.attention import Projected
from jaxctx.model.layers.decoder_layer import LAYERS, DecoderLayer, block_norm
from jaxctx.model.layers.linear import AdapterColumns, Create, Linear
from jaxctx.model.layers.rope import RopeCosSin, cos_sin
from jaxctx_kernels import KernelName


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
        self.layers = nnx.List([LAYERS[config.norms](create, config, layer) for layer in range(config.layers)])
        self.norm = block_norm(create, config)
        self.lm_head = None if config.tied else Linear(create, vocab, embed, bias=False, kind="embedding")

    def hidden(
        self,
        tokens: Int32[Array, " rows"],
        positions: Int32[Array, " rows"],
        kv: AttentionBackend,
        kv_dtype: str,
        adapters: Int32[Array, " rows"] | None = None,
    ) -> Float32[Array, "rows embed"]:
        """Hidden states after the final norm. Query, key and value reach `kv` as `kv_dtype`.

        `adapters` is the slot of each row's adapter; 0, and None, which is for all rows: the row has none.
        """
        config = self.config
        columns = None
        if adapters is not None and config.adapters is not None:
            columns = adapter_columns(adapters, config.adapters)
        of_layer = [config.attention_of(layer).rope for layer in range(config.layers)]
        ropes = tuple(rope for rope in dict.fromkeys(of_layer) if rope is not None)
        # The barrier keeps XLA from computing sines and cosines anew in every layer, fused into what uses them.
        rotations: tuple[RopeCosSin, ...] = lax.optimization_barrier(
            tuple(cos_sin(rope, config.head_dim, positions) for rope in ropes)
        )
        x = jnp.take(self.embed_tokens.weight[...], tokens, axis=0, mode="clip").astype(jnp.float32)
        if config.embedding_scale != 1.0:
            # As narrow as in training: of a width of 3072, 55.5 in bfloat16, and not 55.43.
            x = x * jnp.asarray(config.embedding_scale, self.embed_tokens.weight.dtype).astype(jnp.float32)

        split_layers = [nnx.split(layer) for layer in self.layers]
        before = [
            partial(layer_before_attention, graph, None if rope is None else ropes.index(rope), kv.mesh, state)
            for rope, (graph, state) in zip(of_layer, split_layers, strict=True)
        ]
        after = [partial(layer_after_attention, graph, kv.mesh, kv.kernel, state) for graph, state in split_layers]

        def run_layer(layer: int | jax.Array, x: jax.Array) -> jax.Array:
            projected: Projected = select_and_call(layer, before, x, rotations, columns)
            q, k, v = (each.astype(kv_dtype) for each in (projected.q, projected.k, projected.v))
            attended = kv.attend(layer, q, k, v, projected.sinks)
            output: jax.Array = select_and_call(layer, after, x, attended, kv.padding, columns)
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
        logits = (self.lm_head or self.embed_tokens)(hidden)
        scale, cap = self.config.logits_scale, self.config.logits_soft_cap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else jnp.tanh(logits / cap) * cap


def adapter_columns(slots: Int32[Array, " rows"], adapters: AdapterSlots) -> AdapterColumns:
    """Which columns each row keeps; of slot 0, none."""
    slot_of_column = 1 + jnp.arange(adapters.columns, dtype=jnp.int32) // adapters.rank
    return slots[:, None] == slot_of_column


def select_and_call(index: int | jax.Array, functions: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Call the function at `index`: now if that is a number, else on the device, which knows it at run time."""
    return functions[index](*operands) if isinstance(index, int) else lax.switch(index, functions, *operands)


# A layer travels as graph and state of `nnx.split`: layers of equal graphs share one trace, which XLA inlines.
@partial(jax.jit, static_argnums=(0, 1, 2))
def layer_before_attention(
    graph: Any,
    rope: int | None,
    mesh: Mesh | None,
    state: Any,
    x: jax.Array,
    rotations: tuple[RopeCosSin, ...],
    columns: AdapterColumns | None,
) -> Projected:
    """See `DecoderLayer.before_attention`; the layer's rotation is that of index `rope`; None: it has none."""
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer.before_attention(x, None if rope is None else rotations[rope], mesh, columns)


@partial(jax.jit, static_argnums=(0, 1, 2))
def layer_after_attention(
    graph: Any,
    mesh: Mesh | None,
    kernel: KernelName,
    state: Any,
    x: jax.Array,
    attended: jax.Array,
    padding: jax.Array | None,
    columns: AdapterColumns | None,
) -> jax.Array:
    """See `DecoderLayer.after_attention`."""
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer.after_attention(x, attended, mesh, padding, kernel, columns)
