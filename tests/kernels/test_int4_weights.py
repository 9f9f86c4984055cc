"""Products with weights of 4 bits: the layout, and every kernel against float64 on random weights."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import int4_weights
from jaxctx_kernels.int4_weights import multiply, pack, select_product, unpack, why_not_packed
from tests.kernels.interpreters import OLDEST_JAX_FOR_GPU, gpu_interpreter, tpu_interpreter

INTERPRETERS = {"reference": nullcontext, "tpu": tpu_interpreter, "gpu": gpu_interpreter}
needs_gpu_interpreter = pytest.mark.skipif(
    jax.__version_info__ < OLDEST_JAX_FOR_GPU, reason="JAX's interpreter for GPUs is too old"
)


def weight(seed, out, inside, group, zeros=True):
    """Words, scales, the weight `[in, out]` in float64, and what it would be of codes that are 144 from their zeros."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (out, inside), dtype=np.uint8)
    parts = [random.uniform(0.5, 2, (inside // group, out)) / np.sqrt(inside)]
    parts += [random.integers(0, 16, (inside // group, out))] if zeros else []
    scales = np.stack(parts).astype(np.float32)
    zero = scales[1] if zeros else np.full_like(scales[0], 8)
    wide = (codes.T.reshape(len(zero), group, out) - zero[:, None].astype(np.float64)) * scales[0][:, None]
    return jnp.asarray(pack(codes)), jnp.asarray(scales), wide.reshape(inside, out), scales[0].repeat(group, 0) * 144


def rows_of(seed, rows, inside):
    """Of which one input is far larger than all others, and none is 0 on average, as activations are."""
    x = np.random.default_rng(seed).normal(0.3, 1, (rows, inside))
    x[:, inside // 3] *= 100
    return jnp.asarray(x, jnp.bfloat16)


def test_a_word_has_the_codes_of_a_chunk_that_the_layout_says():
    codes = np.zeros((128, 256), np.uint8)
    codes[5, 128 + 32 * 2 + 2 * 7 + 1] = 0xB
    words = pack(codes)
    assert words.shape == (32, 128)
    assert words[16 + 7, 5].view(np.uint32) == 0xB << (4 * 2 + 16)
    assert np.count_nonzero(words) == 1


def test_unpacking_is_the_inverse():
    codes = np.random.default_rng(0).integers(0, 16, (200, 256), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(unpack(jnp.asarray(pack(codes)))).T, codes)


CASES = [  # rows, outputs, inputs, group, zeros
    (3, 128, 256, 128, True),
    (17, 256, 128, 64, False),
    (1, 128, 384, 32, True),
]
LONG = [
    (70, 384, 256, 128, False),
    (40, 128, 640, 64, True),
    (300, 128, 128, 32, False),
    (3, 128, 66 * 128, 128, True),  # chunks that come one after the other: on a GPU 11, on a TPU two blocks of 33
]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)], ids=str)
@pytest.mark.parametrize("kernel", ["reference", "tpu", pytest.param("gpu", marks=needs_gpu_interpreter)])
def test_products_are_those_of_the_wide_weight(kernel, case):
    rows, out, inside, group, zeros = case
    words, scales, wide, offsets = weight(sum(case), out, inside, group, zeros)
    x = rows_of(rows, rows, inside)
    with INTERPRETERS[kernel]():
        found = np.asarray(multiply(x, words, scales, kernel))
    exact = np.asarray(x, np.float64)
    off, terms = np.abs(found - exact @ wide), np.abs(exact) @ np.abs(wide)
    of_float32 = np.abs(exact) @ offsets * 2**-21  # what adding up in float32 may come to
    if kernel == "tpu" and group < 128:  # weights are rounded to bfloat16
        np.testing.assert_array_less(off, terms * 2**-8 + of_float32)
        assert off.mean() < terms.mean() * 2**-10
    else:
        np.testing.assert_array_less(off, of_float32)


def test_rows_are_rounded_to_bfloat16():
    words, scales, wide, _ = weight(1, 128, 128, 128)
    x = np.full((1, 128), 1 + 2**-12, np.float32)
    np.testing.assert_allclose(multiply(x, words, scales, "reference")[0], wide.sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((128, 128, 32), ""),
        ((1024, 4096, 4096), ""),
        ((128, 96, 32), "96 inputs are not a multiple of 128"),
        ((64, 128, 32), "64 outputs are not a multiple of 128"),
        ((128, 128, 16), "groups of 16 inputs are none of 32, 64, 128 or a multiple of 128"),
        ((128, 384, 96), "groups of 96 inputs are none of 32, 64, 128 or a multiple of 128"),
    ],
)
def test_what_kernels_take(shape, why):
    assert why_not_packed(*shape) == why


@pytest.mark.parametrize(
    ("words", "groups", "inside", "why"),
    [
        ((16, 64), 1, 128, "64 outputs are not a multiple of 128"),
        ((32, 128), 2, 128, "128 inputs, and a weight of 256 in groups of 128"),
        ((32, 128), 1, 256, "256 inputs, and a weight of 256 in groups of 256"),
    ],
)
def test_what_no_kernel_takes_is_refused(words, groups, inside, why):
    with pytest.raises(ValueError, match=why):
        multiply(jnp.zeros((1, inside)), jnp.zeros(words, jnp.int32), jnp.zeros((1, groups, words[1])), "tpu")


def device(platform, capability=""):
    return SimpleNamespace(platform=platform, compute_capability=capability)


@pytest.mark.parametrize(
    ("place", "kernel"),
    [
        (device("tpu"), "tpu"),
        (device("gpu", "8.0"), "gpu"),
        (device("gpu", "12.0"), "gpu"),
        (device("gpu", "7.5"), None),
        (device("gpu", "gfx942"), None),
        (device("cpu"), None),
    ],
)
def test_each_device_has_its_kernel_or_a_reason(monkeypatch, place, kernel):
    monkeypatch.setattr(int4_weights, "OLDEST_JAX", (0, 1))
    found = select_product(place)
    assert found.kernel == kernel
    assert (found.why_no_kernel == "") == (kernel is not None)


def test_an_older_jax_has_none(monkeypatch):
    monkeypatch.setattr(int4_weights, "OLDEST_JAX", (9, 0, 0))
    assert select_product(device("tpu")).why_no_kernel.startswith("it needs JAX 0.11.2 or newer")
