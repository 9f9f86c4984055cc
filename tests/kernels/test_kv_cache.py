"""The KV pages: what is written is read, and nothing the size of a pool is ever allocated beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxctx_kernels import (
    MetadataShape,
    QuantizedKV,
    Segment,
    attend,
    build_attention_metadata,
    head_rows,
    kv_pages_struct,
    kv_values,
    metadata_shape,
    unpack_metadata,
    write_kv,
)
from jaxctx_kernels.kv_cache import copy_pages, decode, read_pages, write_pages

from .builders import zero_pages

Generator = np.random.Generator
HEADS, PAGES, SIZE, DIM = 2, 40, 16, 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint32"])
def test_written_rows_are_read_and_others_kept(rng: Generator, dtype: str) -> None:
    pool = zero_pages(HEADS, PAGES, SIZE, DIM, dtype)
    assert pool.shape == (HEADS, PAGES, SIZE, DIM)
    want = np.array(decode(pool))
    for _ in range(2):
        slots = rng.choice(PAGES * SIZE, 20, replace=False).astype(np.int32)
        values = jnp.asarray(rng.integers(0, 200, size=(20, HEADS, DIM)), dtype)
        pool = write_kv(pool, values, jnp.asarray(slots))
        want[:, slots // SIZE, slots % SIZE] = np.asarray(values.astype(want.dtype)).transpose(1, 0, 2)
    np.testing.assert_array_equal(decode(pool), want)


def test_heads_side_by_side(rng: Generator) -> None:
    """A TPU wants rows of 128 lanes where heads are narrower; what is written is the same, two heads to a row."""
    slots = jnp.asarray(rng.choice(PAGES * SIZE, 20, replace=False), jnp.int32)
    values = jnp.asarray(rng.normal(size=(20, HEADS, DIM)), jnp.float32)
    alone = write_kv(zero_pages(HEADS, PAGES, SIZE, DIM, "float32"), values, slots)
    beside = write_kv(zero_pages(1, PAGES, SIZE, HEADS * DIM, "float32"), values, slots)
    np.testing.assert_array_equal(beside[0].reshape(PAGES, SIZE, HEADS, DIM).transpose(2, 0, 1, 3), alone)


@pytest.mark.parametrize(
    ("heads", "dim", "stored", "full"),
    [
        (2, 64, (1, 2, 128), True),
        (8, 32, (2, 4, 128), True),
        (2, 128, (2, 1, 128), True),
        (4, 256, (4, 1, 256), True),
        (3, 64, (2, 2, 128), False),  # room for a fourth
        (1, 64, (1, 1, 128), False),
        (6, 32, (2, 4, 128), False),  # four and two, as three would be no power of two
        (2, 32, (1, 2, 128), False),
        (3, 40, (2, 2, 128), False),
        (10, 32, (3, 4, 128), False),
        (3, 48, (2, 2, 128), False),
        (2, 80, (2, 1, 128), False),
        (2, 96, (2, 1, 128), False),
        (2, 112, (2, 1, 128), False),
        (2, 192, (2, 1, 256), False),
        (1, 1, (1, 1, 128), False),
    ],
)
def test_a_tpu_has_whole_rows_of_lanes(heads: int, dim: int, stored: tuple[int, int, int], full: bool) -> None:
    """As few as hold the heads; elsewhere each head is by itself."""
    assert head_rows(heads, dim, "tpu") == stored
    assert head_rows(heads, dim, "tpu").are_full(heads, dim) == full
    for platform, (rows, beside, lanes) in (("tpu", stored), ("gpu", (heads, 1, dim)), ("cpu", (heads, 1, dim))):
        wide = kv_pages_struct(heads, PAGES, SIZE, dim, "float32", platform)
        assert (wide.shape, wide.dtype) == ((rows, PAGES, SIZE, lanes), jnp.float32)
        narrow = kv_pages_struct(heads, PAGES, SIZE, dim, "int8", platform)
        assert (narrow.values.shape, narrow.scales.shape[:3]) == (wide.shape, (rows, PAGES, beside))


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 96), (6, 32), (1, 64), (1, 160)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_what_rows_of_lanes_have_to_spare_is_zero(rng: Generator, heads: int, dim: int, dtype: str) -> None:
    """Whatever was there; and heads are where they should be, each with its scale."""
    struct = kv_pages_struct(heads, PAGES, SIZE, dim, dtype, "tpu")
    values = jnp.asarray(rng.normal(size=(20, heads, dim)), jnp.float32)
    slots = rng.choice(PAGES * SIZE, 20, replace=False)
    pages = write_kv(jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), struct), values, jnp.asarray(slots))
    count, beside, lanes = head_rows(heads, dim, "tpu")

    def by_head(array: Any, width: int) -> np.ndarray:
        """What a row has of each head that it has room for, float64 `[20, room, width]`."""
        written = np.asarray(array, np.float64)[:, slots // SIZE, slots % SIZE].swapaxes(0, 1)
        assert not written[..., beside * width :].any()
        written = written[..., : beside * width].reshape(20, count * beside, width)
        assert not written[:, heads:].any()
        return written[:, :heads]

    stored = kv_values(pages)
    assert stored.shape == (count, PAGES, SIZE, lanes)
    got = by_head(stored, dim)
    if isinstance(pages, QuantizedKV):
        got = got * by_head(pages.scales.swapaxes(2, 3), 1)
    largest = np.abs(values).max(-1, keepdims=True)
    assert (np.abs(got - np.asarray(values)) <= largest * 0.04).all()


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_a_cpu_keeps_bfloat16_as_its_bits(dtype: str | type) -> None:
    """However the type is named: XLA widens a bfloat16 pool at every write there."""
    assert kv_pages_struct(HEADS, PAGES, SIZE, DIM, dtype, "cpu").dtype == jnp.uint16
    assert zero_pages(HEADS, PAGES, SIZE, DIM, dtype).dtype == jnp.uint16


def test_every_bfloat16_survives_storage() -> None:
    """Bits in, the same numbers out: subnormals, infinities and signed zeros included."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, HEADS, DIM)
    values = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    rows = bits.shape[0]
    pool = write_kv(zero_pages(HEADS, rows // SIZE, SIZE, DIM, "bfloat16"), values, jnp.arange(rows))
    got = np.asarray(decode(pool), np.float32).reshape(HEADS, rows, DIM).transpose(1, 0, 2)
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


@pytest.mark.parametrize(("dtype", "most", "off"), [("int8", 127, 1 / 254), ("float8_e4m3fn", 448, 2**-4)])
def test_rows_of_8_bits_keep_their_scale(
    rng: Generator, exact: Callable[[object], np.ndarray], dtype: str, most: int, off: float
) -> None:
    """The greatest number of a row is kept as it is, zeros are zeros, others are off by half a step at most."""
    pool = zero_pages(HEADS, PAGES, SIZE, DIM, dtype)
    slots = rng.choice(PAGES * SIZE, 20, replace=False).astype(np.int32)
    values = rng.normal(size=(20, HEADS, DIM)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 9, (20, 1, 1))
    values[3, 1], values[4, 0, 5] = 0, np.nan
    got = exact(write_kv(pool, jnp.asarray(values), jnp.asarray(slots)))
    rows = got[:, slots // SIZE, slots % SIZE].swapaxes(0, 1)
    assert np.isnan(rows[4, 0]).all()
    rows[4, 0] = values[4, 0] = 0
    greatest = np.abs(values).max(-1, keepdims=True)
    np.testing.assert_allclose(np.abs(rows).max(-1, keepdims=True), greatest, rtol=1e-6)
    step = greatest if dtype == "int8" else np.maximum(np.abs(values), greatest * 2.0**-6 / most)
    assert (np.abs(rows - values) <= off * step * 1.001).all()
    got[:, slots // SIZE, slots % SIZE] = 0
    assert not got.any()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("count", [1, 17, 65])
def test_what_is_not_finite_stays_so_in_8_bits(
    exact: Callable[[object], np.ndarray], count: int, dtype: str, number: float
) -> None:
    """In steps of many rows too, compiled, where XLA's own maximum on a CPU would leave a NaN out."""
    rows = np.ones((count, 4, 128), np.float32)
    rows[-1, -1, 3] = number
    slots = np.arange(16, 16 + count, dtype=np.int32)
    got = exact(jax.jit(write_kv)(zero_pages(4, 8, 16, 128, dtype), jnp.asarray(rows), jnp.asarray(slots)))
    written = got[:, slots // 16, slots % 16].swapaxes(0, 1)
    assert np.isnan(written[-1, -1]).all()
    written[-1, -1] = 1
    np.testing.assert_allclose(written, 1, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "rms"), [("int8", 0.0065), ("float8_e4m3fn", 0.0257)])
def test_rows_of_8_bits_are_as_exact_as_their_type_can_be(
    rng: Generator, exact: Callable[[object], np.ndarray], dtype: str, rms: float
) -> None:
    """As docs/kernels/eight-bit-kv.md says of their types: 7 bits of a row's greatest number, or 3 of each number."""
    values = rng.normal(size=(4096, 1, 128)).astype(np.float32)
    got = exact(write_kv(zero_pages(1, 256, 16, 128, dtype), jnp.asarray(values), jnp.arange(4096)))
    off = got.reshape(4096, 128) - values[:, 0]
    assert np.sqrt((off**2).mean()) == pytest.approx(rms, rel=0.02)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_pages_of_8_bits_are_bytes_outside(rng: Generator, dtype: str, platform: str) -> None:
    """Scales and all, whatever the bits; heads side by side too. What was copied or written back is the same."""
    beside = 2 if platform == "tpu" else 1
    pool = jax.tree.map(jnp.zeros_like, kv_pages_struct(HEADS, PAGES, SIZE, DIM, dtype, platform))
    pages = rng.integers(0, 256, (6, HEADS // beside, SIZE, (DIM + 4) * beside)).astype(np.uint8)
    pool = write_pages(pool, jnp.arange(1, 7), list(jnp.asarray(pages)))
    pool = write_pages(pool, jnp.arange(1, 3), list(jnp.asarray(pages[:2])))
    copied = copy_pages(pool, jnp.arange(1, 7), jnp.arange(11, 17))
    for held in (read_pages(copied, jnp.arange(1, 7)), read_pages(copied, jnp.arange(11, 17))):
        assert held.dtype == jnp.uint8
        np.testing.assert_array_equal(held, pages)
    values = jnp.asarray(rng.normal(size=(20, HEADS, DIM)), jnp.float32)
    slots = jnp.asarray(rng.choice(PAGES * SIZE, 20, replace=False), jnp.int32)
    alone = write_kv(
        jax.tree.map(jnp.zeros_like, kv_pages_struct(HEADS, PAGES, SIZE, DIM, dtype, "gpu")), values, slots
    )
    pool = write_kv(jax.tree.map(jnp.zeros_like, pool), values, slots)
    got = read_pages(pool, jnp.arange(PAGES))[..., DIM * beside :].reshape(PAGES, -1, SIZE, beside, 4)
    want = read_pages(alone, jnp.arange(PAGES))[..., DIM:]
    np.testing.assert_array_equal(got.swapaxes(2, 3).reshape(want.shape), want)


def test_copy_pages_reads_before_it_writes(rng: Generator) -> None:
    values = rng.normal(size=(HEADS, PAGES, SIZE, DIM)).astype(np.float32)
    sources, targets = np.array([3, 5, 4, 0, 0], np.int32), np.array([4, 6, 5, 0, 0], np.int32)
    want = values.copy()
    want[:, targets] = values[:, sources]
    np.testing.assert_array_equal(copy_pages(jnp.asarray(values), jnp.asarray(sources), jnp.asarray(targets)), want)


def layer(
    k: jax.Array, v: jax.Array, q: jax.Array, new: jax.Array, slots: jax.Array, packed: jax.Array, shape: MetadataShape
) -> tuple[jax.Array, jax.Array, jax.Array]:
    k, v = write_kv(k, new, slots), write_kv(v, new, slots)
    return attend(q, k, v, unpack_metadata(shape, packed), shape=shape), k, v


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        pytest.param("float32", marks=pytest.mark.slow),
        "int8",
        pytest.param("float8_e4m3fn", marks=pytest.mark.slow),
    ],
)
def test_two_layers_leave_the_pools_in_place(dtype: str) -> None:
    """A donated step needs far less memory beside its arguments than one pool takes."""
    rows, pages, kind = 16, 8000, "float32" if jnp.dtype(dtype).itemsize == 1 else dtype
    shape = metadata_shape(rows, SIZE, 4096, pages)
    struct = jax.ShapeDtypeStruct
    pool = jax.eval_shape(lambda: zero_pages(HEADS, pages, SIZE, DIM, dtype))

    def step(pools: list[jax.Array], q: jax.Array, new: jax.Array, slots: jax.Array, packed: jax.Array) -> object:
        out, *pools[:2] = layer(pools[0], pools[1], q, new, slots, packed, shape)
        out, *pools[2:] = layer(pools[2], pools[3], out.astype(q.dtype), new, slots, packed, shape)
        return out, pools

    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower(
            [pool] * 4,
            struct((rows, 2 * HEADS, DIM), kind),
            struct((rows, HEADS, DIM), kind),
            struct((rows,), jnp.int32),
            struct((shape.size(),), jnp.int32),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    pool_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= 4 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2


@pytest.mark.parametrize(
    "change", [lambda p, i: copy_pages(p, i, i + 9), lambda p, i: write_kv(p, jax.tree.leaves(p)[0][:, :4, 0], i)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_changes_of_a_donated_pool_allocate_no_pool(change: object, dtype: str) -> None:
    pool = jax.eval_shape(lambda: zero_pages(4, 2000, SIZE, DIM, dtype))
    lowered = jax.jit(change, donate_argnums=0).lower(pool, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 10**6


@pytest.mark.parametrize("axis", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_shards_over_kv_heads(rng: Generator, axis: AxisType) -> None:
    """With heads on two devices: the same numbers, results and pools stay sharded, and nothing is communicated."""
    rows = 16
    shape = metadata_shape(rows, SIZE, 512, PAGES)
    pages = rng.permutation(np.arange(1, PAGES)).astype(np.int32)
    segments = [Segment(i, 1, 330 + i, np.concatenate([pages[:20], pages[20 + i : 21 + i]])) for i in range(6)]
    segments.append(Segment(8, 8, 30, pages[30:33]))
    packed = np.empty(shape.size(), np.int32)
    build_attention_metadata(segments, shape, packed)
    slots = np.array([0] * rows, np.int32)
    for s in segments:
        token = s.position + np.arange(s.rows)
        slots[s.first_row : s.first_row + s.rows] = s.pages[token // SIZE] * SIZE + token % SIZE
    k, v = (jnp.asarray(rng.integers(0, 2**15, size=(HEADS, PAGES, SIZE, DIM)) // 2, jnp.uint16) for _ in "kv")
    q, new = (jnp.asarray(rng.normal(size=(rows, n, DIM)), jnp.bfloat16) for n in (2 * HEADS, HEADS))
    step = jax.jit(layer, static_argnames="shape")
    want, want_k, _ = step(k, v, q, new, jnp.asarray(slots), jnp.asarray(packed), shape=shape)

    mesh = jax.make_mesh((2,), ("heads",), axis_types=(axis,))
    pool_heads, row_heads, whole = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("heads",), (None, "heads"), ()))
    arguments = (
        jax.device_put(k, pool_heads),
        jax.device_put(v, pool_heads),
        jax.device_put(q, row_heads),
        jax.device_put(new, row_heads),
        jax.device_put(slots, whole),
        jax.device_put(packed, whole),
    )
    with jax.set_mesh(mesh):
        got, got_k, _ = step(*arguments, shape=shape)
        text = step.lower(*arguments, shape=shape).compile().as_text()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got_k, want_k)
    assert got.sharding.is_equivalent_to(row_heads, 3)
    assert got_k.sharding.is_equivalent_to(pool_heads, 4)
    assert not [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if name in text]
