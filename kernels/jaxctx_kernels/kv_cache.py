"""The KV cache's page arrays: preallocated, written in place and never copied.

An array holds the keys (or the values) of one layer or of all, `[kv_heads, pages, page_size, head_dim]`: a page's
tokens of one head lie together, so that reading pages needs no transpose. Page 0 is scratch: padded rows write there
and nobody reads it. Donate the arrays to the jitted step, or XLA copies them.

    on a CPU, GPU     [kv_heads,     pages, page_size, head_dim]
    on a TPU          [kv_heads / n, pages, page_size, lanes]           n heads side by side, in rows of 128 lanes
    scales            [kv_heads / n, pages, n, page_size]               on a TPU whole rows of 128 lanes

A TPU's rows of lanes are whole. Heads that do not fill them are padded: heads of 80, 96 and 112 to 128 lanes, three
heads of 64 with a fourth one in the second row. Padding holds zeros, and takes memory as all else does.

XLA on CPU widens bfloat16 arrays around a scatter (88 ms for 128 MB, against 0.2 ms), so there bfloat16 is stored as
its bits in uint16 and reinterpreted where it is read. No one outside this package needs to know.

Keys or values of 8 bits are two arrays, `QuantizedKV`: values, and a float32 scale for each token and head, made when
the token is written. Neither changes afterwards, so that copies, forks and what is read back are the same to the bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, Shaped

CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = frozenset(CPU_INFO.read_text().split()) if CPU_INFO.is_file() else frozenset[str]()
"""What this machine's CPU says that it can do, among other words."""
CPU_MULTIPLIES_BFLOAT16 = not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(CPU_FLAGS)
"""Whether it multiplies bfloat16 without widening it."""
CPU_HAS_LONG_VECTORS = "avx512f" in CPU_FLAGS
"""Whether it has vectors of 512 bits, and not only shorter ones."""

DTYPE_OF_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}
"""What a CPU stores as bits, since XLA would widen it: the stored dtype, and the dtype that its bits mean."""

LANES = 128  # of the last axis of an array in a TPU's memory
LARGEST_INT8 = 127
LARGEST_FLOAT8 = 448  # of float8_e4m3fn

PageArray = Shaped[Array, "kv_heads pages page_size head_dim"]


class QuantizedKV(NamedTuple):
    """Page arrays of 8 bits. A value stands for itself times the scale of its token and head."""

    values: PageArray  # int8 or float8_e4m3fn; the latter on a CPU as its bits in uint8, as XLA widens it too
    scales: Float32[Array, "kv_heads pages side_by_side lanes"]  # lanes: one for each token of a page, or more


KVPages: TypeAlias = PageArray | QuantizedKV


