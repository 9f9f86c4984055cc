"""Attention over a work list in plain JAX: the CPU's path and the yardstick of the kernels.

A loop over the items of the metadata, as many as there are, carries per row the running maximum, sum and unnormalised
output in float32 and merges each item into them by log-sum-exp, exact in any order (FlashAttention, arXiv 2205.14135).
Rows are kept in sorted order, in which the rows of an item are one slice; heads are never mixed, so that all of it
shards over the KV heads. One step of the loop computes a *tile*:

    many rows of one item                      several items of one row each (lanes)
              pages of the item                          pages        pages
    row  5    ████████                         lane 0    ████  ← row 2
    row  6    █████████                        lane 1    ██    ← row 7
    row  7    ██████████   one slice of rows   lane 2    ████  ← row 7: two lanes may have the same row

With a sliding window (`MetadataShape.window`) a row sees a range of an item's tokens that need not begin with the
first, and may see none of them. Without one nothing is computed for it.

A mask narrows what the metadata lets rows see: it says of every row and every index, the place of a token in its
sequence's chain of pages, whether the row sees it. Without one nothing is computed for it. Kernels know nothing of
masks: under a mask the reference serves every platform.

An attention sink is a score without a value. Every row's running softmax begins with that of its query head instead of
with nothing, so that it counts once, whatever the items.

    attend ── fold_tiles ── for each class and number of lanes: fold_items ── while there are items: attend_tile
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxctx_kernels.kv_cache import KVPages, QuantizedKV, decode, kv_values
from jaxctx_kernels.metadata import ITEM_FIELDS, AttentionMetadata, Item, ItemClass, MetadataShape

Carry = TypeVar("Carry")
Mask: TypeAlias = Bool[Array, "rows indices"]
LOG2_E = math.log2(math.e)
MASKED_SCORE = -1e30  # below any score, and finite so that differences of two are defined


class Tile(NamedTuple):
    """What one step of the loop computes: some rows of an item, or several items of a row each, and their pages.

    `lanes` items are computed at once, all rows and pages of the class. Lanes may have the same row.
    """

    item_class: ItemClass
    first_row: Int32[Array, " lanes"]  # sorted row
    rows: Int32[Array, " lanes"]  # of the item from `first_row` on, which may be more than the tile has
    pages: Int32[Array, "lanes pages"]
    first_token: Int32[Array, " lanes"]  # index of the first token of the pages
    tokens: Int32[Array, " lanes"]  # of the pages, how many any row of the item sees; 0 in lanes without an item
    seen: Int32[Array, "lanes rows"]  # of these, how many each row sees; 0 where it is not a row of the item
    hidden: Int32[Array, "lanes rows"] | None  # of these, how many are before the row's window; None without windows


class RunningSoftmax(NamedTuple):
    """What has been merged so far, of all sorted rows or of a tile's (lanes × queries instead of rows × group)."""

    max_score: Float32[Array, "kv_heads rows group"]  # scores are in base 2
    weight_sum: Float32[Array, "kv_heads rows group"]
    output: Float32[Array, "kv_heads rows group head_dim"]  # not divided by the sum


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What the tiles of one call read."""

    query: Float[Array, "kv_heads padded_rows group head_dim"]  # in sorted order
    k_pages: KVPages
    v_pages: KVPages
    mask: Bool[Array, "padded_rows padded_indices"] | None  # in sorted order
    page_size: int
    side_by_side: int  # heads in a row of the page arrays
    soft_cap: float | None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]


class TileKV(NamedTuple):
    """Keys and values of a tile's slots, `slots = pages * page_size`. Scales are None where pages are not quantized."""

    keys: Float[Array, "kv_heads lanes slots head_dim"]
    values: Float[Array, "kv_heads lanes slots head_dim"]  # 0 where nothing is stored that any row sees
    key_scales: Float32[Array, "kv_heads lanes one slots"] | None
    value_scales: Float32[Array, "kv_heads lanes one slots"] | None
    stored: Bool[Array, "lanes slots"]  # whether any row of the item sees the slot


