"""Products with weights of 4 bits: how the weights lie in memory, what multiplies them where, and what that computes.

    weight [out, in]:  (code - zero) * scale      codes 0 to 15, a zero and a scale for each group of inputs

Eight codes are in a word of 32 bits. A *chunk* is 128 inputs of an output channel: 16 words, of which word r has
inputs 32·j + 2·r and 32·j + 2·r + 1 for each j from 0 to 3, the first in bits 4·j … 4·j + 3, the second 16 bits higher:

    bits     0   4   8  12  16  20  24  28
    input    2r  …  +32 +64 +96  2r+1 … +32 +64 +96

So 4·j bits moved down and all but two codes cleared, a word with 0x4300 in both halves is two bfloat16, each 128 and
its code: 0x4300 is 128, and the step above it is 1. Of a chunk they are 32 inputs, in order; where a TPU has a pair of
bfloat16 in a word of a register, and where a GPU's product wants a pair of its left operand. Nothing else is widened,
and nothing is ever wide in memory:

    x · weight  =  sum over groups of  scale * (x · (128 + codes)  -  (128 + zero) * sum of x)

The products are of bfloat16 that hold every number exactly, the sums are float32. `multiply` chooses the kernel.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

ProductKernel = Literal["reference", "gpu", "tpu"]

CHUNK = 128  # inputs
WORDS = CHUNK // 8  # of a chunk and an output channel
UNIT = 32  # inputs of a chunk that are widened together
UNITS = CHUNK // UNIT
GROUPS = (32, 64, 128)  # inputs that kernels take for a group
LEAST_OUT = 128  # output channels: kernels take a multiple
MIDDLE = 8  # the zero of weights that have none of their own
OFFSET = 128  # of a code that is widened
TWO_CODES, TWO_OFFSETS = 0x000F000F, 0x43004300
OLDEST_GPU = 8  # the first number of the compute capability of Ampere
OLDEST_JAX = (0, 11, 2)
PACKED_AT_ONCE = 64  # words of a row that a thread makes


class Int4Choice(NamedTuple):
    """What multiplies weights of 4 bits on a device, or why nothing does."""

    kernel: ProductKernel | None
    why_no_kernel: str = ""  # a clause


def select_product(device: Any) -> Int4Choice:
    """What multiplies weights of 4 bits on `device`, which is one of JAX or described like one."""
    if device.platform not in ("tpu", "gpu"):
        return Int4Choice(None, f"there is no product of 4 bits for a {device.platform}")
    if jax.__version_info__ < OLDEST_JAX:
        return Int4Choice(None, f"it needs JAX 0.11.2 or newer, and this is {jax.__version__}")
    if device.platform == "tpu":
        return Int4Choice("tpu")
    capability: str = device.compute_capability
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_GPU:
        return Int4Choice(None, f"compute capability is {capability}, and the product needs {OLDEST_GPU}.0 of NVIDIA")
    return Int4Choice("gpu")


def why_not_packed(out: int, inside: int, group: int) -> str:
    """Why no kernel takes a weight of this shape, or part of one, with so many inputs in a group; empty: one does."""
    if inside % CHUNK:
        return f"{inside} inputs are not a multiple of {CHUNK}"
    if out % LEAST_OUT:
        return f"{out} outputs are not a multiple of {LEAST_OUT}"
    if group not in GROUPS and group % CHUNK:
        return f"groups of {group} inputs are none of {', '.join(map(str, GROUPS))} or a multiple of {CHUNK}"
    return ""


def pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Codes `[out, in]` → words `[in / 8, out]`."""
    out, inside = codes.shape
    words = np.empty((inside // 8, out), np.uint32)

    def fill(start: int) -> None:
        part = codes[start : start + PACKED_AT_ONCE].T  # [in, some]
        # [chunks, j, r, which of two, some]
        pairs = part.reshape(inside // CHUNK, UNITS, WORDS, 2, -1).astype(np.uint32)
        packed = np.zeros((inside // CHUNK, WORDS, part.shape[1]), np.uint32)
        for unit in range(UNITS):
            packed |= pairs[:, unit, :, 0] << np.uint32(4 * unit)
            packed |= pairs[:, unit, :, 1] << np.uint32(4 * unit + 16)
        words[:, start : start + PACKED_AT_ONCE] = packed.reshape(inside // 8, -1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(0, out, PACKED_AT_ONCE)):
            pass
    return words.view(np.int32)


def unpack(words: Int32[Array, "words out"]) -> Int32[Array, "in out"]:
    """The inverse of `pack`, but that the inputs stay first."""
    out = words.shape[1]
    by_chunk = words.reshape(-1, 1, WORDS, 1, out)
    places = jnp.arange(UNITS).reshape(1, UNITS, 1, 1, 1) * 4 + jnp.arange(2).reshape(1, 1, 1, 2, 1) * 16
    return (lax.shift_right_logical(by_chunk, places.astype(jnp.int32)) & 15).reshape(-1, out)


def multiply(
    x: Float[Array, "rows in"],
    words: Int32[Array, "words out"],
    scales: Float32[Array, "parts groups out"],
    kernel: ProductKernel,
) -> Float32[Array, "rows out"]:
    """The product of rows, rounded to bfloat16, with a weight of 4 bits.

    `words` are as `pack` makes them. `scales[0]` is the scale of each group of inputs, `scales[1]` its zero; without
    that it is MIDDLE. Raises ValueError for a shape that kernels do not take.
    """
    inside, out = 8 * words.shape[0], words.shape[1]
    group = inside // scales.shape[1]
    why = why_not_packed(out, inside, group)
    if why or group > CHUNK or x.shape[1] != inside:
        raise ValueError(why or f"{x.shape[1]} inputs, and a weight of {inside} in groups of {group}")
    x = x.astype(jnp.bfloat16)
    if kernel == "reference":
        plain: jax.Array = _plain_product(x, words, scales)
        return plain
    if kernel == "tpu":
        from jaxctx_kernels import pallas_tpu_int4

        return pallas_tpu_int4.multiply(x, words, scales)
    from jaxctx_kernels import mosaic_int4

    return mosaic_int4.multiply(x, words, scales)


@partial(jax.jit, inline=True)
def _plain_product(x: jax.Array, words: jax.Array, scales: jax.Array) -> jax.Array:
    """With a wide weight, in float32."""
    groups = scales.shape[1]
    zeros = scales[1] if len(scales) == 2 else jnp.full_like(scales[0], MIDDLE)
    codes = unpack(words).reshape(groups, -1, words.shape[1]).astype(jnp.float32)
    wide = ((codes - zeros[:, None]) * scales[0][:, None]).reshape(x.shape[1], -1)
    return jnp.matmul(x.astype(jnp.float32), wide, precision="highest")
