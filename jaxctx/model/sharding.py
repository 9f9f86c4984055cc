"""Tensor parallelism as one table: logical axis of a parameter or of the KV pool → axes of the device mesh.

Parameters carry logical axes (`ParamSpec.axes`), the pool has `KV_POOL_AXES`; this table alone says what is split.
Under a mesh the jitted step is partitioned by XLA from where its arguments lie, so the model has no other trace of it;
but for attention, which runs on each device over the heads that it has, and for the two products of a layer that end in
a sum over devices (`products.project_and_sum`).
On a mesh of one device everything here changes nothing.

The mesh has two axes. KV heads are split over "kv" and replicated over "group"; query heads, feed-forward and
vocabulary, if it divides, are split over both. So there may be more devices than KV heads. Of eight query heads on two
KV heads, four devices hold:

    device (kv, group)    (0, 0)   (0, 1)   (1, 0)   (1, 1)
    KV heads              0        0        1        1
    query heads           0 1      2 3      4 5      6 7

Devices that share a KV head write the same keys and values: work done twice, so that nothing need be sent.

Devices may be those of several processes: nothing here, nor what is put by `put`, needs them all to be reachable.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Int

from jaxctx.errors import InvalidArgument
from jaxctx.model.config import ModelConfig
from jaxctx_kernels import head_rows

TPU_LANES = 128
KV, GROUP = "kv", "group"
EVERY_DEVICE = (KV, GROUP)
KV_POOL_AXES = ("kv_heads", "pages", "page", "head_dim")  # of one layer's keys, or values
SPLIT: dict[str, str | tuple[str, ...]] = {"kv_heads": KV, **dict.fromkeys(("vocab", "heads", "ffn"), EVERY_DEVICE)}
WHOLE = ("embed", "head_dim", "pages", "page", "experts", "adapters", "parts")  # every device holds all of these
RULES = SPLIT | dict.fromkeys(WHOLE)


def logical_sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    """Where an array of these logical axes lies. Raises KeyError for an axis the table does not know."""
    return NamedSharding(mesh, partition_spec(axes))


def partition_spec(axes: Sequence[str]) -> PartitionSpec:
    """How any mesh splits an array of these logical axes. Raises KeyError as `logical_sharding`."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def parameter_axes(axes: Sequence[str], shape: Sequence[int], devices: int) -> PartitionSpec:
    """How a mesh of so many devices splits a parameter of these logical axes and this shape.

    A vocabulary that does not divide lies whole on every device: no sum needs its parts to be equal. Raises KeyError as
    `logical_sharding`.
    """
    whole = [axis == "vocab" and size % devices != 0 for axis, size in zip(axes, shape, strict=True)]
    return PartitionSpec(*(None if odd else RULES[axis] for axis, odd in zip(axes, whole, strict=True)))


