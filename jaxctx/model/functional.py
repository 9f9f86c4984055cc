"""From module to function: a `Decoder` split once into a static part and a flat tuple of arrays.

Splitting and merging a module tree on every call costs milliseconds; a flat tuple through plain `jax.jit` costs a
tenth of one. The module is put together again only while a step is traced.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxctx.model.config import AdapterSlots, ModelConfig
from jaxctx.model.decoder import Decoder
from jaxctx.model.interface import AttentionBackend, KVSpec
from jaxctx.model.layers.linear import Axes, Linear
from jaxctx.model.products import QuantizedWeight

EIGHT_BITS = {"int8": jnp.dtype("int8"), "float8_e4m3fn": jnp.dtype("uint8")}
"""Types of weights that have a scale for each output channel, and the type of the array that holds them."""

SCALE = "weight_scale"
"""Last part of the name of such a scale, behind what the name of its `weight` begins with."""

LORA = (".lora_a", ".lora_b")
"""Last parts of the names of what holds adapters, see `Linear`."""

FlatParams = tuple[Any, ...]  # arrays, or ShapeDtypeStructs of an abstract model, in the order of `DecoderModel.specs`


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its tensor name in a checkpoint, its shape, a logical axis per dimension, and its type.

    A parameter of `dtype` float8_e4m3fn is an array of its bits in uint8, see `QuantizedWeight`.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    dtype: str

    @property
    def is_scale(self) -> bool:
        """Whether it is the scales of a weight of 8 bits."""
        return self.name.endswith(f".{SCALE}")

    @property
    def is_of_adapters(self) -> bool:
        """Whether adapters are put here: it is no parameter of the model itself, and no checkpoint has it."""
        return self.name.endswith(LORA)

    @property
    def scale_name(self) -> str:
        """The name of this weight's scales, if it has 8 bits."""
        return scale_beside(self.name)

    @property
    def weight_name(self) -> str:
        """The name of the weight that these scales are of."""
        return self.name.removesuffix(SCALE) + "weight"


def scale_beside(weight: str) -> str:
    """The name of the scales of the tensor `weight`."""
    return weight.removesuffix("weight") + SCALE


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """The static part: `interface.Model` for a `Decoder`. Hashes and compares by configuration and types alone."""

    config: ModelConfig
    dtype: str  # that it computes in; of the parameters, but those that have `weights_dtype`
    weights_dtype: str  # of the layers' matrices: `dtype`, or a key of EIGHT_BITS, which some of them may not have
    matmul_dtype: str  # that they are multiplied as, see `QuantizedWeight`
    kv: KVSpec
    specs: tuple[ParamSpec, ...] = field(compare=False, repr=False)
    _merge: Callable[[FlatParams], Decoder] = field(compare=False, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def context_reason(self, tokens: int) -> str:
        return self.config.context_reason(tokens)

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        return self.config.adapters

    def hidden(
        self,
        params: FlatParams,
        tokens: jax.Array,
        positions: jax.Array,
        kv: AttentionBackend,
        adapters: jax.Array | None = None,
    ) -> jax.Array:
        reaches = self.kv.dtype if jnp.dtype(self.kv.dtype).itemsize > 1 else "float32"
        return self._merge(params).hidden(tokens, positions, kv, reaches, adapters)

    def logits(self, params: FlatParams, hidden: jax.Array) -> jax.Array:
        return self._merge(params).logits(hidden)


def as_model(decoder: Decoder, *, kv_dtype: str | None = None) -> tuple[DecoderModel, FlatParams]:
    """Split a decoder, concrete or abstract, into its static part and its parameters.

    `kv_dtype` is the type of keys and values, see `KVSpec`; None: the one that the model computes in.
    """
    graph, state = nnx.split(decoder)
    flat = nnx.to_flat_state(state)
    specs = tuple(
        ParamSpec(_name(path), tuple(variable.shape), variable.axes, _dtype(variable)) for path, variable in flat
    )
    leaves, leaf_tree = jax.tree.flatten(state)
    assert len(leaves) == len(specs)

    def merge(params: FlatParams) -> Decoder:
        return nnx.merge(graph, jax.tree.unflatten(leaf_tree, params))

    dtype = _dtype(decoder.embed_tokens.weight)
    matrix = _narrowest_matrix(decoder)
    config = decoder.config
    group = config.heads // config.kv_heads
    windows = tuple(config.attention_of(layer).window for layer in range(config.layers))
    windows = () if set(windows) == {None} else windows
    kv = KVSpec(
        config.layers,
        config.kv_heads,
        config.head_dim,
        kv_dtype or dtype,
        group,
        windows=windows,
        soft_cap=config.scores_soft_cap,
    )
    weights_dtype, matmul_dtype = _dtype(matrix.weight), matrix.matmul_dtype or dtype
    return DecoderModel(config, dtype, weights_dtype, matmul_dtype, kv, specs, merge), tuple(leaves)


def _narrowest_matrix(decoder: Decoder) -> Linear:
    """A matrix of 8 bits if there is one, else any. All that have 8 bits are of one type."""
    matrices = [module for _, module in nnx.iter_modules(decoder.layers) if isinstance(module, Linear)]
    return next((matrix for matrix in matrices if matrix.weight_scale is not None), matrices[0])


def _dtype(parameter: Any) -> str:
    """The type of a parameter's numbers; uint8 holds the bits of one of EIGHT_BITS."""
    held = jnp.dtype(parameter.dtype)
    return next((name for name, dtype in EIGHT_BITS.items() if dtype == held), str(held))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path if path[0] == "lm_head" else ("model", *path)))


def abstract(
    config: ModelConfig,
    dtype: str,
    *,
    kv_dtype: str | None = None,
    weights_dtype: str | None = None,
    matmul_dtype: str | None = None,
    wide: Collection[str] = (),
) -> tuple[DecoderModel, FlatParams]:
    """Model and ShapeDtypeStructs: for compiling and for planning memory without weights.

    `dtype` is "bfloat16" or "float32"; `weights_dtype` a key of EIGHT_BITS for the layers' matrices, or None: `dtype`.
    These are multiplied as `matmul_dtype`, see `QuantizedWeight`; None: `dtype`. `wide`: names of those that have
    `dtype` all the same.
    """
    return _abstract(config, dtype, kv_dtype, weights_dtype, matmul_dtype, frozenset(wide))


@lru_cache(maxsize=64)  # who loads a model or plans for one describes it several times over
def _abstract(
    config: ModelConfig,
    dtype: str,
    kv_dtype: str | None,
    weights_dtype: str | None,
    matmul_dtype: str | None,
    wide: frozenset[str],
) -> tuple[DecoderModel, FlatParams]:
    """As `abstract`. What is returned is frozen, so that all may share it."""

    def create(shape: tuple[int, ...], kind: str) -> Any:
        if kind != "matrix" or weights_dtype is None or weights_dtype == dtype:
            return jax.ShapeDtypeStruct(shape, dtype)
        values: Any = jax.ShapeDtypeStruct(shape, EIGHT_BITS[weights_dtype])
        scale: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        return QuantizedWeight(values, scale, matmul_dtype or dtype)

    decoder = Decoder(config, create)
    for path, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear) and _name((*path, "weight")) in wide:
            module.set_weight(jax.ShapeDtypeStruct(module.shape, dtype))
    return as_model(decoder, kv_dtype=kv_dtype)
