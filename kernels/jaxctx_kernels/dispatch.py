"""Dispatch: one `attend`, one `write_rows` and one of each function of whole pages for all implementations.

    attend(…, shape)      shape.kernel       mask is None            under a mask
                          "reference"        reference.attend        reference.attend
                          "gpu"              mosaic_hopper.attend    reference.attend
                          "mma"              mosaic_mma.attend       reference.attend
                          "tpu"              pallas_tpu.attend       reference.attend

    write_rows(…, kernel) "tpu"              pallas_tpu_write.write_rows
                          another            kv_cache.write_kv, of keys and of values

    copy_pages, read_pages,
    write_pages(…, kernel)
                          "tpu"              pallas_tpu_pages.gather_pages, scatter_pages
                          another            those of kv_cache

`select_kernel` takes the first that reads the pages; the caller puts the answer into the metadata's shape, with which a
step is compiled. The implementations never call this module.

    NVIDIA of compute capability 9.0 (H100, H200)                          "gpu", "mma", "reference"
    NVIDIA of another, from 8.0 on (A100, L40S, B200, RTX 3090 and newer)  "mma", "reference"
    older NVIDIA, GPUs of others, CPUs                                     "reference"
    TPU                                                                    "tpu", "reference"
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxctx_kernels import kv_cache, reference
from jaxctx_kernels.kv_cache import (
    MMA_PAGES,
    TPU_PAGES,
    KVPages,
    fits_hopper_kernel,
    fits_mma_kernel,
    fits_tpu_kernel,
    heads_in_row,
    join_scales,
    kv_values,
    pad_axis,
    split_scales,
    write_kv,
)
from jaxctx_kernels.metadata import HOPPER_PROCESSORS, AttentionMetadata, KernelName, MetadataShape, metadata_shape

HOPPER = "9.0"  # the compute capability of H100, H200 and GH200, whose instructions no other GPU has
OLDEST_GPU = 8  # the first number of the compute capability of Ampere, whose instructions all later GPUs have
LARGEST_GROUP = 64  # query heads of a KV head that fit into a product of the kernels for GPUs


class KernelChoice(NamedTuple):
    """What computes attention on a device, and why it is not a kernel where that would be faster."""

    name: KernelName
    why_no_kernel: str = ""  # a clause: "it has compute capability 8.0, …"; empty on CPUs, too
    processors: int = HOPPER_PROCESSORS  # of a GPU, see `MetadataShape`


def select_kernel(
    device: Any, pages: Any, group: int = 1, *, rows: int = 1, max_context_tokens: int = 1
) -> KernelChoice:
    """What computes attention over such pages on `device`: its own kernel if that can read them, else the reference.

    `device`: of JAX, or described like one: its `platform`, and of a GPU its `compute_capability`, decide; a GPU's
    `core_count` says how many processors it has. `pages`: keys (or values), as arrays or ShapeDtypeStructs. `group`:
    how many query heads read a KV head. `rows`: of the largest step, and `max_context_tokens` of a context in it,
    since a TPU's scalar memory limits both. What is chosen never refuses such arrays.
    """
    if device.platform == "gpu":
        choice = select_gpu_kernel(device.compute_capability, pages, group)
        return choice._replace(processors=getattr(device, "core_count", HOPPER_PROCESSORS))
    if device.platform == "tpu":
        return select_tpu_kernel(pages, group, rows, max_context_tokens)
    return KernelChoice("reference")


def select_gpu_kernel(capability: str, pages: Any, group: int) -> KernelChoice:
    """What computes attention on a GPU of this compute capability: "8.6", or of other vendors a name as "gfx942"."""
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_GPU:
        why = f"it has compute capability {capability}, and kernels need {OLDEST_GPU}.0 (A100) or newer, of NVIDIA"
        return KernelChoice("reference", why)
    if group > LARGEST_GROUP:
        return KernelChoice("reference", f"the kernel needs at most {LARGEST_GROUP} query heads for each KV head")
    if capability == HOPPER and fits_hopper_kernel(pages):
        return KernelChoice("gpu")
    if fits_mma_kernel(pages):
        return KernelChoice("mma")
    return KernelChoice("reference", f"the kernel needs {MMA_PAGES}")


def select_tpu_kernel(pages: Any, group: int, rows: int, max_context_tokens: int) -> KernelChoice:
    """What computes attention on a TPU."""
    if not fits_tpu_kernel(pages):
        return KernelChoice("reference", f"the kernel needs {TPU_PAGES}")
    from jaxctx_kernels import pallas_tpu

    values = kv_values(pages)
    shape = metadata_shape(rows, values.shape[2], max_context_tokens, values.shape[1], "tpu")
    if not pallas_tpu.fits_list(shape):
        return KernelChoice("reference", "its scalar memory does not hold a list of so many pages; take larger pages")
    return KernelChoice("tpu")


@partial(
    jax.jit, static_argnames=("shape", "kv_heads", "soft_cap")
)  # layers of a step, and programs of one shape, share a trace; XLA inlines it
def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    metadata: AttentionMetadata,
    mask: Bool[Array, "rows indices"] | None = None,
    *,
    shape: MetadataShape,
    kv_heads: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
) -> Float32[Array, "rows heads head_dim"]:
    """Softmax attention, scale head_dim**-0.5, of every row over the tokens that `metadata` and `mask` let it see.

    Of these a row sees the last ones only where `shape` has a window. `soft_cap`: scaled scores become
    cap * tanh(score / cap), before what a row does not see is left out; None: they stay as they are. `sinks`: of each
    query head a score of no token, which is not scaled or capped: the softmax of every row has it, and its weight goes
    to no value. None: there is none.

    Query heads `h * group .. h * group + group - 1` read KV head h. `kv_heads`: how many of them are no padding,
    which a TPU's pages may have, see `kv_cache.head_rows`; None: all that the pages hold.

    Rows that see no token return zeros. No value of a slot that no row sees reaches the result, not even NaN, and no
    row's NaN reaches a row of another sequence. Under a mask a value that is not finite reaches only the rows that see
    it, as NaN. `mask` covers every index that the metadata names: an index is the place of a token in its sequence's
    chain of pages.

    Raises ValueError if the kernel of `shape` is not made for these arrays.
    """
    heads, dim = q.shape[1:]
    stored_heads, _, _, lanes = kv_values(k_pages).shape
    side_by_side = lanes // dim if kv_heads is None else heads_in_row(kv_heads, stored_heads)
    if kv_heads is not None:  # queries of 0 for KV heads that are padding
        q = pad_axis(q, 1, stored_heads * side_by_side * (heads // kv_heads))
        sinks = None if sinks is None else pad_axis(sinks, 0, q.shape[1])
    # Kernels are imported where they are used: those of GPUs need JAX 0.11, and a CPU needs none.
    if shape.kernel == "gpu" and mask is None:
        from jaxctx_kernels import mosaic_hopper

        return mosaic_hopper.attend(q, k_pages, v_pages, metadata, shape=shape, soft_cap=soft_cap, sinks=sinks)
    if shape.kernel == "mma" and mask is None:
        from jaxctx_kernels import mosaic_mma

        return mosaic_mma.attend(q, k_pages, v_pages, metadata, shape=shape, soft_cap=soft_cap, sinks=sinks)
    if shape.kernel == "tpu" and mask is None:
        from jaxctx_kernels import pallas_tpu

        output = pallas_tpu.attend(
            q, k_pages, v_pages, metadata, shape=shape, side_by_side=side_by_side, soft_cap=soft_cap, sinks=sinks
        )
    else:
        output = reference.attend(
            q, k_pages, v_pages, metadata, mask, shape=shape, side_by_side=side_by_side, soft_cap=soft_cap, sinks=sinks
        )
    return output if q.shape[1] == heads else output[:, :heads]


def write_rows(
    k_pages: KVPages,
    v_pages: KVPages,
    k: Shaped[Array, "rows kv_heads head_dim"],
    v: Shaped[Array, "rows kv_heads head_dim"],
    slots: Int32[Array, " rows"],
    *,
    kernel: KernelName,
) -> tuple[Any, Any]:
    """Store each row's keys and values at its slot, see `kv_cache.write_kv`, with what suits `kernel`.

    Returns keys and values, updated in place if they are donated. No slot outside of page 0 may be there twice. What
    page 0 holds afterwards is undefined.
    """
    if kernel == "tpu":
        from jaxctx_kernels import pallas_tpu_write

        return pallas_tpu_write.write_rows(k_pages, v_pages, k, v, slots)
    return write_kv(k_pages, k, slots), write_kv(v_pages, v, slots)


def copy_pages(arrays: Any, sources: Int32[Array, " n"], targets: Int32[Array, " n"], *, kernel: KernelName) -> Any:
    """Copy whole pages in each array of a tree, with what suits `kernel`; all are read before any is written.

    Returns the arrays, updated in place if they are donated. Pairs (0, 0) are padding; no other target may be there
    twice. What page 0 holds afterwards is undefined.
    """
    if kernel == "tpu":
        from jaxctx_kernels import pallas_tpu_pages

        read = pallas_tpu_pages.gather_pages(arrays, sources)
        return pallas_tpu_pages.scatter_pages(arrays, targets, read)
    return kv_cache.copy_pages(arrays, sources, targets)


def read_pages(
    pages: KVPages, ids: Int32[Array, " n"], *, kernel: KernelName
) -> Shaped[Array, "n kv_heads page_size head_dim"]:
    """Whole pages as they are stored, see `kv_cache.read_pages`, with what suits `kernel`."""
    if kernel == "tpu":
        from jaxctx_kernels import pallas_tpu_pages

        return join_scales(pallas_tpu_pages.gather_pages(pages, ids))
    return kv_cache.read_pages(pages, ids)


def write_pages(
    pages: KVPages,
    ids: Int32[Array, " n"],
    data: Sequence[Shaped[Array, "kv_heads page_size head_dim"]],
    *,
    kernel: KernelName,
) -> Any:
    """The inverse of `read_pages`, from an array for each page, with what suits `kernel`.

    Returns the pages, updated in place if they are donated. Page 0 is padding; no other page may be there twice. What
    page 0 holds afterwards is undefined.
    """
    if kernel == "tpu":
        from jaxctx_kernels import pallas_tpu_pages

        return pallas_tpu_pages.scatter_pages(pages, ids, split_scales(pages, jnp.stack(data)))
    return kv_cache.write_pages(pages, ids, data)