class Visibility(NamedTuple):
    """Which slots of a tile its queries see. A lane's queries are the query heads of its rows, `row * group + head`."""

    in_item: Bool[Array, "lanes queries slots"]  # by the metadata
    visible: Bool[Array, "lanes queries slots"]  # by metadata and mask
    nonfinite: Bool[Array, "kv_heads lanes slots"] | None  # under a mask: slots with a value that is not finite


@dataclass(frozen=True, slots=True)
class ItemLoop:
    """A loop over items of one class, `lanes` at a time, up to item `stop`."""

    metadata: AttentionMetadata
    shape: MetadataShape
    visible_tokens: Int32[Array, " padded_rows"]
    item_class: ItemClass
    lanes: int
    stop: Int32[Array, ""]

    @property
    def takes_rest(self) -> bool:
        """Whether it goes on to the last item, where some lanes may have none; others stop where not all had one."""
        return self.lanes == self.item_class.lanes[-1]


class LoopState(NamedTuple, Generic[Carry]):
    """What the loop carries from tile to tile."""

    item: Int32[Array, ""]
    rows_done: Int32[Array, ""]  # of the item, by earlier tiles
    carry: Carry


def attend(
    q: Float[Array, "rows heads head_dim"],
    k_pages: KVPages,
    v_pages: KVPages,
    metadata: AttentionMetadata,
    mask: Mask | None,
    *,
    shape: MetadataShape,
    side_by_side: int = 1,
    soft_cap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
) -> Float32[Array, "rows heads head_dim"]:
    """See `dispatch.attend`. `side_by_side`: heads in a row of the page arrays, all of which have queries."""
    rows, heads, dim = q.shape
    kv_heads = kv_values(k_pages).shape[0] * side_by_side
    group = heads // kv_heads
    query = q[metadata.sorted_to_batch].reshape(rows, kv_heads, group, dim).transpose(1, 0, 2, 3)
    query = jnp.pad(query, ((0, 0), (0, widest_tile(shape)), (0, 0), (0, 0)))
    allowed = None if mask is None else sort_mask(mask, metadata, shape)
    inputs = AttentionInputs(query, k_pages, v_pages, allowed, shape.page_size, side_by_side, soft_cap)
    zeros = jnp.zeros_like(query[..., 0], jnp.float32)
    begin = RunningSoftmax(zeros + MASKED_SCORE, zeros, jnp.zeros_like(query, jnp.float32))
    if sinks is not None:
        begin = begin._replace(max_score=zeros + sink_scores(sinks, kv_heads)[:, None], weight_sum=zeros + 1)
    _, total, out = fold_tiles(metadata, shape, begin, partial(attend_tile, inputs))
    out = jnp.where(total[..., None] == 0, 0, out / total[..., None])
    return out[:, metadata.batch_to_sorted].transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def sink_scores(sinks: Float32[Array, " heads"], kv_heads: int) -> Float32[Array, "kv_heads group"]:
    """Sinks as scores in base 2, none below MASKED_SCORE: one of -inf counts for nothing then."""
    return jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, MASKED_SCORE).reshape(kv_heads, -1)


# The loop over items


def widest_tile(shape: MetadataShape) -> int:
    """Rows that per-row arrays are padded by, since a tile may reach past the last row."""
    return max(c.rows for c in shape.classes)


def fold_tiles(
    metadata: AttentionMetadata, shape: MetadataShape, carry: Carry, visit: Callable[[Carry, Tile], Carry]
) -> Carry:
    """Fold `visit` over the tiles of all items, class by class: as many tiles as there is work, none for padding.

    Items of one row are taken by the class's lanes, as long as there are so many; the fewest lanes take the rest.
    """
    visible_tokens = jnp.pad(metadata.visible_tokens, (0, widest_tile(shape)))
    item = jnp.zeros_like(metadata.class_ends[0])
    for number, item_class in enumerate(shape.classes):
        for lanes in item_class.lanes:
            stop = metadata.class_ends[number]
            loop = ItemLoop(metadata, shape, visible_tokens, item_class, lanes, stop)
            item, carry = fold_items(loop, item, carry, visit)
        item = metadata.class_ends[number]
    return carry


