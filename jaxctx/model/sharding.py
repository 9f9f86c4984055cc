"""Tensor parallelism as one table: logical axis of a parameter or of the KV pool → axis of the device mesh.

Parameters carry logical axes (`ParamSpec.axes`), the pool has `KV_POOL_AXES`; this table alone says what is split.
Under a mesh the jitted step is partitioned by XLA from where its arguments lie, so the model has no other trace of it;
but for attention, which runs on each device over the heads that it has.
On a mesh of one device everything here changes nothing.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxctx.errors import InvalidArgument
from jaxctx.model.config import ModelConfig

TENSOR = "tensor"
KV_POOL_AXES = ("kv_heads", "pages", "page", "head_dim")  # of one layer's keys, or values
SPLIT = dict.fromkeys(("vocab", "heads", "kv_heads", "ffn"), TENSOR)
RULES = SPLIT | dict.fromkeys(("embed", "head_dim", "pages", "page"))  # None: every device holds all of it


def logical_sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    """Where an array of these logical axes lies. Raises KeyError for an axis the table does not know."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in axes)))


def make_mesh(*, tensor: int = 1) -> Mesh:
    """A mesh of the first `tensor` devices of this process, partitioned by the compiler.

    Raises InvalidArgument if there are fewer.
    """
    count = jax.device_count()
    if not 1 <= tensor <= count:
        raise InvalidArgument.field("tensor", f"must be from 1 to {count}, the number of devices, not {tensor}")
    return jax.make_mesh((tensor,), (TENSOR,), axis_types=(AxisType.Auto,), devices=jax.devices()[:tensor])


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """Raise InvalidArgument unless every split axis of the model has equal parts on `mesh`."""
    parts = mesh.shape[TENSOR]
    sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "ffn": config.ffn, "vocab": config.vocab_size}
    odd = [f"{axis} = {size}" for axis, size in sizes.items() if size % parts]
    if odd:
        raise InvalidArgument.field("tensor", f"{parts} devices do not divide the model's {' and '.join(odd)}")
