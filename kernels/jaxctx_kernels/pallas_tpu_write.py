"""Writing a step's keys and values on TPU: one Pallas kernel that changes the touched rows of the pages in place.

XLA's scatter takes some 1,800 bundles for 16 rows, for keys and values each, and copies whole pools of 8 bits. Here each
row costs a copy in, a merge in one or two registers, and a copy out, with several on their way at once.

What a page has in one sublane of 32 bits is a *word row*: one token of float32, two of bfloat16, four of 8 bits, with
all lanes. It is the least that can be copied, so keys and values are read, merged and written by word rows, of all KV
heads at once; one of which all tokens are new is not read. Scales are written by pages: a page has a row of lanes for
each head.

    plan, once a step     slots ─ sort ─▶ word rows, each with the rows of the batch that go there      (SMEM)
                                       └▶ pages, each with its range of sorted rows                     (SMEM, 8 bits)
    kernel                HBM: pages ──▶ ring of word rows ── merge with the rows in VMEM ──▶ HBM: the same pages

No two word rows (or pages) of a plan are the same, so nothing waits for what is on its way. Rows of the scratch page
are left out. The kernel never reads a page that no row goes to, and never looks at what a number means.

    write_rows ─┬─ plan_groups
                └─ run_kernel ── kernel ─┬─ WordRows  ─┐
                                         └─ ScaleRows ─┴─ change_in_place
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped, UInt32

from jaxctx_kernels.kv_cache import LANES, KVPages, QuantizedKV, encode, kv_values, quantize
from jaxctx_kernels.pallas_tpu import VMEM_BYTES, Ref

BLOCK = 4  # groups that are merged in one basic block
BLOCKS = 4  # that are on their way, in or out
AHEAD = 2  # blocks whose copies in are started before one is merged
WORD_BYTES = 4  # of a sublane
ROWS_BYTES = 48 * 2**20  # of VMEM, for the rows to write


class Plan(NamedTuple):
    """Which rows go where; all are int32."""

    word_count: Int32[Array, " one"]
    words: Int32[Array, " 3*rows"]  # of each word row its page; its offset there; 1 if not all of its tokens are new
    members: Int32[Array, " tokens*rows"]  # of each word row its first token's row of the batch, or -1; the second's, …
    page_count: Int32[Array, " one"]
    pages: Int32[Array, " rows"]
    page_begins: Int32[Array, " rows"]  # of each page, its first place in `sorted_slots`
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
    encoded = [encode_rows(pages, rows) for pages, rows in ((k_pages, k), (v_pages, v))]
    written: tuple[Any, Any] = run_kernel(plan, encoded, (k_pages, v_pages))
    return written


def plan_groups(slots: Int32[Array, " rows"], values: Any) -> Plan:
    """The plan for these slots of such an array of values. Layers of one step share it: XLA computes it once."""
    page_size, tokens = values.shape[2], WORD_BYTES // values.dtype.itemsize
    last = len(slots) - 1
    slots = jnp.pad(slots, (0, -len(slots) % BLOCK))  # to whole blocks, with rows of the scratch page
    numbers = jnp.arange(len(slots), dtype=jnp.int32)
    slots, rows = jax.lax.sort((slots, jnp.minimum(numbers, last)), num_keys=1)
    real, words, offsets = slots >= page_size, slots // tokens, slots % tokens
    members = []
    for token in range(tokens):
        member = jnp.full_like(rows, -1)
        for ahead in range(token + 1):  # of a word row's rows, this token's is among the first token + 1
            is_it = (jnp.roll(words, -ahead) == words) & (jnp.roll(offsets, -ahead) == token)
            member = jnp.where(is_it, jnp.roll(rows, -ahead), member)
        members.append(member)
    pages = slots // page_size
    is_partial = jnp.stack(members).min(0) < 0
    columns = pages, words - pages * (page_size // tokens), is_partial.astype(jnp.int32), *members
    word_count, *columns = keep_firsts(words, real, *columns)
    page_count, pages, begins = keep_firsts(pages, real, pages, numbers)
    behind = jnp.full((1,), jnp.iinfo(jnp.int32).max, jnp.int32)
    return Plan(
        word_count,
        jnp.concatenate(columns[:3]),
        jnp.concatenate(columns[3:]),
        page_count, pages, begins, jnp.concatenate([slots, behind]), rows
    )


def keep_firsts(groups: jax.Array, real: jax.Array, *columns: jax.Array) -> list[jax.Array]:
    """How many groups there are, int32 `[1]`, and of each column the first of each group, in front of anything.

    `groups` are ascending; of those that are not `real` none is kept.
    """
    first = real & ((groups != jnp.roll(groups, 1)) | (jnp.arange(len(groups)) == 0))
    kept = jax.lax.sort(((~first).astype(jnp.int32), *columns), num_keys=1, is_stable=True)
    return [first.sum(dtype=jnp.int32)[None], *kept[1:]]


class Rows(NamedTuple):
    """Keys (or values) of the batch, as the kernel takes them."""

    values: Shaped[Array, "rows stored_heads lanes"]  # float32, bfloat16 or the bits of 8 bits as int8
    scales: Any  # float32 [rows, side_by_side, stored_heads, LANES], the same in all lanes; or None


def encode_rows(pages: KVPages, rows: Shaped[Array, "rows kv_heads head_dim"]) -> Rows:
    """Rows as `pages` store them."""
    values, scales = rows, None
    if isinstance(pages, QuantizedKV):
        side_by_side = pages.scales.shape[2]
        values, scale = quantize(rows, pages.values.dtype)
        by_head = scale.reshape(len(rows), -1, side_by_side).swapaxes(1, 2)
        scales = jnp.broadcast_to(by_head[..., None], (*by_head.shape, LANES))
    stored_heads, _, _, lanes = kv_values(pages).shape
    values = encode(values, kv_values(pages).dtype).reshape(len(rows), stored_heads, lanes)
    if values.dtype.itemsize == 1:
        values = jax.lax.bitcast_convert_type(values, jnp.int8)
    return Rows(values, scales)


def run_kernel(plan: Plan, rows: list[Rows], pages: tuple[KVPages, KVPages]) -> Any:
    """Call the kernel, for as many KV heads at a time as fit into VMEM; pages are updated in place if donated."""
    count, stored_heads, lanes = rows[0].values.shape
    together = heads_at_once(rows[0])

    def of_heads(array: jax.Array) -> pl.BlockSpec:
        axis = array.ndim - 2
        block = (*array.shape[:axis], together, array.shape[-1])
        return pl.BlockSpec(block, lambda step, *_: (*[0] * axis, step, 0))

    in_place = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pages)
    rings = [pltpu.VMEM((BLOCKS, BLOCK, 2, together, lanes), jnp.uint32), pltpu.SemaphoreType.DMA((2, BLOCKS))]
    k_pages = pages[0]
    if isinstance(k_pages, QuantizedKV):
        side_by_side, scale_lanes = k_pages.scales.shape[2:]
        rings.append(pltpu.VMEM((BLOCKS, BLOCK, 2, side_by_side, together, scale_lanes), jnp.float32))
    leaves = len(jax.tree.leaves((plan, rows)))
    return pl.pallas_call(
        partial(kernel, together=together),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(plan),
            grid=(stored_heads // together,),
            in_specs=[jax.tree.map(of_heads, rows), in_place],
            out_specs=in_place,
            scratch_shapes=rings,
        ),
        out_shape=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages),
        input_output_aliases={leaves + n: n for n in range(len(jax.tree.leaves(pages)))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
        name="write_rows",
    )(*plan, rows, pages)


def heads_at_once(rows: Rows) -> int:
    """How many KV heads of all rows fit into VMEM, twice and of keys and values: all, or a multiple of a tile's."""
    _, heads, _ = rows.values.shape
    head_bytes = 4 * sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(rows)) // heads
    for together in range(heads, 0, -1):
        if heads % together == 0 and together * head_bytes <= ROWS_BYTES:
            return together
    return 1


