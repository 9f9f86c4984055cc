"""Attention work for NVIDIA GPUs, cut into equal units: what every block of a kernel does, laid out by XLA.

Sorted rows are cut into *tiles*, whose query heads of a KV head fill the 64 rows of a tensor core product. A tile walks
the pages of every item that has rows in it, 64 tokens a *step*: pages that rows share are read once for all of them.
The steps of all tiles, one after the other, are cut into equal *work units* with no regard to where tiles or items end
(stream-K, arXiv 2301.03598). So work is even whatever the tree, and partial results are few: unit u writes one for each
tile t that it meets, at slot u + t, which no other pair has.

    steps    | tile 0: prefix, suffixes  | tile 1  | tile 2: prompt chunk       |
    units    | unit 0       | unit 1       | unit 2       | unit 3              |
    slots      0              1      2       3    4         5

With a sliding window a tile begins to walk an item at the page, or the step, in which the first of its rows sees
something: what is before is in no pair. What is left of tokens that rows do not see is masked by the kernels.

Nothing here knows of a GPU: it is plain JAX, but for the few functions that also read a schedule inside of a kernel.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxctx_kernels.metadata import AttentionMetadata, Item

Ref: TypeAlias = Any  # to memory of the device

SIDE = 64  # rows of a product, and tokens of a step
MIN_STEPS = 4  # of a unit, so that small batches are not cut into too many partial results
NO_STEP = 2**30  # begin and end of pairs that do not exist

# Columns of `Schedule.pairs`, in the order of the fields of `Pairs`. Only with a window are the last two there.
STEP_BEGIN, STEP_END, FULL_STEPS, FIRST_ROW, ROWS, FIRST_ENTRY, TOKENS, FIRST_TOKEN, MASKED_STEPS, HIDDEN = range(10)


class Window(NamedTuple):
    """The sliding window of a kind of layer: how many tokens a row sees at most, see `MetadataShape`; and the pages."""

    tokens: int
    page_size: int

    @property
    def unit(self) -> int:
        """A tile leaves out a multiple of so many first tokens of an item: whole pages, and whole steps."""
        return max(SIDE, self.page_size)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How rows and work are cut: a tile is `parts` products of `rows` sorted rows; `ways` consumers share its steps.

    And what differs between kinds of layer and between models: the window of rows, and the soft cap of their scores.
    """

    group: int  # query heads of a KV head
    rows: int
    parts: int  # 2 where each consumer has a product of its own, else 1
    ways: int  # 2 where both consumers have the same product and take turns at steps, else 1
    tiles: int
    units: int
    in_registers: bool = False  # whether weights are multiplied and outputs added up there, which interpreters cannot
    window: Window | None = None  # None: a row sees all up to itself
    soft_cap: float | None = None  # see `dispatch.attend`

    @property
    def products(self) -> int:
        """Products of 64 rows, of all tiles."""
        return self.tiles * self.parts

    @property
    def tile_rows(self) -> int:
        """Sorted rows of a tile."""
        return self.rows * self.parts


class Pairs(NamedTuple):
    """A pair is an item within a tile. Of all pairs: their steps, and the item as the tile sees it, int32 `[pairs]`.

    With a window that is the item without the tokens that the tile leaves out, see `Window.unit`.
    """

    step_begin: jax.Array  # steps are counted over all tiles
    step_end: jax.Array
    full_steps: jax.Array  # how many steps from the first on every row sees to their end, of the tile's in the item
    first_row: jax.Array  # of the item, counted from the tile's first row; may be negative
    rows: jax.Array
    first_entry: jax.Array
    tokens: jax.Array
    first_token: jax.Array
    masked_steps: jax.Array | None  # of these full ones, how many first ones are not, since windows begin; None: none
    hidden: jax.Array | None  # how many of its first tokens no row of the tile sees, less than `Window.unit`


class BeforeWindows(NamedTuple):
    """What is before the windows of a tile's rows, of each tile and each item, int32 `[tiles * items]`."""

    left_out: jax.Array  # how many tokens of the item, a multiple of `Window.unit`, are before the first step
    masked_steps: jax.Array  # see `Pairs`
    hidden: jax.Array


class StepCounts(NamedTuple):
    """Of each tile and each item, int32 `[tiles * items]`."""

    steps: jax.Array  # 0 where the tile sees nothing of the item
    full_steps: jax.Array  # see `Pairs`
    before: BeforeWindows | None  # None without a window


class Schedule(NamedTuple):
    """What every unit does. Pairs without steps are left out, pairs are in order of their tiles."""

    pairs: Int32[Array, "pairs fields"]  # see `Pairs`
    tiles: Int32[Array, " tiles_and_one"]  # first pair of each
    units: Int32[Array, "units 6"]  # steps, pairs and tiles, from .. to
    slots: Int32[Array, "tiles 2"]  # of partial results, from .. to
    visible_tokens: Int32[Array, "products 64"]  # of the row of each query head; 0 where a product has none