def fold_items(
    loop: ItemLoop, item: Int32[Array, ""], carry: Carry, visit: Callable[[Carry, Tile], Carry]
) -> tuple[Int32[Array, ""], Carry]:
    """Fold `visit` over the tiles from `item` on. Returns the first item that is left over, and the result."""
    stop = loop.stop - (0 if loop.takes_rest else loop.lanes - 1)
    start = LoopState(item, jnp.zeros_like(item), carry)
    end = jax.lax.while_loop(partial(is_before, stop), partial(visit_tile, loop, visit), start)
    return end.item, end.carry


def is_before(stop: Int32[Array, ""], state: LoopState[Carry]) -> Bool[Array, ""]:
    """Whether the loop has items left."""
    return state.item < stop


def visit_tile(loop: ItemLoop, visit: Callable[[Carry, Tile], Carry], state: LoopState[Carry]) -> LoopState[Carry]:
    """Visit the next tile and move on, to the next rows of the same item or to the next items."""
    tile = load_tile(loop, state.item, state.rows_done)
    carry = visit(state.carry, tile)
    width = loop.item_class.rows
    if width == 1:
        return LoopState(state.item + loop.lanes, state.rows_done, carry)
    has_more_rows = tile.rows[0] > width
    item = jnp.where(has_more_rows, state.item, state.item + 1)
    return LoopState(item, jnp.where(has_more_rows, state.rows_done + width, 0), carry)


def load_tile(loop: ItemLoop, item: Int32[Array, ""], rows_done: Int32[Array, ""]) -> Tile:
    """The tile of `lanes` items from `item` on, without the rows that earlier tiles have done."""
    shape, item_class = loop.shape, loop.item_class
    loaded = Item(*jax.lax.dynamic_slice(loop.metadata.items, (0, item), (ITEM_FIELDS, loop.lanes)))
    first_row, rows = loaded.first_row + rows_done, loaded.rows - rows_done
    tokens, entry = loaded.tokens, loaded.first_entry
    if loop.takes_rest and loop.lanes > 1:
        missing = item + jnp.arange(loop.lanes) >= loop.stop
        first_row = jnp.where(missing, shape.rows, first_row)
        rows, tokens, entry = (jnp.where(missing, 0, each) for each in (rows, tokens, entry))
    entries = entry[:, None] + jnp.arange(item_class.pages)
    pages = loop.metadata.pages.at[entries].get(mode="promise_in_bounds")
    tile_rows = first_row[:, None] + jnp.arange(item_class.rows)
    end = loop.visible_tokens.at[tile_rows].get(mode="promise_in_bounds") - loaded.first_token[:, None]
    seen = jnp.where(jnp.arange(item_class.rows) < rows[:, None], jnp.clip(end, 0, tokens[:, None]), 0)
    hidden = None if shape.window is None else jnp.maximum(end - shape.window, 0)
    return Tile(item_class, first_row, rows, pages, loaded.first_token, tokens, seen, hidden)


# One tile