def kernel(
    word_count: Ref,
    words: Ref,
    members: Ref,
    page_count: Ref,
    page_ids: Ref,
    page_begins: Ref,
    sorted_slots: Ref,
    sorted_rows: Ref,
    rows: list[Rows],
    _: Any,
    k_pages: KVPages,
    v_pages: KVPages,
    ring: Ref,
    arrived: Ref,
    scale_ring: Ref | None = None,
    *,
    together: int,
) -> None:
    """The heads of one grid step. Arguments are refs: of the plan, rows in VMEM, pages in HBM, rings in VMEM."""
    plan = Plan(word_count, words, members, page_count, page_ids, page_begins, sorted_slots, sorted_rows)
    heads, pages = pl.ds(pl.program_id(0) * together, together), (k_pages, v_pages)
    write_values(plan, [each.values for each in rows], [kv_values(each) for each in pages], heads, ring, arrived)
    if scale_ring is not None:
        scales = [each.scales for each in pages if isinstance(each, QuantizedKV)]
        tokens = WORD_BYTES // rows[0].values.dtype.itemsize
        page_size = as_words(kv_values(k_pages)).shape[2] * tokens
        write_scales(plan, page_size, [each.scales for each in rows], scales, heads, scale_ring, arrived)


def as_words(values: Ref) -> Ref:
    """An array of values in HBM, by its word rows: uint32 `[stored_heads, pages, word rows, lanes]`."""
    return values if values.dtype == jnp.uint32 else values.bitcast(jnp.uint32)


