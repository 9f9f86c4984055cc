"""Kernels: pure functions on arrays, and the plan that tells them what to read.

The room knows nothing of models, contexts or requests; it imports jax and numpy. The engine calls it once per step on
the host (`plan_attention`) and once per layer on the device (`write_rows`, `attend`).

    plan        numpy: segments of a batch → packed work list, shared prefixes read once
    pool        the KV page arrays: layout, storage dtype, writing rows, copying and moving pages in place
    attention   `attend`: one function, by the implementation that the plan's shape names
    reference   plain JAX: the CPU path, and what every kernel is tested against
    gpu, tpu    Pallas: Mosaic GPU for Hopper, and TPU v5e and v6e

`NOTES.md` keeps what was measured, what won and what failed.
"""

from jaxctx_kernels.attention import attend
from jaxctx_kernels.plan import PlanShape, Segment, plan_attention, plan_shape, unpack
from jaxctx_kernels.pool import Pool, copy_pages, kernel_for, pool_struct, read_pages, write_pages, write_rows

__all__ = [
    "PlanShape",
    "Pool",
    "Segment",
    "attend",
    "copy_pages",
    "kernel_for",
    "plan_attention",
    "plan_shape",
    "pool_struct",
    "read_pages",
    "unpack",
    "write_pages",
    "write_rows",
]
