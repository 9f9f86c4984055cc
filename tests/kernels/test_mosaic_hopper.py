"""The Hopper kernel in JAX's GPU interpreter, which also looks for races, against dense float64 attention.

What only hardware shows is not tested here: speed, and what the interpreter leaves out (registers, layouts in memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import KVPages, Segment, metadata_shape, unpack_metadata

from .builders import dequantized, filled_pages, packed_metadata, random_sinks, zero_pages
from .interpreters import OLDEST_JAX_FOR_GPU, gpu_interpreter

if jax.__version_info__ < OLDEST_JAX_FOR_GPU:
    pytest.skip("the GPU interpreter of JAX 0.12 or newer is needed", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxctx_kernels import gpu_schedule, gpu_scores, mosaic_hopper

Generator = np.random.Generator


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Interpret kernels."""
    with gpu_interpreter():
        yield


def numbers(rng: Generator, scale: float, *shape: int) -> np.ndarray:
    return np.array(jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16), np.float64)


class Case:
    """A batch with its keys, values and queries, all that no row sees poisoned; `run` is one compiled program."""

    def __init__(
        self,
        rows: int,
        page_size: int,
        dim: int,
        group: int,
        kv_heads: int = 1,
        pool_pages: int = 60,
        dtype: str = "bfloat16",
        processors: int = 4,  # so few that units cross tiles and tiles have several units
        window: int | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        self.shape = metadata_shape(rows, page_size, pool_pages * page_size, pool_pages, "gpu", processors, window)
        self.soft_cap, self.has_sinks = soft_cap, has_sinks
        self.dim, self.group, self.kv_heads, self.pool_pages, self.dtype = dim, group, kv_heads, pool_pages, dtype
        self.run = jax.jit(self.attend)

    def attend(
        self, q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        metadata = unpack_metadata(self.shape, packed)
        return mosaic_hopper.attend(q, k, v, metadata, shape=self.shape, soft_cap=self.soft_cap, sinks=sinks)

    def check(
        self, rng: Generator, segments: list[Segment], visible: Callable, dense: Callable, scale: float | None = None
    ) -> None:
        """A token more or less among n changes a row's output by about n**-0.5 of it, bfloat16 weights by 0.002."""
        rows, size = self.shape.rows, self.shape.page_size
        scale = scale or rng.choice([1, 4])
        k, v = numbers(rng, scale, 2, self.kv_heads, self.pool_pages, size, self.dim)
        q = numbers(rng, 1, rows, self.kv_heads * self.group, self.dim)
        seen = visible(segments, size, self.pool_pages, self.shape.window)
        k[:, ~seen] = v[:, ~seen] = np.nan
        mine = np.concatenate([np.zeros(0, np.int64), *(np.arange(s.rows) + s.first_row for s in segments)])
        q[np.setdiff1d(np.arange(rows), mine)] = np.nan
        packed = packed_metadata(segments, self.shape)
        pools = filled_pages(k, self.dtype), filled_pages(v, self.dtype)
        sinks = random_sinks(rng, q.shape[1]) if self.has_sinks else None
        got = np.asarray(self.run(jnp.asarray(q, jnp.bfloat16), *pools, packed, sinks), np.float64)
        want = dense(q, *map(dequantized, pools), segments, size, None, self.shape.window, self.soft_cap, sinks)
        wrong = np.linalg.norm(got - want, axis=-1)
        assert (wrong <= 0.005 * np.linalg.norm(want, axis=-1)).all(), wrong.max()


@pytest.mark.parametrize(
    ("case", "dtype", "batches"),
    [
        (
            (50, 16, 64, 4),
            "bfloat16",
            ["one_prefix", "three_levels", "chunks_and_decode", "nothing"],
        ),
        pytest.param((50, 16, 64, 4), "bfloat16", ["no_sharing", "many_prefixes"], marks=pytest.mark.campaign),
        # Consumers split rows.
        pytest.param((128, 32, 128, 8), "bfloat16", ["chunks_and_decode", "three_levels"], marks=pytest.mark.campaign),
        (pytest.param((50, 64, 256, 1), "bfloat16", ["chunks_and_decode"], marks=pytest.mark.campaign)),
        # Products with rows to spare, pages of two steps.
        pytest.param((18, 128, 64, 3), "bfloat16", ["many_prefixes"], marks=pytest.mark.campaign),
        pytest.param((24, 32, 128, 4, 2), "bfloat16", ["no_sharing"], marks=pytest.mark.campaign),  # two KV heads
        ((50, 16, 64, 4), "int8", ["chunks_and_decode"]),
        pytest.param((50, 16, 64, 4), "int8", ["nothing"], marks=pytest.mark.campaign),
        pytest.param((50, 16, 128, 8), "float8_e4m3fn", ["three_levels"], marks=pytest.mark.campaign),
        (pytest.param((128, 32, 128, 2), "float8_e4m3fn", ["chunks_and_decode"], marks=pytest.mark.campaign)),
        (pytest.param((24, 64, 256, 1, 2), "int8", ["one_prefix"], marks=pytest.mark.campaign)),
        (pytest.param((130, 128, 256, 3), "int8", ["chunks_and_decode"], marks=pytest.mark.campaign)),
    ],
)
def test_equals_dense_attention(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    case: tuple[int, ...],
    dtype: str,
    batches: list[str],
) -> None:
    """Numbers of 8 bits are compared as they are kept, with their scales."""
    of_case = Case(*case, dtype=dtype)
    for kind in batches:
        print(kind)
        of_case.check(rng, grow(kind, case[0], case[1], 60).segments, visible, dense)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (8, "bfloat16"),
        (pytest.param(128, "bfloat16", marks=pytest.mark.campaign)),
        (pytest.param(8, "float8_e4m3fn", marks=pytest.mark.campaign)),
        pytest.param(128, "int8", marks=pytest.mark.campaign),
    ],
)
def test_no_nan_crosses_to_another_sequence(rng: Generator, grow: Callable, rows: int, dtype: str) -> None:
    """A sequence whose query, keys or values are NaN spoils its own rows only, though others share its tile."""
    forest = grow("nothing", rows, 16, 60)
    prefix = forest.pages(20)
    for _ in range(4):
        forest.add(prefix, 2, 1)
    case, bad = Case(rows, 16, 64, 4, dtype=dtype), forest.segments[1]
    k, v = numbers(rng, 1, 2, 1, 60, 16, 64)
    q = numbers(rng, 1, rows, 4, 64)
    packed = packed_metadata(forest.segments, case.shape)
    clean = np.array(case.run(q, filled_pages(k, dtype), filled_pages(v, dtype), packed))
    q[bad.first_row] = k[:, bad.pages[20]] = np.nan
    v[:, bad.pages[21]] = np.inf
    spoilt = np.array(case.run(q, filled_pages(k, dtype), filled_pages(v, dtype), packed))
    assert np.isnan(spoilt[bad.first_row]).any()
    spoilt[bad.first_row] = clean[bad.first_row]
    np.testing.assert_array_equal(spoilt, clean)


