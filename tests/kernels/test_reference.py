"""The reference against dense float64 attention on random trees, with everything that no row sees poisoned.

Also sums over what rows see, which walk the tiles as the reference does, against numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import MetadataShape, Segment, attend, kv_cache, metadata_shape, unpack_metadata
from jaxctx_kernels.reference import exp2_approximately
from tests.sums import visible_sum

from .builders import filled_pages, packed_metadata, random_sinks

Generator = np.random.Generator
ROWS, POOL = 64, 120
EIGHT = ("int8", "float8_e4m3fn")


@partial(jax.jit, static_argnames=("shape", "soft_cap"))
def run_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    packed: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    shape: MetadataShape,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> jax.Array:
    return attend(q, k, v, unpack_metadata(shape, packed), mask, shape=shape, soft_cap=soft_cap, sinks=sinks)


@partial(jax.jit, static_argnames="shape")
def run_sum(pages: jax.Array, packed: np.ndarray, mask: np.ndarray | None = None, *, shape: MetadataShape) -> jax.Array:
    return visible_sum(pages, unpack_metadata(shape, packed), shape=shape, mask=mask)


@pytest.mark.parametrize(
    ("group", "dim", "page_size", "dtype", "narrow"),
    [
        (1, 64, 16, "float32", False),
        pytest.param(4, 128, 1, "bfloat16", False, marks=pytest.mark.campaign),
        pytest.param(8, 64, 2, "bfloat16", True, marks=pytest.mark.slow),
        pytest.param(4, 64, 16, "bfloat16", False, marks=pytest.mark.campaign),
        (pytest.param(4, 64, 16, "bfloat16", True, marks=pytest.mark.campaign)),
        pytest.param(2, 128, 32, "float32", True, marks=pytest.mark.campaign),
        pytest.param(8, 128, 32, "bfloat16", False, marks=pytest.mark.campaign),
        pytest.param(8, 128, 32, "bfloat16", True, marks=pytest.mark.campaign),
        (pytest.param(4, 64, 16, "int8", False, marks=pytest.mark.slow)),
        (8, 128, 32, "int8", True),
        pytest.param(4, 128, 16, "float8_e4m3fn", True, marks=pytest.mark.slow),
    ],
)
def test_equals_dense_attention(
    rng: Generator,
    grow: Callable,
    kinds: list[str],
    visible: Callable,
    dense: Callable,
    exact: Callable,
    group: int,
    dim: int,
    page_size: int,
    dtype: str,
    narrow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`narrow`: on a CPU that multiplies bfloat16 by itself. Keys and values of 8 bits are as they are kept."""
    monkeypatch.setattr(kv_cache, "CPU_MULTIPLIES_BFLOAT16", narrow)
    jax.clear_caches()
    kv_heads = 2
    shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL)
    for kind in kinds:
        forest = grow(kind, ROWS, page_size, POOL)
        scale = rng.choice([1, 4])
        pools = rng.normal(size=(2, kv_heads, POOL, page_size, dim)) * scale
        pools[:, :, ~visible(forest.segments, page_size, POOL)] = np.nan
        k, v = (filled_pages(x, dtype) for x in pools)
        q = rng.normal(size=(ROWS, kv_heads * group, dim))
        padding = np.ones(ROWS, np.bool_)
        for s in forest.segments:
            padding[s.first_row : s.first_row + s.rows] = False
        q[padding] = np.nan
        q = jnp.asarray(q, "bfloat16" if narrow else "float32" if dtype in EIGHT else dtype)
        got = run_attend(q, k, v, packed_metadata(forest.segments, shape), shape=shape)
        assert got.dtype == jnp.float32
        arrays = [np.asarray(q, np.float64), exact(k), exact(v)]
        v64 = arrays[2]
        want = dense(*arrays, forest.segments, page_size)
        # Weights that are multiplied as bfloat16 are each up to 2**-9 off, in the sum and in the total.
        slack = (
            2**-8 * dense(*(np.abs(x) if x is v64 else x for x in arrays), forest.segments, page_size)
            if narrow and dtype != "float32"
            else 0
        )
        assert (np.abs(got - want) <= 1e-4 * np.abs(want) + 1e-5 * scale**2 + slack).all(), kind
        assert not np.asarray(got)[padding].any()


