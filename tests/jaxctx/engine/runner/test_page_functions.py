"""Functions of whole pages, against the same in numpy: layers in one array and layers apart, plain pages and 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.runner.page_functions import (
    copy_pages,
    host_sharding,
    ids_in_layers,
    page_struct,
    read_pages,
    write_pages,
)
from jaxctx.engine.runner.step import KVCache, Pools
from jaxctx_kernels import kv_pages_struct

LAYERS, HEADS, PAGES, PAGE_SIZE, HEAD_DIM = 3, 2, 6, 4, 8


def make_pools(*, together: bool, dtype: str = "float32") -> Pools:
    """Pools in which every number is another one, as far as the type has so many."""
    pages = PAGES * LAYERS if together else PAGES
    struct = kv_pages_struct(HEADS, pages, PAGE_SIZE, HEAD_DIM, dtype, "cpu")
    source = np.random.default_rng(1)

    def filled(array: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(source.integers(0, 100, array.shape).astype(array.dtype))

    count = 1 if together else LAYERS
    return tuple(KVCache(jax.tree.map(filled, struct), jax.tree.map(filled, struct)) for _ in range(count))


def by_layer(pools: Pools) -> np.ndarray:
    """Plain pools as `[layers, 2, kv_heads, pages, page_size, head_dim]`."""
    arrays = np.stack([np.stack([np.asarray(cache.k), np.asarray(cache.v)]) for cache in pools])
    apart = arrays.reshape(len(pools), 2, HEADS, LAYERS // len(pools), PAGES, PAGE_SIZE, HEAD_DIM)
    return np.moveaxis(apart, 3, 1).reshape(LAYERS, 2, HEADS, PAGES, PAGE_SIZE, HEAD_DIM)


@pytest.mark.parametrize("together", [True, False])
def test_ids_are_those_of_each_layer(together: bool) -> None:
    ids = ids_in_layers(make_pools(together=together), LAYERS, jnp.array([2, 5]))
    assert ids.tolist() == ([2, 5, 8, 11, 14, 17] if together else [2, 5])


@pytest.mark.parametrize("together", [True, False])
def test_pages_are_read_copied_and_written_in_all_layers(together: bool) -> None:
    pools = make_pools(together=together)
    before = by_layer(pools)
    read = read_pages(LAYERS, pools, jnp.array([4, 1]), kernel="reference")
    for page, number in zip(read, (4, 1), strict=True):
        np.testing.assert_array_equal(page, before[:, :, :, number])
    copied = copy_pages(LAYERS, pools, jnp.array([[1, 2], [2, 3]]), kernel="reference")
    expected = before.copy()
    expected[:, :, :, [2, 3]] = before[:, :, :, [1, 2]]  # both are read before any is written
    np.testing.assert_array_equal(by_layer(copied), expected)
    place = jax.tree.leaves(pools)[0].sharding
    written = write_pages(LAYERS, pools, jnp.array([5, 0]), read, (place, place), kernel="reference")
    expected = before.copy()
    expected[:, :, :, [5, 0]] = before[:, :, :, [4, 1]]
    np.testing.assert_array_equal(by_layer(written), expected)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_pages_of_every_type_come_back_to_the_bit(together: bool, dtype: str) -> None:
    pools = make_pools(together=together, dtype=dtype)
    pages, place = jnp.array([3, 1, 4]), jax.tree.leaves(pools)[0].sharding
    read = read_pages(LAYERS, pools, pages, kernel="reference")
    struct = page_struct(LAYERS, pools)
    assert {(page.shape, page.dtype) for page in read} == {(struct.shape, struct.dtype)}
    emptied = jax.tree.map(jnp.zeros_like, pools)
    loaded = write_pages(LAYERS, emptied, pages, read, (place, place), kernel="reference")
    again = read_pages(LAYERS, loaded, pages, kernel="reference")
    for page, expected in zip(again, read, strict=True):
        assert np.asarray(page).tobytes() == np.asarray(expected).tobytes()


def test_a_page_lies_in_host_memory_where_the_device_reaches_it() -> None:
    sharding = jax.tree.leaves(make_pools(together=True))[0].sharding
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    kind = host_sharding(sharding).memory_kind
    assert kind == ("pinned_host" if "pinned_host" in kinds else sharding.memory_kind)