@pytest.mark.parametrize(
    ("in_registers", "rows", "dim", "dtype"),
    [
        pytest.param(False, 40, 64, "bfloat16", marks=pytest.mark.campaign),
        pytest.param(True, 40, 64, "bfloat16", marks=pytest.mark.campaign),
        pytest.param(True, 40, 64, "int8", marks=pytest.mark.campaign),
        # Values are multiplied while the next step's weights are computed, in the last tile by one consumer only. Of 8
        # bits consumers widen for each other.
        (True, 147, 64, "bfloat16"),
        pytest.param(True, 147, 64, "int8", marks=pytest.mark.campaign),
        pytest.param(False, 147, 64, "int8", marks=pytest.mark.campaign),
        pytest.param(True, 147, 128, "bfloat16", marks=pytest.mark.campaign),
        pytest.param(True, 40, 256, "bfloat16", marks=pytest.mark.campaign),
    ],
)
def test_full_steps(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    in_registers: bool,
    rows: int,
    dim: int,
    dtype: str,
) -> None:
    """A prompt's rows over a long prefix, whose steps need no mask but the last, beside a row that is not of it."""
    forest = grow("nothing", rows, 16, 60)
    prompt = Segment(0, rows - 3, 330 - rows, forest.pages(21))
    segments = [prompt, Segment(rows - 2, 1, 70, forest.pages(5))]
    case = Case(rows, 16, dim, 4, dtype=dtype)
    with gpu_interpreter(in_registers=in_registers):
        assert full_steps(case, segments) >= 4
        case.check(rng, segments, visible, dense)