def write_values(plan: Plan, rows: list[Ref], values: list[Ref], heads: Any, ring: Ref, arrived: Ref) -> None:
    """Merge the rows into their word rows."""
    pools = [as_words(each) for each in values]
    tokens = WORD_BYTES // rows[0].dtype.itemsize
    listed = plan.sorted_rows.shape[0]

    def places(group: jax.Array) -> list[Ref]:
        page, word = plan.words[group], plan.words[listed + group]
        return [pool.at[heads, page, word] for pool in pools]

    def is_partial(group: jax.Array) -> jax.Array:
        return plan.words[2 * listed + group] != 0

    def merge(group: jax.Array, slot: Ref) -> None:
        for kind, of_batch in enumerate(rows):
            word = slot[kind]
            for token in range(tokens):
                row = plan.members[token * listed + group]
                new, mask = token_bits(of_batch[jnp.maximum(row, 0)], token)
                word = jnp.where(row >= 0, (word & ~mask) | new, word)
            slot[kind] = word

    change_in_place(plan.word_count[0], places, is_partial, merge, ring, arrived)


def token_bits(numbers: Shaped[Array, "heads lanes"], token: int) -> tuple[UInt32[Array, "heads lanes"], Any]:
    """Where these stand in their words as the `token`-th of them, zero elsewhere; and the mask of these bits."""
    bits = 8 * numbers.dtype.itemsize
    mask = jnp.uint32(((1 << bits) - 1) << (bits * token))
    if bits == 8:
        new = jax.lax.bitcast_convert_type(numbers.astype(jnp.int32), jnp.uint32) << jnp.uint32(bits * token)
        return new & mask, mask
    new = jax.lax.bitcast_convert_type(numbers.astype(jnp.float32), jnp.uint32)  # of bfloat16 the upper half
    return new >> jnp.uint32(32 - bits - bits * token), mask


