"""The schedule of NVIDIA GPUs, which is plain JAX: every row's tokens are in exactly one step of one unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import Segment, gpu_schedule, metadata_shape, unpack_metadata
from jaxctx_kernels.gpu_schedule import MIN_STEPS, SIDE, Schedule, TileConfig, Window
from jaxctx_kernels.metadata import AttentionMetadata

from .builders import packed_metadata

PAGE_SIZE, POOL_PAGES = 16, 60
CONFIGS = [
    TileConfig(group=4, rows=16, parts=1, ways=2, tiles=4, units=3),
    TileConfig(group=3, rows=21, parts=2, ways=1, tiles=2, units=7),  # products with rows to spare
]


def batch(segments: list[Segment], config: TileConfig) -> tuple[AttentionMetadata, Schedule]:
    """The metadata of a batch of 50 rows, and its schedule, as numpy arrays."""
    window = None if config.window is None else config.window.tokens
    shape = metadata_shape(50, PAGE_SIZE, POOL_PAGES * PAGE_SIZE, POOL_PAGES, "gpu", processors=4, window=window)
    metadata = unpack_metadata(shape, packed_metadata(segments, shape))
    row = gpu_schedule.rows_of_products(50, config)
    visible_tokens = jnp.asarray(metadata.visible_tokens).at[row].get(mode="fill", fill_value=0)
    schedule = gpu_schedule.build_schedule(metadata, visible_tokens, config)
    return metadata, Schedule(*map(np.asarray, schedule))


def pairs_of(schedule: Schedule) -> np.ndarray:
    """The pairs that have steps, `[pairs, fields]`."""
    return schedule.pairs[schedule.pairs[:, gpu_schedule.STEP_BEGIN] < gpu_schedule.NO_STEP]


def tokens_in_steps(schedule: Schedule, config: TileConfig) -> np.ndarray:
    """How many tokens of items each row sees in the steps of its tile's pairs, `[tiles * tile_rows]`."""
    seen = np.zeros(config.tiles * config.tile_rows, np.int64)
    visible = schedule.visible_tokens[:, : config.rows * config.group : config.group].reshape(-1)
    for tile, (first, end) in enumerate(zip(schedule.tiles[:-1], schedule.tiles[1:], strict=True)):
        for pair in schedule.pairs[first:end]:
            begin, stop, full, first_row, rows, _, tokens, first_token = pair
            of_tile = np.arange(max(first_row, 0), min(first_row + rows, config.tile_rows)) + tile * config.tile_rows
            sees = np.clip(visible[of_tile] - first_token, 0, tokens)
            assert (sees <= (stop - begin) * SIDE).all(), "a step is missing"
            assert (sees >= min(full, stop - begin) * SIDE).all(), "a step that counts as full is not"
            seen[of_tile] += sees
    return seen


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["one_prefix", "three_levels", "chunks_and_decode", "nothing"])
def test_every_row_sees_its_tokens_once(grow: Callable, kind: str, config: TileConfig) -> None:
    metadata, schedule = batch(grow(kind, 50, PAGE_SIZE, POOL_PAGES).segments, config)
    want = np.zeros(config.tiles * config.tile_rows, np.int64)
    want[:50] = metadata.visible_tokens
    np.testing.assert_array_equal(tokens_in_steps(schedule, config), want)


def windowed_tokens_in_steps(schedule: Schedule, config: TileConfig, window: int) -> np.ndarray:
    """As `tokens_in_steps`, of rows with a sliding window. Pairs begin where one of their rows sees something."""
    seen = np.zeros(config.tiles * config.tile_rows, np.int64)
    visible = schedule.visible_tokens[:, : config.rows * config.group : config.group].reshape(-1)
    for tile, (first, end) in enumerate(zip(schedule.tiles[:-1], schedule.tiles[1:], strict=True)):
        for pair in schedule.pairs[first:end]:
            begin, stop, full, first_row, rows, _, tokens, first_token, masked, hidden = pair
            of_tile = np.arange(max(first_row, 0), min(first_row + rows, config.tile_rows)) + tile * config.tile_rows
            ends = np.clip(visible[of_tile] - first_token, 0, tokens)
            begins = np.maximum(visible[of_tile] - first_token - window, 0)
            sees = np.maximum(ends - begins, 0)
            assert (ends[sees > 0] <= (stop - begin) * SIDE).all(), "a step is missing"
            assert begins[sees > 0].min() == hidden < max(SIDE, PAGE_SIZE), "pairs begin too early or too late"
            for step in range(max(masked, 0), min(full, stop - begin)):
                assert (begins <= step * SIDE).all(), "a step that counts as full is not"
                assert (ends >= (step + 1) * SIDE).all(), "a step that counts as full is not"
            seen[of_tile] += sees
    return seen


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "window",
    [
        70,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(window, marks=pytest.mark.campaign) for window in (15, 16, 200, 5000)),
    ],
)
@pytest.mark.parametrize("kind", ["three_levels", "chunks_and_decode"])
def test_every_row_sees_its_window_once(grow: Callable, kind: str, window: int, config: TileConfig) -> None:
    config = replace(config, window=Window(window, PAGE_SIZE))
    metadata, schedule = batch(grow(kind, 50, PAGE_SIZE, POOL_PAGES).segments, config)
    want = np.zeros(config.tiles * config.tile_rows, np.int64)
    want[:50] = np.minimum(metadata.visible_tokens, window)
    np.testing.assert_array_equal(windowed_tokens_in_steps(schedule, config, window), want)