@pytest.mark.parametrize(
    ("dtype", "off"), [("int8", 0.012), pytest.param("float8_e4m3fn", 0.046, marks=pytest.mark.campaign)]
)
def test_8_bits_are_close_to_what_they_stand_for(
    rng: Generator, grow: Callable, dense: Callable, dtype: str, off: float
) -> None:
    """Of normally distributed keys and values, whatever their size.

    The mean over rows and heads hardly depends on the numbers drawn: of 150 batches, int8 is 0.0093 off (at most
    0.0098), float8 0.036 (0.038). The worst row of a batch may be twice that.
    """
    shape, sizes = metadata_shape(ROWS, 16, POOL * 16, POOL), rng.choice([0.1, 1, 30], (2, 2, 1, 1, 1))
    segments = grow("many_prefixes", ROWS, 16, POOL).segments
    k, v = rng.normal(size=(2, 2, POOL, 16, 128)) * sizes
    q = rng.normal(size=(ROWS, 8, 128)) / np.repeat(sizes[0], 4).reshape(8, 1)
    pools = (filled_pages(x, dtype) for x in (k, v))
    got = run_attend(jnp.asarray(q, "float32"), *pools, packed_metadata(segments, shape), shape=shape)
    want = dense(q, k, v, segments, 16)
    rows = [row for s in segments for row in range(s.first_row, s.first_row + s.rows)]
    wrong = np.linalg.norm(np.asarray(got)[rows] - want[rows], axis=-1) / np.linalg.norm(want[rows], axis=-1)
    assert wrong.mean() <= off
    assert wrong.max() <= 3 * off


@pytest.mark.parametrize(
    "rows",
    [
        1,
        pytest.param(2, marks=pytest.mark.campaign),
        pytest.param(16, marks=pytest.mark.campaign),
        pytest.param(40, marks=pytest.mark.campaign),
        300,
    ],
)
def test_every_number_of_rows(rng: Generator, dense: Callable, rows: int) -> None:
    """Steps with one, two or all three classes of items, a chunk that takes several rounds, and a full batch."""
    size, pool = 16, 40
    shape = metadata_shape(rows, size, 512, pool)
    pages = rng.permutation(np.arange(1, pool)).astype(np.int32)
    segments = [Segment(0, rows, 512 - rows, pages[:32])]
    if rows > 2:
        segments = [Segment(0, 1, 300, pages[:20]), Segment(1, rows - 1, 512 - rows, pages[1:33])]
    k, v = rng.normal(size=(2, 1, pool, size, 32)).astype(np.float32)
    q = rng.normal(size=(rows, 2, 32)).astype(np.float32)
    got = run_attend(
        q, filled_pages(k, "float32"), filled_pages(v, "float32"), packed_metadata(segments, shape), shape=shape
    )
    np.testing.assert_allclose(got, dense(q, k, v, segments, size), rtol=1e-4, atol=2e-5)


def test_no_nan_crosses_to_another_sequence(rng: Generator, grow: Callable) -> None:
    """A sequence whose query, keys or values are NaN spoils its own rows only, though it shares items with others."""
    shape = metadata_shape(16, 16, 1024, POOL)
    forest = grow("nothing", 16, 16, POOL)
    prefix = forest.pages(20)
    for rows in (1, 4, 1, 1):
        forest.add(prefix, 2, rows)
    bad = forest.segments[1]
    k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
    q = rng.normal(size=(16, 4, 64)).astype(np.float32)
    packed = packed_metadata(forest.segments, shape)
    clean = np.array(run_attend(q, filled_pages(k, "float32"), filled_pages(v, "float32"), packed, shape=shape))
    q[bad.first_row] = np.nan
    k[:, bad.pages[20]], v[:, bad.pages[21]] = np.nan, np.inf
    spoilt = np.array(run_attend(q, filled_pages(k, "float32"), filled_pages(v, "float32"), packed, shape=shape))
    mine = slice(bad.first_row, bad.first_row + bad.rows)
    assert np.isnan(spoilt[mine]).any()
    spoilt[mine] = clean[mine]
    np.testing.assert_array_equal(spoilt, clean)


def test_the_cheap_exponential() -> None:
    x = np.concatenate([-np.logspace(-8, 2, 4000), -np.arange(127.0), [0]]).astype(np.float32)
    np.testing.assert_allclose(jax.jit(exp2_approximately)(x), np.exp2(x.astype(np.float64)), rtol=1.1e-4)
    np.testing.assert_array_equal(
        exp2_approximately(jnp.array([0, -1, -127, -1000, -1e30, -jnp.inf])), [1, 0.5, 0, 0, 0, 0]
    )
    assert np.isnan(exp2_approximately(jnp.array(jnp.nan)))


