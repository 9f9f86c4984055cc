"""Dispatch: one `attend` and one `write_rows` for all implementations.

    attend(…, shape)      shape.kernel       mask is None            under a mask
                          "reference"        reference.attend        reference.attend
                          "gpu"              mosaic_hopper.attend    reference.attend
                          "tpu"              pallas_tpu.attend       reference.attend

    write_rows(…, kernel) "reference", "gpu" kv_cache.write_kv, of keys and of values
                          "tpu"              pallas_tpu_write.write_rows

The implementations never call this module. `select_kernel` says which kernel suits a device and a layout of pages; the
caller puts the answer into the metadata's shape, with which a step is compiled.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxctx_kernels import reference
from jaxctx_kernels.kv_cache import (
    HOPPER_PAGES,
    TPU_PAGES,
    KVPages,
    fits_hopper_kernel,
    fits_tpu_kernel,
    write_kv,
)
from jaxctx_kernels.metadata import AttentionMetadata, KernelName, MetadataShape

HOPPER = "9.0"  # the compute capability of H100, H200 and GH200, whose instructions no other GPU has


class KernelChoice(NamedTuple):
    """What computes attention on a device, and why it is not a kernel where that would be faster."""

    name: KernelName
    why_no_kernel: str = ""  # a clause: "it has compute capability 8.0, …"; empty on CPUs, too


def select_kernel(device: Any, pages: Any) -> KernelChoice:
    """What computes attention over such pages on `device`: its own kernel if that can read them, else the reference.

    `device`: of JAX, or described like one: its `platform`, and of a GPU its `compute_capability`, decide. `pages`:
    keys (or values), as arrays or ShapeDtypeStructs.
    """
    if device.platform == "gpu":
        if device.compute_capability != HOPPER:
            why = f"it has compute capability {device.compute_capability}, and the kernel needs {HOPPER} (H100, H200)"
            return KernelChoice("reference", why)
        if not fits_hopper_kernel(pages):
            return KernelChoice("reference", f"the kernel needs {HOPPER_PAGES}")
        return KernelChoice("gpu")
    if device.platform == "tpu":
        if not fits_tpu_kernel(pages):
            return KernelChoice("reference", f"the kernel needs {TPU_PAGES}")
        return KernelChoice("tpu")
    return KernelChoice("reference")


@partial(jax.jit, static_argnames="shape")  # layers of a step, and programs of one shape, share a trace; XLA inlines it
def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    metadata: AttentionMetadata,
    mask: Bool[Array, "rows indices"] | None = None,
    *,
    shape: MetadataShape,
) -> Float32[Array, "rows heads head_dim"]:
    """Softmax attention, scale head_dim**-0.5, of every row over the tokens that `metadata` and `mask` let it see.

    Query heads `h * group .. h * group + group - 1` read KV head h. Rows that see no token return zeros. No value of a
    slot that no row sees reaches the result, not even NaN, and no row's NaN reaches a row of another sequence. Under a
    mask a value that is not finite reaches only the rows that see it, as NaN. `mask` covers every index that the
    metadata names: an index is the place of a token in its sequence's chain of pages.

    Raises ValueError if the kernel of `shape` is not made for these arrays.
    """
    # Kernels are imported where they are used: the Hopper kernel needs JAX 0.11, and a CPU needs neither.
    if shape.kernel == "gpu" and mask is None:
        from jaxctx_kernels import mosaic_hopper

        return mosaic_hopper.attend(q, k_pages, v_pages, metadata, shape=shape)
    if shape.kernel == "tpu" and mask is None:
        from jaxctx_kernels import pallas_tpu

        return pallas_tpu.attend(q, k_pages, v_pages, metadata, shape=shape)
    return reference.attend(q, k_pages, v_pages, metadata, mask, shape=shape)


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
