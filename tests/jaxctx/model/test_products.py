import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.products import FEW_ROWS, project


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 3, 4, 17, FEW_ROWS, FEW_ROWS + 1])
def test_products_of_few_rows_and_of_many_are_the_same(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 96)), dtype)
    weight = jnp.asarray(rng.normal(size=(40, 96)), dtype)
    product = jax.jit(project)(x, weight)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 31, 40, 96, 1024, 3072, 31 * 64, 37 * 32, 64 * 33])
def test_one_row_is_summed_whole_whatever_its_size(size: int) -> None:
    """One vector, vectors narrower than usual, as many as a loop adds at most, and more that divide well or badly."""
    rng = np.random.default_rng(size)
    x, weight = (jnp.asarray(rng.normal(size=shape), "bfloat16") for shape in ((1, size), (5, size)))
    product = jax.jit(project)(x, weight)
    assert product.shape == (1, 5)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(product, want, rtol=1e-5, atol=1e-4)
