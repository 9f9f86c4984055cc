"""The KV pool: preallocated page arrays, written in place and never copied.

One array holds the keys (or the values) of one layer, `[kv_heads, pages, page_size, head_dim]`: a page's tokens of one
head lie together, so that reading pages needs no transpose. Page 0 is scratch: padded rows write there and nobody reads
it. Donate the pool to the jitted step, or XLA copies it.

XLA on CPU widens bfloat16 arrays around a scatter (88 ms for 128 MB, against 0.2 ms), so there a bfloat16 pool is
stored as its bits in uint16 and reinterpreted where it is read. No one outside this module needs to know.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Shaped

CPU_FLAGS = Path("/proc/cpuinfo")
NARROW_PRODUCTS = CPU_FLAGS.is_file() and not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(
    CPU_FLAGS.read_text().split()
)
"""Whether this machine's CPU multiplies bfloat16 by itself."""

Pool = Shaped[Array, "kv_heads pages page_size head_dim"]


def pool_struct(
    kv_heads: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike, platform: str
) -> jax.ShapeDtypeStruct:
    """How a pool of `dtype` ("bfloat16", "float32", "uint32") is stored on `platform`.

    A TPU has heads side by side in the 128 lanes of the last axis, where that fills them: with narrower rows XLA would
    copy the pool at every write and every call of the kernel. Writing and attention see it by the shape.
    """
    bits = platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16
    n = 128 // head_dim if platform == "tpu" and 128 % head_dim == 0 and kv_heads % (128 // head_dim) == 0 else 1
    return jax.ShapeDtypeStruct((kv_heads // n, pages, page_size, n * head_dim), jnp.uint16 if bits else dtype)


def pool_array(kv_heads: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike) -> Pool:
    """A pool on the default platform; its contents are undefined, page 0 is scratch."""
    return jnp.zeros_like(pool_struct(kv_heads, pages, page_size, head_dim, dtype, jax.default_backend()))


def numbers(stored: jax.Array) -> jax.Array:
    """What is stored, as the numbers it stands for: bits become bfloat16, or float32 where that is multiplied faster.

    Both are exact, and the conversion rides on the copy out of the pool.
    """
    if stored.dtype != jnp.uint16:
        return stored
    if NARROW_PRODUCTS:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)


def bits(values: jax.Array, pool: Pool) -> jax.Array:
    """Numbers as `pool` stores them."""
    if pool.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(pool.dtype)


def write_rows(pool: Pool, values: Shaped[Array, "rows kv_heads head_dim"], slots: Int32[Array, " rows"]) -> Pool:
    """Store each row's values at its slot (`page * page_size + offset`). Padded rows go to page 0."""
    stored, _, page_size, lanes = pool.shape
    values = bits(values, pool).reshape(values.shape[0], stored, lanes).transpose(1, 0, 2)
    return pool.at[:, slots // page_size, slots % page_size].set(values)


def copy_pages(pool: Pool, sources: Int32[Array, " n"], targets: Int32[Array, " n"]) -> Pool:
    """Copy whole pages; all sources are read before any target is written. Pairs (0, 0) are padding."""
    return pool.at[:, targets].set(pool[:, sources])


def read_pages(pool: Pool, pages: Int32[Array, " n"]) -> Shaped[Array, "n kv_heads page_size head_dim"]:
    """Whole pages as they are stored."""
    return pool[:, pages].swapaxes(0, 1)


def write_pages(
    pool: Pool, pages: Int32[Array, " n"], data: Sequence[Shaped[Array, "kv_heads page_size head_dim"]]
) -> Pool:
    """The inverse of `read_pages`, from an array each. Repetitions of page 0 are padding."""
    if len(data) > 4:  # as one operation for accelerators; on a CPU it takes 0.60 ms for 4 of 0.5 MB, this 0.35
        return pool.at[:, pages].set(jnp.stack(data, 1))
    for number, page in enumerate(data):
        pool = jax.lax.dynamic_update_slice(pool, page[:, None], (0, pages[number], 0, 0))
    return pool