def test_large_scores_stay_finite(rng: Generator, grow: Callable, dense: Callable) -> None:
    shape = metadata_shape(4, 16, 1024, POOL)
    forest = grow("nothing", 4, 16, POOL)
    forest.add(forest.pages(0), 40, 1)
    k, v = rng.normal(size=(2, 1, POOL, 16, 64)).astype(np.float32)
    k *= 1e4
    q = rng.normal(size=(4, 1, 64)).astype(np.float32)
    got = run_attend(
        q, filled_pages(k, "float32"), filled_pages(v, "float32"), packed_metadata(forest.segments, shape), shape=shape
    )
    np.testing.assert_allclose(got, dense(q, k, v, forest.segments, 16), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "page_size", [1, pytest.param(2, marks=pytest.mark.campaign), 16, pytest.param(32, marks=pytest.mark.campaign)]
)
def test_visible_sum_equals_numpy(rng: Generator, grow: Callable, kinds: list[str], page_size: int) -> None:
    shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL)
    for kind in kinds:
        forest = grow(kind, ROWS, page_size, POOL)
        values = rng.integers(0, 2**32, size=(1, POOL, page_size, 1), dtype=np.uint32)
        want = np.zeros(ROWS, np.uint32)
        for s in forest.segments:
            tokens = values[0, s.pages, :, 0].reshape(-1)[: s.position + s.rows]
            want[s.first_row : s.first_row + s.rows] = np.cumsum(tokens, dtype=np.uint32)[s.position :]
        got = run_sum(filled_pages(values, "uint32"), packed_metadata(forest.segments, shape), shape=shape)
        np.testing.assert_array_equal(got, want, err_msg=kind)


def test_one_program_serves_every_tree(rng: Generator, grow: Callable, kinds: list[str]) -> None:
    """No shape of page tree compiles anything."""
    shape = metadata_shape(ROWS, 16, POOL * 16, POOL)
    pool = filled_pages(rng.integers(0, 9, size=(1, POOL, 16, 1), dtype=np.uint32), "uint32")
    before = None
    for kind in kinds:
        forest = grow(kind, ROWS, 16, POOL)
        run_sum(pool, packed_metadata(forest.segments, shape), shape=shape)
        before = before or run_sum._cache_size()
    assert run_sum._cache_size() == before


