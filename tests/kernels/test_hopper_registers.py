"""Arithmetic that the Hopper kernel emits as code, done by numpy to all bit patterns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 12):
    pytest.skip("the Hopper kernel's tests need JAX 0.12 or newer", allow_module_level=True)

from jaxctx_kernels import hopper_registers
from jaxctx_kernels.hopper_registers import INT8_UNIT, widened_words

Words = np.ndarray[Any, np.dtype[np.uint32]]
BFLOAT16 = np.dtype(jnp.bfloat16)


class NumpyOperations:
    """`WordOperations` as PTX defines prmt.b32, xor.b32 and fma.rn.bf16x2, on arrays of words."""

    def xor(self, word: Words, constant: int) -> Words:
        return word ^ np.uint32(constant)

    def permute(self, word: Words, selector: int) -> Words:
        choice = np.concatenate([word[:, None].view(np.uint8), np.zeros((len(word), 4), np.uint8)], axis=1)
        order = [selector >> 4 * digit & 0xF for digit in range(4)]
        return np.ascontiguousarray(choice[:, order]).view(np.uint32)[:, 0]

    def multiply_add(self, word: Words, factor: int, addend: int) -> Words:
        """In float64, which is exact here, so that it is rounded once."""
        numbers = word[:, None].view(BFLOAT16).astype(np.float64)
        by, plus = (np.array([bits], np.uint32).view(BFLOAT16).astype(np.float64) for bits in (factor, addend))
        return (numbers * by + plus).astype(BFLOAT16).view(np.uint32)[:, 0]


@pytest.mark.parametrize("place", range(4))
def test_every_int8_is_widened_exactly(rng: np.random.Generator, place: int) -> None:
    """At each place of a word, whatever is beside it."""
    numbers = rng.integers(-128, 128, (256, 4)).astype(np.int8)
    numbers[:, place] = np.arange(-128, 128)
    low, high = widened_words(numbers.view(np.uint32)[:, 0], NumpyOperations())
    got = np.stack([low, high], 1).view(BFLOAT16).astype(np.float64)
    np.testing.assert_array_equal(got, numbers / INT8_UNIT)


def test_the_interpreters_path_gives_the_same_numbers() -> None:
    numbers = np.arange(-128, 128).astype(np.int8)
    words = np.stack(widened_words(numbers.view(np.uint32), NumpyOperations()), 1).reshape(-1)
    plain = hopper_registers.widened_int8(jnp.asarray(numbers)[None], layout=None, in_registers=False)
    np.testing.assert_array_equal(np.asarray(plain).view(np.uint32)[0], words)