def attend_tile(inputs: AttentionInputs, state: RunningSoftmax, tile: Tile) -> RunningSoftmax:
    """Merge what the rows of a tile see of its pages into their running softmax."""
    query = take_rows(inputs.query, tile)
    old = RunningSoftmax(
        max_score=take_rows(state.max_score, tile),
        weight_sum=take_rows(state.weight_sum, tile),
        output=take_rows(state.output, tile),
    )
    kv = read_tile(inputs, tile)
    kv, visibility = apply_mask(inputs, tile, kv)
    score = masked_scores(query, kv, visibility.visible, inputs.head_dim, inputs.soft_cap)
    max_score = score.max(-1)
    has_lanes = len(tile.first_row) > 1
    same_row = tile.first_row[:, None] == tile.first_row  # lanes of one row have to end with the same numbers
    if has_lanes:
        max_score = jnp.where(same_row[..., None], max_score[:, None], MASKED_SCORE).max(2)
    max_score = jnp.maximum(old.max_score, max_score)
    weight_sum, output = weigh_values(score, max_score, kv, visibility, is_masked=inputs.mask is not None)
    if has_lanes:
        weight_sum, output = add_lanes(same_row, weight_sum, output)
    shrink = jnp.exp2(old.max_score - max_score)
    if tile.hidden is None:
        inside = visibility.in_item[..., 0]  # rows of the item see at least its first token
    else:
        inside = jnp.repeat(tile.seen > tile.hidden, inputs.group, 1)  # others keep what they had
    new = RunningSoftmax(
        max_score=max_score,
        weight_sum=jnp.where(inside, old.weight_sum * shrink + weight_sum, old.weight_sum),
        output=jnp.where(inside[..., None], old.output * shrink[..., None] + output, old.output),
    )
    return RunningSoftmax(
        max_score=put_rows(state.max_score, new.max_score, tile),
        weight_sum=put_rows(state.weight_sum, new.weight_sum, tile),
        output=put_rows(state.output, new.output, tile),
    )


def read_tile(inputs: AttentionInputs, tile: Tile) -> TileKV:
    """Read a tile's pages. Values that no row sees become 0: anything may be there, and 0 * NaN is NaN."""
    slots = tile.item_class.pages * inputs.page_size
    stored = jnp.arange(slots) < tile.tokens[:, None]
    if tile.hidden is not None:
        stored &= jnp.arange(slots) >= jnp.where(tile.seen > tile.hidden, tile.hidden, slots).min(1)[:, None]
    keys = read_values(inputs.k_pages, tile, inputs.head_dim, inputs.side_by_side)
    values = read_values(inputs.v_pages, tile, inputs.head_dim, inputs.side_by_side)
    values = jnp.where(stored[..., None], values, 0)
    return TileKV(
        keys=keys,
        values=values,
        key_scales=read_scales(inputs.k_pages, tile),
        value_scales=read_scales(inputs.v_pages, tile),
        stored=stored,
    )


def apply_mask(inputs: AttentionInputs, tile: Tile, kv: TileKV) -> tuple[TileKV, Visibility]:
    """Which slots the queries see. Under a mask, values that are not finite become 0 and are remembered.

    A row that does not see such a slot must not get 0 * NaN; those that see it get NaN in `weigh_values`.
    """
    group = inputs.group
    slot = jnp.arange(kv.stored.shape[1])
    in_item = slot < jnp.repeat(tile.seen, group, 1)[..., None]
    if tile.hidden is not None:
        in_item &= slot >= jnp.repeat(tile.hidden, group, 1)[..., None]
    if inputs.mask is None:
        return kv, Visibility(in_item, in_item, None)
    visible = in_item & jnp.repeat(tile_mask(inputs.mask, tile, inputs.page_size), group, 1)
    nonfinite = ~jnp.isfinite(kv.values).all(-1)
    kv = kv._replace(values=jnp.where(jnp.isfinite(kv.values), kv.values, 0))
    if kv.value_scales is not None:
        nonfinite |= ~jnp.isfinite(kv.value_scales[:, :, 0])
        kv = kv._replace(value_scales=jnp.where(jnp.isfinite(kv.value_scales), kv.value_scales, 0))
    return kv, Visibility(in_item, visible, nonfinite)


def masked_scores(
    query: Float[Array, "kv_heads lanes queries head_dim"],
    kv: TileKV,
    visible: Bool[Array, "lanes queries slots"],
    head_dim: int,
    soft_cap: float | None,
) -> Float32[Array, "kv_heads lanes queries slots"]:
    """Scaled and capped scores in base 2; MASKED_SCORE where a query does not see the slot."""
    score = query_key_products(query.astype(kv.keys.dtype), kv.keys) * (head_dim**-0.5 * LOG2_E)
    score = score if kv.key_scales is None else score * kv.key_scales
    return jnp.where(visible, score if soft_cap is None else cap_scores(score, soft_cap), MASKED_SCORE)


