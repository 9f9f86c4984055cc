"""JAX's interpreters for the kernels of accelerators, with race detection: what all tests of these kernels run in.

    tpu_interpreter    `pallas_tpu`, `pallas_tpu_write`, `pallas_tpu_pages`, `pallas_tpu_int4`: memory starts as NaN
    gpu_interpreter    `mosaic_hopper`, `mosaic_mma`, `mosaic_int4`: JAX 0.12 or newer

Each leaves out what its interpreter does not know, and puts something equal in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxctx_kernels import QuantizedKV, kv_values, pallas_tpu_write

Dma: TypeAlias = Literal["eager", "on_wait"]
"""When the TPU's interpreter carries out a copy."""

OLDEST_JAX_FOR_GPU = (0, 12)  # 0.11's refuses barriers that not every warpgroup waits for to the last


# TPU


@contextmanager
def tpu_interpreter(dma: Dma = "on_wait", run_kernel: Callable[..., Any] | None = None) -> Iterator[None]:
    """Interpret the TPU's kernels. Raises AssertionError at the end if two copies raced.

    `run_kernel`: in place of that of `pallas_tpu_write`; if it is not given, its own, with pages of words.
    """
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode=dma, out_of_bounds_reads="raise"
    )
    written = mock.patch.object(pallas_tpu_write, "run_kernel", run_kernel or run_with_words)
    try:
        with written, pltpu.force_tpu_interpret_mode(params):
            yield
        assert not found_races(), "races_found"
    finally:
        interpreter.reset_tpu_interpret_mode_state()  # an exception leaves it behind, for all who come after


def found_races() -> bool:
    """Whether copies of what was interpreted last raced."""
    return interpreter.races is not None and bool(interpreter.races.races_found)


_run_kernel = pallas_tpu_write.run_kernel


def run_with_words(plan: Any, rows: Any, pages: Any) -> Any:
    """`pallas_tpu_write.run_kernel`, with pages of words: the interpreter cannot look at narrower numbers as words."""
    dtype = kv_values(pages[0]).dtype
    words = tuple(_with_values(each, to_words(kv_values(each))) for each in pages)
    written = _run_kernel(plan, rows, words)
    return tuple(_with_values(each, from_words(kv_values(each), dtype)) for each in written)


def to_words(values: jax.Array) -> jax.Array:
    """uint32 `[heads, pages, word rows, lanes]`: as the TPU has it, the first token in the lowest bits."""
    heads, pages, page_size, lanes = values.shape
    tokens = 4 // values.dtype.itemsize
    if tokens == 1:
        return jax.lax.bitcast_convert_type(values, jnp.uint32)
    by_word = values.reshape(heads, pages, page_size // tokens, tokens, lanes).swapaxes(3, 4)
    return jax.lax.bitcast_convert_type(by_word, jnp.uint32)


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_words`."""
    numbers = jax.lax.bitcast_convert_type(words, dtype)
    if numbers.ndim == words.ndim:
        return numbers
    heads, pages, rows, lanes, tokens = numbers.shape
    return numbers.swapaxes(3, 4).reshape(heads, pages, rows * tokens, lanes)


def _with_values(pages: Any, values: jax.Array) -> Any:
    return QuantizedKV(values, pages.scales) if isinstance(pages, QuantizedKV) else values


# GPU


@contextmanager
def gpu_interpreter(*, in_registers: bool = False) -> Iterator[None]:
    """Interpret the kernels for GPUs. A race is an exception of what is interpreted.

    `in_registers`: the Hopper kernel keeps queries, weights and outputs in registers, as on a GPU, by products that the
    interpreter knows, and by the plain operations beside inline code. Else it has them in shared memory. `mma` is a
    product of float32.
    """
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxctx_kernels import hopper_registers, mosaic_hopper, mosaic_int4

    _register_mma()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mosaic_int4, "IN_REGISTERS", False))
        stack.enter_context(mock.patch.object(mosaic_hopper, "IN_REGISTERS", in_registers))
        if in_registers:
            product = _product_in_registers(mosaic_hopper.product)
            stack.enter_context(mock.patch.object(mosaic_hopper, "product", product))
            stack.enter_context(mock.patch.object(mosaic_hopper, "accumulated", _accumulated(product)))
            for inline in (hopper_registers.widened_int8, hopper_registers.shrunk):
                plain = partial(_without_inline_code, inline)
                stack.enter_context(mock.patch.object(mosaic_hopper, inline.__name__, plain))
        stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)))
        try:
            yield
        finally:
            reset_gpu_interpret_mode_state()  # what failed is still there


def _without_inline_code(inline: Callable[..., Any], *of: Any, in_registers: bool) -> Any:
    """What the plain operations beside a function's inline code compute."""
    assert in_registers
    return inline(*of, in_registers=False)


def _register_mma() -> None:
    """Let the interpreter multiply `mma`'s operands, which no test can tell from what a tensor core does."""
    from jax._src.interpreters import mlir
    from jax._src.pallas.mosaic_gpu import primitives

    def multiply(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        product: jax.Array = acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return product

    mlir.register_lowering(primitives.mma_p, mlir.lower_fun(multiply, multiple_results=False), platform="cpu")


def _product_in_registers(of_shared_memory: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`mosaic_hopper.product`, whose left operand may be in registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def product(a: Any, b: Any, columns: int) -> jax.Array:
        if not isinstance(a, jax.Array):
            return of_shared_memory(a, b, columns)
        right = b[...]
        plgpu.commit_smem()  # a GPU's products read as copies write; this read has to be ordered before them
        multiplied: jax.Array = jnp.dot(a.astype(jnp.float32), right.astype(jnp.float32))
        return multiplied

    return product


def _accumulated(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`mosaic_hopper.accumulated`, of products in registers."""

    def accumulated(start: jax.Array, a: Any, b: Any) -> jax.Array:
        return start + product(a, b, start.shape[1])

    return accumulated
