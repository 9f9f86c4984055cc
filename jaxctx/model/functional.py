"""From module to function: a `Decoder` split once into a static part and a flat tuple of arrays.

Splitting and merging a module tree on every call costs milliseconds; a flat tuple through plain `jax.jit` costs a
tenth of one. The module is put together again only while a step is traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxctx.model.config import ModelConfig
from jaxctx.model.decoder import Axes, Decoder
from jaxctx.model.interface import AttentionBackend, KVSpec

FlatParams = tuple[Any, ...]  # arrays, or ShapeDtypeStructs of an abstract model, in the order of `DecoderModel.specs`


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its tensor name in a checkpoint, its shape, and a logical axis per dimension."""

    name: str
    shape: tuple[int, ...]
    axes: Axes


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """The static part: `interface.Model` for a `Decoder`. Hashes and compares by configuration and types alone."""

    config: ModelConfig
    dtype: str  # of the parameters
    kv: KVSpec
    specs: tuple[ParamSpec, ...] = field(compare=False, repr=False)
    _merge: Callable[[FlatParams], Decoder] = field(compare=False, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def attention_window(self) -> int | None:
        return None if self.config.declared_positions is None else self.config.max_positions

    def hidden(self, params: FlatParams, tokens: jax.Array, positions: jax.Array, kv: AttentionBackend) -> jax.Array:
        reaches = self.kv.dtype if jnp.dtype(self.kv.dtype).itemsize > 1 else "float32"
        return self._merge(params).hidden(tokens, positions, kv, reaches)

    def logits(self, params: FlatParams, hidden: jax.Array) -> jax.Array:
        return self._merge(params).logits(hidden)


def as_model(decoder: Decoder, *, kv_dtype: str | None = None) -> tuple[DecoderModel, FlatParams]:
    """Split a decoder, concrete or abstract, into its static part and its parameters.

    `kv_dtype` is the type of keys and values, see `KVSpec`; None: that of the parameters.
    """
    graph, state = nnx.split(decoder)
    flat = nnx.to_flat_state(state)
    specs = tuple(ParamSpec(_name(path), tuple(variable.shape), variable.axes) for path, variable in flat)
    leaves, leaf_tree = jax.tree.flatten(state)
    assert len(leaves) == len(specs)

    def merge(params: FlatParams) -> Decoder:
        return nnx.merge(graph, jax.tree.unflatten(leaf_tree, params))

    dtype = str(jnp.dtype(leaves[0].dtype))
    config = decoder.config
    group = config.heads // config.kv_heads
    kv = KVSpec(config.layers, config.kv_heads, config.head_dim, kv_dtype or dtype, group)
    return DecoderModel(decoder.config, dtype, kv, specs, merge), tuple(leaves)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path if path[0] == "lm_head" else ("model", *path)))


def abstract(config: ModelConfig, dtype: str, *, kv_dtype: str | None = None) -> tuple[DecoderModel, FlatParams]:
    """Model and ShapeDtypeStructs: for compiling and for planning memory without weights."""
    return as_model(Decoder(config, lambda shape, _: jax.ShapeDtypeStruct(shape, dtype)), kv_dtype=kv_dtype)