class TestWindowsAndSoftCaps:
    """A row sees the last tokens only, and scores are capped before what it does not see is left out."""

    @pytest.mark.parametrize(
        ("window", "soft_cap", "page_size", "dtype", "narrow"),
        [
            (1, None, 16, "float32", False),
            pytest.param(17, None, 16, "float32", False, marks=pytest.mark.campaign),
            (40, 2.5, 16, "float32", False),
            pytest.param(10**6, 30.0, 16, "float32", False, marks=pytest.mark.campaign),
            pytest.param(None, 0.7, 16, "float32", False, marks=pytest.mark.campaign),
            pytest.param(15, 20.0, 16, "bfloat16", True, marks=pytest.mark.campaign),
            pytest.param(16, 2.0, 1, "float32", True, marks=pytest.mark.campaign),
            pytest.param(100, 5.0, 16, "bfloat16", False, marks=pytest.mark.campaign),
            (70, 3.0, 16, "int8", True),
            pytest.param(33, None, 32, "float8_e4m3fn", True, marks=pytest.mark.slow),
            pytest.param(300, 4.0, 16, "int8", False, marks=pytest.mark.campaign),
        ],
    )
    def test_equals_dense_attention(
        self,
        rng: Generator,
        grow: Callable,
        kinds: list[str],
        visible: Callable,
        dense: Callable,
        exact: Callable,
        window: int | None,
        soft_cap: float | None,
        page_size: int,
        dtype: str,
        narrow: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Slots that no row sees, before its window or behind it, are poisoned."""
        monkeypatch.setattr(kv_cache, "CPU_MULTIPLIES_BFLOAT16", narrow)
        jax.clear_caches()
        shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL, window=window)
        shape = replace(shape, share_tokens=min(64, shape.share_tokens), items=2000, pages=4000)  # share more
        for kind in kinds:
            segments = grow(kind, ROWS, page_size, POOL).segments
            pools = rng.normal(size=(2, 2, POOL, page_size, 64)) * 2
            pools[:, :, ~visible(segments, page_size, POOL, window)] = np.nan
            k, v = (filled_pages(x, dtype) for x in pools)
            q = jnp.asarray(rng.normal(size=(ROWS, 6, 64)), "bfloat16" if narrow else "float32")
            got = run_attend(q, k, v, packed_metadata(segments, shape), shape=shape, soft_cap=soft_cap)
            q64, k64, v64 = np.asarray(q, np.float64), exact(k), exact(v)
            limits = {"window": window, "soft_cap": soft_cap}
            want = dense(q64, k64, v64, segments, page_size, **limits)
            slack = 2**-8 * dense(q64, k64, np.abs(v64), segments, page_size, **limits) if narrow else 0
            assert (np.abs(got - want) <= 1e-4 * np.abs(want) + 4e-5 + slack).all(), kind

    @pytest.mark.parametrize(
        "window", [pytest.param(1, marks=pytest.mark.campaign), 5, pytest.param(64, marks=pytest.mark.campaign), 65]
    )
    def test_rows_that_see_nothing_of_what_others_share(self, rng: Generator, dense: Callable, window: int) -> None:
        """Of forks of one prefix, some have gone on further than their window reaches back; one shares every item."""
        shape = replace(metadata_shape(16, 4, 400, POOL, window=window), share_tokens=1, items=2000, pages=4000)
        prefix = np.arange(1, 41, dtype=np.int32)
        segments = []
        for row, own in enumerate(rng.permutation([1, 2, 3, 10, 17, 18, 4, 1])):
            pages = np.concatenate([prefix, 41 + np.arange(own) + sum(len(s.pages) - 40 for s in segments)])
            segments.append(Segment(2 * row, 2, len(pages) * 4 - int(rng.integers(2, 5)), pages.astype(np.int32)))
        k, v = rng.normal(size=(2, 1, POOL, 4, 32)).astype(np.float32)
        q = 4 * rng.normal(size=(16, 2, 32)).astype(np.float32)
        got = run_attend(q, k, v, packed_metadata(segments, shape), shape=shape)
        np.testing.assert_allclose(got, dense(q, k, v, segments, 4, window=window), rtol=1e-4, atol=2e-5)

    def test_a_window_under_a_mask(self, rng: Generator, grow: Callable, dense: Callable) -> None:
        """Both hold."""
        shape = metadata_shape(ROWS, 16, POOL * 16, POOL, window=50, masked=True)
        for kind in ("three_levels", "chunks_and_decode"):
            segments = grow(kind, ROWS, 16, POOL).segments
            mask = random_mask(rng, ROWS, POOL * 16)
            k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
            q = rng.normal(size=(ROWS, 2, 64)).astype(np.float32)
            got = run_attend(q, k, v, packed_metadata(segments, shape), mask, shape=shape, soft_cap=1.5)
            want = dense(q, k, v, segments, 16, mask, window=50, soft_cap=1.5)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    def test_a_window_that_hides_nothing_is_none(self, rng: Generator, grow: Callable) -> None:
        shape = metadata_shape(ROWS, 16, POOL * 16, POOL)
        segments = grow("chunks_and_decode", ROWS, 16, POOL).segments
        k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
        q = rng.normal(size=(ROWS, 2, 64)).astype(np.float32)
        packed = packed_metadata(segments, shape)
        want = run_attend(q, k, v, packed, shape=shape)
        got = run_attend(q, k, v, packed, shape=replace(shape, window=POOL * 16))
        np.testing.assert_array_equal(got, want)

    def test_a_bad_value_before_the_window_spoils_nobody(self, rng: Generator) -> None:
        """In the page where the window begins, of a row alone and of a chunk."""
        shape = metadata_shape(16, 16, 1024, POOL, window=40)
        segments = [
            Segment(0, 1, 300, np.arange(1, 21, dtype=np.int32)),
            Segment(1, 8, 300, np.arange(21, 42, dtype=np.int32)),
        ]
        k, v = rng.normal(size=(2, 1, POOL, 16, 32)).astype(np.float32)
        q = rng.normal(size=(16, 2, 32)).astype(np.float32)
        packed = packed_metadata(segments, shape)
        clean = run_attend(q, k, v, packed, shape=shape)
        for segment in segments:
            k[:, segment.pages[260 // 16], 260 % 16] = v[:, segment.pages[260 // 16], 260 % 16] = np.nan
        np.testing.assert_array_equal(run_attend(q, k, v, packed, shape=shape), clean)

    @pytest.mark.parametrize("window", [1, 17, 40])
    def test_visible_sum_equals_numpy(self, rng: Generator, grow: Callable, kinds: list[str], window: int) -> None:
        shape = metadata_shape(ROWS, 16, POOL * 16, POOL, window=window)
        for kind in kinds:
            segments = grow(kind, ROWS, 16, POOL).segments
            values = rng.integers(0, 2**32, size=(1, POOL, 16, 1), dtype=np.uint32)
            want = np.zeros(ROWS, np.uint32)
            for s in segments:
                tokens = values[0, s.pages, :, 0].reshape(-1)
                for row in range(s.first_row, s.first_row + s.rows):
                    n = s.position + row - s.first_row + 1
                    want[row] = tokens[max(0, n - window) : n].sum(dtype=np.uint32)
            got = run_sum(filled_pages(values, "uint32"), packed_metadata(segments, shape), shape=shape)
            np.testing.assert_array_equal(got, want, err_msg=kind)


def random_mask(rng: Generator, rows: int, indices: int) -> np.ndarray:
    """Of any density, with rows that see nothing, rows that see all, and holes as long as items are."""
    mask = rng.random((rows, indices)) < rng.random((rows, 1))
    mask[rng.random(rows) < 0.2] = False
    mask[rng.random(rows) < 0.2] = True
    for row in mask[rng.random(rows) < 0.5]:
        begin = rng.integers(0, indices)
        row[begin : begin + rng.integers(1, indices)] = False
    return mask


class TestUnderAMask:
    """What metadata and mask together let a row see."""

    @pytest.mark.parametrize(
        ("group", "dim", "page_size"),
        [
            (1, 64, 16),
            pytest.param(4, 32, 1, marks=pytest.mark.campaign),
            (pytest.param(2, 64, 2, marks=pytest.mark.campaign)),
            (pytest.param(8, 32, 16, marks=pytest.mark.slow)),
        ],
    )
    def test_equals_dense_attention(
        self,
        rng: Generator,
        grow: Callable,
        kinds: list[str],
        visible: Callable,
        dense: Callable,
        group: int,
        dim: int,
        page_size: int,
    ) -> None:
        """Whatever metadata or mask hides of a row's own tokens is NaN or infinite for somebody, and reaches nobody."""
        kv_heads = 2
        shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL, masked=True)
        for kind in kinds:
            segments = grow(kind, ROWS, page_size, POOL).segments
            mask = random_mask(rng, ROWS, POOL * page_size)
            seen = visible(segments, page_size, POOL, mask=mask)
            k, v = rng.normal(size=(2, kv_heads, POOL, page_size, dim)).astype(np.float32)
            k[:, ~seen], v[:, ~seen] = np.nan, np.inf
            q = rng.normal(size=(ROWS, kv_heads * group, dim)).astype(np.float32)
            got = run_attend(q, k, v, packed_metadata(segments, shape), mask, shape=shape)
            want = dense(q, k, v, segments, page_size, mask)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=kind)
            blind = ~want.any((1, 2))
            assert not np.asarray(got)[blind].any()

    def test_a_mask_that_hides_nothing_is_none(self, rng: Generator, grow: Callable) -> None:
        shape = metadata_shape(ROWS, 16, POOL * 16, POOL, masked=True)
        segments = grow("chunks_and_decode", ROWS, 16, POOL).segments
        k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
        q = rng.normal(size=(ROWS, 2, 64)).astype(np.float32)  # sizes of the test above, compiled already
        packed = packed_metadata(segments, shape)
        everything = np.ones((ROWS, POOL * 16), np.bool_)
        got, want = (run_attend(q, k, v, packed, mask, shape=shape) for mask in (everything, None))
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_bad_value_spoils_those_that_see_it(self, rng: Generator, bad: float) -> None:
        """Rows of one item, of one sequence and of two: what a mask hides from a row cannot reach it."""
        shape = metadata_shape(16, 16, 1024, POOL, masked=True)
        prefix = np.arange(1, 31, dtype=np.int32)
        segments = [Segment(4 * i, 4, 484, np.append(prefix, 31 + i).astype(np.int32)) for i in range(4)]
        k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
        q = rng.normal(size=(16, 4, 64)).astype(np.float32)
        hidden, packed = 70, packed_metadata(segments, shape)
        mask = np.ones((16, 1024), np.bool_)
        mask[[0, 2, 5, 9, 10, 15], hidden] = False
        clean = np.array(run_attend(q, k, v, packed, mask, shape=shape))
        for pool in (k, v):
            pool[:, prefix[hidden // 16], hidden % 16] = bad
            spoilt = np.array(run_attend(q, k, v, packed, mask, shape=shape))
            sees = mask[:, hidden]
            np.testing.assert_array_equal(spoilt[~sees], clean[~sees])
        assert np.isnan(spoilt[sees]).all()

    @pytest.mark.parametrize("page_size", [1, pytest.param(2, marks=pytest.mark.campaign), 16])
    def test_visible_sum_equals_numpy(self, rng: Generator, grow: Callable, kinds: list[str], page_size: int) -> None:
        shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL, masked=True)
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
            got = run_sum(values, packed_metadata(segments, shape), mask, shape=shape)
            np.testing.assert_array_equal(got, want, err_msg=kind)


class TestSinks:
    """Each query head has a score without a value, which every row's softmax has once, whatever it was merged from."""

    @pytest.mark.parametrize(
        ("window", "soft_cap", "page_size", "dtype"),
        [
            (None, None, 16, "float32"),
            (40, 2.5, 16, "float32"),
            pytest.param(None, 3.0, 1, "bfloat16", marks=pytest.mark.campaign),
            (70, None, 16, "int8"),
            pytest.param(33, 20.0, 32, "float8_e4m3fn", marks=pytest.mark.campaign),
        ],
    )
    def test_equals_dense_attention(
        self,
        rng: Generator,
        grow: Callable,
        kinds: list[str],
        visible: Callable,
        dense: Callable,
        exact: Callable,
        window: int | None,
        soft_cap: float | None,
        page_size: int,
        dtype: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Slots that no row sees are poisoned. On any CPU as on one that multiplies float32 alone."""
        monkeypatch.setattr(kv_cache, "CPU_MULTIPLIES_BFLOAT16", False)
        jax.clear_caches()
        shape = metadata_shape(ROWS, page_size, POOL * page_size, POOL, window=window)
        shape = replace(shape, share_tokens=min(64, shape.share_tokens), items=2000, pages=4000)  # share more
        for kind in kinds:
            segments = grow(kind, ROWS, page_size, POOL).segments
            pools = rng.normal(size=(2, 2, POOL, page_size, 64)) * 2
            pools[:, :, ~visible(segments, page_size, POOL, window)] = np.nan
            k, v = (filled_pages(x, dtype) for x in pools)
            q = jnp.asarray(rng.normal(size=(ROWS, 6, 64)), jnp.float32)
            sinks = random_sinks(rng, 6)
            packed = packed_metadata(segments, shape)
            got = run_attend(q, k, v, packed, shape=shape, soft_cap=soft_cap, sinks=sinks)
            of_rows = np.asarray(q, np.float64), exact(k), exact(v), segments, page_size
            want = dense(*of_rows, window=window, soft_cap=soft_cap, sinks=sinks)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=4e-5, err_msg=kind)

    @pytest.mark.parametrize("window", [None, 50])
    def test_under_a_mask(self, rng: Generator, grow: Callable, dense: Callable, window: int | None) -> None:
        """Rows from which a mask hides everything are zeros."""
        shape = metadata_shape(ROWS, 16, POOL * 16, POOL, window=window, masked=True)
        sinks = np.array([1.5, -20], np.float32)
        for kind in ("three_levels", "chunks_and_decode"):
            segments = grow(kind, ROWS, 16, POOL).segments
            mask = random_mask(rng, ROWS, POOL * 16)
            mask[segments[0].first_row] = False
            k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
            q = rng.normal(size=(ROWS, 2, 64)).astype(np.float32)
            got = run_attend(q, k, v, packed_metadata(segments, shape), mask, shape=shape, sinks=sinks)
            want = dense(q, k, v, segments, 16, mask, window=window, sinks=sinks)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            assert not np.asarray(got[segments[0].first_row]).any()

    def test_sinks_without_end(self, rng: Generator, grow: Callable) -> None:
        """One of -inf counts for nothing; one that is far above all scores takes all of the weight."""
        shape = metadata_shape(ROWS, 16, POOL * 16, POOL)
        segments = grow("chunks_and_decode", ROWS, 16, POOL).segments
        k, v = rng.normal(size=(2, 2, POOL, 16, 64)).astype(np.float32)
        q = rng.normal(size=(ROWS, 2, 64)).astype(np.float32)
        packed = packed_metadata(segments, shape)
        want = run_attend(q, k, v, packed, shape=shape)
        got = run_attend(q, k, v, packed, shape=shape, sinks=np.array([-np.inf, 1e4], np.float32))
        np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=1e-6)
        assert not np.asarray(got[:, 1]).any()
