"""The kernel for NVIDIA GPUs since Ampere in JAX's GPU interpreter, against dense float64 attention.

What only hardware shows is not tested: speed, and what the interpreter leaves out (registers, layouts in memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import KVPages, Segment, metadata_shape, unpack_metadata

from .builders import dequantized, filled_pages, packed_metadata, random_sinks, zero_pages
from .interpreters import OLDEST_JAX_FOR_GPU, gpu_interpreter

if jax.__version_info__ < OLDEST_JAX_FOR_GPU:
    pytest.skip("the GPU interpreter of JAX 0.12 or newer is needed", allow_module_level=True)

from jaxctx_kernels import gpu_schedule, gpu_scores, mosaic_mma

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
        kv_heads: int,
        dtype: str,
        window: int | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        self.pool_pages = 60
        # A device so small that units cross tiles and tiles have several units.
        tokens = self.pool_pages * page_size
        self.shape = metadata_shape(rows, page_size, tokens, self.pool_pages, "mma", 2, window)
        self.soft_cap, self.has_sinks = soft_cap, has_sinks
        self.dim, self.group, self.kv_heads, self.dtype = dim, group, kv_heads, dtype
        self.run = jax.jit(self.attend)

    def attend(
        self, q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        metadata = unpack_metadata(self.shape, packed)
        return mosaic_mma.attend(q, k, v, metadata, shape=self.shape, soft_cap=self.soft_cap, sinks=sinks)

    def check(self, rng: Generator, segments: list[Segment], visible: Callable, dense: Callable) -> None:
        """A token more or less among n changes a row's output by about n**-0.5 of it, bfloat16 weights by 0.002."""
        rows, size = self.shape.rows, self.shape.page_size
        k, v = numbers(rng, rng.choice([1, 4]), 2, self.kv_heads, self.pool_pages, size, self.dim)
        q = numbers(rng, 1, rows, self.kv_heads * self.group, self.dim)
        seen = visible(segments, size, self.pool_pages, self.shape.window)
        k[:, ~seen] = v[:, ~seen] = np.nan
        mine = np.concatenate([np.zeros(0, np.int64), *(np.arange(s.rows) + s.first_row for s in segments)])
        q[np.setdiff1d(np.arange(rows), mine)] = np.nan
        pools = filled_pages(k, self.dtype), filled_pages(v, self.dtype)
        sinks = random_sinks(rng, q.shape[1]) if self.has_sinks else None
        packed = packed_metadata(segments, self.shape)
        got = np.asarray(self.run(jnp.asarray(q, jnp.bfloat16), *pools, packed, sinks))
        want = dense(q, *map(dequantized, pools), segments, size, None, self.shape.window, self.soft_cap, sinks)
        wrong = np.linalg.norm(got - want, axis=-1)
        assert (wrong <= 0.005 * np.linalg.norm(want, axis=-1)).all(), wrong.max()