def kv_pages_struct(kv_heads: int, pages: int, page_size: int, head_dim: int, dtype: DTypeLike, platform: str) -> Any:
    """How pages of `dtype` ("bfloat16", "float32", "int8", "float8_e4m3fn", "uint32") are stored on `platform`.

    Returns a ShapeDtypeStruct, or a QuantizedKV of two. A TPU has whole rows of 128 lanes, see `head_rows`: with
    narrower ones XLA would copy the array at every write and every call of the kernel. For the same reason it has whole
    rows of lanes for the scales. Writing and attention recognise it by the shape and the number of KV heads.
    """
    stored = head_rows(kv_heads, head_dim, platform)
    values: Any = jax.ShapeDtypeStruct((stored.rows, pages, page_size, stored.lanes), stored_dtype(dtype, platform))
    if values.dtype.itemsize > 1:
        return values
    scale_lanes = -(-page_size // LANES) * LANES if platform == "tpu" else page_size
    scales: Any = jax.ShapeDtypeStruct((stored.rows, pages, stored.side_by_side, scale_lanes), jnp.float32)
    return QuantizedKV(values, scales)


class HeadRows(NamedTuple):
    """How the KV heads of a token lie in a page array: in `rows` rows, the first of its axes, of `lanes` numbers.

    `side_by_side` of them lie in a row, each in as many lanes as it has numbers; the rest is padding. The last row may
    be padded with heads.
    """

    rows: int
    side_by_side: int
    lanes: int

    def are_full(self, kv_heads: int, head_dim: int) -> bool:
        """Whether there is no padding."""
        return self.rows * self.lanes == kv_heads * head_dim


def head_rows(kv_heads: int, head_dim: int, platform: str) -> HeadRows:
    """How KV heads of one device are stored: each by itself, or on a TPU in few whole rows of lanes that hold them.

    A row holds a power of two of heads: XLA would copy arrays of scales in which three lie side by side.
    """
    if platform != "tpu":
        return HeadRows(kv_heads, 1, head_dim)
    most = 1 << max(1, LANES // head_dim).bit_length() - 1
    count = -(-kv_heads // most)
    side_by_side = heads_in_row(kv_heads, count)
    return HeadRows(count, side_by_side, -(-side_by_side * head_dim // LANES) * LANES)


def heads_in_row(kv_heads: int, count: int) -> int:
    """How many KV heads a row holds, where `count` rows hold them: the least power of two that does."""
    return 1 << (-(-kv_heads // count) - 1).bit_length()


def in_rows_of_lanes(
    rows: Shaped[Array, "rows kv_heads head_dim"], stored_heads: int, lanes: int
) -> Shaped[Array, "rows stored_heads lanes"]:
    """Keys (or values) as a page array has them, with zeros in what is to spare."""
    count, kv_heads, dim = rows.shape
    side_by_side = heads_in_row(kv_heads, stored_heads)
    rows = pad_axis(rows, 1, stored_heads * side_by_side).reshape(count, stored_heads, side_by_side * dim)
    return pad_axis(rows, 2, lanes)


def pad_axis(array: jax.Array, axis: int, size: int) -> jax.Array:
    """The array with zeros at the end of an axis, up to `size`."""
    spare = [(0, 0)] * array.ndim
    spare[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, spare) if spare[axis][1] else array


def stored_dtype(dtype: DTypeLike, platform: str) -> DTypeLike:
    """The dtype in which pages of `dtype` are stored: on a CPU that of their bits, where XLA would widen them."""
    if platform == "cpu":
        for bits, meant in DTYPE_OF_BITS.items():
            if meant == jnp.dtype(dtype):
                return bits
    return dtype


def kv_values(pages: Any) -> Any:
    """The array of values of quantized pages or buffers; others are that array themselves."""
    return pages.values if isinstance(pages, QuantizedKV) else pages


MMA_PAGES = (
    "a head_dim that is a multiple of 16 up to 256, pages of 16, 32 or a multiple of 64 tokens, "
    "and KV of bfloat16 or 8 bits"
)
TPU_PAGES = "pages of a multiple of 16 tokens"


def fits_hopper_kernel(pages: Any) -> bool:
    """Whether the Hopper kernel reads pages of this layout, given as arrays or ShapeDtypeStructs."""
    values = kv_values(pages)
    page_size, head_dim = values.shape[2:]
    if values.dtype not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        return False
    return head_dim in (64, 128, 256) and page_size in (16, 32, 64, 128)


def fits_mma_kernel(pages: Any) -> bool:
    """Whether the kernel for NVIDIA GPUs since Ampere reads pages of this layout; arrays or ShapeDtypeStructs."""
    values = kv_values(pages)
    page_size, head_dim = values.shape[2:]
    if values.dtype not in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
        return False
    fits_page = page_size in (16, 32) or page_size % 64 == 0
    return bool(fits_page and head_dim % 16 == 0 and head_dim <= 256)


def fits_tpu_kernel(pages: Any) -> bool:
    """Whether the TPU kernel reads pages of this layout without a copy, given as arrays or ShapeDtypeStructs."""
    values = kv_values(pages)
    page_size, lanes = values.shape[2:]
    return bool(values.dtype != jnp.uint32 and lanes % LANES == 0 and page_size % 16 == 0)


def without_stored_bits(pages: KVPages) -> KVPages:
    """Pages whose arrays have the dtype that they mean: what a CPU stores as bits is reinterpreted."""
    real: KVPages = jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, DTYPE_OF_BITS.get(x.dtype, x.dtype)), pages)
    return real


def decode(stored: jax.Array) -> jax.Array:
    """Stored values as numbers to compute with: bits become bfloat16, or float32 where that is multiplied faster.

    Both are exact, and the conversion is fused with the copy out of the page array. Values of 8 bits are not scaled.
    """
    if stored.dtype == jnp.uint16 and not CPU_MULTIPLIES_BFLOAT16:
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    if stored.dtype in DTYPE_OF_BITS:
        stored = jax.lax.bitcast_convert_type(stored, DTYPE_OF_BITS[stored.dtype])
    if stored.dtype.itemsize == 1:
        return stored.astype(jnp.bfloat16 if CPU_MULTIPLIES_BFLOAT16 else jnp.float32)
    return stored


def encode(numbers: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
    """Numbers as a page array of this stored dtype holds them: the inverse of `decode`, rounded."""
    if dtype == jnp.int8:
        return jnp.round(numbers).astype(jnp.int8)
    if dtype in DTYPE_OF_BITS:
        return jax.lax.bitcast_convert_type(numbers.astype(DTYPE_OF_BITS[dtype]), dtype)
    return numbers.astype(dtype)


def write_kv(pages: KVPages, rows: Shaped[Array, "rows kv_heads head_dim"], slots: Int32[Array, " rows"]) -> Any:
    """Store each row's keys (or values) at its slot, `page * page_size + offset`. Padded rows go to page 0.

    Returns the pages, updated in place if they are donated. In 8 bits a number that is not finite makes its whole row
    of a head NaN.
    """
    if isinstance(pages, QuantizedKV):
        return write_quantized(pages, rows, slots)
    stored_heads, _, page_size, lanes = pages.shape
    stored = in_rows_of_lanes(encode(rows, pages.dtype), stored_heads, lanes).transpose(1, 0, 2)
    return pages.at[:, slots // page_size, slots % page_size].set(stored)


def write_quantized(
    pages: QuantizedKV, rows: Shaped[Array, "rows kv_heads head_dim"], slots: Int32[Array, " rows"]
) -> QuantizedKV:
    """Quantize each row of a head by its greatest number, which is kept as it is, and store numbers and scales."""
    stored_heads, _, side_by_side, _ = pages.scales.shape
    page_size = pages.values.shape[2]
    numbers, scale = quantize(rows, pages.values.dtype)
    slot_scales = pages.scales.at[:, slots // page_size, :, slots % page_size]
    scales = slot_scales.set(pad_axis(scale, 1, stored_heads * side_by_side).reshape(-1, stored_heads, side_by_side))
    return QuantizedKV(write_kv(pages.values, numbers, slots), scales)


def quantize(
    rows: Shaped[Array, "rows kv_heads head_dim"], dtype: DTypeLike
) -> tuple[Float32[Array, "rows kv_heads head_dim"], Float32[Array, "rows kv_heads"]]:
    """Rows in units of their scales, in the range of `dtype` and not yet rounded; and the scales.

    The scale of what is not finite is not finite either.
    """
    rows = rows.astype(jnp.float32)
    scale = jnp.abs(rows).max(-1) / (LARGEST_INT8 if dtype == jnp.int8 else LARGEST_FLOAT8)
    scale = jax.lax.platform_dependent(scale, rows, cpu=_mark_not_finite, default=lambda scale, _: scale)
    return rows / jnp.where(scale == 0, 1, scale)[..., None], scale


def _mark_not_finite(
    scale: Float32[Array, "rows kv_heads"], rows: Float32[Array, "rows kv_heads head_dim"]
) -> Float32[Array, "rows kv_heads"]:
    """The scales, NaN for what is not finite. XLA's maximum on a CPU leaves a NaN out where there are many rows.

    On a TPU this would triple the bundles of a write.
    """
    return jnp.where(jnp.isfinite(rows).all(-1), scale, jnp.nan)


def copy_pages(arrays: Any, sources: Int32[Array, " n"], targets: Int32[Array, " n"]) -> Any:
    """Copy whole pages in each array of a tree; all sources are read before any target is written.

    Pairs (0, 0) are padding.
    """
    return jax.tree.map(lambda array: array.at[:, targets].set(array[:, sources]), arrays)


def read_pages(pages: KVPages, ids: Int32[Array, " n"]) -> Shaped[Array, "n kv_heads page_size head_dim"]:
    """Whole pages as they are stored; of 8 bits as bytes, the last four of each token and head being its scale."""
    return join_scales(jax.tree.map(lambda array: array[:, ids].swapaxes(0, 1), pages))


def write_pages(
    pages: KVPages, ids: Int32[Array, " n"], data: Sequence[Shaped[Array, "kv_heads page_size head_dim"]]
) -> Any:
    """The inverse of `read_pages`, from an array for each page. Repetitions of page 0 are padding."""

    def write(array: jax.Array, *parts: jax.Array) -> jax.Array:
        if len(parts) > 4:  # as one operation for accelerators; on a CPU it takes 0.60 ms for 4 of 0.5 MB, this 0.35
            return array.at[:, ids].set(jnp.stack(parts, 1))
        for number, part in enumerate(parts):
            array = jax.lax.dynamic_update_slice(array, part[:, None], (0, ids[number], 0, 0))
        return array

    return jax.tree.map(write, pages, *(split_scales(pages, page) for page in data))


def join_scales(read: KVPages) -> Shaped[Array, "n kv_heads page_size head_dim"]:
    """Pages outside the page arrays, of what these hold of each: `[n, kv_heads, …]`, with scales if they have such."""
    if not isinstance(read, QuantizedKV):
        return read
    page_size = read.values.shape[2]
    scales = jax.lax.bitcast_convert_type(read.scales[..., :page_size].swapaxes(2, 3), jnp.uint8)
    values = jax.lax.bitcast_convert_type(read.values, jnp.uint8)
    return jnp.concatenate([values, scales.reshape(*values.shape[:3], -1)], 3)


def split_scales(pages: KVPages, data: Shaped[Array, "*n kv_heads page_size head_dim"]) -> Any:
    """The inverse of `join_scales`: what `pages` hold of the page, or the pages, `data`."""
    if not isinstance(pages, QuantizedKV):
        return data
    page_size, lanes = pages.values.shape[2:]
    side_by_side, scale_lanes = pages.scales.shape[2:]
    values = jax.lax.bitcast_convert_type(data[..., :lanes], pages.values.dtype)
    bits = data[..., lanes:].reshape(*data.shape[:-1], side_by_side, 4)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32).swapaxes(-1, -2)
    spare = ((0, 0),) * (scales.ndim - 1) + ((0, scale_lanes - page_size),)
    return QuantizedKV(values, jnp.pad(scales, spare))
