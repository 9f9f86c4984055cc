"""Writing rows on TPU, in Pallas's TPU interpreter, against `write_kv`: races are errors, memory starts as NaN.

The interpreter does not know how to look at bfloat16 or 8 bits as words of 32, which the kernel does. So it is given
pages that are words already, and what it writes is taken apart again. That the compiler takes the kernel is a matter of
the compile checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh

from jaxctx.engine.runner.step import KVCache, PagedAttention, StepShape, unpack_inputs
from jaxctx.model.interface import KVSpec
from jaxctx.model.sharding import EVERY_DEVICE
from jaxctx_kernels import (
    KernelName,
    Segment,
    kv_pages_struct,
    metadata_shape,
    pallas_tpu_write,
    write_kv,
    write_rows,
)
from jaxctx_kernels.kv_cache import read_pages

from .builders import packed_metadata
from .interpreters import Dma, tpu_interpreter

Generator = np.random.Generator


@dataclass(frozen=True)
class Case:
    """Pages of one layout, and how many rows go there."""

    rows: int = 40
    page_size: int = 16
    heads: int = 2
    dim: int = 128
    dtype: str = "bfloat16"
    pages: int = 12
    dma: Dma = "on_wait"

    def filled(self, rng: Generator) -> Any:
        """Pages with something in every slot, and where there are spare lanes of scales also there."""
        struct = kv_pages_struct(self.heads, self.pages, self.page_size, self.dim, self.dtype, "tpu")
        pages = jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), struct)
        return write_kv(
            pages, self.random_rows(rng, self.pages * self.page_size), jnp.arange(self.pages * self.page_size)
        )

    def random_rows(self, rng: Generator, count: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(count, self.heads, self.dim)), jnp.bfloat16)

    def check(self, rng: Generator, slots: np.ndarray, k: Any = None, v: Any = None) -> None:
        """Every page but the scratch page is the same, to the bit, as `write_kv` leaves it."""
        k_pages, v_pages = self.filled(rng), self.filled(rng)
        k = self.random_rows(rng, len(slots)) if k is None else k
        v = self.random_rows(rng, len(slots)) if v is None else v
        given = jnp.asarray(slots, jnp.int32)
        with tpu_interpreter(self.dma):
            got = jax.jit(lambda *args: write_rows(*args, kernel="tpu"))(k_pages, v_pages, k, v, given)
            jax.block_until_ready(got)
        every = jnp.arange(1, self.pages)
        for written, pages, rows in zip(got, (k_pages, v_pages), (k, v), strict=True):
            want = write_kv(pages, rows, given)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a[:, 1:]), bits(b[:, 1:])), written, want)
            np.testing.assert_array_equal(bits(read_pages(written, every)), bits(read_pages(want, every)))

    def slots(self, rng: Generator, count: int | None = None) -> np.ndarray:
        """Random, none twice, none of the scratch page."""
        return rng.permutation(np.arange(self.page_size, self.pages * self.page_size))[: count or self.rows]


def bits(array: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


QUICK_CASES = [
    Case(),
    Case(rows=13, page_size=32, heads=4, dim=64, dtype="int8", pages=6),
]
CAMPAIGN_CASES = [
    Case(rows=11, dtype="float8_e4m3fn", heads=1, dma="eager"),
    Case(rows=90, page_size=256, dtype="int8", dim=256, pages=3),
    Case(rows=40, page_size=32, heads=3, dim=48, dtype="int8", pages=4),
    Case(rows=9, dim=96, dtype="float32", dma="eager"),
    Case(rows=9, dtype="float32", heads=3),
    Case(rows=30, page_size=64, dtype="int8", pages=6),
    Case(rows=17, page_size=32, dim=256, pages=6, dma="eager"),
    Case(rows=5, page_size=128, dim=64, dtype="float8_e4m3fn", pages=3),
    Case(rows=40, heads=3, dim=64, pages=6),
]


@pytest.mark.parametrize(
    "case",
    [
        *[pytest.param(case, id=str(case)[5:-1]) for case in QUICK_CASES],
        *[pytest.param(case, id=str(case)[5:-1], marks=pytest.mark.campaign) for case in CAMPAIGN_CASES],
    ],
)
def test_random_slots(rng: Generator, case: Case) -> None:
    case.check(rng, case.slots(rng))


@pytest.mark.parametrize(
    "case",
    [Case(rows=70), pytest.param(Case(rows=80, page_size=64, dtype="int8", pages=6), marks=pytest.mark.campaign)],
)
def test_chunks_of_prompts_and_decoding_rows(rng: Generator, case: Case) -> None:
    """A chunk that begins and ends within tiles and fills some between, rows alone, and padding among them."""
    middle = case.page_size + case.page_size // 2 + 3
    chunk = np.arange(middle, middle + case.rows - 20)
    end = (case.pages - 2) * case.page_size
    alone = rng.permutation(np.arange(end, end + case.page_size))[:10]
    case.check(rng, np.concatenate([alone[:5], chunk, [0] * 6, alone[5:], [0] * 4]))


@pytest.mark.parametrize(
    ("page_size", "pages"),
    [pytest.param(16, 8, marks=pytest.mark.campaign), pytest.param(48, 4, marks=pytest.mark.slow)],
)
def test_no_tile_reaches_into_the_next_page(rng: Generator, page_size: int, pages: int) -> None:
    """Of 8 bits it would, as 16 and 48 tokens are no whole tiles of 32, and these pages lie one after the other."""
    case = Case(rows=70, page_size=page_size, dtype="int8", pages=pages)
    case.check(rng, np.arange(page_size + 2, page_size + 2 + 70))


@pytest.mark.slow
def test_all_rows_in_one_page(rng: Generator) -> None:
    Case(rows=16).check(rng, 5 * 16 + rng.permutation(16))


@pytest.mark.slow
def test_whole_tiles_whose_rows_are_not_in_order(rng: Generator) -> None:
    """All slots of two tiles: of one the rows are in order, of the other not, though its first and last row are."""
    slots = np.concatenate([np.arange(16, 32), 48 + np.arange(16)])
    slots[[20, 21]] = slots[[21, 20]]
    Case(rows=32).check(rng, slots)


@pytest.mark.slow
def test_every_row_in_its_own_page(rng: Generator) -> None:
    Case().check(rng, np.arange(1, 12) * 16 + rng.integers(0, 16, 11))


def test_only_padding_changes_nothing(rng: Generator) -> None:
    Case(dtype="int8").check(rng, np.array([0, 3, 0, 0, 15]))


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.campaign)])
def test_what_is_not_finite_spoils_its_row_of_a_head_and_no_other(rng: Generator, dtype: str) -> None:
    case = Case(rows=6, dtype=dtype)
    k = np.array(case.random_rows(rng, 6), np.float32)
    k[2, 1, 7], k[4, 0, 0] = np.nan, np.inf
    case.check(rng, np.array([20, 40, 21, 100, 22, 23]), k=jnp.asarray(k, jnp.bfloat16))


@pytest.mark.campaign
def test_heads_in_turn(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into VMEM at once is written for one KV head after the other."""
    monkeypatch.setattr(pallas_tpu_write, "ROWS_BYTES", 1)
    case = Case(rows=20, heads=2, dtype="int8")
    case.check(rng, np.concatenate([case.slots(rng, 8), [0, 0, 0, 0]]))
    Case(rows=32, heads=2, dim=256).check(rng, np.arange(32, 64))