class Range(NamedTuple):
    """From `begin` up to, without, `end`."""

    begin: jax.Array
    end: jax.Array


class StepsOfPair(NamedTuple):
    """The steps that a unit has of a pair."""

    offset: jax.Array  # number within the unit of the pair's first step, negative if that is an earlier unit's
    first: jax.Array  # step of the pair
    end: jax.Array


class WorkUnit(NamedTuple):
    """Where a warpgroup is, and which steps, pairs and tiles its unit has."""

    head: jax.Array
    number: jax.Array
    warpgroup: jax.Array
    steps: Range
    pairs: Range
    tiles: Range

    def steps_of(self, pair: Ref) -> StepsOfPair:
        """`pair`: a row of `Schedule.pairs`."""
        begin = pair[STEP_BEGIN]
        return StepsOfPair(
            offset=begin - self.steps.begin,
            first=jnp.maximum(self.steps.begin - begin, 0),
            end=jnp.minimum(self.steps.end, pair[STEP_END]) - begin,
        )


def rows_of_products(rows: int, config: TileConfig) -> Int32[Array, "products 64"]:
    """The sorted row of each row of each product; `rows` where there is none."""
    row = jnp.arange(config.products)[:, None] * config.rows + jnp.arange(SIDE) // config.group
    return jnp.where(jnp.arange(SIDE) < config.rows * config.group, row, rows)


def gather_queries(
    q: Float[Array, "rows heads head_dim"],
    metadata: AttentionMetadata,
    row: Int32[Array, "products 64"],
    kv_heads: int,
) -> Float[Array, "kv_heads products 64 head_dim"]:
    """Queries in bfloat16 as the products take them: row r of a product is query head r % group of its sorted row."""
    rows, heads, dim = q.shape
    group = heads // kv_heads
    query = q.astype(jnp.bfloat16).reshape(rows, kv_heads, group, dim)
    batch_row = metadata.sorted_to_batch.at[row].get(mode="clip")
    return query[batch_row, :, jnp.arange(SIDE) % group].transpose(2, 0, 1, 3)


