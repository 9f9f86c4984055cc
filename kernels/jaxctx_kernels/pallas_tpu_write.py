"""Writing a step's keys and values on TPU: one Pallas kernel that changes the touched rows of the pages in place.

XLA's scatter takes some 1,800 bundles for 16 rows, for keys and values each, and copies whole pools of 8 bits. Here
rows are brought, merged in registers and written back by copies of which several are on their way at once.

What a page has in one sublane of 32 bits is a *word row*: one token of float32, two of bfloat16, four of 8 bits, with
all lanes. It is the least that can be copied, of all KV heads at once; one of which all tokens are new is not read.
Eight word rows fill registers of 32 bits, and a *tile* is eight of them that consecutive rows of the batch fill: what
most rows of a prompt are. It takes one copy where its word rows would take eight. Pages of 8 bits that have fewer than
eight word rows, as those of 16 tokens, have no tiles. Scales are written by pages: a page
has a row of lanes for each head.

    plan, once a step     slots ─ sort ─▶ tiles, each with its first row of the batch                    (SMEM)
                                       ├▶ other word rows, each with the rows of its tokens              (SMEM)
                                       └▶ pages, each with its range of sorted rows                      (SMEM, 8 bits)
    kernel                HBM: pages ──▶ ring of what is changed ── merge with the rows in VMEM ──▶ HBM: the same pages

No two tiles, word rows or pages of a plan overlap, so nothing waits for what is on its way. Rows of the scratch page
are left out. The kernel never reads a page that no row goes to, and never looks at what a number means.

    write_rows ─┬─ plan_groups
                └─ run_kernel ── kernel ─┬─ write_tiles  ─┐
                                         ├─ write_words  ─┼─ change_in_place
                                         └─ write_scales ─┘
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from jaxctx_kernels.kv_cache import (
    LANES,
    KVPages,
    QuantizedKV,
    encode,
    in_rows_of_lanes,
    kv_values,
    pad_axis,
    quantize,
)
from jaxctx_kernels.pallas_tpu import VMEM_BYTES, Ref, in_hbm

BLOCK = 4  # groups that are merged in one basic block
BLOCKS = 4  # that are on their way, in or out
AHEAD = 2  # blocks whose copies in are started before one is merged
WORD_BYTES = 4  # of a sublane
TILE_WORDS = 8  # word rows of a tile: sublanes of a register
ROWS_BYTES = 48 * 2**20  # of VMEM, for the rows to write


class Plan(NamedTuple):
    """Which rows go where; all are int32. A word row's offset is that in its page, in word rows."""

    tile_count: Int32[Array, " one"]
    tiles: Int32[Array, " 3*rows"]  # of each tile its page; its first word row's offset; its first row
    word_count: Int32[Array, " one"]
    words: Int32[Array, " 3*rows"]  # of each word row its page; its offset; 1 if not all of its tokens are new, or 0
    members: Int32[Array, " tokens*rows"]  # of each word row its first token's row of the batch, or -1; the second's, …
    page_count: Int32[Array, " one"]
    pages: Int32[Array, " 2*rows"]  # of each page its number; its first place in `sorted_slots`
    sorted_slots: Int32[Array, " rows+1"]  # the last is past all pages
    sorted_rows: Int32[Array, " rows"]


def write_rows(
    k_pages: KVPages,
    v_pages: KVPages,
    k: Shaped[Array, "rows kv_heads head_dim"],
    v: Shaped[Array, "rows kv_heads head_dim"],
    slots: Int32[Array, " rows"],
) -> tuple[Any, Any]:
    """As `kv_cache.write_kv` of keys and of values, but that rows of page 0 are not written.

    No slot may be there twice, other than those of page 0.
    """
    plan = plan_groups(slots, kv_values(k_pages))
    return run_kernel(plan, (encode_rows(k_pages, k), encode_rows(v_pages, v)), (k_pages, v_pages))