@pytest.mark.parametrize(
    ("case", "dtype", "batches"),
    [
        ((50, 16, 64, 4, 1), "bfloat16", ["three_levels", "chunks_and_decode", "nothing"]),
        pytest.param(
            (50, 16, 80, 3, 1), "float8_e4m3fn", ["chunks_and_decode"], marks=pytest.mark.slow
        ),  # rows to spare
        ((24, 64, 96, 1, 2), "int8", ["one_prefix"]),  # two KV heads
        pytest.param((50, 16, 64, 4, 1), "bfloat16", ["no_sharing", "many_prefixes"], marks=pytest.mark.campaign),
        pytest.param((130, 32, 128, 8, 1), "bfloat16", ["chunks_and_decode"], marks=pytest.mark.campaign),
        pytest.param((24, 128, 256, 1, 1), "bfloat16", ["one_prefix"], marks=pytest.mark.campaign),  # values come late
        pytest.param((50, 192, 112, 7, 1), "float8_e4m3fn", ["three_levels"], marks=pytest.mark.campaign),
        pytest.param((18, 32, 256, 64, 1), "int8", ["many_prefixes"], marks=pytest.mark.campaign),  # a row fills a tile
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
    ("case", "dtype", "window", "soft_cap", "has_sinks"),
    [
        ((24, 16, 64, 4, 1), "bfloat16", 70, 2.0, False),
        ((24, 16, 64, 4, 1), "bfloat16", None, None, True),
        pytest.param((24, 16, 80, 3, 1), "int8", 9, None, False, marks=pytest.mark.slow),
        pytest.param((24, 16, 80, 3, 2), "int8", 70, 5.0, True, marks=pytest.mark.slow),  # rows of products to spare
        pytest.param((24, 128, 64, 1, 2), "float8_e4m3fn", 128, 30.0, False, marks=pytest.mark.campaign),
        pytest.param(
            (24, 32, 64, 2, 1), "bfloat16", None, 0.001, False, marks=pytest.mark.campaign
        ),  # nearly all alike
    ],
)
def test_windows_caps_and_sinks(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    case: tuple[int, ...],
    dtype: str,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    """A chunk behind a prefix of which another row sees the end, or nothing, and rows of their own."""
    forest = grow("nothing", *case[:2], 60)
    prefix = forest.pages(10)
    for own_pages, rows in ((4, 15), (1, 1), (9, 1)):
        forest.add(prefix, own_pages, rows)
    forest.add(forest.pages(0), 12, 2)
    of_case = Case(*case, dtype=dtype, window=window, soft_cap=soft_cap, has_sinks=has_sinks)
    of_case.check(rng, forest.segments, visible, dense)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.campaign) for dtype in ("int8", "float8_e4m3fn"))]
)
def test_no_nan_crosses_to_another_sequence(rng: Generator, grow: Callable, dtype: str) -> None:
    """A sequence whose query, keys or values are NaN spoils its own rows only, though others share its tile."""
    forest = grow("nothing", 8, 16, 60)
    prefix = forest.pages(20)
    for _ in range(4):
        forest.add(prefix, 2, 1)
    case, bad = Case(8, 16, 64, 4, 1, dtype), forest.segments[1]
    k, v = numbers(rng, 1, 2, 1, 60, 16, 64)
    q = numbers(rng, 1, 8, 4, 64)
    packed = packed_metadata(forest.segments, case.shape)
    clean = np.array(case.run(q, filled_pages(k, dtype), filled_pages(v, dtype), packed))
    for spoil_keys in (True, False):
        spoilt_q, spoilt_k, spoilt_v = q.copy(), k.copy(), v.copy()
        if spoil_keys:
            spoilt_q[bad.first_row] = spoilt_k[:, bad.pages[20]] = np.nan
        spoilt_v[:, bad.pages[21]] = np.inf
        spoilt = np.array(case.run(spoilt_q, filled_pages(spoilt_k, dtype), filled_pages(spoilt_v, dtype), packed))
        assert not np.isfinite(spoilt[bad.first_row]).any()
        spoilt[bad.first_row] = clean[bad.first_row]
        np.testing.assert_array_equal(spoilt, clean)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_widening_is_exact(dtype: str) -> None:
    """Every number of 8 bits, subnormal ones and both zeros, but for NaN, which becomes 480 of its sign."""
    stored = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.dtype(dtype))
    want = np.array(stored, np.float32)
    if dtype != "int8":
        want[[0x7F, 0xFF]] = 480, -480
    got = np.array(mosaic_mma.widen(stored), np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize(
    ("dim", "page_size", "heads", "dtype"),
    [
        (72, 16, 4, "bfloat16"),
        (272, 16, 4, "bfloat16"),
        (64, 8, 4, "int8"),
        (64, 48, 4, "bfloat16"),
        (64, 16, 65, "bfloat16"),
        (64, 16, 4, "float32"),
    ],
)
def test_refuses_what_it_is_not_made_for(dim: int, page_size: int, heads: int, dtype: str) -> None:
    shape = metadata_shape(1, page_size, 64, 4, "mma")
    pool = zero_pages(1, 4, page_size, dim, dtype)
    metadata = unpack_metadata(shape, packed_metadata([], shape))
    with pytest.raises(ValueError, match="no kernel for"):
        mosaic_mma.attend(jnp.zeros((1, heads, dim)), pool, pool, metadata, shape=shape)


def spoil_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values past an item's last token stay."""
    monkeypatch.setattr(mosaic_mma, "clear_rows", lambda *_: None)


def spoil_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither scores nor weights are scaled."""
    monkeypatch.setattr(mosaic_mma, "scale_columns", lambda x, *_: x)


def spoil_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a step's tokens are those of its first page."""
    load = mosaic_mma.load_step

    def first_page(*of: object) -> mosaic_mma.StepKV:
        step = load(*of)
        return step._replace(numbers=step.numbers[:1] * len(step.numbers))

    monkeypatch.setattr(mosaic_mma, "load_step", first_page)


def spoil_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was merged before keeps its weight when the maximum grows."""
    add = mosaic_mma.add_values
    monkeypatch.setattr(mosaic_mma, "add_values", lambda *of: add(*of[:-1], jnp.ones_like(of[-1])))


@pytest.mark.parametrize(
    ("spoil", "dtype"),
    [
        (spoil_clearing, "bfloat16"),
        (spoil_scales, "int8"),
        pytest.param(spoil_pages, "bfloat16", marks=pytest.mark.campaign),
        pytest.param(spoil_shrinking, "bfloat16", marks=pytest.mark.slow),
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
) -> None:
    segments = [Segment(0, 8, 460, grow("nothing", 8, 16, 60).pages(30))]
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        Case(8, 16, 64, 4, 1, dtype).check(rng, segments, visible, dense)


def spoil_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows see a token more than their window has."""
    monkeypatch.setattr(mosaic_mma, "Window", lambda tokens, page_size: gpu_schedule.Window(tokens + 1, page_size))


def spoil_narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows see a token less than their window has."""
    monkeypatch.setattr(mosaic_mma, "Window", lambda tokens, page_size: gpu_schedule.Window(tokens - 1, page_size))


def spoil_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values before all windows stay."""
    clear = mosaic_mma.clear_rows
    monkeypatch.setattr(mosaic_mma, "clear_rows", lambda values, known, hidden: clear(values, known, None))


def spoil_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores have no cap."""
    monkeypatch.setattr(mosaic_mma, "capped", lambda score, unit, soft_cap: (score, unit))


def spoil_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap is half as high."""
    monkeypatch.setattr(
        mosaic_mma, "capped", lambda score, unit, soft_cap: gpu_scores.capped(score, unit, soft_cap / 2)
    )


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_window,
        pytest.param(spoil_cap, marks=pytest.mark.slow),
        *(pytest.param(spoil, marks=pytest.mark.campaign) for spoil in (spoil_narrow_window, spoil_hidden, spoil_unit)),
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
    segments = [Segment(0, 8, 201, grow("nothing", 8, 16, 60).pages(14))]
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        Case(8, 16, 64, 4, 1, "bfloat16", window=40, soft_cap=2.0).check(rng, segments, visible, dense)