def cap_scores(score: Float32[Array, "*shape"], soft_cap: float) -> Float32[Array, "*shape"]:
    """Scores in base 2, none further from 0 than `soft_cap` (in base e): cap * tanh(score / cap), as Gemma 2 has it."""
    cap = soft_cap * LOG2_E
    return cap * jnp.tanh(score / cap)


def weigh_values(
    score: Float32[Array, "kv_heads lanes queries slots"],
    max_score: Float32[Array, "kv_heads lanes queries"],
    kv: TileKV,
    visibility: Visibility,
    *,
    is_masked: bool,
) -> tuple[Float32[Array, "kv_heads lanes queries"], Float32[Array, "kv_heads lanes queries head_dim"]]:
    """The sum of weights 2**(score - max_score), and the sum of values times them."""
    values, value_scales = kv.values, kv.value_scales
    exp2 = exp2_approximately if values.dtype == jnp.bfloat16 else jnp.exp2
    weight = exp2(score - max_score[..., None])
    if is_masked:  # else a row that counts sees something of the item, and MASKED_SCORE below its maximum weighs 0
        weight = jnp.where(visibility.visible, weight, 0)
    scaled = weight
    if value_scales is not None:
        scaled = weight * jnp.where(kv.stored[:, None], value_scales, 0)
    scaled = jax.lax.optimization_barrier(scaled.astype(values.dtype))
    # Without scales narrow weights are summed as they are multiplied: what rounding does to them cancels.
    weight_sum = (scaled if value_scales is None else weight).sum(-1, dtype=jnp.float32)
    output = matmul("hnms,hnsd->hnmd", scaled, values)
    if visibility.nonfinite is not None:
        sees_nonfinite = (visibility.visible & visibility.nonfinite[:, :, None]).any(-1)
        output = jnp.where(sees_nonfinite[..., None], jnp.nan, output)
    return weight_sum, output


def add_lanes(
    same_row: Bool[Array, "lanes lanes"],
    weight_sum: Float32[Array, "kv_heads lanes queries"],
    output: Float32[Array, "kv_heads lanes queries head_dim"],
) -> tuple[Float32[Array, "kv_heads lanes queries"], Float32[Array, "kv_heads lanes queries head_dim"]]:
    """Add up each lane's sum and output with those of the lanes of its row. A row's NaN stays its own."""
    nonfinite = ~(jnp.isfinite(weight_sum) & jnp.isfinite(output).all(-1))
    output = matmul("nk,hkmd->hnmd", same_row.astype(jnp.float32), jnp.where(nonfinite[..., None], 0, output))
    meets_nonfinite = (same_row[..., None] & nonfinite[:, None]).any(2)
    weight_sum = jnp.where(same_row[..., None], weight_sum[:, None], 0).sum(2)
    return weight_sum, jnp.where(meets_nonfinite[..., None], jnp.nan, output)


# Rows and pages of a tile


def take_rows(x: jax.Array, tile: Tile) -> jax.Array:
    """Of `x` `[kv_heads, rows, group, …]` the rows of a tile, as `[kv_heads, lanes, tile rows * group, …]`."""
    if len(tile.first_row) > 1:
        return x.at[:, tile.first_row].get(mode="promise_in_bounds")
    taken = jax.lax.dynamic_slice_in_dim(x, tile.first_row[0], tile.item_class.rows, 1)
    return taken.reshape(x.shape[0], -1, *x.shape[3:])[:, None]


def put_rows(x: jax.Array, y: jax.Array, tile: Tile) -> jax.Array:
    """`x` with the rows of a tile replaced by `y`: the inverse of `take_rows`."""
    if len(tile.first_row) > 1:
        return x.at[:, tile.first_row].set(y, mode="promise_in_bounds")
    rows = y[:, 0].reshape(x.shape[0], tile.item_class.rows, *x.shape[2:])
    return jax.lax.dynamic_update_slice_in_dim(x, rows, tile.first_row[0], 1)