def parameter_sharding(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    """Where a parameter of these logical axes and this shape lies, see `parameter_axes`."""
    return NamedSharding(mesh, parameter_axes(axes, shape, mesh.size))


def kv_parts(mesh: Mesh | None) -> int:
    """Over how many devices KV heads are split. None: all is on one device."""
    return 1 if mesh is None else int(mesh.shape[KV])


def make_mesh(config: ModelConfig, *, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `tensor` devices, for a model of this configuration, partitioned by the compiler.

    `devices`: those to choose from; None: all devices, of all processes. Raises InvalidArgument if there are fewer, or
    if the model does not divide into so many equal parts.
    """
    devices = jax.devices() if devices is None else devices
    if not 1 <= tensor <= len(devices):
        count = f"must be from 1 to {len(devices)}, the number of devices, not {tensor}"
        raise InvalidArgument.field("tensor", count)
    platform: str = devices[0].platform
    shape = mesh_shape(config, tensor, platform)
    _check(config, *shape, platform)
    placed = mesh_utils.create_device_mesh(shape, devices[:tensor], allow_split_physical_axes=True)
    return Mesh(placed, EVERY_DEVICE, axis_types=(AxisType.Auto,) * len(shape))


def mesh_shape(config: ModelConfig, tensor: int, platform: str) -> tuple[int, int]:
    """The sizes of the axes "kv" and "group" that `tensor` devices have: KV heads over as many as they divide into.

    On a TPU KV heads that fill a row of 128 lanes stay together, if the model then divides: apart each would take one.
    """
    stored = head_rows(config.kv_heads, config.head_dim, platform)
    together = stored.side_by_side if stored.are_full(config.kv_heads, config.head_dim) else 1
    kv = math.gcd(tensor, config.kv_heads // together)
    if config.heads // config.kv_heads % (tensor // kv):
        kv = math.gcd(tensor, config.kv_heads)
    return kv, tensor // kv


def mesh_that_divides(config: ModelConfig, tensor: int, platform: str) -> tuple[int, int] | None:
    """The sizes of the axes "kv" and "group" that `tensor` devices have; None: the model does not divide over them."""
    sizes = mesh_shape(config, tensor, platform)
    return None if _odd_axes(config, *sizes) else sizes


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """Raise InvalidArgument unless every split axis of the model but the vocabulary has equal parts on `mesh`."""
    _check(config, mesh.shape[KV], mesh.shape[GROUP], mesh.devices.flat[0].platform)


def _check(config: ModelConfig, kv: int, group: int, platform: str) -> None:
    odd = _odd_axes(config, kv, group)
    if odd:
        fitting = [n for n in range(1, config.heads + 1) if mesh_that_divides(config, n, platform)]
        would = ", ".join(map(str, fitting))
        why = f"{kv * group} devices do not divide the model's {' and '.join(odd)}; these numbers do: {would}"
        raise InvalidArgument.field("tensor", why)


def _odd_axes(config: ModelConfig, kv: int, group: int) -> list[str]:
    """The axes of the model that do not divide, with their sizes."""
    odd = [] if config.kv_heads % kv == 0 else [f"kv_heads = {config.kv_heads}"]
    if config.heads // config.kv_heads % group:
        odd.append(f"heads = {config.heads} on kv_heads = {config.kv_heads}")
    return odd + [f"{axis} = {size}" for axis, size in _ffn_sizes(config) if size % (kv * group)]


def _ffn_sizes(config: ModelConfig) -> list[tuple[str, int]]:
    """Of all feed-forward blocks that the model has, with what they are of."""
    experts = config.experts
    if experts is None:
        return [("ffn", config.ffn)]
    sizes = [("ffn of experts", experts.ffn)]
    if experts.shared_ffn:
        sizes.append(("ffn of the shared expert", experts.shared_ffn))
    if experts.dense_layers:
        sizes.append(("ffn", config.ffn))
    return sizes


def in_rows(shape: Sequence[int], vocab_size: int, sharding: Sharding) -> Sharding | Format:
    """Where a parameter of this shape lies, and of an embedding on a TPU that its rows lie in one piece each.

    Tokens take rows of it. A TPU's own choice would be columns where rows are no whole lanes and columns are; each step
    would then copy the whole.
    """
    device: Any = next(iter(sharding.device_set))
    is_of_tpu = device.platform == "tpu"
    if is_of_tpu and len(shape) == 2 and shape[0] == vocab_size and shape[1] % TPU_LANES:
        return Format(Layout((0, 1)), sharding)
    return sharding


def put(data: np.ndarray | jax.Array, sharding: Sharding | Format | None) -> jax.Array:
    """`data` laid out as `sharding` says; None: on the default device.

    Every process that has a part of the devices calls this with the same data, and copies what its devices hold.
    """
    where = sharding.sharding if isinstance(sharding, Format) else sharding
    if sharding is None or where is None or where.is_fully_addressable:
        placed: jax.Array = jax.device_put(data, sharding)
        return placed
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def put_parameter(
    data: np.ndarray | jax.Array, axes: Sequence[str], config: ModelConfig, mesh: Mesh | None
) -> jax.Array:
    """A parameter of these logical axes, as its checkpoint has it, laid out over `mesh`; None: on the default device.

    Query heads are in the order of `query_head_order`.
    """
    if mesh is None:
        place = in_rows(data.shape, config.vocab_size, SingleDeviceSharding(jax.devices()[0]))
        return put(data, place if isinstance(place, Format) else None)
    if "heads" in axes:
        order = query_head_order(config.kv_heads, config.heads // config.kv_heads, mesh)
        if (np.diff(order) != 1).any():  # else nothing need be copied
            axis = axes.index("heads")
            # Of a weight of 4 bits that is split by its inputs, a head has fewer words than inputs.
            by_head = data.reshape(*data.shape[:axis], config.heads, -1, *data.shape[axis + 1 :])
            data = by_head.take(order, axis).reshape(data.shape)
    return put(data, in_rows(data.shape, config.vocab_size, parameter_sharding(mesh, axes, data.shape)))


def query_head_order(kv_heads: int, group: int, mesh: Mesh | None) -> Int[np.ndarray, " heads"]:
    """Which query head of the model is at each place of an array that is split over `mesh` by its query heads.

    Those that a device has lie together. So the order is another one where a device has several KV heads, but not all
    of the `group` query heads of each.
    """
    heads = np.arange(kv_heads * group)
    if mesh is None:
        return heads
    kv, groups = mesh.shape[KV], mesh.shape[GROUP]
    by_device = heads.reshape(kv, kv_heads // kv, groups, group // groups).swapaxes(1, 2)
    return by_device.reshape(-1)
