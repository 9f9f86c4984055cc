"""Attention over a work list on TPU (v5e, v6e): one Pallas kernel that walks the items and never leaves the chip.

A chip has one core, and a grid runs in sequence. So nothing is merged across cores: the running maximum, sum and output
of every sorted row stay in VMEM while the items pass by, in the order of the list and as many as there are. The list
itself is in SMEM. An item's pages come by DMA, the keys, or the values, of all heads of a page in one copy, into a ring
of buffers: the next items are on their way while one is computed. A page is read once for all its rows.

    sorted rows × group ──▶ VMEM: queries, maximum, sum, output       HBM: pages [kv_heads, pages, page_size, head_dim]
      ┌────────────┐                                                          │ one DMA per page, K and V
      │  window    │  q · k ─▶ mask ─▶ online softmax ─▶ · v  ◀── ring of items: i, i + 1, i + 2, i + 3
      └────────────┘

The query heads of one KV head are rows of one matrix, `row * group + head`, and an item looks at aligned windows of
them: what of a window is not the item's is masked, which costs nothing while the matrix unit is as high as a window.
If not all of this fits into VMEM, the outer grid takes a few KV heads at a time and walks the list for each.

Heads narrower than the 128 lanes lie side by side in a page array (`kv_cache.head_rows`): a query is zero but in the
lanes of its head, and takes those lanes of the output. Lanes to spare are zero in queries, keys and values.

With a sliding window (`MetadataShape.window`) a row may see nothing of an item, and keeps what it has then.

With attention sinks a row begins with that of its query head as its maximum, and a sum of 1, instead of with nothing.
The sinks of a KV head come as they repeat along its rows, so long that aligned rows can be copied.

Values of 8 bits are multiplied as bfloat16. Scores are then scaled by the keys' scales, and weights, before they are
rounded, by the values': no key or value is written a second time.

Under a mesh this runs per shard of the KV heads, in `shard_map(…, check_vma=False)`: no head needs another, all have
the same metadata. Where the ideas came from: ragged paged attention (arXiv 2604.15464), FlashAttention (arXiv
2205.14135).

    attend ── kernel ─┬─ start_copies   of an item, RING - 1 items ahead
                      └─ attend_item ── attend_window ── attend_head
"""

from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxctx_kernels.kv_cache import LANES, HeadRows, KVPages, QuantizedKV, kv_values, pad_axis
from jaxctx_kernels.metadata import ITEM_FIELDS, AttentionMetadata, Item, ItemClass, MetadataShape
from jaxctx_kernels.reference import LOG2_E, MASKED_SCORE, cap_scores, matmul, sink_scores

Ref: TypeAlias = Any  # to memory of the device

RING = 4  # items whose pages are on their way or being computed
COPIES_PER_BLOCK = 4  # pages whose copies are started in one basic block
ROW_ALIGNMENT = 16  # rows of a tile of bfloat16 in VMEM; windows start at multiples of it
ROWS_PER_BLOCK = 128  # of narrower windows, several heads are computed in one basic block
VMEM_BYTES = 112 * 2**20  # of 128 MiB
STATE_BYTES = 80 * 2**20  # of these, what `heads_at_once` counts; the rest is for intermediate results
SMEM_BYTES = 1000 * 2**10  # of 1 MiB
KEYS, VALUES = range(2)  # in pairs of them
INT32_MAX = 2**31 - 1


class Memory(NamedTuple):
    """What the kernel works with: refs. `height` is query rows (rows × group, padded), `heads` those of a grid step."""

    # In SMEM
    class_ends: Ref  # [classes]
    items: Ref  # [ITEM_FIELDS * items]
    page_list: Ref  # [entries]
    # In VMEM
    query: Ref  # [heads, height, lanes]
    visible_tokens: Ref  # [height, 1]
    sinks: Ref  # [heads, period, LANES], see `repeated_sinks`; None where there is none
    # In HBM
    pages: tuple[Ref, Ref]  # keys, values, as KVPages
    # In VMEM
    output: Ref  # [heads, height, lanes]
    max_score: Ref  # [heads, height, LANES], a row's number in all lanes; in base 2
    weight_sum: Ref  # as max_score
    rings: tuple[Ref, Ref]  # keys, values, as KVPages: [RING, heads, pages, page_size, lanes]
    scales: Ref  # [2, heads, side_by_side, tokens] of one item's keys and values; None where nothing is quantized
    # Semaphores
    arrived: Ref  # [RING]


