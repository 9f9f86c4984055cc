import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxctx.model.products import FEW_ROWS, project, project_and_sum


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS + 1])
def test_devices_send_each_other_products_of_the_weights_type(rows: int, dtype: str) -> None:
    """Two: the sum of both, rounded once more in bfloat16; and as a sum of float32 where weights are that."""
    mesh = jax.make_mesh((1, 2), ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(rows)
    x, weight = jnp.asarray(rng.normal(size=(rows, 96))), jnp.asarray(rng.normal(size=(40, 96)), dtype)
    summed = jax.jit(lambda x, weight: project_and_sum(x, weight, mesh))(x, weight)
    products = [jax.jit(project)(x[:, half], weight[:, half]) for half in (slice(48), slice(48, 96))]
    first, second = (np.asarray(product.astype(dtype), np.float32) for product in products)
    want = jnp.asarray(first + second).astype(dtype)
    assert summed.dtype == jnp.float32
    np.testing.assert_array_equal(summed, np.asarray(want, np.float32))


def test_one_device_rounds_nothing() -> None:
    one = jax.make_mesh((1, 1), ("kv", "group"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    rng = np.random.default_rng(2)
    x, weight = jnp.asarray(rng.normal(size=(5, 96))), jnp.asarray(rng.normal(size=(40, 96)), "bfloat16")
    for mesh in (one, None):
        np.testing.assert_array_equal(project_and_sum(x, weight, mesh), project(x, weight))
