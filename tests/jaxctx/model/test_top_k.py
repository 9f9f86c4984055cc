"""The best k of each row: what numpy's sort finds, to the bit, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxctx.model.sharding import EVERY_DEVICE
from jaxctx.model.top_k import GPU_BLOCK, TPU_BLOCK, top_k, top_k_by_blocks

ROWS = 3
SIZES = [65, 5000]  # less than a block of each of the best, and many blocks of which the last is not whole
MORE_SIZES = [1, 7, 63, 64, 1000, 4096, 4096 + 64 * 7, 12_347, 20 * 64 + 1, 64 * 128 + 1]
NAN, INFINITY = np.float32(np.nan), np.float32(np.inf)


def expected(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """By a stable sort of the bits, so that neither NaN nor the sign of zero is lost."""
    bits = x.view(np.int32).astype(np.int64)
    ascending = np.where(bits < 0, -(2**31) - 1 - bits, bits)  # as the floats do, in IEEE 754's total order
    ids = np.argsort(-ascending, axis=1, kind="stable")[:, :k].astype(np.int32)
    return np.take_along_axis(x, ids, axis=1), ids


def rows_of(kind: str, size: int, seed: int) -> np.ndarray:
    """float32 `[ROWS, size]` of one kind."""
    rng = np.random.default_rng([seed, size])
    x = rng.normal(size=(ROWS, size)).astype(np.float32)
    match kind:
        case "random":
            return x
        case "tied":
            return np.round(x)
        case "flat":
            return np.full_like(x, -0.25)
        case "ascending":
            return np.sort(x, axis=1)
        case "masked":  # few tokens allowed
            return np.where(rng.random(x.shape) < 0.004, x, -INFINITY)
        case "all masked":
            return np.full_like(x, -INFINITY)
        case "zeros":
            return np.where(rng.random(x.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
        case "special":
            values = np.array([NAN, -NAN, INFINITY, -INFINITY, 0.0, -0.0, 1e-45, 3.0], np.float32)
            return values[rng.integers(len(values), size=x.shape)]
        case "all negative NaN":  # what comes last of all, as the padding of the last block does
            return np.full_like(x, -1).view(np.int32).__or__(0x7FFFFFFF).view(np.float32)
    raise ValueError(kind)


KINDS = ("random", "tied", "flat", "ascending", "masked", "all masked", "zeros", "special", "all negative NaN")


def assert_best(found: tuple[jax.Array, jax.Array], x: np.ndarray, k: int) -> None:
    """Ids and numbers are the expected ones, bit by bit."""
    numbers, ids = expected(x, k)
    assert found[1].dtype == jnp.int32
    np.testing.assert_array_equal(found[1], ids)
    np.testing.assert_array_equal(np.asarray(found[0]).view(np.int32), numbers.view(np.int32))


by_blocks = jax.jit(top_k_by_blocks, static_argnums=(1, 2))


@pytest.mark.parametrize("block", [GPU_BLOCK, TPU_BLOCK])
@pytest.mark.parametrize("size", SIZES + [pytest.param(size, marks=pytest.mark.slow) for size in MORE_SIZES])
def test_blocks_find_what_a_sort_finds(size: int, block: int) -> None:
    for k in {min(20, size), min(64, size)}:
        for kind in KINDS:
            x = rows_of(kind, size, k)
            assert_best(by_blocks(x, k, block), x, k)


def test_one_alone_is_the_first_of_the_greatest() -> None:
    for kind in KINDS:
        x = rows_of(kind, 300, 5)
        assert_best(by_blocks(x, 1, GPU_BLOCK), x, 1)


def test_this_device_finds_what_a_sort_finds() -> None:
    for kind in KINDS:
        x = rows_of(kind, 1000, 0)
        assert_best(jax.jit(top_k, static_argnums=1)(x, 20), x, 20)


def test_the_best_of_one_block_are_all_found() -> None:
    """All of the best in one block, and one in each of many."""
    size, k = 5000, 20
    for kind in KINDS:
        together = rows_of(kind, size, 1)
        together[:, 640 : 640 + k] = 1e6 + np.arange(k, dtype=np.float32)
        apart = rows_of(kind, size, 2)
        apart[:, np.arange(k) * 129 + 5] = 1e6
        for x in (together, apart):
            assert_best(by_blocks(x, k, GPU_BLOCK), x, k)


@pytest.mark.parametrize("size", [8, 300, pytest.param(8192, marks=pytest.mark.slow)])
def test_split_rows_have_the_same_best(size: int) -> None:
    """Of rows of 300 all 20 may lie on one device; of rows of 8 no device has as many as are asked for."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2, 1), EVERY_DEVICE, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    k = min(20, size)
    find = jax.jit(lambda x: top_k(x, k, mesh))
    for kind in KINDS:
        x = rows_of(kind, size, 3)
        for spec in (PartitionSpec(None, EVERY_DEVICE), PartitionSpec()):
            assert_best(find(jax.device_put(x, NamedSharding(mesh, spec))), x, k)


def test_rows_that_devices_do_not_divide_are_not_split() -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2, 1), EVERY_DEVICE, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    x = rows_of("tied", 301, 4)
    assert_best(jax.jit(lambda x: top_k(x, 20, mesh))(x), x, 20)


def test_a_mesh_of_two_axes_splits_rows_over_both() -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("one", "other"))
    x = rows_of("tied", 300, 6)
    assert_best(jax.jit(lambda x: top_k(x, 20, mesh))(x), x, 20)
