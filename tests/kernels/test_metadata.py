"""Metadata: each visible (row, token) exactly once, shared pages listed once, limits that hold, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np
import pytest

from jaxctx_kernels import (
    KernelName,
    MetadataOverflow,
    MetadataShape,
    Segment,
    build_attention_metadata,
    metadata_shape,
    unpack_metadata,
)
from jaxctx_kernels.metadata import Item

from .builders import packed_metadata

Generator = np.random.Generator
for_every_kernel = pytest.mark.parametrize("kernel", get_args(KernelName))


class MetadataStats(NamedTuple):
    """What the metadata came to. `pages_seen - pages_read` page reads per layer are saved by sharing."""

    items: int
    pages_read: int  # entries of the page list that items cover, which is all of them
    pages_seen: int  # pages that the segments see, each counted by itself


def build(segments: list[Segment], shape: MetadataShape) -> tuple[MetadataStats, np.ndarray]:
    packed = packed_metadata(segments, shape, unused=-(2**31))
    metadata = unpack_metadata(shape, packed)
    items = Item(*metadata.items[:, : metadata.class_ends[-1]])
    first, behind = items.first_entry, items.first_entry + -(-items.tokens // shape.page_size)
    covered = {entry for ends_of in zip(first, behind, strict=True) for entry in range(*ends_of)}
    assert covered == set(range(len(covered)))
    seen = sum(-(-(s.position + s.rows) // shape.page_size) for s in segments)
    return MetadataStats(len(items.rows), len(covered), seen), packed


def coverage(packed: np.ndarray, shape: MetadataShape) -> Counter[tuple[int, int, int, int]]:
    """How often each (batch row, token, page, offset) is visited, walking the items as a kernel would."""
    ends, order, inverse, length, items, pages = unpack_metadata(shape, packed)
    np.testing.assert_array_equal(order[inverse], np.arange(shape.rows))
    np.testing.assert_array_equal(inverse[order], np.arange(shape.rows))
    seen: Counter[tuple[int, int, int, int]] = Counter()
    kind = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    for (row, rows, entry, tokens, start), length_pages in zip(
        items[:, : ends[-1]].T, np.array([c.pages for c in shape.classes])[kind], strict=True
    ):
        assert rows >= 1
        assert 1 <= tokens <= length_pages * shape.page_size
        assert entry >= 0
        assert entry + length_pages <= shape.pages
        for r in range(row, row + rows):
            hidden = 0 if shape.window is None else max(0, int(length[r]) - shape.window - int(start))
            for t in range(hidden, min(int(tokens), int(length[r]) - int(start))):
                page = int(pages[entry + t // shape.page_size])
                seen[int(order[r]), int(start) + t, page, t % shape.page_size] += 1
    return seen


def expected(segments: list[Segment], page_size: int, window: int | None = None) -> Counter[tuple[int, int, int, int]]:
    return Counter(
        (s.first_row + r, t, int(s.pages[t // page_size]), t % page_size)
        for s in segments
        for r in range(s.rows)
        for t in range(0 if window is None else max(0, s.position + r + 1 - window), s.position + r + 1)
    )


def chain(*parts: range | list[int]) -> np.ndarray:
    return np.array([page for part in parts for page in part], np.int32)


@pytest.mark.parametrize(
    ("page_size", "kernel", "masked"),
    [
        *((size, "reference", False) for size in (1, 2, 16)),
        *((size, "reference", True) for size in (1, 16)),
        (16, "gpu", False),
    ],
)
def test_every_visible_token_once(
    grow: Callable, kinds: list[str], page_size: int, kernel: KernelName, masked: bool
) -> None:
    shape = metadata_shape(64, page_size, 120 * page_size, 120, kernel, masked=masked)
    for kind in kinds:
        for _ in range(3):
            segments = grow(kind, 64, page_size, 120).segments
            _, packed = build(segments, shape)
            assert coverage(packed, shape) == expected(segments, page_size), kind


def test_random_trees_of_random_pages(rng: Generator) -> None:
    """Trees grown by forking anywhere, page by page, with prompts, full duplicates and shared partial pages."""
    shape = metadata_shape(48, 4, 400, 300)
    for _ in range(60):
        segments = random_tree(rng, 300, 48)
        _, packed = build(segments, shape)
        assert coverage(packed, shape) == expected(segments, 4)


def test_shared_prefix_is_listed_once() -> None:
    shape = metadata_shape(16, 16, 16384, 1100)
    prefix = range(1, 513)
    segments = [Segment(i, 1, 512 * 16 + 5, chain(prefix, [600 + i])) for i in range(16)]
    stats, packed = build(segments, shape)
    assert stats == MetadataStats(items=4 + 16, pages_read=512 + 16, pages_seen=16 * 513)
    items = unpack_metadata(shape, packed).items
    assert Counter(items[1, : stats.items].tolist()) == {16: 4, 1: 16}


def test_three_levels_and_several_groups() -> None:
    """Two roots of 64 pages; under each two branches of 32 pages with three leaves of one page: each listed once."""
    shape = metadata_shape(12, 16, 4096, 600)
    segments: list[Segment] = []
    for root in (0, 1):
        for branch in (0, 1):
            first = 200 + 100 * root + 40 * branch
            for _ in range(3):
                pages = chain(range(1 + 70 * root, 65 + 70 * root), range(first, first + 32), [500 + len(segments)])
                segments.append(Segment(len(segments), 1, 96 * 16, pages))
    stats, packed = build([segments[i] for i in (3, 0, 7, 11, 1, 2, 4, 8, 5, 9, 6, 10)], shape)
    assert stats.pages_read == 2 * 64 + 4 * 32 + 12
    assert coverage(packed, shape) == expected(segments, 16)


def test_small_savings_are_not_shared() -> None:
    """Two readers of one page of 16 tokens save too little; two readers of 16 pages do not."""
    shape = metadata_shape(2, 16, 4096, 600)
    for shared, read in ((1, 4), (15, 32), (16, 18)):
        segments = [Segment(i, 1, shared * 16, chain(range(1, 1 + shared), [100 + i])) for i in range(2)]
        assert build(segments, shape)[0].pages_read == read


def test_prompt_chunk_skips_what_no_row_sees() -> None:
    """Rows of a chunk that end before an item's first token are left out of it, and no item is invisible."""
    shape = metadata_shape(512, 16, 4096, 600)
    stats, packed = build([Segment(0, 512, 256, chain(range(1, 100)))], shape)
    assert stats == MetadataStats(items=2, pages_read=48, pages_seen=48)
    items = unpack_metadata(shape, packed).items
    np.testing.assert_array_equal(items[:, :2], [[0, 128], [512, 384], [0, 24], [384, 384], [0, 384]])


