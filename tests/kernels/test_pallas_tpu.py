"""The TPU kernel in Pallas's TPU interpreter, against dense float64 attention: memory starts as NaN, races are errors.

What no row sees is NaN too. Nothing here says how fast it is, or that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from jaxctx_kernels import (
    KVPages,
    MetadataShape,
    Segment,
    attend,
    kv_pages_struct,
    metadata_shape,
    pallas_tpu,
    unpack_metadata,
    write_kv,
)

from .builders import BATCHES, dequantized, packed_metadata, random_sinks
from .interpreters import Dma, tpu_interpreter

Generator = np.random.Generator


@dataclass(frozen=True)
class Case:
    """One compiled program, for batches over pages of which all that no row sees is poisoned."""

    rows: int
    page_size: int
    dim: int
    group: int
    kv_heads: int = 2
    dtype: str = "bfloat16"
    pool_pages: int = 120
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dma: Dma = "on_wait"

    @property
    def shape(self) -> MetadataShape:
        sizes = self.rows, self.page_size, self.pool_pages * self.page_size, self.pool_pages
        return metadata_shape(*sizes, "tpu", window=self.window)

    @property
    def multiplied(self) -> str:
        return self.dtype if self.dtype in ("float32", "bfloat16") else "bfloat16"

    def random(self, rng: Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys, values: numbers that the dtype holds, or that are kept as 8 bits."""
        pools = (2, self.kv_heads, self.pool_pages, self.page_size, self.dim)
        queries = (self.rows, self.kv_heads * self.group, self.dim)
        q, kv = (np.array(jnp.asarray(rng.normal(size=size), self.multiplied), np.float64) for size in (queries, pools))
        return q, kv[0], kv[1]

    def stored(self, values: np.ndarray) -> KVPages:
        heads, pages, size, dim = values.shape
        struct = kv_pages_struct(heads, pages, size, dim, self.dtype, "tpu")
        rows = jnp.asarray(values.transpose(1, 2, 0, 3).reshape(pages * size, heads, dim), jnp.float32)
        return write_kv(jax.tree.map(jnp.zeros_like, struct), rows, jnp.arange(pages * size))

    def kept(self, values: np.ndarray) -> np.ndarray:
        """What is stored for them."""
        if self.multiplied == self.dtype:
            return values
        return dequantized(self.stored(values), self.kv_heads, self.dim)

    def attend(
        self,
        run: Callable,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        segments: list[Segment],
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        """float32 `[rows, heads, head_dim]`, with the program `run` of `program`."""
        with tpu_interpreter(self.dma):
            got = np.array(
                run(
                    jnp.asarray(q, self.multiplied),
                    self.stored(k),
                    self.stored(v),
                    packed_metadata(segments, self.shape),
                    sinks,
                )
            )
        assert got.dtype == np.float32
        return got

    def program(self) -> Callable:
        def run(q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
            metadata = unpack_metadata(self.shape, packed)
            kept = {"kv_heads": self.kv_heads, "soft_cap": self.soft_cap, "sinks": sinks}
            return attend(q, k, v, metadata, shape=self.shape, **kept)

        return jax.jit(run)

    def check(self, rng: Generator, run: Callable, segments: list[Segment], visible: Callable, dense: Callable) -> None:
        q, k, v = self.random(rng)
        hidden = ~visible(segments, self.page_size, self.pool_pages, self.window)
        k[:, hidden], v[:, hidden] = np.nan, rng.choice([np.nan, np.inf])
        padding = np.ones(self.rows, np.bool_)
        for s in segments:
            padding[s.first_row : s.first_row + s.rows] = False
        q[padding] = np.nan
        sinks = random_sinks(rng, self.kv_heads * self.group) if self.has_sinks else None
        got = self.attend(run, q, k, v, segments, sinks)
        limits = {"window": self.window, "soft_cap": self.soft_cap, "sinks": sinks}
        want = dense(q, self.kept(k), self.kept(v), segments, self.page_size, **limits)
        tolerance = 1e-5 if self.dtype == "float32" else 1e-2  # weights are rounded to the dtype of values
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
        assert not got[padding].any()


QUICK_CASES = [
    (Case(64, 16, 128, 4, dtype="float32"), ["three_levels", "nothing"]),
    (Case(50, 16, 128, 4, dtype="int8"), ["one_prefix"]),
    (Case(64, 16, 128, 3, dtype="float32", window=40, soft_cap=1.5), ["chunks_and_decode", "three_levels"]),
    (Case(50, 16, 64, 3, kv_heads=3, has_sinks=True), ["one_prefix"]),  # heads side by side
]
SLOW_CASES = [
    (Case(50, 16, 64, 4, window=17), ["many_prefixes"]),
    (Case(50, 16, 64, 3, kv_heads=3), ["chunks_and_decode"]),  # the second row has room for a fourth head
]
CAMPAIGN_CASES = [
    (Case(64, 16, 128, 3, dtype="float32", window=40, soft_cap=1.5, has_sinks=True), ["three_levels", "nothing"]),
    (Case(50, 16, 128, 4, dtype="int8", has_sinks=True), ["chunks_and_decode"]),
    (Case(50, 16, 128, 1, dtype="float32", window=17, has_sinks=True), ["many_prefixes"]),
    (Case(50, 16, 128, 4, dtype="float8_e4m3fn", window=70, soft_cap=4.0), ["chunks_and_decode"]),
    (Case(50, 32, 48, 2, kv_heads=3, dtype="int8"), ["many_prefixes"]),  # lanes and a head to spare
    (Case(50, 32, 64, 4), ["chunks_and_decode"]),
    (Case(50, 16, 128, 3, dtype="float32"), ["chunks_and_decode"]),  # rows' heads straddle the windows' ends
    (Case(50, 64, 256, 1), ["chunks_and_decode"]),
    (Case(16, 128, 128, 8, kv_heads=1), ["one_prefix"]),
    (Case(50, 16, 128, 4, dtype="int8", window=33, soft_cap=2.0), ["chunks_and_decode", "one_prefix"]),
    (Case(300, 16, 128, 1, dtype="float32", window=50), ["chunks_and_decode"]),
    (Case(50, 16, 128, 4, dma="eager"), ["many_prefixes"]),
    (Case(50, 16, 64, 8, kv_heads=1, dtype="float32"), ["three_levels"]),
    (Case(50, 16, 96, 1, dtype="float32", window=40, soft_cap=1.5), ["chunks_and_decode"]),
    (Case(50, 32, 64, 4, dtype="float8_e4m3fn"), ["three_levels"]),
    (Case(50, 16, 160, 2, kv_heads=1), ["one_prefix"]),
    (Case(50, 16, 32, 2, kv_heads=6, dtype="int8"), ["chunks_and_decode"]),  # rows of four heads and of two
    *[(Case(64, 16, 128, 2, dtype="float32", window=window), list(BATCHES)) for window in (1, 15, 16, 100, 10**6)],
    (Case(64, 16, 128, 4, dtype="float32"), ["no_sharing", "one_prefix"]),
    (Case(50, 32, 64, 4), ["many_prefixes"]),
    (Case(50, 16, 128, 4, dtype="int8"), ["chunks_and_decode"]),
]


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        *[pytest.param(case, kinds, id=str(case)[5:-1]) for case, kinds in QUICK_CASES],
        *[pytest.param(case, kinds, id=str(case)[5:-1], marks=pytest.mark.slow) for case, kinds in SLOW_CASES],
        *[pytest.param(case, kinds, id=str(case)[5:-1], marks=pytest.mark.campaign) for case, kinds in CAMPAIGN_CASES],
    ],
)
def test_equals_dense_attention(
    rng: Generator, grow: Callable, visible: Callable, dense: Callable, case: Case, kinds: list[str]
) -> None:
    run = case.program()
    for kind in kinds:
        forest = grow(kind, case.rows, case.page_size, case.pool_pages)
        case.check(rng, run, forest.segments, visible, dense)


