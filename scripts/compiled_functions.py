"""What `compile_checks.py` compiles: names, and how each is lowered for chips that need not be there.

Nothing is allocated: all arguments are shapes. A name begins with "step", "short step" (of two layers of qwen3-0.6b, or
of the model that is named), "published step" (of a layer of each kind that a published model has), "write", "product",
"page copy", "page save", "page load" (of two layers) or "kernel".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from published_models import PUBLISHED

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.default_sizes import default_page_size
from jaxctx.engine.plan.mesh_plan import described_on
from jaxctx.engine.runner.compiled_model import MAX_PAGES_PER_CALL, CompiledModel, StateFunction
from jaxctx.model.config import SHAPES, AdapterSlots, ModelConfig
from jaxctx.model.functional import Int4Form, abstract
from jaxctx.model.registry import from_hf
from jaxctx.model.sharding import make_mesh
from jaxctx.model.weights import read_config
from jaxctx_kernels import (
    KernelChoice,
    KVPages,
    attend,
    kv_pages_struct,
    metadata_shape,
    select_kernel,
    unpack_metadata,
    write_rows,
)
from jaxctx_kernels.int4_weights import ProductKernel, multiply, select_product

Changes = Mapping[str, Any]
WHOLE_STEPS = (("qwen3-0.6b", 16), ("llama-3.1-8b", 512))  # models and rows: decoding, and the largest
SHORT: Changes = {"layers": 2}  # of a model of which a step is counted: all layers are alike
INT4 = (128, True)  # inputs of a group, and whether there are zeros: AWQ
PRODUCTS = ((16, 128, True), (16, 32, False), (512, 128, True))  # of 4 bits, by themselves: rows, and as above
PRODUCT = (4096, 14336)  # inputs and outputs: the feed-forward block of llama-3.1-8b
EIGHT_BIT_WEIGHTS = ((16, "int8"), (512, "float8_e4m3fn"))  # rows and types of short steps
WITH_EXPERTS = (("mixtral-8x7b", None), ("qwen3-30b-a3b", None), ("qwen3-30b-a3b", "int8"))
"""Models, and types of their weights, of short steps: a few large experts, and many small ones."""
WINDOWED = ((128, 4, 1024, None), (256, 2, 1024, 50.0))  # of kernels: head_dim, group, window, soft cap
WITH_SINKS = (64, 8, 128)  # of a kernel: head_dim, group and window, as gpt-oss has them
PUBLISHED_STEPS = (
    "SmolLM2 135M",  # Llama; nine heads of 64, on three KV heads
    "Mistral 7B Instruct v0.1",
    "Qwen2.5 7B Instruct",
    "Qwen1.5 MoE A2.7B",
    "Gemma 2B",
    "Gemma 2 2B",
    "Gemma 3 1B",
    "Phi-3 mini 4k",
    "Phi-4 mini",
    "Granite 3.1 8B Instruct",
    "OLMo 3 7B",
    "SmolLM3 3B",
    "gpt-oss 20B",
)
"""Of each family whose steps are not among those above, in which a layer at least of each kind is compiled."""
PUBLISHED_ROWS = 16
PUBLISHED_TOKENS = 32768  # of the pool of such a step
ADAPTERS = AdapterSlots(8, 16)
HEAD_DIMS, PAGE_SIZES, GROUPS = (64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 8)
LAYOUTS = tuple(  # head_dim, page size, group: the first with each of the others
    dict.fromkeys(
        [(dim, size, 4) for dim in HEAD_DIMS for size in PAGE_SIZES]
        + [(dim, 64, group) for dim in HEAD_DIMS for group in GROUPS]
    )
)
KERNEL_ROWS = 64
LONG_ROWS = 256  # of a kernel in whose steps consumers have a product each
EIGHT_BITS = ((64, "int8"), (128, "int8"), (128, "float8_e4m3fn"), (256, "int8"))
WRITES = (  # dtypes, sizes of pages and rows: chunks of prompts, and decoding
    ("bfloat16", 16, 512),
    ("bfloat16", 128, 512),
    ("bfloat16", 128, 64),
    ("float32", 64, 64),
    ("int8", 16, 64),
    ("int8", 64, 64),
    ("int8", 128, 512),
    ("float8_e4m3fn", 64, 64),
)
MOVES = ("bfloat16", 16), ("bfloat16", 128), ("int8", 16), ("int8", 64), ("int8", 128), ("float8_e4m3fn", 128)
"""Types and sizes of the pages that are moved."""
MOVE_FUNCTIONS = (StateFunction.COPY_PAGES, StateFunction.SAVE_PAGES, StateFunction.LOAD_PAGES)
KV_HEADS = 8
SIZES = EngineConfig(pages=256, max_batch=32, max_batch_tokens=512, max_context_tokens=8192)  # 8B fits a v5e, just
LARGE_PAGES = replace(SIZES, pages=SIZES.pages // 8, page_size=SIZES.page_size * 8)
KERNEL_TOKENS = 32768  # of the pool of a kernel by itself


class Chips(NamedTuple):
    """What functions are compiled for."""

    one: jax.Device
    four: Sequence[jax.Device]


Lower = Callable[[Chips], jax.stages.Lowered]


def functions() -> Iterator[tuple[str, Lower]]:
    """Names, and what lowers each."""
    for model_name, rows in WHOLE_STEPS:
        yield f"step {model_name}, {rows} rows", step(model_name, rows)
    short = partial(step, "qwen3-0.6b", changes=SHORT)
    for rows in (16, 512):
        yield f"short step, {rows} rows", short(rows)
    yield "short step, 16 rows, on four chips", short(16, split=True)
    few_heads: Changes = {**SHORT, "kv_heads": 2}
    yield "short step, 2 KV heads, 16 rows, on four chips", step("qwen3-0.6b", 16, split=True, changes=few_heads)
    yield "short step, 16 rows, KV of int8", short(16, kv_dtype="int8")
    name = f"short step, 16 rows, KV of int8 in pages of {LARGE_PAGES.page_size}"
    yield name, short(16, kv_dtype="int8", sizes=LARGE_PAGES)
    for rows, dtype in EIGHT_BIT_WEIGHTS:
        yield f"short step, {rows} rows, weights of {dtype}", short(rows, weights_dtype=dtype)
    group, has_zeros = INT4
    name = f"short step llama-3.1-8b, 16 rows, weights of int4 in groups of {group}"
    yield name, step("llama-3.1-8b", 16, int4=(group, has_zeros), changes=SHORT)
    for rows, group, has_zeros in PRODUCTS:
        name = f"product of int4, {rows} rows, groups of {group}" + (", zeros" if has_zeros else "")
        yield name, product(rows, group, has_zeros)
    for model_name, weights in WITH_EXPERTS:
        name = f"short step {model_name}, 16 rows" + (f", weights of {weights}" if weights else "")
        yield name, step(model_name, 16, weights_dtype=weights, changes=SHORT)
    name = f"short step llama-3.1-8b, 16 rows, {ADAPTERS.count} adapters of rank {ADAPTERS.rank}"
    yield name, step("llama-3.1-8b", 16, changes={**SHORT, "adapters": ADAPTERS})
    for model_name in PUBLISHED_STEPS:
        yield f"published step {model_name}, {PUBLISHED_ROWS} rows", published_step(model_name, PUBLISHED_ROWS)
    for dtype, page_size, rows in WRITES:
        yield f"write {dtype}, {rows} rows, pages of {page_size}", write(dtype, page_size, rows)
    for function in MOVE_FUNCTIONS:
        for dtype, page_size in MOVES:
            yield f"{function}, {dtype}, pages of {page_size}", move(function, dtype, page_size)
        yield f"{function}, int8, pages of 128, head_dim 64", move(function, "int8", 128, {"head_dim": 64})
        yield f"{function}, int8, pages of 128, on four chips", move(function, "int8", 128, split=True)
    for dim, dtype in EIGHT_BITS:
        yield f"kernel {dtype} head_dim {dim}, pages of 16, group 4", kernel(KERNEL_ROWS, dim, 16, 4, dtype)
    for dtype in ("bfloat16", "int8"):
        name = f"kernel {dtype} head_dim 128, pages of 64, group 4, {LONG_ROWS} rows"
        yield name, kernel(LONG_ROWS, 128, 64, 4, dtype)
    for dim, group, window, soft_cap in WINDOWED:
        name = f"kernel head_dim {dim}, pages of 64, group {group}, window of {window}"
        lower = kernel(KERNEL_ROWS, dim, 64, group, window=window, soft_cap=soft_cap)
        yield name + (", soft cap" if soft_cap else ""), lower
    dim, group, window = WITH_SINKS
    name = f"kernel head_dim {dim}, pages of 64, group {group}, window of {window}, sinks"
    yield name, kernel(KERNEL_ROWS, dim, 64, group, window=window, has_sinks=True)
    for dim, page_size, group in LAYOUTS:
        yield f"kernel head_dim {dim}, pages of {page_size}, group {group}", kernel(KERNEL_ROWS, dim, page_size, group)


def kernel(
    rows: int,
    dim: int,
    page_size: int,
    group: int,
    dtype: str = "bfloat16",
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
) -> Lower:
    """Attention by itself."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        pages = KERNEL_TOKENS // page_size
        pool = kv_pages_struct(KV_HEADS, pages, page_size, dim, dtype, chips.one.platform)
        choice = required(select_kernel(chips.one, pool, group))
        longest = SIZES.max_context_tokens
        shape = metadata_shape(rows, page_size, longest, pages, choice.name, choice.processors, window)

        def run(q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array) -> jax.Array:
            output: jax.Array = attend(q, k, v, unpack_metadata(shape, packed), shape=shape, soft_cap=soft_cap)
            return output

        def run_with_sinks(q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array, sinks: jax.Array) -> jax.Array:
            metadata = unpack_metadata(shape, packed)
            output: jax.Array = attend(q, k, v, metadata, shape=shape, soft_cap=soft_cap, sinks=sinks)
            return output

        query = jax.ShapeDtypeStruct((rows, KV_HEADS * group, dim), jnp.bfloat16)
        packed = jax.ShapeDtypeStruct((shape.size(),), jnp.int32)
        if has_sinks:
            sinks = jax.ShapeDtypeStruct((KV_HEADS * group,), jnp.float32)
            return jax.jit(run_with_sinks).lower(*on(chips.one, query, pool, pool, packed, sinks))
        return jax.jit(run).lower(*on(chips.one, query, pool, pool, packed))

    return lower


