"""The work list: which pages of the KV pool are read for which rows of a step, decided once on the host.

Host code flattens the page tree of a batch into *items* once per step; every layer then reuses them. An item is a range
of pages and a range of rows that look at them. Sequences that share leading pages are neighbours after sorting, so the
rows under any node of the page tree are one range, and a shared prefix is read once for all its readers, at any depth
and for many groups at once. Where nothing is shared an item is a piece of split-KV decode; where the rows are a prompt
chunk it is paged prefill.

    sequences' pages      sorted rows   runs (rows × pages)     items (pages cut to their class's length)
    A: 7 8 9 4            0             0-2 × 7 8 9             0-2 × 7 8,  0-2 × 9
    C: 7 8 9 5 1    →     1         →   0   × 4             →   0   × 4
    B: 7 8 9 6            2             1   × 5 1               1   × 5 1
                                        2   × 6                 2   × 6

Nothing here is padded but by capacity: items and pages are counted, so the arrays are small and no shape of tree
compiles anything. This module is numpy only; it never touches a device and never sees a token, key or value.

The idea of one read per shared prefix with partials merged by log-sum-exp: Hydragen (arXiv 2402.05099), FlashInfer's
cascade attention (arXiv 2501.01005), DeFT (arXiv 2404.00242), FastTree (MLSys 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

ITEM_FIELDS = 5  # first row, rows, first entry of the page list, pages, first token


class PlanOverflow(Exception):
    """The batch lists more pages than any batch within the limits given to `plan_shape` can."""


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
    """Items are computed `pages` pages and `rows` rows at a time; an item of more rows takes several rounds."""

    rows: int
    pages: int


@dataclass(frozen=True, slots=True)
class PlanShape:
    """The static part of a plan: what a step is compiled for. Made by `plan_shape`."""

    rows: int  # of the step, padding included
    page_size: int
    classes: tuple[ItemClass, ...]  # by rising rows
    items: int  # capacity
    pages: int  # capacity of the page list, with room to read one class's pages from its last entry
    share_tokens: int  # a node of the page tree is read once if that saves reading this many tokens

    def size(self) -> int:
        """How many int32 a packed plan takes: class ends, three per row, the items, the page list."""
        return len(self.classes) + 3 * self.rows + ITEM_FIELDS * self.items + self.pages


@dataclass(frozen=True, slots=True)
class PlanStats:
    """What a plan came to. `pages_seen - pages_read` page reads per layer are saved by sharing."""

    items: int
    pages_read: int  # entries of the page list
    pages_seen: int  # pages that the segments see, each counted by itself


def plan_shape(rows: int, page_size: int, max_context_tokens: int, pool_pages: int) -> PlanShape:
    """The shape that fits every batch of up to `rows` rows over contexts of up to `max_context_tokens` tokens.

    It cannot overflow where a page has one place in one chain of pages, as pages of a prefix tree do. There are at most
    `rows` segments, so at most `rows` leaves and `rows - 1` inner nodes in the page tree. A page is listed once for the
    node it lies in, and once more for each further reader where its node is not shared; a node that is not shared saves
    less than `share_tokens`, so adds fewer than `share_tokens / page_size` entries. Hence

        pages <= min(rows * max pages of a context, pool_pages + (rows - 1) * share_tokens / page_size)
        items <= pages / (pages of the smallest item) + (nodes, at most 2 * rows - 1)
    """
    if min(rows, page_size, max_context_tokens, pool_pages) < 1:
        raise ValueError("rows, page_size, max_context_tokens and pool_pages must be positive")
    share_tokens = 256
    classes = tuple(
        ItemClass(rows=min(width, rows), pages=max(1, tokens // page_size))
        for width, tokens in ((1, 512), (16, 1024), (128, 1024))
        if width == 1 or width // 16 < rows
    )
    context_pages = -(-max_context_tokens // page_size)
    pages = min(rows * context_pages, pool_pages + (rows - 1) * -(-share_tokens // page_size))
    items = -(-pages // min(c.pages for c in classes)) + 2 * rows - 1
    slack = max(c.pages for c in classes)
    return PlanShape(rows, page_size, classes, items, pages + slack, share_tokens)


def plan_attention(segments: Sequence[Segment], shape: PlanShape, out: Int32s) -> PlanStats:
    """Plan one step: fills `out` int32 `[shape.size()]`, to be unpacked by `unpack` inside the jitted step.

    Rows of no segment see nothing. Raises PlanOverflow if the batch is no tree of pages (see `plan_shape`) and
    ValueError if segments overlap, leave the batch or lack pages; `out` is undefined then.
    """
    raise_unless_valid(segments, shape, out)
    used = [-(-(s.position + s.rows) // shape.page_size) for s in segments]
    by_path = sorted(range(len(segments)), key=lambda i: segments[i].pages[: used[i]].tobytes())
    segments = [segments[i] for i in by_path]
    used = [used[i] for i in by_path]
    runs, paths = share(segments, used, shape)

    count = len(shape.classes)
    ends, order, inverse, length, table, pages = split(shape, out)
    rows = np.fromiter((s.rows for s in segments), np.int64, len(segments))
    sort_rows(segments, rows, order, inverse, length)
    listed = sum(len(path) for path in paths)
    if listed > shape.pages - max(c.pages for c in shape.classes):
        raise PlanOverflow(f"{listed} page entries; the shape holds {shape.pages}")
    if paths:
        np.concatenate(paths, out=pages[:listed])
    pages[listed:] = 0
    items = cut(runs, shape)
    if items.shape[1] > shape.items:
        raise PlanOverflow(f"{items.shape[1]} items; the shape holds {shape.items}")
    ends[:] = np.searchsorted(items[ITEM_FIELDS], np.arange(count), side="right")
    table[:, : items.shape[1]] = items[:ITEM_FIELDS]
    table[:, items.shape[1] :] = 0
    return PlanStats(items.shape[1], listed, sum(used))


def raise_unless_valid(segments: Sequence[Segment], shape: PlanShape, out: Int32s) -> None:
    """Cheap checks of what would otherwise be silently wrong data: JAX does not check indices."""
    if out.shape != (shape.size(),) or out.dtype != np.int32:
        raise ValueError(f"out must be int32 [{shape.size()}]")
    taken = np.zeros(shape.rows, np.bool_)
    for s in segments:
        rows = taken[s.first_row : s.first_row + s.rows]
        if s.rows < 1 or s.first_row < 0 or s.position < 0 or len(rows) != s.rows:
            raise ValueError(f"rows {s.first_row}+{s.rows} at position {s.position} do not fit {shape.rows} rows")
        if rows.any():
            raise ValueError(f"rows {s.first_row}+{s.rows} belong to two segments")
        if len(s.pages) * shape.page_size < s.position + s.rows or s.pages.dtype != np.int32:
            raise ValueError(f"{len(s.pages)} pages of {s.pages.dtype} for {s.position + s.rows} tokens")
        rows[:] = True


def split(shape: PlanShape, packed: Int32s) -> tuple[Int32s, Int32s, Int32s, Int32s, Int32s, Int32s]:
    """The parts of a packed plan as views: class ends, order, inverse, length `[rows]`, items `[5, items]`, pages."""
    count, rows = len(shape.classes), shape.rows
    edges = np.cumsum([count, rows, rows, rows, ITEM_FIELDS * shape.items])
    ends, order, inverse, length, table, pages = np.split(packed, edges)
    return ends, order, inverse, length, table.reshape(ITEM_FIELDS, shape.items), pages


def sort_rows(
    segments: Sequence[Segment], rows: NDArray[np.int64], order: Int32s, inverse: Int32s, length: Int32s
) -> None:
    """Fill `order` (batch row of each sorted row; rows of no segment last), its inverse, and what sorted rows see."""
    total = int(rows.sum())
    within = np.arange(total) - np.repeat(np.cumsum(rows) - rows, rows)
    order[:total] = within + np.repeat([s.first_row for s in segments], rows)
    length[:total] = within + np.repeat([s.position + 1 for s in segments], rows)
    length[total:] = 0
    inverse[:] = -1
    inverse[order[:total]] = np.arange(total, dtype=np.int32)
    order[total:] = np.flatnonzero(inverse < 0)
    inverse[order[total:]] = np.arange(total, len(order), dtype=np.int32)


def share(
    segments: Sequence[Segment], used: Sequence[int], shape: PlanShape
) -> tuple[list[tuple[int, int, int, int, int]], list[Int32s]]:
    """Walk the page tree of segments sorted by their pages, and decide what is read once.

    Returns runs (first sorted row, rows, first page, pages, position of the first row or -1 if of many segments) and
    the page ids of each. A node is shared if (readers - 1) times its tokens reach `shape.share_tokens`; else its pages
    go to its children.
    """
    common = [0] * (len(segments) + 1)  # leading pages that segments i - 1 and i share
    for i in range(1, len(segments)):
        common[i] = leading(segments[i - 1].pages, segments[i].pages, min(used[i - 1], used[i]))
    row = [0]
    for s in segments:
        row.append(row[-1] + s.rows)
    runs, paths = [], []
    todo = [(0, len(segments), 0)] if segments else []
    while todo:
        low, high, start = todo.pop()
        if high - low == 1:
            runs.append((row[low], row[high] - row[low], start, used[low] - start, segments[low].position))
            paths.append(segments[low].pages[start : used[low]])
            continue
        depth = min(common[low + 1 : high])
        if (high - low - 1) * (depth - start) * shape.page_size >= shape.share_tokens:
            runs.append((row[low], row[high] - row[low], start, depth - start, -1))
            paths.append(segments[low].pages[start:depth])
            start = depth
        edges = [low, *(i for i in range(low + 1, high) if common[i] == depth), high]
        todo.extend((a, b, start) for a, b in pairwise(edges))
    return runs, paths


def leading(a: Int32s, b: Int32s, limit: int) -> int:
    """How many of the first `limit` entries are equal from the start on."""
    if a[0] != b[0]:
        return 0
    differs = a[:limit] != b[:limit]
    first = int(differs.argmax())
    return first if differs[first] else limit


def cut(runs: Sequence[tuple[int, int, int, int, int]], shape: PlanShape) -> NDArray[np.int64]:
    """Cut runs into items of at most their class's pages and of similar bytes. Returns `[5 fields + class, items]`.

    Rows of a prompt chunk that see nothing of an item are left out of it.
    """
    first_row, rows, start, pages, position = np.array(runs, np.int64).reshape(-1, 5).T
    kind = np.searchsorted([c.rows for c in shape.classes[:-1]], rows)
    room = np.array([c.pages for c in shape.classes])[kind]
    first_page = np.cumsum(pages) - pages
    parts = -(-pages // room)
    run = np.repeat(np.arange(len(rows)), parts)
    part = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = part * pages[run] // parts[run]
    end = (part + 1) * pages[run] // parts[run]
    token = (start[run] + begin) * shape.page_size
    skip = np.where(position[run] >= 0, np.maximum(token - position[run], 0), 0)
    items = np.stack([first_row[run] + skip, rows[run] - skip, first_page[run] + begin, end - begin, token, kind[run]])
    return items[:, np.argsort(kind[run], kind="stable")]
