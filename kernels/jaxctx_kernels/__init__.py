"""Kernels: pure functions on arrays, and the metadata that tells them what to read.

The package knows nothing of models, contexts or requests; it imports jax and numpy. The engine calls it once per step
on the host (`build_attention_metadata`) and once per layer on the device (`write_rows`, `attend`). Between steps it
moves whole pages (`copy_pages`, `read_pages`, `write_pages`).

    metadata        numpy: segments of a batch → packed work list, in which shared prefixes are read once
    kv_cache        the KV page arrays: layout, storage dtype, writing rows, copying and moving pages in place
    dispatch        these functions, and which of the implementations below computes them
    reference       plain JAX: the CPU's path, attention under a mask, and what every kernel is tested against
    gpu_schedule    for NVIDIA GPUs: a step's work cut into equal units, in plain JAX
    gpu_scores      the soft cap of their kernels' scores
    gpu_merge       Pallas Mosaic GPU: what the units found, merged
    mosaic_hopper   Pallas Mosaic GPU, for NVIDIA Hopper
    hopper_registers
                    what it does in registers: products, and inline code
    mosaic_mma      Pallas Mosaic GPU, for other NVIDIA GPUs since Ampere
    pallas_tpu      Pallas, for TPUs
    pallas_tpu_write
                    Pallas, for TPUs: writing a step's keys and values in place
    pallas_tpu_pages
                    Pallas, for TPUs: moving whole pages, without a copy of a page array
    int4_weights    weights of 4 bits: their layout, and their products by one of the next two
    pallas_tpu_int4
                    Pallas, for TPUs
    mosaic_int4     Pallas Mosaic GPU, for NVIDIA GPUs since Ampere

                 dispatch
           ┌────────┼──────────────┬──────────┐
           │  mosaic_hopper   mosaic_mma  pallas_tpu ◀─ pallas_tpu_write, pallas_tpu_pages
           │        └──────┬───────┘          │
           │    gpu_schedule, gpu_scores, gpu_merge ◀─ hopper_registers
           │               │                  │
           └──▶ reference ◀┴──────────────────┘       (constants and products that all have in common)
                    │
            metadata, kv_cache

`docs/kernels/` keeps what was measured, what won and what failed.
"""

from jaxctx_kernels.dispatch import KernelChoice as KernelChoice
from jaxctx_kernels.dispatch import attend as attend
from jaxctx_kernels.dispatch import copy_pages as copy_pages
from jaxctx_kernels.dispatch import read_pages as read_pages
from jaxctx_kernels.dispatch import select_kernel as select_kernel
from jaxctx_kernels.dispatch import write_pages as write_pages
from jaxctx_kernels.dispatch import write_rows as write_rows
from jaxctx_kernels.kv_cache import HeadRows as HeadRows
from jaxctx_kernels.kv_cache import KVPages as KVPages
from jaxctx_kernels.kv_cache import QuantizedKV as QuantizedKV
from jaxctx_kernels.kv_cache import head_rows as head_rows
from jaxctx_kernels.kv_cache import heads_in_row as heads_in_row
from jaxctx_kernels.kv_cache import kv_pages_struct as kv_pages_struct
from jaxctx_kernels.kv_cache import kv_values as kv_values
from jaxctx_kernels.kv_cache import write_kv as write_kv
from jaxctx_kernels.metadata import AttentionMetadata as AttentionMetadata
from jaxctx_kernels.metadata import ItemClass as ItemClass
from jaxctx_kernels.metadata import KernelName as KernelName
from jaxctx_kernels.metadata import MetadataOverflow as MetadataOverflow
from jaxctx_kernels.metadata import MetadataShape as MetadataShape
from jaxctx_kernels.metadata import Segment as Segment
from jaxctx_kernels.metadata import build_attention_metadata as build_attention_metadata
from jaxctx_kernels.metadata import metadata_shape as metadata_shape
from jaxctx_kernels.metadata import unpack_metadata as unpack_metadata