def test_under_a_mask_a_cpu_has_fewer_loops() -> None:
    """Others compute masks with tiles of their own sizes already, see `TILE_SIZES`."""
    masked, other = (metadata_shape(64, 16, 4096, 600, masked=masked) for masked in (True, False))
    loops, other_loops = (sum(len(c.lanes) for c in shape.classes) for shape in (masked, other))
    assert (loops, other_loops) == (4, 8)
    for kernel in ("gpu", "mma", "tpu"):
        shapes = [metadata_shape(64, 16, 4096, 600, kernel, masked=masked) for masked in (True, False)]
        assert shapes[0] == shapes[1]


def test_long_ranges_are_split_evenly() -> None:
    shape = metadata_shape(4, 16, 4096, 600)
    stats, packed = build([Segment(0, 4, 51 * 16 - 4, chain(range(1, 52)))], shape)
    assert stats.items == 2
    items = unpack_metadata(shape, packed).items
    assert sorted(items[3, :2].tolist()) == [25 * 16, 26 * 16]


def test_one_row_takes_long_items_and_short_ones_for_the_rest() -> None:
    shape = metadata_shape(4, 16, 4096, 600)
    for pages, lengths in (
        (3, [3]),
        (15, [7, 8]),
        (16, [16]),
        (20, [20]),
        (60, [30, 30]),
        (150, [22, 128]),
        (165, [5, 32, 128]),
    ):
        stats, packed = build([Segment(2, 1, pages * 16 - 1, chain(range(1, pages + 1)))], shape)
        items = unpack_metadata(shape, packed).items
        assert sorted(items[3, : stats.items].tolist()) == [16 * length for length in lengths]


PAGE_WINDOWS = (1, 15, 16, 17, 40, 300, 10**6)  # around a page of 16 tokens, and more than any context has


