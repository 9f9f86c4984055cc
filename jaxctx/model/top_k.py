"""The best k of each row, as each kind of device finds them best: the same numbers and ids everywhere.

The order is that of `jax.lax.top_k`: descending in IEEE 754's total order (NaN above infinity, 0.0 above -0.0, a NaN
with its sign set below all), equal numbers by ascending id.

On GPUs `lax.top_k` sorts whole rows, and on TPUs it reads them once for each of the k. So there the row is cut into
blocks, and only blocks that may hold one of the best are looked into:

    row ──best of each block──▶ the k best blocks ──their numbers──▶ the k best

If a number is in none of these blocks, each of them has one that comes before it; so it is not one of the best k. Where
a block's best equals another's, the block of the lower ids comes first, as its number does.

What the vendors' compilers show for 16 rows of 151,936 and k = 64:

                             lax.top_k    blocks
    H200, kernels                   31         8
    H200, bytes they move     1,100 MB     13 MB
    v5e, bundles x trips       639,000   107,000

The kernels of `lax.top_k` on the H200 are 28 passes of a sort over all numbers and their ids, whatever k is; the bytes
are those of the operands. The bundles are counted in the final bundles of each fusion, by hand.

On two CPU cores `lax.top_k` is quicker: 13 against 17 ms for 8 rows, k = 64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, Int32

GPU_BLOCK = 64  # both sorts of 152k numbers and k = 64 are then of at most 4,096, which one thread block does by itself
TPU_BLOCK = 128  # as many as there are lanes


def top_k(
    x: Float32[Array, "rows n"], k: int, mesh: Mesh | None = None
) -> tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]:
    """The `k` greatest numbers of each row and their ids, best first; equal ones by lowest id. `k` is at most `n`.

    `mesh`: the rows may be split over it. Then each device finds the best of its part, and these are put together: XLA
    would exchange whole rows, several times, where its devices' parts are no multiples of blocks.
    """
    if mesh is None or x.shape[1] % mesh.size:
        return _top_k_of_device(x, k)
    find = partial(_top_k_of_devices, k=k, axes=mesh.axis_names)
    parts, everywhere = PartitionSpec(None, mesh.axis_names), PartitionSpec()
    best: tuple[jax.Array, jax.Array] = jax.shard_map(
        find, mesh=mesh, in_specs=parts, out_specs=(everywhere, everywhere), check_vma=False
    )(x)
    return best


def _top_k_of_devices(
    part: Float32[Array, "rows part"], k: int, axes: tuple[str, ...]
) -> tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]:
    """The best of all devices' parts of the rows, on each device."""
    size = part.shape[1]
    best, ids = _top_k_of_device(part, min(k, size))
    ids = ids + size * lax.axis_index(axes)
    places, ids = lax.all_gather((_place(best), ids), axes, axis=1, tiled=True)
    place, ids = _first(places, ids, k)
    return _number(place), ids


def _top_k_of_device(x: Float32[Array, "rows n"], k: int) -> tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]:
    best: tuple[jax.Array, jax.Array] = lax.platform_dependent(
        x,
        cpu=partial(_top_k_of_rows, k=k),
        tpu=partial(top_k_by_blocks, k=k, block=TPU_BLOCK),
        default=partial(top_k_by_blocks, k=k, block=GPU_BLOCK),
    )
    return best


def top_k_by_blocks(
    x: Float32[Array, "rows n"], k: int, block: int
) -> tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]:
    """`lax.top_k` of rows cut into blocks of `block` numbers; where these would not be more than `k`, of whole rows."""
    rows, n = x.shape
    blocks = -(-n // block)
    if blocks <= k:
        return _top_k_of_rows(x, k)
    padding = ((0, 0), (0, blocks * block - n))  # after all others, by its id even after those that equal it
    by_block = jnp.pad(_place(x), padding, constant_values=np.iinfo(np.int32).max).reshape(rows, blocks, block)
    _, chosen = _first(by_block.min(-1), jnp.broadcast_to(jnp.arange(blocks), (rows, blocks)), k)
    places = jnp.take_along_axis(by_block, chosen[:, :, None], axis=1)  # [rows, k, block]
    ids = chosen[:, :, None] * block + jnp.arange(block)
    place, ids = _first(places.reshape(rows, -1), ids.reshape(rows, -1), k)
    return _number(place), ids


def _top_k_of_rows(x: Float32[Array, "rows n"], k: int) -> tuple[Float32[Array, "rows k"], Int32[Array, "rows k"]]:
    best, ids = lax.top_k(x, k)
    return best, ids


def _first(
    places: Int32[Array, "rows n"], ids: Int32[Array, "rows n"], k: int
) -> tuple[Int32[Array, "rows k"], Int32[Array, "rows k"]]:
    """The `k` lowest places of each row and their ids, in the order of (place, id)."""
    places, ids = lax.sort((places, ids.astype(jnp.int32)), dimension=1, num_keys=2, is_stable=False)
    return places[:, :k], ids[:, :k]


def _place(x: Float32[Array, " *shape"]) -> Int32[Array, " *shape"]:
    """Integers that ascend where the numbers descend in their total order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return ~jnp.where(bits < 0, bits ^ np.iinfo(np.int32).max, bits)


def _number(place: Int32[Array, " *shape"]) -> Float32[Array, " *shape"]:
    """The inverse of `_place`."""
    bits = ~place
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ np.iinfo(np.int32).max, bits), jnp.float32)
