"""Kernels: pure functions on arrays, and the plan that tells them what to read.

The room knows nothing of models, contexts or requests; it imports jax and numpy. The engine calls it once per step on
the host (`plan_attention`) and once per layer on the device (`write_rows`, `attend`).

    plan        numpy: segments of a batch → packed work list, shared prefixes read once
    pool        the KV page arrays: layout, storage dtype, writing rows, copying and moving pages in place
    attention   `attend`: plain JAX, the CPU path and what every kernel is tested against; or the plan's kernel
    gpu, tpu    Pallas: Mosaic GPU for Hopper, and TPU v5e and v6e

`NOTES.md` keeps what was measured, what won and what failed.
"""

from jaxctx_kernels.attention import attend as attend
from jaxctx_kernels.plan import PlanShape as PlanShape
from jaxctx_kernels.plan import Segment as Segment
from jaxctx_kernels.plan import plan_attention as plan_attention
from jaxctx_kernels.plan import plan_shape as plan_shape
from jaxctx_kernels.plan import unpack as unpack
from jaxctx_kernels.pool import Pool as Pool
from jaxctx_kernels.pool import copy_pages as copy_pages
from jaxctx_kernels.pool import kernel_for as kernel_for
from jaxctx_kernels.pool import pool_struct as pool_struct
from jaxctx_kernels.pool import read_pages as read_pages
from jaxctx_kernels.pool import write_pages as write_pages
from jaxctx_kernels.pool import write_rows as write_rows
