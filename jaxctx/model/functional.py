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
from jaxctx.model.layers.experts import ExpertLinears
from jaxctx.model.layers.linear import PARTS, Axes, Linear
from jaxctx.model.products import Int4Weight, QuantizedWeight
from jaxctx_kernels.int4_weights import ProductKernel

EIGHT_BITS = {"int8": jnp.dtype("int8"), "float8_e4m3fn": jnp.dtype("uint8")}
"""Types of weights that have a scale for each output channel, and the type of the array that holds them."""

INT4 = "int4"
"""The type of weights that have a scale for each group of inputs; they are in words of 32 bits, see `Int4Weight`."""

SCALE = "weight_scale"
"""Last part of the name of such a scale, behind what the name of its `weight` begins with."""

LORA = (".lora_a", ".lora_b")
"""Last parts of the names of what holds adapters, see `Linear`."""

FlatParams = tuple[Any, ...]  # arrays, or ShapeDtypeStructs of an abstract model, in the order of `DecoderModel.specs`


@dataclass(frozen=True, slots=True)
class Int4Form:
    """How a model has weights of 4 bits: what multiplies them, and how many inputs share a scale, and a zero if any."""

    kernel: ProductKernel
    group: int
    has_zeros: bool


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its tensor name in a checkpoint, its shape, a logical axis per dimension, and its type.

    A parameter of `dtype` float8_e4m3fn is an array of its bits in uint8, see `QuantizedWeight`; one of INT4 of int32.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    dtype: str

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in numbers, as checkpoints have it: output channels first."""
        if self.dtype == INT4:
            return self.shape[1], 8 * self.shape[0]
        return self.shape[::-1] if self.axes[0] == PARTS else self.shape

    @property
    def is_scale(self) -> bool:
        """Whether it is the scales of a weight of 8 or of 4 bits."""
        return self.name.endswith(f".{SCALE}")

    @property
    def is_of_adapters(self) -> bool:
        """Whether adapters are put here: it is no parameter of the model itself, and no checkpoint has it."""
        return self.name.endswith(LORA)

    @property
    def scale_name(self) -> str:
        """The name of this weight's scales, if it has 8 or 4 bits."""
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
    weights_dtype: str  # of the layers' matrices: `dtype`, a key of EIGHT_BITS or INT4, which some may not have
    matmul_dtype: str  # that they are multiplied as, see `QuantizedWeight`
    product_kernel: ProductKernel | None  # of weights of 4 bits
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
        sinks=config.attention_sinks,
    )
    weights_dtype, matmul_dtype = _dtype(matrix.weight), matrix.matmul_dtype or dtype
    kernel = matrix.product_kernel if isinstance(matrix, Linear) else None  # experts have no 4 bits
    return DecoderModel(config, dtype, weights_dtype, matmul_dtype, kernel, kv, specs, merge), tuple(leaves)


def _narrowest_matrix(decoder: Decoder) -> Linear | ExpertLinears:
    """A matrix of 8 or 4 bits if there is one, else any. All that have so few are of one type."""
    modules = (module for _, module in nnx.iter_modules(decoder.layers))
    matrices = [module for module in modules if isinstance(module, Linear | ExpertLinears)]
    return next((matrix for matrix in matrices if matrix.weight_scale is not None), matrices[0])


def _dtype(parameter: Any) -> str:
    """The type of a parameter's numbers; uint8 holds the bits of one of EIGHT_BITS, int32 those of INT4."""
    held = jnp.dtype(parameter.dtype)
    if held == jnp.int32:
        return INT4
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
    int4: Int4Form | None = None,
) -> tuple[DecoderModel, FlatParams]:
    """Model and ShapeDtypeStructs: for compiling and for planning memory without weights.

    `dtype` is "bfloat16" or "float32"; `weights_dtype` a key of EIGHT_BITS for the layers' matrices, INT4, or None:
    `dtype`. Those of 8 bits are multiplied as `matmul_dtype`, see `QuantizedWeight`; None: `dtype`. `int4`: the form of
    those of 4 bits, which no expert has. `wide`: names of those that have `dtype` all the same.
    """
    return _abstract(config, dtype, kv_dtype, weights_dtype, matmul_dtype, frozenset(wide), int4)


@lru_cache(maxsize=64)  # who loads a model or plans for one describes it several times over
def _abstract(
    config: ModelConfig,
    dtype: str,
    kv_dtype: str | None,
    weights_dtype: str | None,
    matmul_dtype: str | None,
    wide: frozenset[str],
    int4: Int4Form | None,
) -> tuple[DecoderModel, FlatParams]:
    """As `abstract`. What is returned is frozen, so that all may share it."""

    def create(shape: tuple[int, ...], kind: str) -> Any:
        if kind != "matrix" or weights_dtype is None or weights_dtype == dtype:
            return jax.ShapeDtypeStruct(shape, dtype)
        if weights_dtype == INT4:
            return jax.ShapeDtypeStruct(shape, dtype) if int4 is None or len(shape) != 2 else _int4_weight(shape, int4)
        values: Any = jax.ShapeDtypeStruct(shape, EIGHT_BITS[weights_dtype])
        scale: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        return QuantizedWeight(values, scale, matmul_dtype or dtype)

    decoder = Decoder(config, create)
    for path, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear | ExpertLinears) and _name((*path, "weight")) in wide:
            module.set_weight(jax.ShapeDtypeStruct(module.shape, dtype))
    return as_model(decoder, kv_dtype=kv_dtype)


def _int4_weight(shape: tuple[int, ...], form: Int4Form) -> Int4Weight:
    """A weight `[out, in]` of this form, of ShapeDtypeStructs."""
    out, inside = shape
    words: Any = jax.ShapeDtypeStruct((inside // 8, out), jnp.int32)
    scales: Any = jax.ShapeDtypeStruct((1 + form.has_zeros, inside // form.group, out), jnp.float32)
    return Int4Weight(words, scales, form.kernel)