@pytest.mark.parametrize("page_size", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_tiles_leave_out_what_is_before_their_windows(page_size: int) -> None:
    """Of a prompt's chunk each tile of 16 rows begins less than a page, or a step, before its first row's window."""
    window, rows, position = 100, 64, 400
    shape = metadata_shape(rows, page_size, 1024, 70, "gpu", processors=4, window=window)
    pages = np.arange(1, 1024 // page_size + 1, dtype=np.int32)
    packed = packed_metadata([Segment(0, rows, position, pages)], shape)
    metadata = jax.tree.map(jnp.asarray, unpack_metadata(shape, packed))
    config = replace(CONFIGS[0], window=Window(window, page_size))
    row = gpu_schedule.rows_of_products(rows, config)
    visible_tokens = metadata.visible_tokens.at[row].get(mode="fill", fill_value=0)
    schedule = Schedule(*map(np.asarray, gpu_schedule.build_schedule(metadata, visible_tokens, config)))
    for tile, pair in enumerate(pairs_of(schedule)):  # all is one item
        first_seen = position + 16 * tile + 1 - window
        assert pair[gpu_schedule.FIRST_TOKEN] + pair[gpu_schedule.HIDDEN] == first_seen
        assert pair[gpu_schedule.HIDDEN] < max(SIDE, page_size)
        page = metadata.pages[pair[gpu_schedule.FIRST_ENTRY]]
        assert page == pages[pair[gpu_schedule.FIRST_TOKEN] // page_size]
    assert tile == 3


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["one_prefix", "chunks_and_decode", "nothing"])
def test_units_share_all_steps_evenly(grow: Callable, kind: str, config: TileConfig) -> None:
    """They follow each other without a gap, name the pairs and tiles of their steps, and none has more than a share."""
    _, schedule = batch(grow(kind, 50, PAGE_SIZE, POOL_PAGES).segments, config)
    pairs, total = pairs_of(schedule), 0
    share = max(MIN_STEPS, -(-int(max(pairs[:, gpu_schedule.STEP_END], default=0)) // config.units))
    for begin, end, pair_begin, pair_end, tile_begin, tile_end in schedule.units:
        if begin == end:
            continue
        assert begin == total
        assert end - begin <= share
        total = end
        inside = (pairs[:, gpu_schedule.STEP_END] > begin) & (pairs[:, gpu_schedule.STEP_BEGIN] < end)
        np.testing.assert_array_equal(np.flatnonzero(inside), np.arange(pair_begin, pair_end))
        assert schedule.tiles[tile_begin] <= pair_begin < schedule.tiles[tile_begin + 1]
        assert schedule.tiles[tile_end - 1] <= pair_end - 1 < schedule.tiles[tile_end]
    assert total == max(pairs[:, gpu_schedule.STEP_END], default=0)


@pytest.mark.parametrize("config", CONFIGS)
def test_slots_of_tiles_are_what_units_write(grow: Callable, config: TileConfig) -> None:
    """Unit u writes tile t at slot u + t: no slot twice, and each tile's slots are those from .. to."""
    _, schedule = batch(grow("chunks_and_decode", 50, PAGE_SIZE, POOL_PAGES).segments, config)
    written: dict[int, list[int]] = {tile: [] for tile in range(config.tiles)}
    for unit, (begin, end, *_, tile_begin, tile_end) in enumerate(schedule.units):
        if begin < end:
            for tile in range(tile_begin, tile_end):
                written[tile].append(unit + tile)
    for tile, slots in written.items():
        assert slots == list(range(*schedule.slots[tile]))
    everything = [slot for slots in written.values() for slot in slots]
    assert len(everything) == len(set(everything)) > 0
    assert max(everything) < config.units + config.tiles - 1


def test_a_prompt_has_full_steps(grow: Callable) -> None:
    """40 rows behind a prefix of 290 tokens: four steps of 64 need no mask in every tile."""
    forest = grow("nothing", 50, PAGE_SIZE, POOL_PAGES)
    _, schedule = batch([Segment(0, 40, 290, forest.pages(21))], CONFIGS[0])
    assert (pairs_of(schedule)[:, gpu_schedule.FULL_STEPS] >= 4).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_queries_and_outputs_are_moved_to_products_and_back(grow: Callable, config: TileConfig) -> None:
    metadata, _ = batch(grow("one_prefix", 50, PAGE_SIZE, POOL_PAGES).segments, config)
    metadata = jax.tree.map(jnp.asarray, metadata)
    heads = 2 * config.group
    q = jnp.arange(50 * heads * 8).reshape(50, heads, 8) % 256  # exact in bfloat16
    row = gpu_schedule.rows_of_products(50, config)
    products = gpu_schedule.gather_queries(q, metadata, row, kv_heads=2)
    assert products.shape == (2, config.products, SIDE, 8)
    back = gpu_schedule.scatter_outputs(products.astype(jnp.float32), metadata, config, 50, heads)
    np.testing.assert_array_equal(back, q)