@pytest.mark.parametrize(
    ("rows", "group"),
    [(1, 1), pytest.param(1, 4, marks=pytest.mark.campaign), pytest.param(2, 2, marks=pytest.mark.campaign), (200, 1)],
)
def test_every_number_of_rows(rng: Generator, visible: Callable, dense: Callable, rows: int, group: int) -> None:
    """One row; a chunk that takes several windows, the last of which reaches back over rows that were visited."""
    case = Case(rows, 16, 128, group, kv_heads=1, dtype="float32", pool_pages=80)
    pages = rng.permutation(np.arange(1, 80)).astype(np.int32)
    segments = [Segment(0, rows, 1200 - rows, pages)]
    if rows > 2:
        segments = [Segment(0, 1, 300, pages[:20]), Segment(1, 7, 330, pages[:22]), Segment(8, rows - 9, 990, pages)]
    case.check(rng, case.program(), segments, visible, dense)


@pytest.mark.slow
def test_heads_in_turn(
    rng: Generator, grow: Callable, visible: Callable, dense: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit into VMEM at once is walked for one KV head after the other."""
    monkeypatch.setattr(pallas_tpu, "STATE_BYTES", 1)
    case = Case(16, 16, 128, 2)
    case.check(rng, case.program(), grow("many_prefixes", 16, 16, case.pool_pages).segments, visible, dense)


@pytest.mark.slow
def test_shards_of_the_heads(rng: Generator, grow: Callable, visible: Callable, dense: Callable) -> None:
    """As steps run it on a mesh: a shard of the KV heads at a time, the metadata for each.

    On one device: two that are interpreted at once wait for each other's callbacks, and with two cores for ever.
    """
    case, heads, pool = Case(16, 16, 128, 2), PartitionSpec(None, "heads"), PartitionSpec("heads")

    def run(q: jax.Array, k: jax.Array, v: jax.Array, packed: jax.Array, sinks: None) -> jax.Array:
        places = (heads, pool, pool, PartitionSpec())
        mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
        local = partial(attend, shape=case.shape)
        shard = jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=heads, check_vma=False)
        metadata = unpack_metadata(case.shape, packed)
        shards = zip(jnp.split(q, 2, 1), jnp.split(k, 2), jnp.split(v, 2), strict=True)
        return jnp.concatenate([shard(*one, metadata) for one in shards], 1)

    case.check(rng, jax.jit(run), grow("many_prefixes", 16, 16, case.pool_pages).segments, visible, dense)


def test_no_nan_crosses_to_another_sequence(rng: Generator, grow: Callable) -> None:
    """A sequence whose query, keys or values are NaN spoils its own rows only, though it shares items with others."""
    case = Case(16, 16, 128, 2, dtype="float32")
    forest = grow("nothing", case.rows, 16, case.pool_pages)
    prefix = forest.pages(20)
    for rows in (1, 4, 1, 1):
        forest.add(prefix, 2, rows)
    bad = forest.segments[1]
    run, (q, k, v) = case.program(), case.random(rng)
    clean = case.attend(run, q, k, v, forest.segments)
    q[bad.first_row] = np.nan
    k[:, bad.pages[20]], v[:, bad.pages[21]] = np.nan, np.inf
    spoilt = case.attend(run, q, k, v, forest.segments)
    mine = slice(bad.first_row, bad.first_row + bad.rows)
    assert np.isnan(spoilt[mine]).any()
    spoilt[mine] = clean[mine]
    np.testing.assert_array_equal(spoilt, clean)


@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype", "rtol", "atol"),
    [
        (3, 48, "float32", 1e-4, 1e-5),
        pytest.param(2, 64, "float32", 1e-4, 1e-5, marks=pytest.mark.campaign),
        pytest.param(3, 64, "int8", 1e-2, 1e-2, marks=pytest.mark.slow),
        pytest.param(2, 64, "float8_e4m3fn", 1e-2, 1e-2, marks=pytest.mark.campaign),
    ],
)
def test_heads_side_by_side_under_a_mask(
    rng: Generator, grow: Callable, dense: Callable, kv_heads: int, dim: int, dtype: str, rtol: float, atol: float
) -> None:
    """Passes are the reference's; it reads the pools that the kernel wants, with room to spare in some."""
    case = Case(50, 16, dim, 2, kv_heads=kv_heads, dtype=dtype)
    segments = grow("chunks_and_decode", 50, 16, case.pool_pages).segments
    q, k, v = case.random(rng)
    mask = rng.random((50, case.pool_pages * 16)) < 0.5
    metadata = unpack_metadata(case.shape, jnp.asarray(packed_metadata(segments, case.shape)))
    got = attend(
        jnp.asarray(q, "float32"),
        case.stored(k),
        case.stored(v),
        metadata,
        shape=case.shape,
        kv_heads=kv_heads,
        mask=mask,
    )
    want = dense(q, case.kept(k), case.kept(v), segments, 16, mask)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def test_a_list_that_exceeds_smem_is_refused() -> None:
    shape = metadata_shape(512, 16, 2**20, 2**18, "tpu")
    q, pool = jnp.zeros((512, 2, 128)), jnp.zeros((1, 2, 16, 128))
    with pytest.raises(ValueError, match="take larger pages"):
        attend(q, pool, pool, unpack_metadata(shape, jnp.zeros(shape.size(), jnp.int32)), shape=shape)


def test_a_copy_not_waited_for_is_a_race(
    rng: Generator, grow: Callable, visible: Callable, dense: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these tests rest on: the values would be right here."""
    patient = pallas_tpu.pltpu.make_async_copy
    hasty = lambda *args: SimpleNamespace(start=patient(*args).start, wait=lambda: None)  # noqa: E731
    monkeypatch.setattr(pallas_tpu, "pltpu", SimpleNamespace(**{**vars(pltpu), "make_async_copy": hasty}))
    case = Case(16, 16, 128, 2, dma="eager")
    with pytest.raises(Exception, match=r"RACE DETECTED|races_found"):
        case.check(rng, case.program(), grow("no_sharing", 16, 16, case.pool_pages).segments, visible, dense)
