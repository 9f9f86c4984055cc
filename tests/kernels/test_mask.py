"""Masks: attention and sums over what plan and mask together let a row see, against dense float64 and numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest

from jaxctx_kernels import MetadataShape, Segment, attend, build_attention_metadata, metadata_shape, unpack_metadata
from tests.sums import visible_sum

Generator = np.random.Generator
ROWS, POOL = 64, 120


@partial(jax.jit, static_argnames="shape")
def run_attend(
    q: jax.Array, k: jax.Array, v: jax.Array, packed: np.ndarray, mask: np.ndarray | None, shape: MetadataShape
) -> jax.Array:
    return attend(q, k, v, unpack_metadata(shape, packed), shape=shape, mask=mask)


@partial(jax.jit, static_argnames="shape")
def run_sum(pool: jax.Array, packed: np.ndarray, mask: np.ndarray, shape: MetadataShape) -> jax.Array:
    return visible_sum(pool, unpack_metadata(shape, packed), shape=shape, mask=mask)


def packed_plan(segments: list[Segment], shape: MetadataShape) -> np.ndarray:
    packed = np.full(shape.size(), 2**31 - 1, np.int32)
    build_attention_metadata(segments, shape, packed)
    return packed


def random_mask(rng: Generator, rows: int, indices: int) -> np.ndarray:
    """Of any density, with rows that see nothing, rows that see all, and holes as long as items are."""
    mask = rng.random((rows, indices)) < rng.random((rows, 1))
    mask[rng.random(rows) < 0.2] = False
    mask[rng.random(rows) < 0.2] = True
    for row in mask[rng.random(rows) < 0.5]:
        begin = rng.integers(0, indices)
        row[begin : begin + rng.integers(1, indices)] = False
    return mask


@pytest.mark.parametrize(
    ("group", "dim", "page_size"),
    [
        (1, 64, 16),
        (4, 32, 1),
        pytest.param(2, 64, 2, marks=pytest.mark.slow),
        pytest.param(8, 32, 16, marks=pytest.mark.slow),
    ],
)
def test_equals_dense_attention(
    rng: Generator, grow: Callable, kinds: list[str], dense: Callable, group: int, dim: int, page_size: int
) -> None:
    """Whatever the plan or the mask hides of a row's own tokens is NaN or infinite for somebody, and reaches nobody."""
    kv_heads = 2
    shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL)
    for kind in kinds:
        segments = grow(kind, ROWS, page_size, POOL).segments
        mask = random_mask(rng, ROWS, POOL * page_size)
        seen = np.zeros((POOL, page_size), np.bool_)
        for s in segments:
            for row in range(s.first_row, s.first_row + s.rows):
                token = np.flatnonzero(mask[row, : s.position + row - s.first_row + 1])
                seen[s.pages[token // page_size], token % page_size] = True
        k, v = rng.normal(size=(2, kv_heads, POOL, page_size, dim)).astype(np.float32)
        k[:, ~seen], v[:, ~seen] = np.nan, np.inf
        q = rng.normal(size=(ROWS, kv_heads * group, dim)).astype(np.float32)
        got = run_attend(q, k, v, packed_plan(segments, shape), mask, shape=shape)
        want = dense(q, k, v, segments, page_size, mask)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=kind)
        blind = ~want.any((1, 2))
        assert not np.asarray(got)[blind].any()


def test_a_mask_that_hides_nothing_is_none(rng: Generator, grow: Callable) -> None:
    shape = metadata_shape(ROWS, 16, POOL * 16, POOL)
    segments = grow("chunks_and_decode", ROWS, 16, POOL).segments
    k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
    q = rng.normal(size=(ROWS, 4, 64)).astype(np.float32)
    packed = packed_plan(segments, shape)
    everything = np.ones((ROWS, POOL * 16), np.bool_)
    got, want = (run_attend(q, k, v, packed, mask, shape=shape) for mask in (everything, None))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_a_bad_value_spoils_those_that_see_it(rng: Generator, bad: float) -> None:
    """Rows of one item, of one sequence and of two: keys and values that a mask hides from a row cannot reach it."""
    shape = metadata_shape(16, 16, 1024, POOL)
    prefix = np.arange(1, 31, dtype=np.int32)
    segments = [Segment(4 * i, 4, 484, np.append(prefix, 31 + i).astype(np.int32)) for i in range(4)]
    k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
    q = rng.normal(size=(16, 4, 64)).astype(np.float32)
    hidden, packed = 70, packed_plan(segments, shape)
    mask = np.ones((16, 1024), np.bool_)
    mask[[0, 2, 5, 9, 10, 15], hidden] = False
    clean = np.array(run_attend(q, k, v, packed, mask, shape=shape))
    for pool in (k, v):
        pool[:, prefix[hidden // 16], hidden % 16] = bad
        spoilt = np.array(run_attend(q, k, v, packed, mask, shape=shape))
        sees = mask[:, hidden]
        np.testing.assert_array_equal(spoilt[~sees], clean[~sees])
    assert np.isnan(spoilt[sees]).all()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_visible_sum_equals_numpy(rng: Generator, grow: Callable, kinds: list[str], page_size: int) -> None:
    shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL)
    for kind in kinds:
        segments = grow(kind, ROWS, page_size, POOL).segments
        values = rng.integers(0, 2**32, size=(1, POOL, page_size, 1), dtype=np.uint32)
        mask = random_mask(rng, ROWS, POOL * page_size)
        want = np.zeros(ROWS, np.uint32)
        for s in segments:
            tokens = values[0, s.pages, :, 0].reshape(-1)
            for row in range(s.first_row, s.first_row + s.rows):
                n = s.position + row - s.first_row + 1
                want[row] = tokens[:n][mask[row, :n]].sum(dtype=np.uint32)
        got = run_sum(values, packed_plan(segments, shape), mask, shape=shape)
        np.testing.assert_array_equal(got, want, err_msg=kind)
