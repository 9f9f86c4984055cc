"""The KV pool: preallocated page arrays, written in place and never copied.

An array holds the keys (or the values) of one layer or of all, `[kv_heads, pages, page_size, head_dim]`: a page's
tokens of one head lie together, so that reading pages needs no transpose. Page 0 is scratch: padded rows write there
and nobody reads it. Donate the pool to the jitted step, or XLA copies it.

XLA on CPU widens bfloat16 arrays around a scatter (88 ms for 128 MB, against 0.2 ms), so there a bfloat16 pool is
stored as its bits in uint16 and reinterpreted where it is read. No one outside this module needs to know.

A pool of 8 bits is two arrays, `QuantizedKV`: numbers, and a float32 scale for each token and head, made when the token is
written. Neither changes afterwards, so that copies, forks and what is read back are the same numbers to the bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, Shaped

from jaxctx_kernels.metadata import KernelName

CPU_FLAGS = Path("/proc/cpuinfo")
NARROW_PRODUCTS = CPU_FLAGS.is_file() and not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(
    CPU_FLAGS.read_text().split()
)
"""Whether this machine's CPU multiplies bfloat16 by itself."""

BITS_OF = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}
"""What a CPU keeps as bits, since XLA would widen it."""

Plain = Shaped[Array, "kv_heads pages page_size head_dim"]


class QuantizedKV(NamedTuple):
    """A pool of 8 bits. A number stands for itself times its token's and head's scale."""

    numbers: Plain  # int8 or float8_e4m3fn; the latter on a CPU as its bits in uint8, as XLA widens it too
    scales: Float32[Array, "kv_heads pages heads_beside page_size"]  # heads side by side apart, see `kv_pages_struct`


KVPages: TypeAlias = Plain | QuantizedKV


