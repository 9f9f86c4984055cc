"""Attention metadata: which pages of the KV cache are read for which rows of a step, decided once on the host.

Host code flattens the page tree of a batch into *items* once per step; every layer then reuses them. An item is a range
of pages and a range of rows that look at them. Sequences that share leading pages are neighbours after sorting, so the
rows under any node of the page tree are one range, and a shared prefix is read once for all its readers, at any depth
and for many groups at once. Where nothing is shared an item is a piece of split-KV decode; where the rows are a prompt
chunk it is paged prefill.

    sequences' pages      sorted rows   prefix ranges (rows × pages)   items (ranges split to similar lengths)
    A: 7 8 9 4            0             0-2 × 7 8 9                    0-2 × 7 8,  0-2 × 9
    B: 7 8 9 5 1    →     1         →   0   × 4                    →   0   × 4
    C: 7 8 9 6            2             1   × 5 1                      1   × 5 1
                                        2   × 6                        2   × 6

An item is five numbers (`Item`). What a single row sees of it follows from the number of tokens that the row sees. So
the metadata is small, items are counted and not padded to a bucket, and no shape of tree compiles anything. This module
is numpy only; it never touches a device and never sees a token, key or value.

Layers with a sliding window have a work list of their own. Pages that are before the window of all rows of a sequence
are left out of it, pages that some reader of a shared prefix sees are read once, and a row's own window cuts exactly:
it ends where the row does, so that its length, which is part of the shape, says all.

    window of 40 tokens, pages of 16       page   0    1    2    3    4    5
    row A at position 85                          -    -    ▐█   ██   ██   █▌      sees 46 … 85
    row B at position 70                          -    ▐█   ██   ██   █▌           sees 31 … 70
    the prefix that they share: pages 1 to 3, both rows; page 1 of it hides nothing of A, which sees none of it

    build_attention_metadata
      check_segments           refuse what would be silently wrong
      sort_by_pages            sequences that share leading pages become neighbours
      find_shared_prefixes     page tree → prefix ranges
      write_row_order          sorted rows ↔ rows of the batch
      write_page_list          pages of the prefix ranges, one after the other
      write_items
        assign_classes         prefix ranges → pieces, each for items of one class
        split_items            pieces → items, sorted by their class

This runs on the host before every step, so it has to be fast. Loops over segments and ranges append to a list for each
field, which costs less than an object for each range. What concerns items is computed by numpy for all items at once.

The idea of one read per shared prefix with partials merged by log-sum-exp: Hydragen (arXiv 2402.05099), FlashInfer's
cascade attention (arXiv 2501.01005), DeFT (arXiv 2404.00242), FastTree (MLSys 2025).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
INT32 = np.dtype(np.int32)
KernelName: TypeAlias = Literal["reference", "gpu", "mma", "tpu"]


class TileSize(NamedTuple):
    """How much of an item a kernel computes at once. Widths and lengths were measured: see docs/kernels/cpu.md."""

    rows: int
    tokens: int
    lanes: tuple[int, ...] = (1,)  # see `ItemClass`


TILE_SIZES: dict[KernelName, tuple[TileSize, ...]] = {
    "reference": (
        TileSize(1, 128, lanes=(16, 4)),
        TileSize(1, 512, lanes=(4,)),
        TileSize(1, 2048),
        TileSize(4, 512),
        TileSize(32, 256),
        TileSize(32, 2048),
        TileSize(128, 256),
        TileSize(256, 512),
    ),
    # Kernels of GPUs cut the work anew. Tiles of these sizes are computed only by the reference, under a mask.
    "gpu": (TileSize(1, 1024), TileSize(16, 1024), TileSize(128, 1024)),
    "mma": (TileSize(1, 1024), TileSize(16, 1024), TileSize(128, 1024)),
    "tpu": (
        TileSize(1, 128),
        TileSize(1, 512),
        TileSize(8, 512),
        TileSize(32, 512),
        TileSize(64, 512),
        TileSize(64, 1024),
    ),
}
MASKED_TILE_SIZES: dict[KernelName, tuple[TileSize, ...]] = {
    **TILE_SIZES,
    "reference": (TileSize(1, 128, lanes=(4,)), TileSize(1, 512, lanes=(4,)), TileSize(4, 512), TileSize(64, 512)),
}
"""The same for steps under a mask, which are few: on a CPU fewer sizes, as each takes its time to compile."""
SHARE_TOKENS = 256  # a shared node of the page tree is read once if that saves reading this many tokens
TILE_COST_ROWS = 8  # starting a tile costs about as much as computing this many rows
MANY_SEQUENCES = 2**31 - 1  # position of a prefix range whose rows belong to several sequences; past any token


class MetadataOverflow(Exception):
    """The batch lists more pages than any batch within the limits given to `metadata_shape` can."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part in this step.

    Its rows are `first_row .. first_row + rows - 1` of the batch; row `first_row + r` is the token at absolute position
    `position + r` and sees tokens `0 .. position + r`, or the last of these, see `MetadataShape.window`. `pages` int32:
    physical page ids in order, covering at least `position + rows` tokens; what lies past those is not read. Neither
    are pages that end before `first_token`, at most `position`: a mask hides these tokens from all rows.
    """

    first_row: int
    rows: int
    position: int
    pages: Int32s
    first_token: int = 0


class ItemClass(NamedTuple):
    """Items of a class have up to `pages` pages and are computed `rows` rows at a time, in tiles if they have more.

    Items of one row are computed several at a time: as many as the first number of `lanes` says. Where fewer items are
    left, the next number is used; the last number also takes the rest.
    """

    rows: int
    pages: int
    lanes: tuple[int, ...] = (1,)


class Item(NamedTuple):
    """Rows and the pages that they look at: an entry of the work list. Each field is a number, or an array of many."""

    first_row: Any  # sorted row
    rows: Any
    first_entry: Any  # of the page list
    tokens: Any  # of these pages, how many any row of the item sees
    first_token: Any  # position of the first of these tokens


ITEM_FIELDS = len(Item._fields)


HOPPER_PROCESSORS = 132
"""Streaming multiprocessors of an H100 SXM or an H200, for devices that do not say how many they have."""


@dataclass(frozen=True, slots=True)
class MetadataShape:
    """The static part of the metadata: what a step is compiled for. Made by `metadata_shape`."""

    rows: int  # of the step, padding included
    page_size: int
    pool_pages: int
    classes: tuple[ItemClass, ...]  # by rising rows, then pages; fewer where `rows` is small
    items: int  # capacity
    pages: int  # capacity of the page list; one class's pages can be read from its last entry
    share_tokens: int  # see SHARE_TOKENS
    kernel: KernelName  # what computes the attention
    processors: int  # of the device; kernels of GPUs cut a step's work into a part, or two, for each
    window: int | None = None  # tokens that a row sees at most, the last ones up to itself; None: all up to itself

    def size(self) -> int:
        """How many int32 the packed metadata takes: class ends, three per row, the items, the page list."""
        return len(self.classes) + 3 * self.rows + ITEM_FIELDS * self.items + self.pages


class AttentionMetadata(NamedTuple):
    """The parts of the packed metadata: int32 arrays, of numpy for the host to write, or of JAX for a step to read."""

    class_ends: Any  # [classes]; items of class c are class_ends[c - 1] .. class_ends[c] - 1
    sorted_to_batch: Any  # [rows] batch row of each sorted row
    batch_to_sorted: Any  # [rows] sorted row of each batch row
    visible_tokens: Any  # [rows] how many tokens each sorted row sees
    items: Any  # [ITEM_FIELDS, items], as the fields of `Item`
    pages: Any  # [entries]


class PrefixRanges(NamedTuple):
    """Nodes of the page tree with the rows that read them. A list for each field, with an entry for each range."""

    first_row: list[int]  # sorted row
    rows: list[int]
    first_token: list[int]  # position of the first token of the range's pages
    stop_token: list[int]  # no row sees a token at this position or later
    position: list[int]  # of the first row, where all rows belong to one sequence; else MANY_SEQUENCES
    pages: list[Int32s]


class SharedNode(NamedTuple):
    """A node of the page tree, less what nobody below it sees: the last of its pages, up to the node's end."""

    first: int  # sorted segment that sees some of it
    stop: int  # behind the last such segment
    begin: int  # first page that any of them sees
    pages_saved: int  # reads of a page, if it is read once for all of them