def plan_groups(slots: Int32[Array, " rows"], values: Any) -> Plan:
    """The plan for these slots of such an array of values. Layers of one step share it: XLA computes it once."""
    page_size, tokens = values.shape[2], WORD_BYTES // values.dtype.itemsize
    last = len(slots) - 1
    slots = jnp.pad(slots, (0, -len(slots) % BLOCK))  # to whole blocks, with rows of the scratch page
    numbers = jnp.arange(len(slots), dtype=jnp.int32)
    slots, rows = jax.lax.sort((slots, jnp.minimum(numbers, last)), num_keys=1)
    real, pages, offsets = slots >= page_size, slots // page_size, slots % page_size
    begins_tile, in_tile = find_tiles(slots, rows, tokens_of_tile(page_size, tokens, len(slots)))
    begins_tile, in_tile = real & begins_tile, real & in_tile

    words, places = slots // tokens, offsets % tokens
    members = []
    for token in range(tokens):
        member = jnp.full_like(rows, -1)
        for ahead in range(token + 1):  # of a word row's rows, this token's is among the first token + 1
            is_it = (jnp.roll(words, -ahead) == words) & (jnp.roll(places, -ahead) == token)
            member = jnp.where(is_it, jnp.roll(rows, -ahead), member)
        members.append(member)
    is_partial = (jnp.stack(members).min(0) < 0).astype(jnp.int32)

    first_rows = jnp.where(begins_tile, rows, 0)  # what is not kept is looked at, too, in the last block
    tile_count, *of_tiles = keep(begins_tile, pages, offsets // tokens, first_rows)
    word_count, *of_words = keep(real & ~in_tile & is_first(words), pages, offsets // tokens, is_partial, *members)
    page_count, *of_pages = keep(real & is_first(pages), pages, numbers)
    behind = jnp.full((1,), 2**31 - 1, jnp.int32)
    return Plan(
        tile_count,
        jnp.concatenate(of_tiles),
        word_count,
        jnp.concatenate(of_words[:3]),
        jnp.concatenate(of_words[3:]),
        page_count,
        jnp.concatenate(of_pages),
        jnp.concatenate([slots, behind]),
        rows,
    )


def tokens_of_tile(page_size: int, tokens: int, rows: int) -> int:
    """Tokens of a tile whose words have so many; 0 where pages are not of whole tiles, or no tile has enough rows."""
    of_tile = TILE_WORDS * tokens
    return of_tile if page_size % of_tile == 0 and rows >= of_tile else 0


def find_tiles(
    slots: Int32[Array, " rows"], rows: Int32[Array, " rows"], tokens: int
) -> tuple[Bool[Array, " rows"], Bool[Array, " rows"]]:
    """Where tiles of `tokens` tokens begin in the sorted slots, and what lies in one.

    That is where all of its slots are there, and their rows follow one another in the batch as the slots do. Of 0
    tokens there is none.
    """
    if not tokens:
        return jnp.zeros(slots.shape, bool), jnp.zeros(slots.shape, bool)
    follow = (jnp.roll(slots, -1) == slots + 1) & (jnp.roll(rows, -1) == rows + 1)
    span = 1  # follow: so many follow each other
    while 2 * span < tokens:
        follow &= jnp.roll(follow, -span)
        span *= 2
    begins = follow & jnp.roll(follow, span + 1 - tokens) & (slots % tokens == 0)
    inside, span = begins, 1
    while span < tokens:
        inside |= jnp.roll(inside, span)
        span *= 2
    return begins, inside


def is_first(groups: Int32[Array, " rows"]) -> Bool[Array, " rows"]:
    """Whether it is the first of its group; groups are ascending."""
    return (groups != jnp.roll(groups, 1)) | (jnp.arange(len(groups)) == 0)


def keep(kept: Bool[Array, " rows"], *columns: Int32[Array, " rows"]) -> list[jax.Array]:
    """How many are kept, int32 `[1]`, and of each column those that are, in front of the others."""
    _, *in_front = jax.lax.sort(((~kept).astype(jnp.int32), *columns), num_keys=1, is_stable=True)
    return [kept.sum(dtype=jnp.int32)[None], *in_front]


class Rows(NamedTuple):
    """Keys (or values) of the batch, as the kernel takes them; a block is the heads of a grid step."""

    bits: UInt32[Array, "blocks lane_tiles rows*heads LANES"]  # of each number, in the lowest bits
    scales: Any  # float32 [blocks, rows*side_by_side*heads, LANES], the same in all lanes; or None


def encode_rows(pages: KVPages, rows: Shaped[Array, "rows kv_heads head_dim"]) -> Rows:
    """Rows as `pages` store them."""
    stored_heads, _, _, lanes = kv_values(pages).shape
    together = heads_at_once(pages, len(rows))
    scales = None
    if isinstance(pages, QuantizedKV):
        side_by_side = pages.scales.shape[2]
        rows, scale = quantize(rows, pages.values.dtype)
        scale = pad_axis(scale, 1, stored_heads * side_by_side)
        scale = scale.reshape(len(rows), -1, together, side_by_side).transpose(1, 0, 3, 2)
        scales = jnp.broadcast_to(scale.reshape(len(scale), -1, 1), (len(scale), scale[0].size, LANES))
    stored = in_rows_of_lanes(encode(rows, kv_values(pages).dtype), stored_heads, lanes)
    bits = jax.lax.bitcast_convert_type(stored, f"uint{8 * stored.dtype.itemsize}").astype(jnp.uint32)
    bits = bits.reshape(len(rows), stored_heads // together, together, lanes // LANES, LANES).transpose(1, 3, 0, 2, 4)
    return Rows(bits.reshape(*bits.shape[:2], -1, LANES), scales)


def heads_at_once(pages: KVPages, rows: int) -> int:
    """How many KV heads of all rows fit into VMEM, twice and of keys and values; at least one."""
    heads, _, _, lanes = kv_values(pages).shape
    numbers = lanes + (LANES * pages.scales.shape[2] if isinstance(pages, QuantizedKV) else 0)
    most = ROWS_BYTES // (4 * WORD_BYTES * rows * numbers)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n <= most or n == 1))


def run_kernel(plan: Plan, rows: tuple[Rows, Rows], pages: tuple[KVPages, KVPages]) -> tuple[Any, Any]:
    """Call the kernel, for as many KV heads at a time as fit into VMEM; pages are updated in place if donated."""
    k_pages = pages[0]
    stored_heads, _, _, lanes = kv_values(k_pages).shape
    blocks = rows[0].bits.shape[0]
    together = stored_heads // blocks

    def of_block(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), lambda step, *_: (step, *[0] * (array.ndim - 1)))

    in_place = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), pages)
    scratch = [
        pltpu.VMEM((BLOCKS, BLOCK, 2, together, TILE_WORDS, lanes), jnp.uint32),
        pltpu.VMEM((BLOCKS, BLOCK, 2, together, lanes), jnp.uint32),
        pltpu.SemaphoreType.DMA((2, BLOCKS)),
    ]
    if isinstance(k_pages, QuantizedKV):
        side_by_side, scale_lanes = k_pages.scales.shape[2:]
        scratch.append(pltpu.VMEM((BLOCKS, BLOCK, 2, side_by_side, together, scale_lanes), jnp.float32))
    first_page = len(jax.tree.leaves((plan, rows)))
    written: tuple[Any, Any] = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(blocks,),
            in_specs=[jax.tree.map(of_block, rows), in_place],
            out_specs=in_place,
            scratch_shapes=scratch,
        ),
        out_shape=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages),
        input_output_aliases={first_page + n: n for n in range(len(jax.tree.leaves(pages)))},
        # The slots come from the host, which checked them; on the chip a check takes longer than starting the copy.
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
        name="write_rows",
    )(*plan, rows, in_hbm(pages))
    return written