@dataclass(frozen=True, slots=True)
class GridStep:
    """One grid step: some KV heads, over all items."""

    memory: Memory
    shape: MetadataShape
    group: int  # query heads that read one row of lanes
    score_scale: float  # of scores in base 2
    soft_cap: float | None  # see `dispatch.attend`
    item_count: jax.Array
    first_head: jax.Array

    @property
    def heads(self) -> int:
        """KV heads (or rows of lanes with several) of this grid step."""
        heads: int = self.memory.query.shape[0]
        return heads

    @property
    def height(self) -> int:
        height: int = self.memory.query.shape[1]
        return height

    @property
    def page_size(self) -> int:
        page_size: int = kv_values(self.memory.rings[KEYS]).shape[3]
        return page_size


@dataclass(frozen=True, slots=True)
class Window:
    """An aligned range of query rows that see an item, while it is computed."""

    slot: jax.Array  # of the ring
    pages: int  # of the item's class
    rows: Any  # slice of the query rows
    row_numbers: Int32[Array, "rows one"]
    inside: Bool[Array, "rows one"]  # which rows see some of the item, and are not of an earlier window
    visible: Bool[Array, "rows tokens"]


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    metadata: AttentionMetadata,
    *,
    shape: MetadataShape,
    side_by_side: int = 1,
    soft_cap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
) -> Float32[Array, "rows heads head_dim"]:
    """See `dispatch.attend`.

    `side_by_side`: heads in a row of lanes, all of which have queries. Pages hold a multiple of 16 tokens, and rows of
    lanes are whole: others XLA copies before every call. Raises ValueError if the work list is too large for SMEM; the
    compiler fails if the rows of a single KV head are too many for VMEM, see docs/kernels/tpu.md.
    """
    if not fits_list(shape):
        raise ValueError(f"a list of {shape.pages} pages and {shape.items} items exceeds SMEM; take larger pages")
    rows, heads, dim = q.shape
    values = kv_values(k_pages)
    stored_heads, _, page_size, lanes = values.shape
    dtype = values.dtype if values.dtype.itemsize > 1 else jnp.bfloat16  # what is multiplied
    group = heads // stored_heads
    height = -(-rows * group // ROW_ALIGNMENT) * ROW_ALIGNMENT
    stored = HeadRows(stored_heads, side_by_side, lanes)
    query = spread_queries(q[metadata.sorted_to_batch].astype(dtype), stored, height)
    visible_tokens = jnp.pad(jnp.repeat(metadata.visible_tokens, group), (0, height - rows * group))[:, None]
    most_pages = max(c.pages for c in shape.classes)
    together = heads_at_once(stored_heads, height, lanes, most_pages * page_size, jnp.dtype(dtype).itemsize)
    of_heads = pl.BlockSpec((together, height, lanes), lambda block, *_: (block, 0, 0))
    pages = in_hbm((k_pages, v_pages))
    repeated = repeated_sinks(sinks, stored_heads)
    of_sinks = None
    if repeated is not None:
        of_sinks = pl.BlockSpec((together, *repeated.shape[1:]), lambda block, *_: (block, 0, 0))
    out = pl.pallas_call(
        partial(kernel, shape=shape, group=group, score_scale=dim**-0.5 * LOG2_E, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(stored_heads // together,),
            in_specs=[
                of_heads,
                pl.BlockSpec((height, 1), lambda *_: (0, 0)),
                of_sinks,
                jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), pages),
            ],
            out_specs=of_heads,
            scratch_shapes=[
                pltpu.VMEM((together, height, LANES), jnp.float32),
                pltpu.VMEM((together, height, LANES), jnp.float32),
                jax.tree.map(lambda array: ring_buffers(array, together, most_pages), pages),
                scale_buffer(k_pages, together, most_pages),
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        # The host checked the page ids; on the chip a check takes longer than starting the copy.
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
        name="attend",
    )(metadata.class_ends, metadata.items.reshape(-1), metadata.pages, query, visible_tokens, repeated, pages)
    return collect_outputs(out, side_by_side, q.shape)[metadata.batch_to_sorted]


def repeated_sinks(
    sinks: Float32[Array, " heads"] | None, stored_heads: int
) -> Float32[Array, "stored_heads period lanes"] | None:
    """Sinks in base 2 as they repeat along the query rows of each row of lanes; the same in all lanes.

    `period`: so many rows that they begin anew at a multiple of ROW_ALIGNMENT.
    """
    if sinks is None:
        return None
    # No maximum may be as low as a masked score, see `kernel`.
    of_group = jnp.maximum(sink_scores(sinks, stored_heads), MASKED_SCORE / 2)
    group = of_group.shape[1]
    repeated = jnp.tile(of_group, (1, lcm(group, ROW_ALIGNMENT) // group))
    return jnp.broadcast_to(repeated[..., None], (*repeated.shape, LANES))


def fits_list(shape: MetadataShape) -> bool:
    """Whether a work list of this shape fits into SMEM."""
    return 4 * (ITEM_FIELDS * shape.items + shape.pages) <= SMEM_BYTES


def in_hbm(pages: Any) -> Any:
    """The same page arrays for a kernel, which then takes them where they lie.

    XLA would bring arrays that fit, such as those of scales, into VMEM before each call, and back after it.
    """
    return jax.tree.map(lambda array: pltpu.with_memory_space_constraint(array, pltpu.HBM), pages)


def spread_queries(
    q: Float[Array, "rows heads head_dim"], stored: HeadRows, height: int
) -> Float[Array, "stored_heads height lanes"]:
    """Queries, by rows of lanes of the page array: zero but in the lanes of the KV head that they read."""
    rows, heads, dim = q.shape
    stored_heads, side_by_side, lanes = stored
    group = heads // stored_heads
    query = q.reshape(rows, stored_heads, side_by_side, group // side_by_side, 1, dim)
    own_lanes = jnp.eye(side_by_side, dtype=bool)[:, None, :, None]
    query = jnp.where(own_lanes, query, 0).reshape(rows, stored_heads, group, side_by_side * dim)
    query = pad_axis(query, 3, lanes).transpose(1, 0, 2, 3).reshape(stored_heads, rows * group, lanes)
    return jnp.pad(query, ((0, 0), (0, height - rows * group), (0, 0)))


def collect_outputs(
    out: Float32[Array, "stored_heads height lanes"], side_by_side: int, shape: tuple[int, ...]
) -> Float32[Array, "rows heads head_dim"]:
    """The inverse of `spread_queries`: of each output the lanes of its KV head. `shape`: of the queries."""
    rows, heads, dim = shape
    stored_heads = out.shape[0]
    group = heads // stored_heads
    out = out[:, : rows * group, : side_by_side * dim]
    parts = out.reshape(stored_heads, rows, side_by_side, group // side_by_side, side_by_side, dim)
    own_lanes = jnp.stack([parts[:, :, n, :, n] for n in range(side_by_side)], 2)
    return own_lanes.transpose(1, 0, 2, 3, 4).reshape(rows, heads, dim)


def heads_at_once(stored_heads: int, height: int, lanes: int, tokens: int, itemsize: int) -> int:
    """How many of `stored_heads` KV heads fit into VMEM, of which the grid has two of each block; at least one.

    `tokens` of the longest item, `itemsize` bytes of a number that is multiplied.
    """
    width = max(lanes, LANES)
    queries_and_outputs = height * (2 * width * (itemsize + 4) + 2 * LANES * 4)
    rings = 2 * RING * tokens * width * itemsize
    most = (STATE_BYTES - 2 * height * LANES * 4) // (queries_and_outputs + rings)
    for heads in range(stored_heads, 1, -1):
        if heads <= most and stored_heads % heads == 0:
            return heads
    return 1


def ring_buffers(array: jax.Array, heads: int, pages: int) -> Any:
    """The type of a ring for pages of this array: values `[heads, pages, page_size, lanes]`, or scales, of an item."""
    return pltpu.VMEM((RING, heads, pages, *array.shape[2:]), array.dtype)


def scale_buffer(k_pages: KVPages, heads: int, pages: int) -> Any:
    """The type of the buffer in which scales of one item's tokens lie side by side; None without scales."""
    if not isinstance(k_pages, QuantizedKV):
        return None
    side_by_side, page_size = k_pages.scales.shape[2], k_pages.values.shape[2]
    return pltpu.VMEM((2, heads, side_by_side, pages * page_size), jnp.float32)


def kernel(
    class_ends: Ref,
    items: Ref,
    page_list: Ref,
    query: Ref,
    visible_tokens: Ref,
    sinks: Ref,
    pages: tuple[Ref, Ref],
    output: Ref,
    max_score: Ref,
    weight_sum: Ref,
    rings: tuple[Ref, Ref],
    scales: Ref,
    arrived: Ref,
    *,
    shape: MetadataShape,
    group: int,
    score_scale: float,
    soft_cap: float | None,
) -> None:
    """The heads of one grid step, over all items. Arguments are refs as in `Memory`."""
    memory = Memory(
        class_ends=class_ends,
        items=items,
        page_list=page_list,
        query=query,
        visible_tokens=visible_tokens,
        sinks=sinks,
        pages=pages,
        output=output,
        max_score=max_score,
        weight_sum=weight_sum,
        rings=rings,
        scales=scales,
        arrived=arrived,
    )
    step = GridStep(
        memory,
        shape,
        group,
        score_scale,
        soft_cap,
        item_count=class_ends[len(shape.classes) - 1],
        first_head=pl.program_id(0) * query.shape[0],
    )
    if sinks is None:
        # Half of MASKED_SCORE, so that a row's maximum is never as low as a masked score, which then weighs 0.
        max_score[...] = jnp.full(max_score.shape, MASKED_SCORE / 2)
        weight_sum[...] = jnp.zeros(weight_sum.shape)
    else:
        begin_with_sinks(step)
    output[...] = jnp.zeros(output.shape)
    pl.loop(0, jnp.minimum(RING - 1, step.item_count))(partial(start_copies, step))
    begin = 0
    for number, item_class in enumerate(shape.classes):
        pl.loop(begin, class_ends[number])(partial(visit_item, step, item_class))
        begin = class_ends[number]
    total = weight_sum[:, :, :1]
    output[...] = jnp.where(total == 0, 0, output[...] / total)


def begin_with_sinks(step: GridStep) -> None:
    """Every row has seen its query head's sink, whose weight is 1."""
    memory = step.memory
    period = memory.sinks.shape[1]

    @pl.loop(0, step.height // ROW_ALIGNMENT)
    def copy_rows(number: jax.Array) -> None:
        row = pl.multiple_of(number * ROW_ALIGNMENT, ROW_ALIGNMENT)
        source = pl.multiple_of(jax.lax.rem(row, period), ROW_ALIGNMENT)
        memory.max_score[:, pl.ds(row, ROW_ALIGNMENT)] = memory.sinks[:, pl.ds(source, ROW_ALIGNMENT)]

    memory.weight_sum[...] = jnp.ones(memory.weight_sum.shape)


def visit_item(step: GridStep, item_class: ItemClass, index: jax.Array) -> None:
    """Start the copies of the item RING - 1 ahead, into the slot of the item before this; then attend to this one."""

    @pl.when(index + RING - 1 < step.item_count)
    def copy_ahead() -> None:
        start_copies(step, index + RING - 1)

    attend_item(step, item_class, index)


def load_item(step: GridStep, index: jax.Array) -> Item:
    """An item, as scalars."""
    items = step.memory.items
    return Item(*(items[field * step.shape.items + index] for field in range(ITEM_FIELDS)))


# Copies into the ring


def start_copies(step: GridStep, index: jax.Array) -> None:
    """Start copying the pages of an item into its slot of the ring. K and V of a slot signal one semaphore."""
    item, slot = load_item(step, index), jax.lax.rem(index, RING)
    count = pl.cdiv(item.tokens, step.page_size)
    start = partial(start_copy, step, item, slot)

    @pl.loop(0, count // COPIES_PER_BLOCK)
    def start_block(block: jax.Array) -> None:
        for n in range(COPIES_PER_BLOCK):
            start(block * COPIES_PER_BLOCK + n)

    pl.loop(count // COPIES_PER_BLOCK * COPIES_PER_BLOCK, count)(start)


def start_copy(step: GridStep, item: Item, slot: jax.Array, number: jax.Array) -> None:
    """Start copying keys, values and scales of one page of an item, for all heads of the grid step."""
    memory = step.memory
    page = memory.page_list[item.first_entry + number]
    for array, ring in zip(jax.tree.leaves(memory.pages), jax.tree.leaves(memory.rings), strict=True):
        source = array.at[pl.ds(step.first_head, step.heads), page]
        pltpu.make_async_copy(source, ring.at[slot, :, number], memory.arrived.at[slot]).start()


def wait_for_copies(step: GridStep, item: Item, slot: jax.Array) -> None:
    """Wait until all pages of an item are in the ring."""
    for ring in jax.tree.leaves(step.memory.rings):
        copied = ring.at[slot, :, pl.ds(0, pl.cdiv(item.tokens, step.page_size))]
        pltpu.make_async_copy(copied, copied, step.memory.arrived.at[slot]).wait()


def clear_values(step: GridStep, tokens: jax.Array, slot: jax.Array, pages: int) -> None:
    """Zero the values past an item's tokens: anything may be there, and 0 * NaN is NaN. No int8 is NaN."""
    ring = kv_values(step.memory.rings[VALUES])
    if ring.dtype == jnp.int8:
        return

    @pl.loop(tokens // step.page_size, pages)
    def clear_page(page: jax.Array) -> None:
        values = ring[slot, :, page]
        token = page * step.page_size + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        ring[slot, :, page] = jnp.where(token < tokens, values.astype(jnp.float32), 0).astype(values.dtype)


def clear_hidden_values(step: GridStep, item: Item, slot: jax.Array, width: int) -> None:
    """Zero the values before the window of all rows of an item, read in windows of `width` query rows.

    These are less than a page: the list begins where the first of the rows sees.
    """
    ring, window = kv_values(step.memory.rings[VALUES]), step.shape.window
    if window is None or ring.dtype == jnp.int8:
        return
    begin, end = item.first_row * step.group, (item.first_row + item.rows) * step.group
    base = begin // ROW_ALIGNMENT * ROW_ALIGNMENT

    def least(number: jax.Array, seen: jax.Array) -> jax.Array:
        """The fewest tokens that a row sees without its window, of rows of the item up to a window of query rows."""
        low, row = window_rows(step, base + number * width, width)
        inside = (row >= begin) & (row < end)
        return jnp.minimum(seen, jnp.where(inside, step.memory.visible_tokens[pl.ds(low, width)], INT32_MAX).min())

    seen = jax.lax.fori_loop(0, pl.cdiv(end - base, width), least, jnp.int32(INT32_MAX))
    hidden = seen - window - item.first_token

    @pl.when(hidden > 0)
    def clear_page() -> None:
        values = ring[slot, :, 0]
        token = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        ring[slot, :, 0] = jnp.where(token >= hidden, values.astype(jnp.float32), 0).astype(values.dtype)


def lay_out_scales(step: GridStep, slot: jax.Array, pages: int) -> None:
    """Bring the scales of an item's tokens, which the ring has page by page, side by side."""
    scales, page_size = step.memory.scales, step.page_size

    @pl.loop(0, step.heads)
    def lay_out_head(head: jax.Array) -> None:
        for kind, ring in enumerate(step.memory.rings):
            for n in range(pages):
                scales[kind, head, :, n * page_size : (n + 1) * page_size] = ring.scales[slot, head, n, :, :page_size]


# Attention to one item


def attend_item(step: GridStep, item_class: ItemClass, index: jax.Array) -> None:
    """Merge an item into the running softmax of its rows, window by window."""
    item, slot = load_item(step, index), jax.lax.rem(index, RING)
    wait_for_copies(step, item, slot)
    clear_values(step, item.tokens, slot, item_class.pages)
    if step.memory.scales is not None:
        lay_out_scales(step, slot, item_class.pages)
    width = -(-item_class.rows * step.group // ROW_ALIGNMENT) * ROW_ALIGNMENT
    clear_hidden_values(step, item, slot, width)
    first, end = item.first_row * step.group, (item.first_row + item.rows) * step.group  # query rows
    base = first // ROW_ALIGNMENT * ROW_ALIGNMENT

    @pl.loop(0, pl.cdiv(end - base, width))
    def visit_window(number: jax.Array) -> None:
        window = load_window(step, item_class, item, slot, base + number * width, width, first, end)
        attend_window(step, window, width)


def load_window(
    step: GridStep,
    item_class: ItemClass,
    item: Item,
    slot: jax.Array,
    begin: jax.Array,
    width: int,
    first: jax.Array,
    end: jax.Array,
) -> Window:
    """The window of `width` query rows from `begin` on, of an item whose query rows are `first` .. `end` - 1."""
    tokens = item_class.pages * step.page_size
    low, row = window_rows(step, begin, width)
    rows = pl.ds(low, width)
    inside = (row >= jnp.maximum(first, begin)) & (row < end)
    visible_tokens = step.memory.visible_tokens[rows]
    seen = jnp.where(inside, jnp.clip(visible_tokens - item.first_token, 0, item.tokens), 0)
    token = jax.lax.broadcasted_iota(jnp.int32, (width, tokens), 1)
    visible = token < seen
    if step.shape.window is not None:
        hidden = visible_tokens - item.first_token - step.shape.window
        visible &= token >= hidden
        inside &= seen > hidden
    return Window(slot, item_class.pages, rows, row, inside, visible)


def window_rows(step: GridStep, begin: jax.Array, width: int) -> tuple[jax.Array, Int32[Array, "rows one"]]:
    """The first of `width` query rows from `begin` on, or from before it at the end of all rows; and their numbers."""
    low = pl.multiple_of(jnp.minimum(begin, step.height - width), ROW_ALIGNMENT)
    return low, low + jax.lax.broadcasted_iota(jnp.int32, (width, 1), 0)


def attend_window(step: GridStep, window: Window, width: int) -> None:
    """All heads of one window, several in a basic block if that is narrow."""
    attend = partial(attend_head, step, window)
    block = heads_per_block(step.heads, width)

    @pl.loop(0, step.heads, step=block)
    def attend_block(head: jax.Array) -> None:
        for n in range(block):
            attend(head + n)


def heads_per_block(heads: int, width: int) -> int:
    """How many heads of windows of `width` rows to compute in one basic block: a divisor of `heads`."""
    for block in (8, 4, 2):
        if heads % block == 0 and block * width <= ROWS_PER_BLOCK:
            return block
    return 1


def attend_head(step: GridStep, window: Window, head: jax.Array) -> None:
    """Merge the item into the running softmax of one head's rows of a window."""
    memory, rows = step.memory, window.rows
    key = load_ring(step, window, memory.rings[KEYS], head)
    value = load_ring(step, window, memory.rings[VALUES], head)
    score = matmul("md,sd->ms", memory.query[head, rows], key) * step.score_scale
    score = scale_columns(step, window, score, KEYS, head)
    score = score if step.soft_cap is None else cap_scores(score, step.soft_cap)
    score = jnp.where(window.visible, score, MASKED_SCORE)
    old = memory.max_score[head, rows]
    new = jnp.maximum(old, score.max(-1, keepdims=True))
    weight = jnp.exp2(score - new[:, :1])  # 0 where nothing is visible: no maximum is as low as MASKED_SCORE
    shrink = jnp.exp2(old - new)
    scaled = scale_columns(step, window, weight, VALUES, head)
    product = matmul("ms,sd->md", scaled.astype(memory.query.dtype), value)
    output = memory.output[head, rows] * shrink[:, :1] + product
    memory.max_score[head, rows] = new
    memory.weight_sum[head, rows] = memory.weight_sum[head, rows] * shrink + weight.sum(-1, keepdims=True)
    # Other rows keep their output: the product may be NaN because of another sequence's values.
    memory.output[head, rows] = jnp.where(window.inside, output, memory.output[head, rows])


def load_ring(step: GridStep, window: Window, ring: Ref, head: jax.Array) -> Float[Array, "tokens lanes"]:
    """Keys (or values) of one head of the window's item, as they are multiplied."""
    pages: jax.Array = kv_values(ring)[window.slot, head, : window.pages]
    return pages.reshape(window.pages * step.page_size, pages.shape[-1]).astype(step.memory.query.dtype)


def scale_columns(
    step: GridStep, window: Window, x: Float32[Array, "rows tokens"], kind: int, head: jax.Array
) -> Float32[Array, "rows tokens"]:
    """Columns times the scales of their tokens' keys or values (`kind`), 0 where a row sees nothing.

    Of heads that lie side by side each row takes the scales of its own.
    """
    scales = step.memory.scales
    if scales is None:
        return x
    side_by_side = scales.shape[2]
    of_tokens = scales[kind, head, :, : x.shape[1]]
    own = of_tokens[:1]
    for n in range(1, side_by_side):
        is_own = window.row_numbers % step.group // (step.group // side_by_side) == n
        own = jnp.where(is_own, of_tokens[n : n + 1], own)
    return jnp.where(window.visible, x * own, 0)
