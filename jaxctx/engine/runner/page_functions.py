"""Functions of whole pages, which run between steps: copy pages, read them out, write them back.

Page 0 is scratch; callers pad with it. Outside the pools a page is one array of the dtype in which the pools store it,
`[layers, 2, kv_heads, page_size, head_dim]`: keys and values; or of bytes where 8 bits are stored, a scale of four
bytes after each token's numbers. So a page can be kept, checked and given up on its own. Its bytes are the same on
every platform but a TPU, of whose rows of lanes they are (`kv_cache.head_rows`): snapshots name that layout.
`copy_pages`, `read_pages` and `write_pages` are traced.

On a mesh a page outside the pools is in as many parts as there are devices: by KV heads over "kv", and where a KV head
is on several devices, by tokens (or what else divides) over these. So every byte leaves and comes back once, a part of
it by each; on its way back into the pools devices that share KV heads exchange their parts. XLA cannot split a kernel
over a mesh, so that each device moves the pages of its own KV heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

import jaxctx_kernels as kernels
from jaxctx.engine.runner.step import KVCache, Pools
from jaxctx.model.sharding import GROUP, KV

PageArrays: TypeAlias = tuple[jax.Array, ...]


def ids_in_layers(pools: Pools, layers: int, pages: jax.Array) -> jax.Array:
    """Where pages `[n]` lie in one `KVCache` of `pools`: their ids in its first layer, then in its second one, …

    int32 `[n * layers of a KVCache]`.
    """
    layers_per_cache = layers // len(pools)
    pages_per_layer = jax.tree.leaves(pools)[0].shape[1] // layers_per_cache
    return jnp.concatenate([pages + layer * pages_per_layer for layer in range(layers_per_cache)])


def copy_pages(
    layers: int, pools: Pools, pairs: jax.Array, *, kernel: kernels.KernelName, mesh: Mesh | None = None
) -> Pools:
    """Copy pages `pairs[0]` to `pairs[1]`; int32 `[2, n]`. All are read before any is written.

    `kernel`: what suits the pools; `mesh`: they are split over it.
    """
    sources, targets = (ids_in_layers(pools, layers, pages) for pages in pairs)
    copy = _on_each_device(partial(kernels.copy_pages, kernel=kernel), mesh, (_POOL, _ON_ALL, _ON_ALL), _POOL)
    return tuple(copy(cache, sources, targets) for cache in pools)


def read_pages(
    layers: int, pools: Pools, pages: jax.Array, *, kernel: kernels.KernelName, mesh: Mesh | None = None
) -> PageArrays:
    """The pages `[n]`, one array each."""
    ids = ids_in_layers(pools, layers, pages)
    read = _on_each_device(partial(kernels.read_pages, kernel=kernel), mesh, (_POOL, _ON_ALL), _PAGES)
    by_cache = [jnp.stack([read(array, ids) for array in cache], 1) for cache in pools]
    stacked = jnp.concatenate(by_cache)  # [layers * n, 2, kv_heads, page_size, head_dim]
    stacked = stacked.reshape(layers, len(pages), *stacked.shape[1:])
    return tuple(stacked[:, i] for i in range(len(pages)))


def write_pages(
    layers: int,
    pools: Pools,
    pages: jax.Array,
    data: PageArrays,
    places: tuple[Sharding, Sharding],
    *,
    kernel: kernels.KernelName,
    mesh: Mesh | None = None,
) -> Pools:
    """Write one array of `data` to each of the pages `[n]`.

    `places`: first each part is brought to its device, and from there to all devices whose pools hold it.
    """
    on_device, in_pools = places
    # Without the barrier a TPU's compiler would have the hosts exchange the parts, before they are brought to devices.
    parts = jax.lax.optimization_barrier([jax.device_put(page, on_device) for page in data])
    arrived = [jax.device_put(part, in_pools) for part in parts]
    write = _on_each_device(partial(kernels.write_pages, kernel=kernel), mesh, (_POOL, _ON_ALL, _POOL), _POOL)
    layers_per_cache = layers // len(pools)
    ids = ids_in_layers(pools, layers, pages).reshape(-1, len(arrived))  # [layers of a KVCache, n]
    written = list(pools)
    for layer in range(layers):
        cache = written[layer // layers_per_cache]
        layer_ids = ids[layer % layers_per_cache]
        of_layer = [page[layer] for page in arrived]
        written[layer // layers_per_cache] = KVCache(
            k=write(cache.k, layer_ids, [page[0] for page in of_layer]),
            v=write(cache.v, layer_ids, [page[1] for page in of_layer]),
        )
    return tuple(written)


_POOL = PartitionSpec(KV)  # of page arrays, and of a layer of a page: their KV heads
_PAGES = PartitionSpec(None, KV)  # of several pages of a layer
_ON_ALL = PartitionSpec()  # of page ids


def _on_each_device(
    move: Callable[..., Any], mesh: Mesh | None, in_specs: tuple[PartitionSpec, ...], out_specs: PartitionSpec
) -> Callable[..., Any]:
    """`move` of each device's own KV heads; without a mesh, `move` itself."""
    if mesh is None:
        return move
    moved: Callable[..., Any] = jax.shard_map(move, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return moved


def page_struct(layers: int, pools: Pools) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a page outside the pools, split over all devices that the pools are on."""
    read = partial(read_pages, layers, kernel="reference")  # whose pages are those of any kernel
    page = jax.eval_shape(read, pools, jax.ShapeDtypeStruct((1,), jnp.int32))[0]
    sharding = jax.tree.leaves(pools)[0].sharding
    if isinstance(sharding, NamedSharding):
        spec = page_spec(page.shape, sharding.mesh.shape[GROUP])
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=sharding)


def page_spec(shape: tuple[int, ...], group: int) -> PartitionSpec:
    """How a page of this shape is split: KV heads over "kv", and over "group" the first of its tokens, layers and
    numbers of a token that divides. If none does, devices along "group" all hold and move the same.
    """
    axes: list[str | None] = [None, None, KV, None, None]
    tokens, layers, numbers = 3, 0, 4
    for axis in (tokens, layers, numbers):
        if shape[axis] % group == 0:
            axes[axis] = GROUP
            break
    return PartitionSpec(*axes)


def host_sharding(sharding: Sharding) -> Sharding:
    """The same in host memory that the device can reach, where there is such memory; else unchanged."""
    device: Any = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else sharding