def kernel(
    tile_count: Ref,
    tiles: Ref,
    word_count: Ref,
    words: Ref,
    members: Ref,
    page_count: Ref,
    page_list: Ref,
    sorted_slots: Ref,
    sorted_rows: Ref,
    rows: tuple[Rows, Rows],
    _: Any,
    k_pages: KVPages,
    v_pages: KVPages,
    tile_ring: Ref,
    word_ring: Ref,
    arrived: Ref,
    scale_ring: Ref | None = None,
) -> None:
    """The heads of one grid step. Arguments are refs: of the plan, rows in VMEM, pages in HBM, rings in VMEM."""
    plan = Plan(tile_count, tiles, word_count, words, members, page_count, page_list, sorted_slots, sorted_rows)
    together = word_ring.shape[3]
    heads = pl.ds(pl.program_id(0) * together, together)
    pools = [as_words(kv_values(each)) for each in (k_pages, v_pages)]
    bits = [each.bits for each in rows]
    tokens = members.shape[0] // sorted_rows.shape[0]
    page_size = pools[0].shape[2] * tokens
    if tokens_of_tile(page_size, tokens, sorted_rows.shape[0]):
        write_tiles(plan, tokens, bits, pools, heads, tile_ring, arrived)
    write_words(plan, tokens, bits, pools, heads, word_ring, arrived)
    if scale_ring is not None:
        scales = [each.scales for each in (k_pages, v_pages) if isinstance(each, QuantizedKV)]
        write_scales(plan, page_size, [each.scales for each in rows], scales, heads, scale_ring, arrived)


