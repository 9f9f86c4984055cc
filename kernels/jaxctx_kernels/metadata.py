"""The work list: which pages of the KV pool are read for which rows of a step, decided once on the host.

Host code flattens the page tree of a batch into *items* once per step; every layer then reuses them. An item is a range
of pages and a range of rows that look at them. Sequences that share leading pages are neighbours after sorting, so the
rows under any node of the page tree are one range, and a shared prefix is read once for all its readers, at any depth
and for many groups at once. Where nothing is shared an item is a piece of split-KV decode; where the rows are a prompt
chunk it is paged prefill.

    sequences' pages      sorted rows   runs (rows × pages)     items (runs cut to pieces of similar length)
    A: 7 8 9 4            0             0-2 × 7 8 9             0-2 × 7 8,  0-2 × 9
    B: 7 8 9 5 1    →     1         →   0   × 4             →   0   × 4
    C: 7 8 9 6            2             1   × 5 1               1   × 5 1
                                        2   × 6                 2   × 6

An item is five numbers: its first sorted row, its rows, its first entry in one list of pages, how many tokens of those
pages any of its rows sees, and the position of the first of these tokens. What a single row sees of it follows from the
row's length. So a plan is small, items are counted and not padded to a bucket, and no shape of tree compiles anything.
This module is numpy only; it never touches a device and never sees a token, key or value.

The idea of one read per shared prefix with partials merged by log-sum-exp: Hydragen (arXiv 2402.05099), FlashInfer's
cascade attention (arXiv 2501.01005), DeFT (arXiv 2404.00242), FastTree (MLSys 2025).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
KernelName: TypeAlias = Literal["reference", "gpu", "tpu"]

ITEM_FIELDS = 5  # first row, rows, first entry of the page list, tokens, position of the first token
SHARE_TOKENS = 256
CLASSES = {  # rows, tokens and lanes of a round, by kernel; see NOTES.md
    "reference": (
        *((1, 128, (16, 4)), (1, 512, (4,)), (1, 2048, (1,))),
        *((rows, tokens, (1,)) for rows, tokens in ((4, 512), (32, 256), (32, 2048), (128, 256), (256, 512))),
    ),
    "gpu": tuple((rows, 1024, (1,)) for rows in (1, 16, 128)),  # the kernel cuts work itself, only masks need rounds
    "tpu": tuple((*each, (1,)) for each in ((1, 128), (1, 512), (8, 512), (32, 512), (64, 512), (64, 1024))),
}
ROUND_COST = 8  # what a round costs besides its rows, in rows


class MetadataOverflow(Exception):
    """The batch lists more pages than any batch within the limits given to `metadata_shape` can."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part in this step.

    Its rows are `first_row .. first_row + rows - 1` of the batch; row `first_row + r` is the token at absolute position
    `position + r` and sees tokens `0 .. position + r`. `pages` int32: physical page ids in order, covering at least
    `position + rows` tokens; what lies past those is not read.
    """

    first_row: int
    rows: int
    position: int
    pages: Int32s


@dataclass(frozen=True, slots=True)
class ItemClass:
    """Items of a class have up to `pages` pages and are computed `rows` rows at a time, in rounds if they have more.

    Items of one row are computed several at a time: as many as the first of `lanes` says, or where fewer are left the
    next, the last of which takes what remains.
    """

    rows: int
    pages: int
    lanes: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class MetadataShape:
    """The static part of a plan: what a step is compiled for. Made by `metadata_shape`."""

    rows: int  # of the step, padding included
    page_size: int
    pool_pages: int
    classes: tuple[ItemClass, ...]  # by rising rows, then pages; fewer where `rows` is small
    items: int  # capacity
    pages: int  # capacity of the page list, with room to read one class's pages from its last entry
    share_tokens: int  # a node of the page tree is read once if that saves reading this many tokens
    kernel: KernelName  # what computes the attention

    def size(self) -> int:
        """How many int32 a packed plan takes: class ends, three per row, the items, the page list."""
        return len(self.classes) + 3 * self.rows + ITEM_FIELDS * self.items + self.pages


class AttentionMetadata(NamedTuple):
    """A packed plan's parts: int32 arrays of numpy, to write, or of JAX, to read, as what is unpacked."""

    ends: Any  # [classes]; items of class c are ends[c - 1] .. ends[c] - 1
    order: Any  # [rows] batch row of each sorted row
    inverse: Any  # [rows] sorted row of each batch row
    length: Any  # [rows] tokens that each sorted row sees
    items: Any  # [ITEM_FIELDS, items]
    pages: Any  # [entries]


class Run(NamedTuple):
    """A node of the page tree, with the readers it is read for: `rows` sorted rows over `path`, from token `start`.

    No row sees a token at `stop` or later. `position` is the first row's where the rows are one sequence's, else -1.
    """

    row: int
    rows: int
    start: int
    stop: int
    position: int
    path: Int32s