class NumberedClass(NamedTuple):
    """An item class among those of its width."""

    number: int  # its place in `MetadataShape.classes`
    pages: int
    may_lack: int  # pages that the last of several items may lack


class Pieces(NamedTuple):
    """Consecutive pages of prefix ranges, each piece to be split evenly into items of one class.

    Each field is a list with an entry for each piece, or an array of them. See also the fields of `PrefixRanges`.
    """

    first_row: Any
    rows: Any
    first_token: Any
    stop_token: Any  # of the range
    position: Any
    first_entry: Any  # of the page list
    pages: Any
    items: Any
    class_number: Any  # place in `MetadataShape.classes`


ITEM_COUNT = Pieces._fields.index("items")
CLASS_NUMBER = Pieces._fields.index("class_number")


def metadata_shape(
    rows: int,
    page_size: int,
    max_context_tokens: int,
    pool_pages: int,
    kernel: KernelName = "reference",
    processors: int = HOPPER_PROCESSORS,
    window: int | None = None,
    *,
    masked: bool = False,
) -> MetadataShape:
    """The shape that fits every batch of up to `rows` rows over contexts of up to `max_context_tokens` tokens.

    `window`: how many tokens a row sees at most, see `MetadataShape`. `masked`: for a step whose rows a mask narrows.

    It cannot overflow where a page has one place in one chain of pages, as pages of a prefix tree do. There are at most
    `rows` segments, so at most `rows` leaves and `rows - 1` inner nodes in the page tree. A page is listed once for the
    node it lies in, and once more for each further reader where its node is not shared; a node that is not shared saves
    less than `share_tokens`, so adds fewer than `share_tokens / page_size` entries. A node's pages are split into items
    that are full but for the last, or for one long item's half of its width (see `assign_classes`). Hence

        pages <= min(rows * most pages that a row sees, pool_pages + (rows - 1) * share_tokens / page_size)
        items <= pages / (pages of a long item) + (nodes, at most 2 * rows - 1) * (shorter items in half a long one)

    Raises ValueError if a number is not positive.
    """
    if min(rows, page_size, max_context_tokens, pool_pages, processors) < 1:
        raise ValueError("rows, page_size, max_context_tokens, pool_pages and processors must be positive")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens: a row sees itself")
    row_pages = -(-max_context_tokens // page_size)  # that one row sees at most
    sizes = (MASKED_TILE_SIZES if masked else TILE_SIZES)[kernel]
    classes = item_classes(rows, page_size, sizes)
    if window is not None:
        row_pages = min(row_pages, -(-(window - 1) // page_size) + 1)
        classes = item_classes(rows, page_size, sizes, row_pages)
    longest = {c.rows: c.pages for c in classes}  # of each width; classes are sorted, so that the last one stays
    pages = min(rows * row_pages, pool_pages + (rows - 1) * -(-SHARE_TOKENS // page_size))
    items = pages // min(longest.values()) + (2 * rows - 1) * most_short_items(classes)
    items += max(c.lanes[0] for c in classes)  # a tile reads so many items, wherever it starts
    return MetadataShape(
        rows=rows,
        page_size=page_size,
        pool_pages=pool_pages,
        classes=classes,
        items=items,
        pages=pages + max(longest.values()),
        share_tokens=SHARE_TOKENS,
        kernel=kernel,
        processors=processors,
        window=window,
    )


def item_classes(
    rows: int, page_size: int, sizes: Sequence[TileSize], row_pages: int | None = None
) -> tuple[ItemClass, ...]:
    """The classes of a step of `rows` rows, by rising rows, then pages: of these sizes, but no wider than it needs.

    `row_pages`: how many pages a row sees at most, if that is less than a context has. Rows alone then need no items
    that so many pages do not fill at least half.
    """
    widest = min((size.rows for size in sizes if size.rows >= rows), default=rows)
    lanes_of: dict[tuple[int, int], tuple[int, ...]] = {}  # by rows and pages, of which several sizes may have the same
    for size in sizes:
        if size.rows <= widest:
            key = min(size.rows, rows), max(1, size.tokens // page_size)
            if row_pages is not None and size.rows == 1 and size != sizes[0] and key[1] - key[1] // 2 > row_pages:
                continue
            lanes_of[key] = size.lanes if rows > 1 else (1,)
    return tuple(ItemClass(width, pages, lanes_of[width, pages]) for width, pages in sorted(lanes_of))


def most_short_items(classes: Sequence[ItemClass]) -> int:
    """How many items shorter than a width's longest class one node of the page tree may leave, at least 1."""
    halves = Counter[int]()
    for short, long in pairwise(classes):
        if short.rows == long.rows:
            halves[long.rows] += -(-long.pages // (2 * short.pages))
    return max([1, *halves.values()])


def unpack_metadata(shape: MetadataShape, packed: Any) -> AttentionMetadata:
    """Views into what `build_attention_metadata` packs. `packed`: int32 `[shape.size()]`, of numpy or JAX."""
    sorted_to_batch = len(shape.classes)  # where each part begins
    batch_to_sorted = sorted_to_batch + shape.rows
    visible_tokens = batch_to_sorted + shape.rows
    items = visible_tokens + shape.rows
    pages = items + ITEM_FIELDS * shape.items
    return AttentionMetadata(
        class_ends=packed[:sorted_to_batch],
        sorted_to_batch=packed[sorted_to_batch:batch_to_sorted],
        batch_to_sorted=packed[batch_to_sorted:visible_tokens],
        visible_tokens=packed[visible_tokens:items],
        items=packed[items:pages].reshape(ITEM_FIELDS, shape.items),
        pages=packed[pages : pages + shape.pages],
    )


def build_attention_metadata(segments: Sequence[Segment], shape: MetadataShape, out: Int32s) -> None:
    """Fill `out`, int32 `[shape.size()]`, with the metadata of one step; `unpack_metadata` reads it in the jitted step.

    Rows of no segment see nothing. Raises MetadataOverflow if the batch is no tree of pages (see `metadata_shape`) and
    ValueError if segments overlap, leave the batch or lack pages; `out` is undefined then.
    """
    if out.shape != (shape.size(),) or out.dtype != INT32:
        raise ValueError(f"out must be int32 [{shape.size()}]")
    check_segments(segments, shape)
    segments, used_pages = sort_by_pages(segments, shape.page_size)
    ranges = find_shared_prefixes(segments, used_pages, shape)
    metadata = unpack_metadata(shape, out)
    write_row_order(segments, metadata)
    write_page_list(ranges.pages, shape, metadata.pages)
    write_items(ranges, shape, metadata)


def check_segments(segments: Sequence[Segment], shape: MetadataShape) -> None:
    """Raise ValueError for what would otherwise be silently wrong data."""
    end = 0
    page_size = shape.page_size
    for s in sorted(segments, key=attrgetter("first_row")):
        rows, position, pages = s.rows, s.position, s.pages
        if rows < 1 or position < 0:
            raise ValueError(f"a segment has {rows} rows at position {position}")
        if s.first_row < end:
            raise ValueError(f"row {s.first_row} is negative or belongs to two segments")
        if not 0 <= s.first_token <= position:
            raise ValueError(f"the row at position {position} sees itself, but tokens from {s.first_token} on")
        if len(pages) * page_size < position + rows or pages.dtype != INT32:
            raise ValueError(f"{len(pages)} pages of {pages.dtype} for {position + rows} tokens")
        end = s.first_row + rows
    if end > shape.rows:
        raise ValueError(f"segments take {end} rows, the step has {shape.rows}")


def sort_by_pages(segments: Sequence[Segment], page_size: int) -> tuple[list[Segment], list[int]]:
    """Segments in an order that makes sharers of leading pages neighbours, and how many pages each of them reads."""
    used = [-(-(s.position + s.rows) // page_size) for s in segments]
    # Any order of page ids will do, so that comparing their bytes is enough.
    keys = [s.pages[:count].tobytes() for s, count in zip(segments, used, strict=True)]
    order = sorted(range(len(segments)), key=keys.__getitem__)
    return [segments[i] for i in order], [used[i] for i in order]


def first_pages(segments: Sequence[Segment], shape: MetadataShape) -> list[int]:
    """How many leading pages of each segment none of its rows sees: the first row sees furthest back."""
    page_size, window = shape.page_size, shape.window
    if window is None:
        return [s.first_token // page_size for s in segments]
    return [max(s.first_token, s.position + 1 - window) // page_size for s in segments]


def find_shared_prefixes(segments: Sequence[Segment], used_pages: Sequence[int], shape: MetadataShape) -> PrefixRanges:
    """Walk the page tree of sorted segments, and decide which nodes are read once for all segments below them.

    A node is shared if that saves reading `shape.share_tokens`; else its pages go to its children. Its pages are those
    that some segment sees. Where all see all of them, (readers - 1) times its tokens are saved.
    """
    page_size, share_tokens = shape.page_size, shape.share_tokens
    common = common_with_previous(segments, used_pages)
    begins = first_pages(segments, shape)
    see_from_start = not any(begins)
    sorted_row = list(accumulate([s.rows for s in segments], initial=0))  # first of each segment, and the end
    stop_token = [s.position + s.rows for s in segments]
    ranges = PrefixRanges([], [], [], [], [], [])
    # Subtrees still to be visited: sorted segments first .. stop - 1. Their first `depth` pages are the same, and in a
    # range already.
    todo = [(0, len(segments), 0)] if segments else []
    while todo:
        first, stop, depth = todo.pop()
        segment = segments[first]
        if stop - first == 1:  # a leaf
            begin = max(depth, begins[first])
            if begin < used_pages[first]:
                ranges.first_row.append(sorted_row[first])
                ranges.rows.append(segment.rows)
                ranges.first_token.append(begin * page_size)
                ranges.stop_token.append(stop_token[first])
                ranges.position.append(segment.position)
                ranges.pages.append(segment.pages[begin : used_pages[first]])
            continue
        shared = min(common[first + 1 : stop])  # pages that all of these segments begin with
        if see_from_start:
            node = SharedNode(first, stop, depth, (stop - first - 1) * (shared - depth))
        else:
            node = trim_node(begins, first, stop, depth, shared)
        if shared > depth and node.pages_saved * page_size >= share_tokens:
            ranges.first_row.append(sorted_row[node.first])
            ranges.rows.append(sorted_row[node.stop] - sorted_row[node.first])
            ranges.first_token.append(node.begin * page_size)
            ranges.stop_token.append(max(stop_token[first:stop]))
            ranges.position.append(MANY_SEQUENCES)
            ranges.pages.append(segment.pages[node.begin : shared])
            depth = shared
        child = first  # first segment of the child that is not yet listed
        for i in range(first + 1, stop):
            if common[i] == shared:
                todo.append((child, i, depth))
                child = i
        todo.append((child, stop, depth))
    return ranges


def trim_node(begins: Sequence[int], first: int, stop: int, depth: int, shared: int) -> SharedNode:
    """What sorted segments `first .. stop - 1` see of the pages `depth .. shared - 1` that all of them begin with.

    `begins`: the first page that each segment sees.
    """
    readers = [i for i in range(first, stop) if begins[i] < shared]
    if not readers:
        return SharedNode(first, stop, shared, 0)
    seen = [shared - max(depth, begins[i]) for i in readers]
    return SharedNode(readers[0], readers[-1] + 1, shared - max(seen), sum(seen) - max(seen))


def common_with_previous(segments: Sequence[Segment], used_pages: Sequence[int]) -> list[int]:
    """How many leading pages each segment has in common with the one before it; 0 for the first."""
    common = [0]
    for i in range(1, len(segments)):
        limit = min(used_pages[i - 1], used_pages[i])
        common.append(count_equal_leading(segments[i - 1].pages, segments[i].pages, limit))
    return common


def count_equal_leading(a: Int32s, b: Int32s, limit: int) -> int:
    """How many of the first `limit` entries are equal from the start on."""
    if a[0] != b[0]:
        return 0
    differs = (a[:limit] != b[:limit]).tobytes()  # a byte for each page; finding one is much faster than argmax
    first = differs.find(1)
    return first if first >= 0 else limit


def write_row_order(segments: Sequence[Segment], metadata: AttentionMetadata) -> None:
    """Fill the order of sorted rows (rows of no segment last), its inverse, and how many tokens sorted rows see."""
    rows: list[int] = []
    seen: list[int] = []
    for s in segments:
        if s.rows == 1:  # two appends cost a third of two ranges
            rows.append(s.first_row)
            seen.append(s.position + 1)
        else:
            rows.extend(range(s.first_row, s.first_row + s.rows))
            seen.extend(range(s.position + 1, s.position + s.rows + 1))
    total, used = len(metadata.visible_tokens), len(rows)
    if used < total:
        rows.extend(sorted(set(range(total)).difference(rows)))
    metadata.sorted_to_batch[:] = rows
    metadata.batch_to_sorted[metadata.sorted_to_batch] = np.arange(total, dtype=np.int32)
    metadata.visible_tokens[:used] = seen
    metadata.visible_tokens[used:] = 0


def write_page_list(ranges: Sequence[Int32s], shape: MetadataShape, pages: Int32s) -> None:
    """Fill the page list with the pages of all ranges, and zeros for tiles that read past the last entry.

    Raises MetadataOverflow if they are too many, ValueError for a page id that is none.
    """
    listed = sum(map(len, ranges))
    spare = longest_item(shape.classes)  # a tile reads this many entries, wherever it starts
    if listed + spare > shape.pages:
        raise MetadataOverflow(f"{listed} page entries are more than a tree of {shape.pool_pages} pages can need")
    pages[listed : listed + spare] = 0
    if not ranges:
        return
    np.concatenate(ranges, out=pages[:listed])
    if pages[:listed].min() < 0 or pages[:listed].max() >= shape.pool_pages:
        raise ValueError(f"a page id is not in 0 .. {shape.pool_pages - 1}")


def write_items(ranges: PrefixRanges, shape: MetadataShape, metadata: AttentionMetadata) -> None:
    """Fill the items, sorted by their class, and where each class ends.

    Raises MetadataOverflow if they are too many.
    """
    pieces = assign_classes(ranges, shape)
    count = sum(pieces.items)
    if count > shape.items:
        raise MetadataOverflow(f"{count} items are more than a tree of {shape.pool_pages} pages can need")
    items, class_number = split_items(pieces, shape.page_size, shape.window)
    metadata.items[:, :count] = items
    metadata.class_ends[:] = np.bincount(class_number, minlength=len(shape.classes)).cumsum()


def assign_classes(ranges: PrefixRanges, shape: MetadataShape) -> Pieces:
    """Cut each range into pieces, at most one for each class of its width.

    The class of the longest items takes as many pages as fill its items at least half, then the next shorter class, and
    so on; the class of the shortest items takes the rest.
    """
    page_size = shape.page_size
    longest_first = classes_by_width(shape.classes)
    widths = tuple(longest_first)
    pieces = Pieces([], [], [], [], [], [], [], [], [])
    first_entry = 0  # ranges are listed in order
    for first_row, rows, first_token, stop_token, position, pages in zip(*ranges, strict=True):
        pages_left = len(pages)
        for item_class in longest_first[cheapest_width(rows, widths)]:
            items = (pages_left + item_class.may_lack) // item_class.pages
            if items == 0:
                continue
            taken = min(pages_left, items * item_class.pages)
            pieces.first_row.append(first_row)
            pieces.rows.append(rows)
            pieces.first_token.append(first_token)
            pieces.stop_token.append(stop_token)
            pieces.position.append(position)
            pieces.first_entry.append(first_entry)
            pieces.pages.append(taken)
            pieces.items.append(items)
            pieces.class_number.append(item_class.number)
            first_token += taken * page_size
            first_entry += taken
            pages_left -= taken
            if pages_left == 0:
                break
    return pieces


def split_items(pieces: Pieces, page_size: int, window: int | None = None) -> tuple[Item, Int64s]:
    """Split pieces evenly into items. Returns the items, int64 `[items]` a field, and their classes in rising order.

    Rows of a prompt chunk that see nothing of an item are left out of it. `window`: see `MetadataShape`.
    """
    table = np.array(pieces, np.int64)  # [fields, pieces]
    table = table.take(table[CLASS_NUMBER].argsort(kind="stable"), axis=1)  # sorting pieces also sorts their items
    counts = table[ITEM_COUNT]
    first_item = (counts.cumsum() - counts).repeat(counts)  # of the item's piece; from here on all arrays are [items]
    piece = Pieces._make(table.repeat(counts, axis=1))
    number = np.arange(len(first_item)) - first_item  # of the item within its piece
    pages_before = number * piece.pages
    begin = pages_before // piece.items  # first page of the item, counted from the piece's first
    end = (pages_before + piece.pages) // piece.items
    first_token = piece.first_token + begin * page_size
    # Row r of a prompt chunk is at `position + r`, so that the first rows may end before the item's first token.
    unseeing_rows = np.maximum(first_token - piece.position, 0)
    tokens = np.minimum((end - begin) * page_size, piece.stop_token - first_token)
    stop_row = piece.rows
    if window is not None:  # the last rows' windows may begin behind the item's last token
        own = first_token + tokens + window - 1 - piece.position
        stop_row = np.where(piece.position == MANY_SEQUENCES, piece.rows, np.minimum(piece.rows, own))
    items = Item(
        first_row=piece.first_row + unseeing_rows,
        rows=stop_row - unseeing_rows,
        first_entry=piece.first_entry + begin,
        tokens=tokens,
        first_token=first_token,
    )
    return items, piece.class_number


@lru_cache(maxsize=64)
def classes_by_width(classes: tuple[ItemClass, ...]) -> dict[int, tuple[NumberedClass, ...]]:
    """The classes of each number of rows, those of the longest items first. Keys are in rising order."""
    by_width: dict[int, tuple[NumberedClass, ...]] = {}
    for number, item_class in enumerate(classes):
        pages = item_class.pages
        # The shortest class takes the rest, even if that is nearly nothing; another's last item is at least half full.
        may_lack = pages // 2 if item_class.rows in by_width else pages - 1
        by_width[item_class.rows] = (NumberedClass(number, pages, may_lack), *by_width.get(item_class.rows, ()))
    return by_width


@lru_cache(maxsize=4096)
def cheapest_width(rows: int, widths: tuple[int, ...]) -> int:
    """Of the rising widths of classes, that which computes so many rows at the least cost; 1 only for a single row."""
    if rows == 1:
        return 1
    return min(widths[1:], key=lambda width: -(-rows // width) * (width + TILE_COST_ROWS))


@lru_cache(maxsize=64)
def longest_item(classes: tuple[ItemClass, ...]) -> int:
    """The most pages of an item of any class."""
    return max(c.pages for c in classes)