def write_scales(plan: Plan, page_size: int, rows: list[Ref], scales: list[Ref], heads: Any, ring: Ref, arrived: Ref) -> None:
    """Put the rows' scales into the lanes of their tokens, page by page."""
    side_by_side, together, page_lanes = ring.shape[3:]
    lane = jax.lax.broadcasted_iota(jnp.int32, (together, LANES), 1)

    def places(group: jax.Array) -> list[Ref]:
        return [pool.at[heads, plan.pages[group], n] for pool in scales for n in range(side_by_side)]

    def merge(group: jax.Array, slot: Ref) -> None:
        first_slot = plan.pages[group] * page_size
        begin = plan.page_begins[group]

        def put_row(place: jax.Array) -> jax.Array:
            offset, row = plan.sorted_slots[place] - first_slot, plan.sorted_rows[place]
            for kind, of_batch in enumerate(rows):
                for n in range(side_by_side):
                    for start in range(0, page_lanes, LANES):
                        lanes = pl.ds(start, LANES)
                        old = slot[kind, n, :, lanes]
                        slot[kind, n, :, lanes] = jnp.where(lane + start == offset, of_batch[row, n], old)
            return place + 1

        jax.lax.while_loop(lambda place: plan.sorted_slots[place] < first_slot + page_size, put_row, begin)

    change_in_place(plan.page_count[0], places, lambda _: jnp.bool_(True), merge, ring, arrived)


def change_in_place(
    count: jax.Array,
    places: Callable[[jax.Array], list[Ref]],
    is_partial: Callable[[jax.Array], jax.Array],
    merge: Callable[[jax.Array, Ref], None],
    ring: Ref,
    arrived: Ref,
) -> None:
    """Bring `count` groups into the ring, change them there and write them back, with several on their way.

    `places` are where the parts of a group's slot of the ring come from and go to; those of no two groups overlap.
    `merge` changes a slot. Only what `is_partial` is brought: of another group nothing stays.
    """
    parts = list(np.ndindex(*ring.shape[2:-2]))
    blocks = pl.cdiv(count, BLOCK)

    def groups(block: jax.Array) -> list[jax.Array]:
        return [block * BLOCK + n for n in range(BLOCK)]

    def to_bring(group: jax.Array) -> jax.Array:
        return (group < count) & is_partial(group)

    def bring(block: jax.Array) -> None:
        into = jax.lax.rem(block, BLOCKS)
        for n, group in enumerate(groups(block)):

            @pl.when(to_bring(group))
            def start() -> None:
                for part, place in zip(parts, places(group), strict=True):
                    pltpu.make_async_copy(place, ring.at[(into, n, *part)], arrived.at[0, into]).start()

    def write_back(block: jax.Array) -> None:
        into = jax.lax.rem(block, BLOCKS)
        for n, group in enumerate(groups(block)):

            @pl.when(group < count)
            def start() -> None:
                for part, place in zip(parts, places(group), strict=True):
                    pltpu.make_async_copy(ring.at[(into, n, *part)], place, arrived.at[1, into]).start()

    def wait(block: jax.Array, brought: jax.Array, semaphore: int) -> None:
        into = jax.lax.rem(block, BLOCKS)
        copied = ring.at[into, pl.ds(0, brought)]
        pltpu.make_async_copy(copied, copied, arrived.at[semaphore, into]).wait()

    def wait_until_written(block: jax.Array) -> None:
        wait(block, jnp.minimum(BLOCK, count - block * BLOCK), 1)

    def change(block: jax.Array) -> None:
        coming = block + AHEAD

        @pl.when(coming < blocks)
        def bring_ahead() -> None:
            pl.when(coming >= BLOCKS)(lambda: wait_until_written(coming - BLOCKS))
            bring(coming)

        are_brought = [to_bring(group).astype(jnp.int32) for group in groups(block)]
        brought = sum(are_brought[1:], are_brought[0])
        pl.when(brought > 0)(lambda: wait(block, brought, 0))
        for n, group in enumerate(groups(block)):
            merge(group, ring.at[jax.lax.rem(block, BLOCKS), n])
        write_back(block)

    pl.loop(0, jnp.minimum(AHEAD, blocks))(bring)
    pl.loop(0, blocks)(change)
    pl.loop(jnp.maximum(0, blocks - BLOCKS), blocks)(wait_until_written)