def as_words(values: Ref) -> Ref:
    """An array of values in HBM, by its word rows: uint32 `[stored_heads, pages, word rows, lanes]`."""
    return values if values.dtype == jnp.uint32 else values.bitcast(jnp.uint32)


def write_tiles(
    plan: Plan, tokens: int, rows: list[Ref], pools: list[Ref], heads: Any, ring: Ref, arrived: Ref
) -> None:
    """Write the tiles; a word has `tokens` tokens."""
    listed, together = plan.sorted_rows.shape[0], ring.shape[3]

    def places(group: jax.Array) -> list[Ref]:
        page, word = plan.tiles[group], pl.multiple_of(plan.tiles[listed + group], TILE_WORDS)
        return [pool.at[heads, page, pl.ds(word, TILE_WORDS)] for pool in pools]

    def gather(group: jax.Array, slot: Ref) -> None:
        first = plan.tiles[2 * listed + group] * together
        for kind, of_batch in enumerate(rows):
            for (lane_tile, lanes), head in product(lane_tiles(ring), range(together)):
                words = jnp.zeros((TILE_WORDS, LANES), jnp.uint32)
                for token in range(tokens):
                    same_place = pl.ds(first + token * together + head, TILE_WORDS, stride=tokens * together)
                    words |= of_batch[lane_tile, same_place] << jnp.uint32(32 // tokens * token)
                slot[kind, head, :, lanes] = words

    change_in_place(plan.tile_count[0], places, None, gather, ring, arrived)


def write_words(
    plan: Plan, tokens: int, rows: list[Ref], pools: list[Ref], heads: Any, ring: Ref, arrived: Ref
) -> None:
    """Merge rows into their word rows, of `tokens` tokens."""
    listed, together = plan.sorted_rows.shape[0], ring.shape[3]
    one_token = (1 << 32 // tokens) - 1

    def places(group: jax.Array) -> list[Ref]:
        page, word = plan.words[group], plan.words[listed + group]
        return [pool.at[heads, page, word] for pool in pools]

    def is_partial(group: jax.Array) -> jax.Array:
        return plan.words[2 * listed + group] != 0

    def merge(group: jax.Array, slot: Ref) -> None:
        for (kind, of_batch), (lane_tile, lanes) in product(enumerate(rows), lane_tiles(ring)):
            word = slot[kind, :, lanes]
            for token in range(tokens):
                row, shift = plan.members[token * listed + group], 32 // tokens * token
                new = of_batch[lane_tile, pl.ds(jnp.maximum(row, 0) * together, together)] << jnp.uint32(shift)
                word = jnp.where(row >= 0, (word & ~jnp.uint32(one_token << shift)) | new, word)
            slot[kind, :, lanes] = word

    change_in_place(plan.word_count[0], places, is_partial, merge, ring, arrived)


def write_scales(
    plan: Plan, page_size: int, rows: list[Ref], scales: list[Ref], heads: Any, ring: Ref, arrived: Ref
) -> None:
    """Put the rows' scales into the lanes of their tokens, page by page."""
    side_by_side, together, _ = ring.shape[3:]
    lane = jax.lax.broadcasted_iota(jnp.int32, (together, LANES), 1)

    def places(group: jax.Array) -> list[Ref]:
        return [pool.at[heads, plan.pages[group], n] for pool in scales for n in range(side_by_side)]

    def merge(group: jax.Array, slot: Ref) -> None:
        first_slot = plan.pages[group] * page_size
        begin = plan.pages[plan.sorted_rows.shape[0] + group]

        def put_row(place: jax.Array) -> jax.Array:
            offset, row = plan.sorted_slots[place] - first_slot, plan.sorted_rows[place]
            for kind, of_batch in enumerate(rows):
                for n in range(side_by_side):
                    new = of_batch[pl.ds((row * side_by_side + n) * together, together)]
                    for lane_tile, lanes in lane_tiles(ring):
                        is_it = lane + lane_tile * LANES == offset
                        slot[kind, n, :, lanes] = jnp.where(is_it, new, slot[kind, n, :, lanes])
            return place + 1

        jax.lax.while_loop(lambda place: plan.sorted_slots[place] < first_slot + page_size, put_row, begin)

    change_in_place(plan.page_count[0], places, lambda _: jnp.bool_(True), merge, ring, arrived, part_axes=2)


def lane_tiles(ref: Ref) -> list[tuple[int, Any]]:
    """The lanes of its last axis, by registers: their numbers and slices."""
    return [(number, pl.ds(number * LANES, LANES)) for number in range(ref.shape[-1] // LANES)]


def change_in_place(
    count: jax.Array,
    places: Callable[[jax.Array], list[Ref]],
    is_partial: Callable[[jax.Array], jax.Array] | None,
    merge: Callable[[jax.Array, Ref], None],
    ring: Ref,
    arrived: Ref,
    *,
    part_axes: int = 1,
) -> None:
    """Bring `count` groups into the ring, change them there and write them back, with several on their way.

    A slot of the ring has a part for each of `places`, numbered by its first `part_axes` axes; that is where the parts
    of a group come from and go to, and those of no two groups overlap.
    `merge` changes a slot. Only groups that are `is_partial` are brought: of others nothing stays. None: no group is.
    """
    parts = list(np.ndindex(*ring.shape[2 : 2 + part_axes]))
    blocks = pl.cdiv(count, BLOCK)

    def groups(block: jax.Array) -> list[jax.Array]:
        return [block * BLOCK + n for n in range(BLOCK)]

    def to_bring(group: jax.Array) -> jax.Array:
        assert is_partial
        return (group < count) & is_partial(group)

    def start_copies(block: jax.Array, number: int, *, back: bool) -> None:
        into = jax.lax.rem(block, BLOCKS)
        for part, place in zip(parts, places(block * BLOCK + number), strict=True):
            slot = ring.at[(into, number, *part)]
            source, target = (slot, place) if back else (place, slot)
            pltpu.make_async_copy(source, target, arrived.at[int(back), into]).start()

    def bring(block: jax.Array) -> None:
        for number, group in enumerate(groups(block)):
            pl.when(to_bring(group))(partial(start_copies, block, number, back=False))

    def write_back(block: jax.Array) -> None:
        for number, group in enumerate(groups(block)):
            pl.when(group < count)(partial(start_copies, block, number, back=True))

    def wait(block: jax.Array, copied: jax.Array, *, back: bool) -> None:
        into = jax.lax.rem(block, BLOCKS)
        slots = ring.at[into, pl.ds(0, copied)]
        pltpu.make_async_copy(slots, slots, arrived.at[int(back), into]).wait()

    def wait_until_written(block: jax.Array) -> None:
        wait(block, jnp.minimum(BLOCK, count - block * BLOCK), back=True)

    def change(block: jax.Array) -> None:
        coming = block + AHEAD

        @pl.when(coming < blocks)
        def bring_ahead() -> None:
            pl.when(coming >= BLOCKS)(lambda: wait_until_written(coming - BLOCKS))
            if is_partial:
                bring(coming)

        if is_partial:
            are_brought = [to_bring(group).astype(jnp.int32) for group in groups(block)]
            brought = sum(are_brought[1:], are_brought[0])
            pl.when(brought > 0)(lambda: wait(block, brought, back=False))
        for n, group in enumerate(groups(block)):
            merge(group, ring.at[jax.lax.rem(block, BLOCKS), n])
        write_back(block)

    if is_partial:
        pl.loop(0, jnp.minimum(AHEAD, blocks))(bring)
    pl.loop(0, blocks)(change)
    pl.loop(jnp.maximum(0, blocks - BLOCKS), blocks)(wait_until_written)