def read_values(
    pages: KVPages, tile: Tile, head_dim: int, side_by_side: int = 1
) -> Float[Array, "kv_heads lanes slots head_dim"]:
    """A tile's keys (or values), not yet scaled. Heads that lie side by side (`kv_cache`) are taken apart."""
    array = kv_values(pages)
    read = decode(array.at[:, tile.pages].get(mode="promise_in_bounds"))
    stored_heads, lanes, row_width = array.shape[0], len(tile.first_row), array.shape[3]
    if row_width == head_dim:  # JAX 0.10 cannot take apart what is split over a mesh, and need not
        return read.reshape(stored_heads, lanes, -1, head_dim)
    read = read[..., : side_by_side * head_dim].reshape(stored_heads, lanes, -1, side_by_side, head_dim)
    return jnp.moveaxis(read, 3, 1).reshape(-1, lanes, read.shape[2], head_dim)


def read_scales(pages: KVPages, tile: Tile) -> Float32[Array, "kv_heads lanes one slots"] | None:
    """What scores of keys, or weights of values, are multiplied by, which are fewer numbers than keys or values."""
    if not isinstance(pages, QuantizedKV):
        return None
    page_size = pages.values.shape[2]
    scales = pages.scales.at[:, tile.pages].get(mode="promise_in_bounds")[..., :page_size]
    slots = tile.item_class.pages * page_size
    return jnp.moveaxis(scales, 3, 1).reshape(-1, len(tile.first_row), 1, slots)


def sort_mask(
    mask: Mask, metadata: AttentionMetadata, shape: MetadataShape
) -> Bool[Array, "padded_rows padded_indices"]:
    """The mask with its rows in sorted order, padded for a tile that reaches past the last row or index."""
    most_tokens = shape.page_size * max(c.pages for c in shape.classes)
    return jnp.pad(mask[metadata.sorted_to_batch], ((0, widest_tile(shape)), (0, most_tokens)))


def tile_mask(
    sorted_mask: Bool[Array, "padded_rows padded_indices"], tile: Tile, page_size: int
) -> Bool[Array, "lanes rows slots"]:
    """What the mask of `sort_mask` lets a tile's rows see of its slots."""
    size = tile.item_class.rows, tile.item_class.pages * page_size
    take = partial(take_window, sorted_mask, size)
    return jax.vmap(take)(tile.first_row, tile.first_token)


def take_window(
    sorted_mask: Bool[Array, "padded_rows padded_indices"],
    size: tuple[int, int],
    row: Int32[Array, ""],
    index: Int32[Array, ""],
) -> Bool[Array, "rows slots"]:
    """`size` rows and indices of a mask, from `row` and `index` on."""
    return jax.lax.dynamic_slice(sorted_mask, (row, index), size)


# Arithmetic


def exp2_approximately(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """2^x for x up to 0, within 1.1e-4, a twentieth of what narrowing it to bfloat16 loses; 0 below -127.

    A cubic polynomial takes half as long as XLA's exponential, which is a sixth of a long prompt's attention.
    """
    x = jnp.maximum(x, -127)
    whole = jnp.floor(x)
    part = x - whole
    power = 1 + part * (0.6954244 + part * (0.2263077 + part * 0.0782679))
    bits = jax.lax.bitcast_convert_type(power, jnp.int32) + (whole.astype(jnp.int32) << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def query_key_products(
    q: Float[Array, "kv_heads lanes queries head_dim"], k: Float[Array, "kv_heads lanes slots head_dim"]
) -> Float32[Array, "kv_heads lanes queries slots"]:
    """q · k. On CPU few queries are faster as right operand; the barrier keeps XLA from swapping them back."""
    if q.shape[2] > 8:
        return matmul("hnmd,hnsd->hnms", q, k)
    product: jax.Array = jax.lax.optimization_barrier(matmul("hnsd,hnmd->hnsm", k, q))
    return product.swapaxes(2, 3)


def matmul(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Einstein sum of two: products of float32 exactly, of bfloat16 as they are; sums in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    product: jax.Array = jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
    return product
