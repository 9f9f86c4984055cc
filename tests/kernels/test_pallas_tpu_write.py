"""Writing rows on TPU, in Pallas's TPU interpreter, against `write_kv`: races are errors, memory starts as NaN.

The interpreter does not know how to look at bfloat16 or 8 bits as words of 32, which the kernel does. So it is given
pages that are words already, and what it writes is taken apart again. That the compiler takes the kernel is a matter of
the compile checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxctx_kernels import QuantizedKV, kv_pages_struct, kv_values, pallas_tpu_write, read_pages, write_kv, write_rows

Generator = np.random.Generator
run_kernel = pallas_tpu_write.run_kernel


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


def with_values(pages: Any, values: jax.Array) -> Any:
    return QuantizedKV(values, pages.scales) if isinstance(pages, QuantizedKV) else values


def run_with_words(plan: Any, rows: Any, pages: Any) -> Any:
    """`run_kernel`, with pages of words."""
    dtype = kv_values(pages[0]).dtype
    words = tuple(with_values(each, to_words(kv_values(each))) for each in pages)
    return tuple(with_values(each, from_words(kv_values(each), dtype)) for each in run_kernel(plan, rows, words))


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pallas_tpu_write, "run_kernel", run_with_words)
    yield
    interpreter.reset_tpu_interpret_mode_state()  # an exception leaves it behind, for all who come after


@dataclass(frozen=True)
class Case:
    """Pages of one layout, and how many rows go there."""

    rows: int = 40
    page_size: int = 16
    heads: int = 2
    dim: int = 128
    dtype: str = "bfloat16"
    pages: int = 12
    dma: Literal["eager", "on_wait"] = "on_wait"  # when the interpreter carries out a copy

    def filled(self, rng: Generator) -> Any:
        """Pages with something in every slot, and where there are spare lanes of scales also there."""
        struct = kv_pages_struct(self.heads, self.pages, self.page_size, self.dim, self.dtype, "tpu")
        pages = jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), struct)
        return write_kv(pages, self.random_rows(rng, self.pages * self.page_size), jnp.arange(self.pages * self.page_size))

    def random_rows(self, rng: Generator, count: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(count, self.heads, self.dim)), jnp.bfloat16)

    def check(self, rng: Generator, slots: np.ndarray, k: Any = None, v: Any = None) -> None:
        """Every page but the scratch page is the same, to the bit, as `write_kv` leaves it."""
        k_pages, v_pages = self.filled(rng), self.filled(rng)
        k = self.random_rows(rng, len(slots)) if k is None else k
        v = self.random_rows(rng, len(slots)) if v is None else v
        given = jnp.asarray(slots, jnp.int32)
        params = pltpu.InterpretParams(
            detect_races=True, uninitialized_memory="nan", dma_execution_mode=self.dma, out_of_bounds_reads="raise"
        )
        with pltpu.force_tpu_interpret_mode(params):
            got = jax.jit(lambda *args: write_rows(*args, kernel="tpu"))(k_pages, v_pages, k, v, given)
            jax.block_until_ready(got)
        assert not interpreter.races.races_found
        every = jnp.arange(1, self.pages)
        for written, pages, rows in zip(got, (k_pages, v_pages), (k, v), strict=True):
            want = write_kv(pages, rows, given)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a[:, 1:]), bits(b[:, 1:])), written, want)
            np.testing.assert_array_equal(bits(read_pages(written, every)), bits(read_pages(want, every)))

    def slots(self, rng: Generator, count: int | None = None) -> np.ndarray:
        """Random, none twice, none of the scratch page."""
        return rng.permutation(np.arange(self.page_size, self.pages * self.page_size))[: count or self.rows]


def bits(array: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize(
    "case",
    [Case(), Case(dtype="float32", rows=9), Case(dtype="int8", page_size=32, pages=6), Case(dim=64, dtype="int8", heads=4), Case(dtype="float8_e4m3fn", rows=11)],
    ids=str,
)
def test_random_slots(rng: Generator, case: Case) -> None:
    case.check(rng, case.slots(rng))
