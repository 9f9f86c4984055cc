"""Weights in 8 bits: scales, rounding, and what becomes of rows that are special."""

import ml_dtypes
import numpy as np
import pytest

from jaxctx.model.weights import quantize as module
from jaxctx.model.weights.quantize import LARGEST, float8_bits, quantize


def steps(values, dtype):
    """Half the distance of each value to its neighbours, before it is scaled."""
    if dtype == "int8":
        return np.full(values.shape, 0.5)
    magnitude = np.maximum(np.abs(values.astype(np.float32)), 2.0**-6)
    return 2.0 ** (np.floor(np.log2(magnitude)) - 3) / 2


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", LARGEST)
def test_every_weight_is_within_half_a_step(monkeypatch, dtype, stored):
    monkeypatch.setattr(module, "AT_ONCE", 100)  # parts of two rows, and a last one of one
    weight = (
        np.random.default_rng(0)
        .normal(size=(7, 50))
        .astype(np.dtype(stored) if stored != "bfloat16" else ml_dtypes.bfloat16)
    )
    values, scale = quantize(weight, dtype)
    assert (values.dtype, values.shape) == (np.dtype(dtype) if dtype == "int8" else ml_dtypes.float8_e4m3fn, (7, 50))
    assert (scale.dtype, scale.shape) == (np.float32, (7,))
    wide = weight.astype(np.float32)
    np.testing.assert_array_equal(scale, np.abs(wide).max(1) / LARGEST[dtype])
    error = np.abs(values.astype(np.float32) - wide / scale[:, None])
    assert (error <= steps(values, dtype) * (1 + 1e-5)).all()
    assert error.max() > 0
    assert (np.abs(values.astype(np.float32)).max(1) == LARGEST[dtype]).all()  # the greatest of each row


def test_halves_go_to_the_even_neighbour():
    row = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    assert quantize(row, "int8")[0].tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    row = np.array([[448, 17, 19, -17, -19, 2**-10, 3 * 2**-10]], np.float32)
    values, scale = quantize(row, "float8_e4m3fn")
    assert scale == [1]
    assert values.astype(np.float32).tolist() == [[448, 16, 20, -16, -20, 0, 2**-8]]


def test_float8_is_rounded_as_ml_dtypes_does_it():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(sign * np.inf)) for sign in (1, -1)]
    random = np.random.default_rng(0).uniform(-1, 1, 10_000).astype(np.float32)
    numbers = np.concatenate([every, middles, *beside, random, 448 * random, np.float32([0.0, -0.0, 1e-40, -1e-40])])
    np.testing.assert_array_equal(float8_bits(numbers), numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 1e38])
def test_rows_of_zeros_and_of_the_smallest_and_greatest_numbers_stay_finite(dtype, value):
    weight = np.array([[value, -value, 0.0], [1.0, 0.5, 0.0]], np.float32)
    values, scale = quantize(weight, dtype)
    assert np.isfinite(scale).all()
    assert (scale >= np.finfo(np.float32).tiny).all()
    back = values.astype(np.float32) * scale[:, None]
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[0], weight[0], rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(back[1], weight[1], atol=0.01)