def product(rows: int, group: int, has_zeros: bool) -> Lower:
    """A product with a weight of 4 bits by itself."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        kernel = int4_kernel(chips)
        inside, out = PRODUCT

        def run(x: jax.Array, words: jax.Array, scales: jax.Array) -> jax.Array:
            product: jax.Array = multiply(x, words, scales, kernel)
            return product

        x = jax.ShapeDtypeStruct((rows, inside), jnp.bfloat16)
        words = jax.ShapeDtypeStruct((inside // 8, out), jnp.int32)
        scales = jax.ShapeDtypeStruct((1 + has_zeros, inside // group, out), jnp.float32)
        return jax.jit(run).lower(*on(chips.one, x, words, scales))

    return lower


def int4_kernel(chips: Chips) -> ProductKernel:
    """What multiplies weights of 4 bits. Raises LookupError if nothing does."""
    choice = select_product(chips.one)
    if choice.kernel is None:
        raise LookupError(choice.why_no_kernel)
    return choice.kernel


def write(dtype: str, page_size: int, rows: int) -> Lower:
    """Writing the keys and values of a layer by itself."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        pool = kv_pages_struct(KV_HEADS, KERNEL_TOKENS // page_size, page_size, 128, dtype, chips.one.platform)
        name = select_kernel(chips.one, pool).name

        def run(k_pages: KVPages, v_pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> Any:
            return write_rows(k_pages, v_pages, k, v, slots, kernel=name)

        of_batch = jax.ShapeDtypeStruct((rows, KV_HEADS, 128), jnp.bfloat16)
        slots = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return jax.jit(run, donate_argnums=(0, 1)).lower(*on(chips.one, pool, pool, of_batch, of_batch, slots))

    return lower


def move(
    function: StateFunction, dtype: str, page_size: int, changes: Changes | None = None, *, split: bool = False
) -> Lower:
    """Moving 16 whole pages of an engine of two layers between steps, on one chip or split over four."""
    sizes = replace(SIZES, pages=KERNEL_TOKENS // page_size, page_size=page_size, moving_pages=MAX_PAGES_PER_CALL)

    def lower(chips: Chips) -> jax.stages.Lowered:
        program = engine("qwen3-0.6b", chips, sizes, dtype, changes={**SHORT, **(changes or {})}, split=split)
        return program.lower(function)

    return lower


def step(
    model_name: str,
    rows: int,
    *,
    split: bool = False,
    kv_dtype: str = "bfloat16",
    weights_dtype: str | None = None,
    int4: tuple[int, bool] | None = None,
    sizes: EngineConfig = SIZES,
    changes: Changes | None = None,
) -> Lower:
    """The whole step of an engine, on one chip or split over four. `changes`: of the model's configuration.

    `int4`: of weights of 4 bits, inputs of a group and whether there are zeros.
    """

    def lower(chips: Chips) -> jax.stages.Lowered:
        form = None if int4 is None else Int4Form(int4_kernel(chips), *int4)
        program = engine(
            model_name,
            chips,
            sizes,
            kv_dtype,
            weights_dtype=weights_dtype,
            int4=form,
            changes=changes or {},
            split=split,
        )
        return program.lower(next(shape for shape in program.shapes if shape.rows == rows))

    return lower


def published_step(model_name: str, rows: int) -> Lower:
    """The whole step of an engine with pages in the platform's size, for a layer of each kind that the model has."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        config = one_layer_of_each_kind(from_hf(PUBLISHED[model_name]))
        page_size = default_page_size(chips.one.platform)
        sizes = replace(
            SIZES,
            page_size=page_size,
            pages=PUBLISHED_TOKENS // page_size,
            max_context_tokens=min(SIZES.max_context_tokens, config.max_positions),
        )
        program = CompiledModel(*abstract(config, "bfloat16"), sizes, chips.one)
        required(program.kernel)
        return program.lower(next(shape for shape in program.shapes if shape.rows == rows))

    return lower


def one_layer_of_each_kind(config: ModelConfig) -> ModelConfig:
    """The model with as few layers as have all of its windows, position embeddings and feed-forward blocks."""
    kinds = dict.fromkeys(
        (config.attention_of(layer), config.experts_of(layer) is not None) for layer in range(config.layers)
    )
    dense = tuple(layer for layer, (_, has_experts) in enumerate(kinds) if not has_experts)
    return replace(
        config,
        layers=len(kinds),
        layer_attention=tuple(attention for attention, _ in kinds),
        experts=config.experts and replace(config.experts, dense_layers=dense),
    )


def engine(
    model_name: str,
    chips: Chips,
    sizes: EngineConfig,
    kv_dtype: str,
    *,
    weights_dtype: str | None = None,
    int4: Int4Form | None = None,
    changes: Changes,
    split: bool,
) -> CompiledModel:
    """All functions of an engine with a kernel, on one chip or split over four."""
    config = replace(read_config(SHAPES / model_name), **changes)
    weights_dtype = weights_dtype if int4 is None else "int4"
    model, params = abstract(config, "bfloat16", kv_dtype=kv_dtype, weights_dtype=weights_dtype, int4=int4)
    mesh = make_mesh(config, tensor=len(chips.four), devices=chips.four) if split else None
    if mesh is not None:
        params = described_on(mesh, model, params)
    program = CompiledModel(model, params, sizes, mesh or chips.one)
    required(program.kernel)
    return program


def required(choice: KernelChoice) -> KernelChoice:
    """The choice of a kernel. Raises LookupError for that of plain JAX."""
    if choice.name == "reference":
        raise LookupError(f"no kernel is chosen: {choice.why_no_kernel}")
    return choice


def on(device: jax.Device, *arguments: Any) -> tuple[Any, ...]:
    """The same ShapeDtypeStructs, on a device."""
    place = SingleDeviceSharding(device)
    moved: tuple[Any, ...] = jax.tree.map(lambda array: array.update(sharding=place), arguments)
    return moved