class TestWindows:
    """A row sees the last tokens only: exactly these, and no page before those of all rows is read."""

    @pytest.mark.parametrize("window", PAGE_WINDOWS)
    @pytest.mark.parametrize(("page_size", "kernel"), [(1, "reference"), (16, "reference"), (16, "tpu")])
    def test_every_visible_token_once(
        self, grow: Callable, kinds: list[str], page_size: int, kernel: KernelName, window: int
    ) -> None:
        shape = metadata_shape(64, page_size, 120 * page_size, 120, kernel, window=window)
        for kind in kinds:
            segments = grow(kind, 64, page_size, 120).segments
            _, packed = build(segments, shape)
            assert coverage(packed, shape) == expected(segments, page_size, window), kind

    @pytest.mark.parametrize("window", [1, 3, 4, 5, 30, 200])
    def test_random_trees(self, rng: Generator, window: int) -> None:
        """Forks anywhere, so that readers of one node see different parts of it, or nothing."""
        for share_tokens in (1, 8, 64):
            shape = replace(metadata_shape(48, 4, 400, 300, window=window), share_tokens=share_tokens, items=4000)
            shape = replace(shape, pages=shape.pages + 48 * 64)
            for _ in range(20):
                segments = random_tree(rng, 300, 48)
                _, packed = build(segments, shape)
                assert coverage(packed, shape) == expected(segments, 4, window)

    @pytest.mark.parametrize(
        ("window", "read"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (50, 4), (160, 10), (10**6, 10)]
    )
    def test_pages_before_the_window_are_not_listed(self, window: int, read: int) -> None:
        """Of a row at the last slot of its tenth page."""
        shape = metadata_shape(4, 16, 4096, 600, window=window)
        stats, packed = build([Segment(0, 1, 159, chain(range(1, 20)))], shape)
        assert stats.pages_read == read
        assert unpack_metadata(shape, packed).pages[:read].tolist() == list(range(11 - read, 11))

    def test_a_chunk_reads_what_its_first_row_sees_and_rows_are_left_out_of_items_behind_their_window(self) -> None:
        shape = metadata_shape(512, 16, 4096, 600, window=64)
        stats, packed = build([Segment(0, 512, 512, chain(range(1, 100)))], shape)
        assert stats.pages_read == 32 + 4  # the chunk's own, and what 63 tokens before it reach into
        items = Item(*unpack_metadata(shape, packed).items[:, : stats.items].astype(int))
        assert stats.items > 1
        position = 512 + items.first_row
        np.testing.assert_array_equal(items.first_row, np.maximum(items.first_token - 512, 0))
        last = np.minimum(items.first_token + items.tokens + 62, 1023)
        np.testing.assert_array_equal(position + items.rows - 1, last)

    def test_readers_of_a_shared_prefix_list_it_once_from_where_the_first_of_them_sees(self) -> None:
        """Three contexts behind 64 pages, each a little longer; a fourth has gone on too far to see any of it."""
        shape = metadata_shape(16, 16, 16384, 1100, window=512)
        prefix = range(1, 65)
        ends = (64 * 16 + 3, 64 * 16 + 40, 64 * 16 + 100, 64 * 16 + 520)
        pages = [chain(prefix, range(90 + 40 * i, 130 + 40 * i)) for i in range(4)]  # in the order of rows
        segments = [Segment(i, 1, end, table) for i, (end, table) in enumerate(zip(ends, pages, strict=True))]
        stats, packed = build(segments, shape)
        own = [1, 3, 7, 33]  # the last one's window begins in its own pages
        assert stats.pages_read == 32 + sum(own)
        assert coverage(packed, shape) == expected(segments, 16, 512)
        items = Item(*unpack_metadata(shape, packed).items[:, : stats.items].astype(int))
        of_prefix = items.first_token < 1024
        assert set(items.rows[of_prefix]) == {3}  # the fourth is not among the rows that the prefix is read for

    def test_what_too_few_readers_see_is_not_shared(self) -> None:
        """A prefix of 40 pages that a second reader sees 15 or 16 pages of: 256 tokens are worth sharing."""
        shape = metadata_shape(2, 16, 16384, 1100, window=20 * 16)
        for gap, shared in ((4, True), (5, False)):
            near = Segment(0, 1, 41 * 16 - 1, chain(range(1, 41), [100]))
            far = Segment(1, 1, (40 + gap) * 16 - 1, chain(range(1, 41), range(200, 200 + gap)))
            stats, _ = build([near, far], shape)
            seen_by = 19, 20 - gap
            assert stats.pages_read == 1 + gap + (seen_by[0] if shared else sum(seen_by))

    def test_the_first_token_that_a_mask_leaves(self) -> None:
        """Pages before it are not listed; those of another sequence are."""
        shape = metadata_shape(4, 16, 4096, 600)
        far = Segment(0, 3, 155, chain(range(1, 20)), first_token=100)
        near = Segment(3, 1, 40, chain(range(30, 34)))
        stats, packed = build([far, near], shape)
        assert stats.pages_read == 4 + 3
        from_page = Counter({key: n for key, n in expected([far], 16).items() if key[1] >= 96})
        assert coverage(packed, shape) == from_page + expected([near], 16)

    def test_lists_of_short_windows_are_short(self) -> None:
        """And rows alone have no items that their windows never fill."""
        short, whole = metadata_shape(16, 16, 32768, 3000, window=128), metadata_shape(16, 16, 32768, 3000)
        assert short.size() < whole.size() / 3
        assert [c.pages for c in short.classes if c.rows == 1] == [8]
        assert [c.pages for c in whole.classes if c.rows == 1] == [8, 32, 128]
        assert metadata_shape(16, 16, 32768, 3000, window=10**6) == replace(whole, window=10**6)

    @pytest.mark.parametrize("window", [0, -1])
    def test_no_window_is_empty(self, window: int) -> None:
        with pytest.raises(ValueError, match="a row sees itself"):
            metadata_shape(4, 16, 64, 8, window=window)


