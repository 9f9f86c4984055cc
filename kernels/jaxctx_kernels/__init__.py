"""Kernels: pure functions on arrays, and the plan that tells them what to read.

The room knows nothing of models, contexts or requests; it imports jax and numpy. The engine calls it once per step on
the host (`build_attention_metadata`) and once per layer on the device (`write_kv`, `attend`).

    plan        numpy: segments of a batch → packed work list, shared prefixes read once
    pool        the KV page arrays: layout, storage dtype, writing rows, copying and moving pages in place
    attention   `attend`: plain JAX, the CPU path and what every kernel is tested against; or the plan's kernel
    gpu, tpu    Pallas: Mosaic GPU for Hopper, and TPU v5e and v6e

`NOTES.md` keeps what was measured, what won and what failed.
"""

from jaxctx_kernels.kv_cache import KVPages as KVPages
from jaxctx_kernels.kv_cache import copy_pages as copy_pages
from jaxctx_kernels.kv_cache import kv_pages_struct as kv_pages_struct
from jaxctx_kernels.kv_cache import read_pages as read_pages
from jaxctx_kernels.kv_cache import select_kernel as select_kernel
from jaxctx_kernels.kv_cache import write_kv as write_kv
from jaxctx_kernels.kv_cache import write_pages as write_pages
from jaxctx_kernels.metadata import MetadataShape as MetadataShape
from jaxctx_kernels.metadata import Segment as Segment
from jaxctx_kernels.metadata import build_attention_metadata as build_attention_metadata
from jaxctx_kernels.metadata import metadata_shape as metadata_shape
from jaxctx_kernels.metadata import unpack_metadata as unpack_metadata
from jaxctx_kernels.reference import attend as attend