def test_a_write_back_not_waited_for_is_seen(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests rest on."""
    patient = pallas_tpu_write.pltpu.make_async_copy
    hasty = lambda *args: SimpleNamespace(start=patient(*args).start, wait=lambda: None)  # noqa: E731
    monkeypatch.setattr(pallas_tpu_write, "pltpu", SimpleNamespace(**{**vars(pltpu), "make_async_copy": hasty}))
    case = Case(rows=60, dma="eager")
    with pytest.raises(Exception, match=r"RACE DETECTED|races_found"):
        case.check(rng, case.slots(rng))


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_tiles_are_found(rng: Generator, tokens: int) -> None:
    """Against a search one by one, in sorted slots of runs and gaps whose rows are partly in order."""
    slots = np.flatnonzero(rng.random(400) < 0.97)[:200]
    rows = np.arange(200)
    rows[150:] = rng.permutation(np.arange(150, 200))
    begins, inside = pallas_tpu_write.find_tiles(jnp.asarray(slots), jnp.asarray(rows), tokens)
    want_begins, want_inside = np.zeros(200, bool), np.zeros(200, bool)
    for n in range(201 - tokens):
        run = np.arange(tokens)
        if slots[n] % tokens == 0 and (slots[n : n + tokens] == slots[n] + run).all():
            if (rows[n : n + tokens] == rows[n] + run).all():
                want_begins[n], want_inside[n : n + tokens] = True, True
    np.testing.assert_array_equal(begins, want_begins)
    np.testing.assert_array_equal(inside, want_inside)


def test_rows_of_two_layers_share_a_plan() -> None:
    """It is sorted once a step, whatever the number of layers."""
    struct = jax.ShapeDtypeStruct((2, 12, 16, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((16,), jnp.int32)

    def plans(count: int) -> int:
        def make(slots: jax.Array) -> Any:
            return [pallas_tpu_write.plan_groups(slots, struct) for _ in range(count)]

        return jax.jit(make).lower(slots).compile().as_text().count(" sort(")

    assert plans(3) == plans(1) > 0


@pytest.mark.parametrize(
    "split", [pytest.param(False, marks=pytest.mark.campaign), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_layer_of_a_step_writes_and_attends(rng: Generator, split: bool) -> None:
    """As with plain JAX: what is attended to, and the pages. Split over a mesh, here of one device, too."""
    rows, pages, page_size, heads = 24, 12, 16, 2
    segments = [Segment(0, 20, 5, np.array([3, 7, 2], np.int32)), Segment(21, 1, 18, np.array([5, 9], np.int32))]
    slots = np.zeros(rows, np.int32)
    for each in segments:
        tokens = each.position + np.arange(each.rows)
        slots[each.first_row : each.first_row + each.rows] = each.pages[tokens // page_size] * page_size + tokens % 16
    case = Case(page_size=page_size, heads=heads, pages=pages)
    pool = KVCache(case.filled(rng), case.filled(rng))
    q, k, v = (jnp.asarray(rng.normal(size=(rows, n, 128)), jnp.bfloat16) for n in (2 * heads, heads, heads))
    mesh = (
        Mesh(np.array(jax.devices()[:1]).reshape(1, 1), EVERY_DEVICE, axis_types=(AxisType.Auto,) * 2)
        if split
        else None
    )

    spec = KVSpec(layers=1, kv_heads=heads, head_dim=128, dtype="bfloat16", group=2)

    def attend(kernel: KernelName) -> tuple[jax.Array, KVCache]:
        shape = StepShape(rows, 1, (metadata_shape(rows, page_size, pages * page_size, pages, kernel),))
        packed = np.zeros(shape.size, np.int32)
        inputs = unpack_inputs(packed, shape)
        inputs.kv_slots[:] = slots
        inputs.metadata[0][:] = packed_metadata(segments, shape.metadata[0])

        def layer(pool: KVCache, packed: jax.Array) -> tuple[jax.Array, KVCache]:
            backend = PagedAttention((pool,), spec, unpack_inputs(packed, shape), shape, mesh)
            return backend.attend(0, q, k, v), backend.pools[0]

        return jax.jit(layer)(pool, jnp.asarray(packed))

    want, want_pool = attend("reference")
    with tpu_interpreter():
        got, got_pool = jax.block_until_ready(attend("tpu"))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)
    for written, of_reference in zip(got_pool, want_pool, strict=True):
        np.testing.assert_array_equal(bits(written[:, 1:]), bits(of_reference[:, 1:]))