def scatter_outputs(
    merged: Float32[Array, "kv_heads products 64 head_dim"],
    metadata: AttentionMetadata,
    config: TileConfig,
    rows: int,
    heads: int,
) -> Float32[Array, "rows heads head_dim"]:
    """The inverse of `gather_queries`, for outputs."""
    row, dim = metadata.batch_to_sorted[:, None], merged.shape[3]
    of_rows = merged[:, row // config.rows, row % config.rows * config.group + jnp.arange(config.group)]
    return of_rows.transpose(1, 0, 2, 3).reshape(rows, heads, dim)


def build_schedule(
    metadata: AttentionMetadata, visible_tokens: Int32[Array, "products 64"], config: TileConfig
) -> Schedule:
    """Lay out the steps and cut them into units. This is the same for all layers, so that XLA computes it once."""
    item = Item(*metadata.items)
    items = metadata.items.shape[1]
    counts = count_steps(item, metadata.class_ends, visible_tokens, config)
    steps = counts.steps
    step_ends = steps.cumsum()
    pairs = list_pairs(item, counts, step_ends, config)
    tile_ends = step_ends.reshape(config.tiles, items)[:, -1]
    tile_begins, total = jnp.pad(tile_ends[:-1], (1, 0)), tile_ends[-1]
    unit_steps = jnp.maximum(MIN_STEPS, -(-total // config.units))
    units = cut_into_units(pairs, tile_begins, tile_ends, unit_steps, total, config)
    # Unit u writes its partial result of tile t at slot u + t.
    slots = jnp.stack([tile_begins // unit_steps, -(-tile_ends // unit_steps)], 1) + jnp.arange(config.tiles)[:, None]
    slots *= (tile_begins < tile_ends)[:, None]
    first_pairs = jnp.pad((steps.reshape(config.tiles, items) > 0).sum(1).cumsum(), (1, 0))
    return Schedule(
        pairs=jnp.stack([field for field in pairs if field is not None], 1).astype(jnp.int32),
        tiles=first_pairs.astype(jnp.int32),
        units=units.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        visible_tokens=visible_tokens.astype(jnp.int32),
    )


def count_steps(
    item: Item,
    class_ends: Int32[Array, " classes"],
    visible_tokens: Int32[Array, "products 64"],
    config: TileConfig,
) -> StepCounts:
    """How many steps each tile has over each item, most of them 0, and how many of them need no mask.

    Items past the last class's end do not exist. Steps without a mask come first: all rows of the tile that belong to
    the item see each of their 64 tokens. With a window there are steps with a mask before them.
    """
    items = item.first_row.shape[0]
    sees = visible_tokens[:, : config.rows * config.group : config.group].reshape(-1, 1)  # of each sorted row
    row = jnp.arange(sees.shape[0])[:, None]
    exists = jnp.arange(items) < class_ends[-1]
    in_item = exists & (row >= item.first_row) & (row < item.first_row + item.rows)
    seen = jnp.clip(sees - item.first_token, 0, item.tokens)
    of_tiles = config.tiles, config.tile_rows, items
    most = jnp.where(in_item, seen, 0).reshape(of_tiles).max(1)
    least = jnp.where(in_item, seen, NO_STEP).reshape(of_tiles).min(1)
    if config.window is None:
        return StepCounts((-(-most // SIDE)).reshape(-1), (least // SIDE).reshape(-1), None)
    before = jnp.maximum(sees - item.first_token - config.window.tokens, 0)  # of the item's tokens, the row's window
    sees_some = in_item & (seen > before)
    most = jnp.where(sees_some, seen, 0).reshape(of_tiles).max(1)
    first = jnp.where(sees_some, before, NO_STEP).reshape(of_tiles).min(1)
    last = jnp.where(in_item, before, 0).reshape(of_tiles).max(1)
    left_out = first // config.window.unit * config.window.unit
    return StepCounts(
        steps=jnp.where(most > 0, -(-(most - left_out) // SIDE), 0).reshape(-1),
        full_steps=(jnp.maximum(least - left_out, 0) // SIDE).reshape(-1),
        before=BeforeWindows(
            left_out=left_out.reshape(-1),
            masked_steps=(-(-(last - left_out) // SIDE)).reshape(-1),
            hidden=(first - left_out).reshape(-1),
        ),
    )


def list_pairs(
    item: Item, counts: StepCounts, step_ends: Int32[Array, " tiles_times_items"], config: TileConfig
) -> Pairs:
    """The pairs of a tile and an item that have steps, in order of tiles; behind them pairs at NO_STEP."""
    items = item.first_row.shape[0]
    steps = counts.steps
    (cell,) = jnp.nonzero(steps, size=steps.shape[0], fill_value=steps.shape[0])
    tile, number = cell // items, cell % items
    step_end = step_ends.at[cell].get(mode="fill", fill_value=NO_STEP)
    first_entry, tokens, first_token = item.first_entry[number], item.tokens[number], item.first_token[number]
    masked_steps = hidden = None
    if config.window is not None and counts.before is not None:
        of_pairs = (of_cells.at[cell].get(mode="fill", fill_value=0) for of_cells in counts.before)
        left_out, masked_steps, hidden = of_pairs
        first_entry += left_out // config.window.page_size
        tokens -= left_out
        first_token += left_out
    return Pairs(
        step_begin=step_end - steps.at[cell].get(mode="fill", fill_value=0),
        step_end=step_end,
        full_steps=counts.full_steps.at[cell].get(mode="fill", fill_value=0),
        first_row=item.first_row[number] - tile * config.tile_rows,
        rows=item.rows[number],
        first_entry=first_entry,
        tokens=tokens,
        first_token=first_token,
        masked_steps=masked_steps,
        hidden=hidden,
    )


def cut_into_units(
    pairs: Pairs,
    tile_begins: Int32[Array, " tiles"],
    tile_ends: Int32[Array, " tiles"],
    unit_steps: Int32[Array, ""],
    total: Int32[Array, ""],
    config: TileConfig,
) -> Int32[Array, "units 6"]:
    """Of each unit: its steps, pairs and tiles, from .. to; zeros for units without steps. `total`: of all steps."""
    begin, end = (jnp.minimum((jnp.arange(config.units) + n) * unit_steps, total) for n in (0, 1))
    # The first pair or tile that ends after the unit begins, and the first that begins when or after it ends.
    pair_begin = (pairs.step_end <= begin[:, None]).sum(1)
    tile_begin = (tile_ends <= begin[:, None]).sum(1)
    pair_end = (pairs.step_begin < end[:, None]).sum(1)
    tile_end = (tile_begins < end[:, None]).sum(1)
    return jnp.stack([begin, end, pair_begin, pair_end, tile_begin, tile_end], 1) * (begin < end)[:, None]


def load_work_unit(units: Any, head: jax.Array, number: jax.Array, warpgroup: jax.Array) -> WorkUnit:
    """Read a unit's row of `Schedule.units`."""
    return WorkUnit(
        head,
        number,
        warpgroup,
        steps=Range(units[number, 0], units[number, 1]),
        pairs=Range(units[number, 2], units[number, 3]),
        tiles=Range(units[number, 4], units[number, 5]),
    )
