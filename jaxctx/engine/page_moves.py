"""Page moves: whole pages of all layers, copied on the device, read out of it and written into it.

The functions are traced once by `device`, which says how many pages one call takes; page 0 is scratch and pads. Outside
the pools a page is one array of the dtype in which the pools store it, `[layers, 2, kv_heads, page_size, head_dim]`:
keys and values, or `[layers, 1, …]` of a model that keeps one number a token. So a page can be kept, checked and given
up on its own, and its bytes are the same on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxctx.engine.step import LayerPool
from jaxctx_kernels import copy_pages, read_pages, write_pages

Pools: TypeAlias = tuple[LayerPool, ...]
Pages: TypeAlias = tuple[jax.Array, ...]


def each_array(function: Callable[[jax.Array, int, int], jax.Array], pools: Pools) -> Pools:
    """Apply `function(array, layer, 0 for keys or 1 for values)` to every page array."""
    return tuple(
        LayerPool(*(function(array, layer, i) if array.ndim == 4 else array for i, array in enumerate(pool)))
        for layer, pool in enumerate(pools)
    )


def copy(pools: Pools, pairs: jax.Array) -> Pools:
    """Copy pages `pairs[0]` to `pairs[1]`; int32 `[2, n]`."""
    return each_array(lambda array, *_: copy_pages(array, pairs[0], pairs[1]), pools)


def save(pools: Pools, pages: jax.Array) -> Pages:
    """The pages `[n]`, an array each."""
    layers = [jnp.stack([read_pages(array, pages) for array in pool if array.ndim == 4], 1) for pool in pools]
    stacked = jnp.stack(layers, 1)
    return tuple(stacked[i] for i in range(pages.shape[0]))


def load(pools: Pools, pages: jax.Array, data: Pages, on_device: Sharding) -> Pools:
    """Write an array of `data` to each of the pages `[n]`, once it lies where `on_device` says."""
    stacked = jnp.stack([jax.device_put(page, on_device) for page in data])
    return each_array(lambda array, layer, i: write_pages(array, pages, stacked[:, layer, i]), pools)


def page_struct(pools: Pools) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a page outside the pools, split over devices as the pools are."""
    keys = pools[0].k
    heads, _, page_size, head_dim = keys.shape
    sharding = keys.sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, None, *sharding.spec[:1])
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    arrays = sum(array.ndim == 4 for array in pools[0])
    return jax.ShapeDtypeStruct((len(pools), arrays, heads, page_size, head_dim), keys.dtype, sharding=sharding)


def on_host(sharding: Sharding) -> Sharding:
    """The same in host memory that the device can reach, where there is such memory; else where it was."""
    device: Any = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else sharding