def kv_pages_struct(kv_heads: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike, platform: str) -> Any:
    """How a pool of `dtype` ("bfloat16", "float32", "int8", "float8_e4m3fn", "uint32") is stored on `platform`.

    A TPU has heads side by side in the 128 lanes of the last axis, where that fills them: with narrower rows XLA would
    copy the pool at every write and every call of the kernel. Writing and attention see it by the shape.
    """
    kept = {number: bits for bits, number in BITS_OF.items()} if platform == "cpu" else {}
    stored = kept.get(jnp.dtype(dtype), dtype)
    n = 128 // head_dim if platform == "tpu" and 128 % head_dim == 0 and kv_heads % (128 // head_dim) == 0 else 1
    numbers: Any = jax.ShapeDtypeStruct((kv_heads // n, pages, page_size, n * head_dim), stored)
    if numbers.dtype.itemsize > 1:
        return numbers
    scales: Any = jax.ShapeDtypeStruct((kv_heads // n, pages, n, page_size), jnp.float32)
    return QuantizedKV(numbers, scales)


def select_kernel(platform: str, pool: Any) -> KernelName:
    """What computes attention over such pools on `platform`: its kernel, if that is made for them.

    `pool` is of arrays or ShapeDtypeStructs.
    """
    (page_size, lanes), kind = kv_values(pool).shape[2:], kv_values(pool).dtype
    narrow = kind in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
    if platform == "gpu" and narrow and lanes in (64, 128, 256) and page_size in (16, 32, 64, 128):
        return "gpu"
    if platform == "tpu" and kind != jnp.uint32 and lanes % 128 == 0 and page_size % 16 == 0:
        return "tpu"
    return "reference"


def kv_values(pool: Any) -> Any:
    """The numbers of a pool or of buffers, scaled or not."""
    return pool.numbers if isinstance(pool, QuantizedKV) else pool


def numbers(stored: jax.Array) -> jax.Array:
    """What is stored, as the numbers it stands for: bits become bfloat16, or float32 where that is multiplied faster.

    Both are exact, and the conversion rides on the copy out of the pool. Numbers of 8 bits are not yet scaled.
    """
    if stored.dtype == jnp.uint16 and not NARROW_PRODUCTS:
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    if stored.dtype in BITS_OF:
        stored = jax.lax.bitcast_convert_type(stored, BITS_OF[stored.dtype])
    if stored.dtype.itemsize == 1:
        return stored.astype(jnp.bfloat16 if NARROW_PRODUCTS else jnp.float32)
    return stored


def bits(values: jax.Array, pool: Plain) -> jax.Array:
    """Numbers as `pool` stores them."""
    if pool.dtype == jnp.int8:
        return jnp.round(values).astype(jnp.int8)
    if pool.dtype in BITS_OF:
        return jax.lax.bitcast_convert_type(values.astype(BITS_OF[pool.dtype]), pool.dtype)
    return values.astype(pool.dtype)


def write_kv(pool: KVPages, values: Shaped[Array, "rows kv_heads head_dim"], slots: Int32[Array, " rows"]) -> Any:
    """Store each row's values at its slot (`page * page_size + offset`). Padded rows go to page 0.

    In 8 bits a value that is not finite makes its whole row of a head NaN.
    """
    if isinstance(pool, QuantizedKV):
        stored, _, beside, page_size = pool.scales.shape
        values = values.astype(jnp.float32)
        scale = jnp.abs(values).max(-1) / (127 if pool.numbers.dtype == jnp.int8 else 448)  # the greatest there is
        values /= jnp.where(scale == 0, 1, scale)[..., None]
        scales = pool.scales.at[:, slots // page_size, :, slots % page_size].set(scale.reshape(-1, stored, beside))
        return QuantizedKV(write_kv(pool.numbers, values, slots), scales)
    stored, _, page_size, lanes = pool.shape
    values = bits(values, pool).reshape(values.shape[0], stored, lanes).transpose(1, 0, 2)
    return pool.at[:, slots // page_size, slots % page_size].set(values)


def copy_pages(pools: Any, sources: Int32[Array, " n"], targets: Int32[Array, " n"]) -> Any:
    """Copy whole pages of each pool; all sources are read before any target is written. Pairs (0, 0) are padding."""
    return jax.tree.map(lambda array: array.at[:, targets].set(array[:, sources]), pools)


def read_pages(pool: KVPages, pages: Int32[Array, " n"]) -> Shaped[Array, "n kv_heads page_size head_dim"]:
    """Whole pages as they are stored; of 8 bits as bytes, the last four of a token and head being its scale."""
    if isinstance(pool, QuantizedKV):
        scales = jax.lax.bitcast_convert_type(read_pages(pool.scales, pages).swapaxes(2, 3), jnp.uint8)
        kv_values = jax.lax.bitcast_convert_type(read_pages(pool.numbers, pages), jnp.uint8)
        return jnp.concatenate([kv_values, scales.reshape(*kv_values.shape[:3], -1)], 3)
    return pool[:, pages].swapaxes(0, 1)


def write_pages(
    pool: KVPages, pages: Int32[Array, " n"], data: Sequence[Shaped[Array, "kv_heads page_size head_dim"]]
) -> Any:
    """The inverse of `read_pages`, from an array each. Repetitions of page 0 are padding."""
    if isinstance(pool, QuantizedKV):
        lanes, beside = pool.numbers.shape[3], pool.scales.shape[2]
        kv_values = [jax.lax.bitcast_convert_type(page[..., :lanes], pool.numbers.dtype) for page in data]
        scales = [page[..., lanes:].reshape(*page.shape[:2], beside, 4) for page in data]
        scales = [jax.lax.bitcast_convert_type(page, jnp.float32).swapaxes(1, 2) for page in scales]
        return QuantizedKV(write_pages(pool.numbers, pages, kv_values), write_pages(pool.scales, pages, scales))
    if len(data) > 4:  # as one operation for accelerators; on a CPU it takes 0.60 ms for 4 of 0.5 MB, this 0.35
        return pool.at[:, pages].set(jnp.stack(data, 1))
    for number, page in enumerate(data):
        pool = jax.lax.dynamic_update_slice(pool, page[:, None], (0, pages[number], 0, 0))
    return pool