@pytest.mark.parametrize(
    ("in_registers", "case", "dtype", "window", "soft_cap"),
    [
        (True, (40, 16, 64, 4), "bfloat16", 170, 2.0),
        # Consumers clear for each other.
        pytest.param(True, (140, 128, 64, 4), "int8", 170, None, marks=pytest.mark.campaign),
        pytest.param(False, (40, 32, 64, 8), "float8_e4m3fn", 220, 30.0, marks=pytest.mark.campaign),
    ],
)
def test_full_steps_of_windows(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    in_registers: bool,
    case: tuple[int, ...],
    dtype: str,
    window: int,
    soft_cap: float | None,
) -> None:
    """A prompt's rows, of whose steps those between windows' beginnings and ends need no mask, beside another row."""
    rows, page_size = case[:2]
    forest = grow("nothing", rows, page_size, 60)
    prompt = Segment(0, rows - 3, 463 - rows, forest.pages(-(-460 // page_size)))
    segments = [prompt, Segment(rows - 2, 1, 70, forest.pages(5))]
    of_case = Case(*case, dtype=dtype, window=window, soft_cap=soft_cap)
    with gpu_interpreter(in_registers=in_registers):
        assert full_steps(of_case, segments) >= 1
        of_case.check(rng, segments, visible, dense)


@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [
        pytest.param(70, None, marks=pytest.mark.campaign),
        pytest.param(9, 30.0, marks=pytest.mark.campaign),
        pytest.param(None, 0.001, marks=pytest.mark.slow),  # scores are nearly all alike
    ],
)
def test_windows_and_caps_in_trees(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """A chunk behind a prefix of which another row sees the end, or nothing, and rows of their own."""
    forest = grow("nothing", 24, 16, 60)
    prefix = forest.pages(10)
    for own_pages, rows in ((4, 15), (1, 1), (9, 1)):
        forest.add(prefix, own_pages, rows)
    forest.add(forest.pages(0), 12, 2)
    Case(24, 16, 64, 4, window=window, soft_cap=soft_cap).check(rng, forest.segments, visible, dense)


@pytest.mark.parametrize(
    ("case", "dtype", "window", "soft_cap"),
    [
        ((24, 16, 64, 4), "bfloat16", None, None),
        pytest.param((24, 16, 64, 3, 2), "int8", 70, 5.0, marks=pytest.mark.slow),  # rows of products to spare
        # Consumers split rows.
        pytest.param((130, 32, 128, 8), "bfloat16", None, 30.0, marks=pytest.mark.campaign),
        pytest.param((140, 16, 256, 2), "float8_e4m3fn", 40, None, marks=pytest.mark.campaign),
    ],
)
def test_sinks(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    case: tuple[int, ...],
    dtype: str,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Tiles of several units, whose partial results have the sink once; and rows of padding."""
    forest = grow("nothing", case[0], case[1], 60)
    prefix = forest.pages(10)
    for own_pages, rows in ((4, 15), (1, 1), (9, 1)):
        forest.add(prefix, own_pages, rows)
    forest.add(forest.pages(0), 12, 2)
    Case(*case, dtype=dtype, window=window, soft_cap=soft_cap, has_sinks=True).check(
        rng, forest.segments, visible, dense
    )


def full_steps(case: Case, segments: list[Segment]) -> int:
    """How many steps of some pair need no mask."""
    config = mosaic_hopper.tile_config(case.shape.rows, case.kv_heads, case.group, case.shape.processors)
    if case.shape.window is not None:
        config = replace(config, window=gpu_schedule.Window(case.shape.window, case.shape.page_size))
    row = gpu_schedule.rows_of_products(case.shape.rows, config)
    metadata = unpack_metadata(case.shape, packed_metadata(segments, case.shape))
    visible_tokens = jnp.asarray(metadata.visible_tokens).at[row].get(mode="fill", fill_value=0)
    pairs = gpu_schedule.build_schedule(metadata, visible_tokens, config).pairs
    steps = pairs[:, gpu_schedule.STEP_END] - pairs[:, gpu_schedule.STEP_BEGIN]
    masked = 0 if case.shape.window is None else pairs[:, gpu_schedule.MASKED_STEPS]
    return int((jnp.minimum(pairs[:, gpu_schedule.FULL_STEPS], steps) - masked).max())


def test_one_program_serves_every_tree(rng: Generator, grow: Callable, kinds: list[str]) -> None:
    case = Case(24, 16, 64, 4)
    k = filled_pages(numbers(rng, 1, 1, 60, 16, 64), "bfloat16")
    for kind in ("nothing", "no_sharing"):
        packed = packed_metadata(grow(kind, 24, 16, 60).segments, case.shape)
        case.run(numbers(rng, 1, 24, 4, 64), k, k, packed)
    assert case.run._cache_size() == 1


@pytest.mark.parametrize(
    ("dim", "page_size", "heads", "dtype"),
    [
        (96, 16, 4, "bfloat16"),
        (64, 8, 4, "bfloat16"),
        (64, 16, 65, "bfloat16"),
        (64, 16, 4, "float32"),
        (96, 16, 4, "int8"),
        (64, 8, 4, "float8_e4m3fn"),
    ],
)
def test_refuses_what_it_is_not_made_for(dim: int, page_size: int, heads: int, dtype: str) -> None:
    shape = metadata_shape(1, page_size, 64, 4, "gpu")
    pool = zero_pages(1, 4, page_size, dim, dtype)
    metadata = unpack_metadata(shape, packed_metadata([], shape))
    with pytest.raises(ValueError, match="no kernel for"):
        mosaic_hopper.attend(jnp.zeros((1, heads, dim)), pool, pool, metadata, shape=shape)


def spoil_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows see a token less than they should."""
    build = mosaic_hopper.build_schedule
    monkeypatch.setattr(
        mosaic_hopper,
        "build_schedule",
        lambda metadata, visible, config: build(metadata, visible - (visible > 1), config),
    )


def spoil_full_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step more than should counts as one in which all rows see all tokens."""
    count = gpu_schedule.count_steps

    def spoilt(*of: Any) -> gpu_schedule.StepCounts:
        counts = count(*of)
        return counts._replace(full_steps=counts.full_steps + 1)

    monkeypatch.setattr(gpu_schedule, "count_steps", spoilt)


def spoil_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What weights are relative to stays as low as it starts."""
    monkeypatch.setattr(mosaic_hopper, "MAXIMUM_SLACK", float("inf"))


def spoil_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values past an item's last token stay."""
    monkeypatch.setattr(mosaic_hopper, "jnp", SimpleNamespace(**{**vars(jnp), "zeros_like": lambda x: x}))


def spoil_widening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers multiply what they widen for each other before the other is done."""
    careless(monkeypatch, "widen", "barrier_arrive", "barrier_wait")


def careless(monkeypatch: pytest.MonkeyPatch, part: str, *leaves_out: str) -> None:
    """A part of the kernel leaves something out."""
    nothing = dict.fromkeys(leaves_out, lambda *of: None)
    careful, without = getattr(mosaic_hopper, part), SimpleNamespace(**{**vars(plgpu), **nothing})

    def spoilt(*of: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(mosaic_hopper, "plgpu", without)
            return careful(*of)

    monkeypatch.setattr(mosaic_hopper, part, spoilt)


def spoil_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer does not wait until a buffer is free."""
    careless(monkeypatch, "produce", "barrier_wait")


def spoil_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers do not commit what they read before a copy may overwrite it."""
    careless(monkeypatch, "consume", "commit_smem")


def spoil_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a step's tokens have the first one's."""
    concatenate = lambda pages: jnp.full((64,), pages[0][0])  # noqa: E731
    monkeypatch.setattr(mosaic_hopper, "jnp", SimpleNamespace(**{**vars(jnp), "concatenate": concatenate}))


@pytest.mark.parametrize(
    ("spoil", "dtype", "found"),
    [
        (spoil_length, "bfloat16", "assert"),
        pytest.param(spoil_maximum, "bfloat16", "assert", marks=pytest.mark.campaign),
        pytest.param(spoil_clearing, "bfloat16", "assert", marks=pytest.mark.slow),
        (pytest.param(spoil_clearing, "float8_e4m3fn", "assert", marks=pytest.mark.campaign)),
        (spoil_waiting, "bfloat16", "RACE DETECTED|Computation failed"),
        (pytest.param(spoil_waiting, "int8", "RACE DETECTED|Computation failed", marks=pytest.mark.campaign)),
        pytest.param(spoil_commits, "int8", "RACE DETECTED|Computation failed", marks=pytest.mark.slow),
        (spoil_scales, "int8", "assert"),
        (spoil_full_steps, "bfloat16", "assert"),
        pytest.param(spoil_widening, "int8", "RACE DETECTED|Computation failed", marks=pytest.mark.campaign),
    ],
)
def test_the_check_finds(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable,
    dtype: str,
    found: str,
) -> None:
    rows = 128 if spoil is spoil_widening else 16
    segments = [Segment(0, rows, 460 - rows, grow("nothing", rows, 16, 60).pages(30))]
    spoil(monkeypatch)
    with pytest.raises(Exception, match=found):
        Case(rows, 16, 64, 4, dtype=dtype, processors=1).check(  # as many steps as buffers and more
            rng, segments, visible, dense, scale=1
        )


def spoil_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows see a token more than their window has."""
    monkeypatch.setattr(mosaic_hopper, "Window", lambda tokens, page_size: gpu_schedule.Window(tokens + 1, page_size))


def spoil_narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows see a token less than their window has."""
    monkeypatch.setattr(mosaic_hopper, "Window", lambda tokens, page_size: gpu_schedule.Window(tokens - 1, page_size))


def spoil_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values before all windows stay."""
    clear = mosaic_hopper.clear_rows
    monkeypatch.setattr(mosaic_hopper, "clear_rows", lambda *of: clear(*of[:-1], None))


def spoil_masked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step less than should counts as one in which windows begin."""
    count = gpu_schedule.count_steps

    def spoilt(*of: Any) -> gpu_schedule.StepCounts:
        counts = count(*of)
        assert counts.before is not None
        return counts._replace(before=counts.before._replace(masked_steps=counts.before.masked_steps - 1))

    monkeypatch.setattr(gpu_schedule, "count_steps", spoilt)


def spoil_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores have no cap."""
    monkeypatch.setattr(mosaic_hopper, "capped", lambda score, unit, soft_cap: (score, unit))


def spoil_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap is half as high."""
    monkeypatch.setattr(
        mosaic_hopper, "capped", lambda score, unit, soft_cap: gpu_scores.capped(score, unit, soft_cap / 2)
    )


@pytest.mark.parametrize(
    "spoil",
    [
        *(pytest.param(spoil, marks=pytest.mark.slow) for spoil in (spoil_masked_steps, spoil_hidden)),
        *(
            pytest.param(spoil, marks=pytest.mark.campaign)
            for spoil in (spoil_window, spoil_narrow_window, spoil_cap, spoil_unit)
        ),
    ],
)
def test_the_check_finds_in_windows(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable,
) -> None:
    segments = [Segment(0, 16, 201, grow("nothing", 16, 16, 60).pages(14))]
    spoil(monkeypatch)
    window = 160 if spoil is spoil_masked_steps else 40
    with pytest.raises(AssertionError):
        Case(16, 16, 64, 4, processors=1, window=window, soft_cap=2.0).check(rng, segments, visible, dense, scale=1)