def metadata_shape(
    rows: int, page_size: int, max_context_tokens: int, pool_pages: int, kernel: KernelName = "reference"
) -> MetadataShape:
    """The shape that fits every batch of up to `rows` rows over contexts of up to `max_context_tokens` tokens.

    It cannot overflow where a page has one place in one chain of pages, as pages of a prefix tree do. There are at most
    `rows` segments, so at most `rows` leaves and `rows - 1` inner nodes in the page tree. A page is listed once for the
    node it lies in, and once more for each further reader where its node is not shared; a node that is not shared saves
    less than `share_tokens`, so adds fewer than `share_tokens / page_size` entries. A node's pages are cut into items
    that are full but for the last, or for one long item's half of its width (see `cut`). Hence

        pages <= min(rows * max pages of a context, pool_pages + (rows - 1) * share_tokens / page_size)
        items <= pages / (pages of a long item) + (nodes, at most 2 * rows - 1) * (shorter items in half a long one)
    """
    if min(rows, page_size, max_context_tokens, pool_pages) < 1:
        raise ValueError("rows, page_size, max_context_tokens and pool_pages must be positive")
    widest = min((c[0] for c in CLASSES[kernel] if c[0] >= rows), default=rows)
    wanted = [c if rows > 1 else (*c[:2], (1,)) for c in CLASSES[kernel] if c[0] <= widest]
    by_size = {(min(width, rows), max(1, tokens // page_size)): lanes for width, tokens, lanes in wanted}
    classes = tuple(ItemClass(*size, by_size[size]) for size in sorted(by_size))
    context_pages = -(-max_context_tokens // page_size)
    pages = min(rows * context_pages, pool_pages + (rows - 1) * -(-SHARE_TOKENS // page_size))
    longest = {c.rows: c.pages for c in classes}
    halves = Counter[int]()
    for short, long in pairwise(classes):
        if short.rows == long.rows:
            halves[long.rows] += -(-long.pages // (2 * short.pages))
    pieces = max([1, *halves.values()])
    items = pages // min(longest.values()) + (2 * rows - 1) * pieces
    items += max(c.lanes[0] for c in classes)  # a round reads so many, wherever it starts
    return MetadataShape(
        rows, page_size, pool_pages, classes, items, pages + max(longest.values()), SHARE_TOKENS, kernel
    )


def build_attention_metadata(segments: Sequence[Segment], shape: MetadataShape, out: Int32s) -> None:
    """Plan one step: fills `out` int32 `[shape.size()]`, to be unpacked by `unpack_metadata` inside the jitted step.

    Rows of no segment see nothing. Raises PlanOverflow if the batch is no tree of pages (see `metadata_shape`) and
    ValueError if segments overlap, leave the batch or lack pages; `out` is undefined then.
    """
    if out.shape != (shape.size(),) or out.dtype != np.int32:
        raise ValueError(f"out must be int32 [{shape.size()}]")
    check(segments, shape)
    used = [-(-(s.position + s.rows) // shape.page_size) for s in segments]
    by_path = sorted(range(len(segments)), key=lambda i: segments[i].pages[: used[i]].tobytes())
    segments = [segments[i] for i in by_path]
    runs = share(segments, [used[i] for i in by_path], shape)

    ends, order, inverse, length, table, pages = unpack_metadata(shape, out)
    sort_rows(segments, order, inverse, length)
    listed = sum(len(run.path) for run in runs)
    spare = max(c.pages for c in shape.classes)  # a round reads this many entries, wherever it starts
    if listed + spare > shape.pages:
        raise MetadataOverflow(f"{listed} page entries are more than a tree of {shape.pool_pages} pages can need")
    pages[listed : listed + spare] = 0
    if not runs:
        ends[:] = 0
        return
    np.concatenate([run.path for run in runs], out=pages[:listed])
    if pages[:listed].min() < 0 or pages[:listed].max() >= shape.pool_pages:
        raise ValueError(f"a page id is not in 0 .. {shape.pool_pages - 1}")
    items, kind = cut(runs, shape)
    count = items.shape[1]
    if count > shape.items:
        raise MetadataOverflow(f"{count} items are more than a tree of {shape.pool_pages} pages can need")
    ends[:] = np.bincount(kind, minlength=len(ends)).cumsum()
    table[:, :count] = items[:, kind.argsort(kind="stable")]


def check(segments: Sequence[Segment], shape: MetadataShape) -> None:
    """Raise ValueError for what would otherwise be silently wrong data."""
    end = 0
    for s in sorted(segments, key=attrgetter("first_row")):
        if s.rows < 1 or s.position < 0:
            raise ValueError(f"a segment has {s.rows} rows at position {s.position}")
        if s.first_row < end:
            raise ValueError(f"row {s.first_row} is negative or belongs to two segments")
        if len(s.pages) * shape.page_size < s.position + s.rows or s.pages.dtype != np.int32:
            raise ValueError(f"{len(s.pages)} pages of {s.pages.dtype} for {s.position + s.rows} tokens")
        end = s.first_row + s.rows
    if end > shape.rows:
        raise ValueError(f"segments take {end} rows, the step has {shape.rows}")


def unpack_metadata(shape: MetadataShape, packed: Any) -> AttentionMetadata:
    """Split what `build_attention_metadata` packs. `packed` is int32 `[shape.size()]`."""
    sizes = (len(shape.classes), shape.rows, shape.rows, shape.rows, ITEM_FIELDS * shape.items, shape.pages)
    parts = [packed[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    parts[4] = parts[4].reshape(ITEM_FIELDS, shape.items)
    return AttentionMetadata(*parts)


def sort_rows(segments: Sequence[Segment], order: Int32s, inverse: Int32s, length: Int32s) -> None:
    """Fill `order` (batch row of each sorted row; rows of no segment last), its inverse, and what sorted rows see."""
    rows = [*chain.from_iterable(range(s.first_row, s.first_row + s.rows) for s in segments)]
    seen = [*chain.from_iterable(range(s.position + 1, s.position + s.rows + 1) for s in segments)]
    length[:] = seen + [0] * (len(length) - len(seen))
    order[:] = rows + sorted({*range(len(order))}.difference(rows))
    inverse[order] = np.arange(len(order), dtype=np.int32)


def share(segments: Sequence[Segment], used: Sequence[int], shape: MetadataShape) -> list[Run]:
    """Walk the page tree of segments sorted by their pages, and decide which nodes are read once for all below them.

    A node is shared if (readers - 1) times its tokens reach `shape.share_tokens`; else its pages go to its children.
    """
    neighbours = pairwise(zip(segments, used, strict=True))
    common = [0, *(leading(a.pages, b.pages, min(m, n)) for (a, m), (b, n) in neighbours)]  # with the one before
    row = list(accumulate((s.rows for s in segments), initial=0))
    end = [s.position + s.rows for s in segments]
    runs = []
    todo = [(0, len(segments), 0)] if segments else []
    while todo:
        low, high, done = todo.pop()
        s, start = segments[low], done * shape.page_size
        if high - low == 1:
            runs.append(Run(row[low], s.rows, start, end[low], s.position, s.pages[done : used[low]]))
            continue
        depth = min(common[low + 1 : high])
        if (high - low - 1) * (depth - done) * shape.page_size >= shape.share_tokens:
            runs.append(Run(row[low], row[high] - row[low], start, max(end[low:high]), -1, s.pages[done:depth]))
            done = depth
        edges = [low, *(i for i in range(low + 1, high) if common[i] == depth), high]
        todo.extend((a, b, done) for a, b in pairwise(edges))
    return [run for run in runs if len(run.path)]


def leading(a: Int32s, b: Int32s, limit: int) -> int:
    """How many of the first `limit` entries are equal from the start on."""
    if a[0] != b[0]:
        return 0
    differs = a[:limit] != b[:limit]
    first = int(differs.argmax())
    return first if differs[first] else limit


def cut(runs: Sequence[Run], shape: MetadataShape) -> tuple[Int64s, Int64s]:
    """Cut runs into items that fit their class. Returns the items `[5, items]` and their classes.

    Of the classes of a run's width, that of the longest items takes as much as fills them at least half, and so on;
    that of the shortest takes the rest. The items of one class have similar lengths. Rows of a prompt chunk that see
    nothing of an item are left out of it.
    """
    size = shape.page_size
    by_width: dict[int, list[tuple[int, int]]] = {}  # (class, pages), longest first
    for c, of_class in enumerate(shape.classes):
        by_width.setdefault(of_class.rows, []).insert(0, (c, of_class.pages))
    widths = list(by_width)
    fields = []
    listed = items = 0
    for run in runs:
        at, left = run.start, len(run.path)
        # Of the widths, ascending, that whose rounds over so many rows cost least.
        width = 1 if run.rows == 1 else min(widths[1:], key=lambda w: -(-run.rows // w) * (w + ROUND_COST))
        lengths = by_width[width]
        for c, most in lengths:
            into = -(-left // most) if c == lengths[-1][0] else (left + most // 2) // most
            if into:
                count = min(left, into * most)
                fields.append((run.row, run.rows, at, run.stop, run.position, count, listed, items, into, c))
                at += count * size
                left -= count
                listed += count
                items += into
    of_piece = np.array(fields, np.int64).T
    row, rows, start, stop, position, pages, entry, first_item, parts, kind = of_piece.repeat(of_piece[8], axis=1)
    part = np.arange(items) - first_item
    begin, end = part * pages // parts, (part + 1) * pages // parts
    token = start + begin * size
    skip = np.maximum(token - position, 0) * (position >= 0)
    tokens = np.minimum((end - begin) * size, stop - token)
    return np.array((row + skip, rows - skip, entry + begin, tokens, token)), kind