def random_tree(rng: Generator, pool: int, rows_of_step: int) -> list[Segment]:
    """Trees of pages of 4 tokens, grown by forking anywhere, with prompts, duplicates and shared partial pages."""
    free = list(rng.permutation(pool))
    chains: list[list[int]] = [[]]
    segments: list[Segment] = []
    row = 0
    for _ in range(int(rng.integers(1, 12))):
        base = chains[int(rng.integers(len(chains)))]
        pages = base[: int(rng.integers(len(base) + 1))]
        pages = pages + [int(free.pop()) for _ in range(int(rng.integers(0 if pages else 1, 25)))]
        chains.append(pages)
        end = len(pages) * 4 - int(rng.integers(4))
        rows = min(int(rng.integers(1, 5)), end, rows_of_step - row)
        if rows:
            segments.append(Segment(row, rows, end - rows, np.array(pages, np.int32)))
            row += rows
    rng.shuffle(segments)
    return segments


def test_nothing_to_do() -> None:
    shape = metadata_shape(8, 16, 4096, 600)
    stats, packed = build([], shape)
    assert stats == MetadataStats(0, 0, 0)
    assert coverage(packed, shape) == Counter()


class TestCapacity:
    """The promise of `metadata_shape`: batches within the limits fit, whatever their tree and the kernel's classes."""

    @for_every_kernel
    @pytest.mark.parametrize(
        ("rows", "page_size", "context", "pool"), [(1, 16, 32768, 2048), (16, 16, 32768, 4096), (64, 1, 512, 4096)]
    )
    def test_pool_full_of_unshared_contexts(
        self, rows: int, page_size: int, context: int, pool: int, kernel: KernelName
    ) -> None:
        shape = metadata_shape(rows, page_size, context, pool, kernel)
        each = min(pool // rows, context // page_size)
        segments = [Segment(i, 1, each * page_size - 1, chain(range(i * each, (i + 1) * each))) for i in range(rows)]
        assert build(segments, shape)[0].pages_read == rows * each

    @for_every_kernel
    @pytest.mark.parametrize("page_size", [1, 2, 16, 32, 512])
    def test_nodes_that_are_just_not_worth_sharing(self, page_size: int, kernel: KernelName) -> None:
        """A comb of pairs, each with the longest prefix that is not shared, on top of a pool full of their leaves."""
        rows, pool = 32, 5000
        unshared = max(1, 256 // page_size) - 1
        own = (pool - 16 * unshared) // rows
        segments = []
        for i in range(rows):
            first = (i // 2) * unshared
            leaf = 16 * unshared + i * own
            pages = chain(range(first, first + unshared), range(leaf, leaf + own))
            segments.append(Segment(i, 1, len(pages) * page_size - 1, pages))
        shape = metadata_shape(rows, page_size, pool * page_size, pool, kernel)
        stats, _ = build(segments, shape)
        assert stats.pages_read == rows * (unshared + own)

    @for_every_kernel
    def test_caterpillar(self, kernel: KernelName) -> None:
        """512 decode rows, each forking one page after the last: as deep as a tree of that many leaves gets."""
        rows = 512
        trunk = range(1, rows + 1)
        segments = [Segment(i, 1, 16 * (i + 1), chain(trunk[: i + 1], [1000 + i])) for i in range(rows)]
        shape = metadata_shape(rows, 16, 16 * (rows + 1), 1000 + rows, kernel)
        stats, packed = build(segments, shape)
        assert stats.pages_read <= shape.pages - max(c.pages for c in shape.classes)
        metadata = unpack_metadata(shape, packed)
        seen = np.zeros(rows, np.int64)
        for row, count, _, tokens, start in metadata.items[:, : stats.items].T:
            mine = slice(row, row + count)
            seen[mine] += np.clip(metadata.visible_tokens[mine] - start, 0, tokens)
        np.testing.assert_array_equal(seen, metadata.visible_tokens)

    @for_every_kernel
    @pytest.mark.parametrize("window", [1, 16, 17, 130, 1024, 5000])
    def test_windows(self, kernel: KernelName, window: int) -> None:
        """Rows alone whose windows begin at the end of a page, and a chunk of as many rows."""
        rows, page_size, context = 32, 16, 8192
        shape = metadata_shape(rows, page_size, context, rows * context // page_size, kernel, window=window)
        each = context // page_size
        for slack in (0, 1, 15):
            segments = [Segment(i, 1, context - 1 - slack, chain(range(i * each, (i + 1) * each))) for i in range(rows)]
            build(segments, shape)
        build([Segment(0, rows, context - rows, chain(range(each)))], shape)

    def test_sizes_stay_small(self) -> None:
        """Copied to the device every step: a large mixed step over a large pool, and a decode step over a small one."""
        assert metadata_shape(512, 16, 32768, 40000).size() * 4 < 400_000
        assert metadata_shape(16, 16, 32768, 3000).size() * 4 < 20_000

    def test_no_tree_overflows(self) -> None:
        """Contexts that hold the same pages in other orders are no tree; their metadata may not fit, which is said."""
        rows, pool = 64, 128
        segments = [Segment(i, 1, pool * 16 - 1, np.roll(np.arange(pool, dtype=np.int32), i)) for i in range(rows)]
        with pytest.raises(MetadataOverflow, match="tree of 128 pages"):
            build(segments, metadata_shape(rows, 16, pool * 16, pool))


class TestRefusals:
    good = Segment(0, 2, 30, np.arange(2, dtype=np.int32))

    @pytest.mark.parametrize(
        ("segment", "message"),
        [
            (Segment(1, 1, 0, np.array([3], np.int32)), "row 1"),
            (Segment(-1, 1, 0, np.array([3], np.int32)), "row -1"),
            (Segment(3, 2, 0, np.array([3], np.int32)), "segments take 5 rows"),
            (Segment(2, 0, 0, np.array([3], np.int32)), "0 rows"),
            (Segment(2, 1, -1, np.array([3], np.int32)), "position -1"),
            (Segment(2, 2, 15, np.array([3], np.int32)), "1 pages of int32 for 17 tokens"),
            (Segment(2, 1, 0, np.array([3], np.int64)), "int64"),
            (Segment(2, 1, 3, np.array([3], np.int32), first_token=4), "from 4 on"),
            (Segment(2, 1, 3, np.array([3], np.int32), first_token=-1), "from -1 on"),
            (Segment(2, 1, 0, np.array([8], np.int32)), "page id"),
            (Segment(2, 1, 0, np.array([-1], np.int32)), "page id"),
        ],
    )
    def test_bad_segment(self, segment: Segment, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build([self.good, segment], metadata_shape(4, 16, 64, 8))

    @pytest.mark.parametrize("out", [np.zeros(3, np.int32), np.zeros(metadata_shape(4, 16, 64, 8).size(), np.int64)])
    def test_bad_output(self, out: np.ndarray) -> None:
        with pytest.raises(ValueError, match="out must be int32"):
            build_attention_metadata([self.good], metadata_shape(4, 16, 64, 8), out)

    @pytest.mark.parametrize("limits", list(pairwise([0, 1, 1, 1, 0])))
    def test_bad_limits(self, limits: tuple[int, int]) -> None:
        if min(limits) < 1:
            with pytest.raises(ValueError, match="positive"):
                metadata_shape(limits[0], limits[1], *limits)
