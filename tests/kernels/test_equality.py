"""The campaign of equality: its product, its report, a slice of it with a fresh seed, and that it finds mistakes."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 12):
    pytest.skip("the GPU interpreter of JAX 0.12 or newer is needed", allow_module_level=True)

from jax.experimental.pallas import tpu as pltpu

from jaxctx_kernels import (
    gpu_schedule,
    kv_cache,
    mosaic_hopper,
    mosaic_mma,
    pallas_tpu,
    pallas_tpu_pages,
    pallas_tpu_write,
    reference,
)

from .equality import campaign
from .equality.checks import Subject
from .equality.product import REFUSED, Combination, Layout, combinations, combinations_of, draw, layouts, part_of
from .equality.trees import CAPPED, MASKED, SINKS, TREES, WINDOWS, grow_tree

Generator = np.random.Generator


def test_the_product_is_whole() -> None:
    """What it has of every part, reckoned from the tables of docs/kernels: 4 types, 4 sizes, 6 head dims, 6 groups."""
    everything = combinations()
    assert len({str(each) for each in everything}) == len(everything)
    trees, slots, operations = len(TREES), 4, 3
    of_attention = 4 * 4 * 6 * 6
    hopper, mma = 3 * 4 * 3 * 6, 3 * 4 * 6 * 6  # no float32; three head dims
    expected = {
        "attend reference_float32": of_attention * trees,
        "attend reference_bfloat16": of_attention * trees,
        "attend mosaic_hopper": hopper * trees,
        "attend mosaic_hopper refused": of_attention - hopper,
        "attend mosaic_mma": mma * trees,
        "attend mosaic_mma refused": of_attention - mma,
        "attend pallas_tpu": of_attention * trees,
    }
    for task, cases in (("write", slots), ("move", operations)):
        for mover in ("kv_cache_cpu", "kv_cache_gpu", "pallas_tpu"):
            expected[f"{task} {mover}"] = 4 * 4 * 6 * cases
    assert Counter(part_of(each) for each in everything) == expected


@pytest.mark.parametrize("fraction", [0.01, 0.3, 1.0])
def test_a_fraction_has_its_part_of_every_part(fraction: float) -> None:
    everything = combinations()
    drawn = draw(everything, fraction, 3)
    assert drawn == draw(everything, fraction, 3)
    assert len(set(drawn)) == len(drawn)
    assert drawn != draw(everything, fraction, 4)
    total, taken = (Counter(part_of(each) for each in of) for of in (everything, drawn))
    for part, count in total.items():
        cases = 1 if part.endswith(REFUSED) else {"attend": len(TREES), "write": 4, "move": 3}[part.split()[0]]
        assert taken[part] == math.ceil(fraction * count / cases) * cases
    half = Counter(part_of(each) for each in drawn[: len(drawn) // 2])
    assert all(abs(half[part] - count / 2) <= 2 * len(TREES) for part, count in taken.items())


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", TREES)
def test_trees_fit_their_pool(rng: Generator, name: str, page_size: int) -> None:
    """And no slot is written twice, rows see themselves, and a mask hides something."""
    tree = grow_tree(rng, name, 48, page_size)
    own = tree.slots[tree.slots > 0]
    assert len(np.unique(own)) == len(own)
    assert (own >= page_size).all()
    rows = sum(s.rows for s in tree.segments)
    assert (rows == 0) == (name == "nothing")
    if name not in MASKED:
        assert tree.mask is None
        assert (tree.window is not None, tree.soft_cap is not None) == (name in WINDOWS, name in CAPPED)
        assert tree.has_sinks == (name in SINKS)
        assert tree.visible.reshape(-1)[own].all()
        return
    assert tree.mask is not None
    hidden = [~tree.mask[s.first_row + r, s.position : s.position + r] for s in tree.segments for r in range(s.rows)]
    assert np.concatenate(hidden).any()


def pick(pattern: str, rng: Generator) -> list[Combination]:
    """All combinations of one layout, drawn from those with such a name."""
    named = [layout for layout in layouts() if fnmatch(str(layout), pattern)]
    return combinations_of(named[rng.integers(len(named))])


def check_all(chosen: list[Combination], rng: Generator) -> None:
    subject = Subject(chosen[0].layout, int(rng.integers(2**31)))
    for combination in chosen:
        print(f"{combination}, seed {subject.seed}: {subject.drawn}")
        subject.check(combination.case)


@pytest.mark.parametrize("pattern", ["write kv_cache_*", "move kv_cache_*"])
def test_a_slice_of_plain_jax(rng: Generator, pattern: str) -> None:
    check_all(pick(pattern, rng), rng)


# The quick suite has cases of these kernels too.
INTERPRETED_LONG = ("attend pallas_tpu", "attend mosaic_mma", "attend mosaic_mma refused")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.campaign if part in INTERPRETED_LONG else pytest.mark.slow)
        for part in sorted({part_of(each) for each in combinations()})
    ],
)
def test_a_slice(rng: Generator, part: str) -> None:
    """A combination of every part; campaigns run the others."""
    of_part = [each for each in combinations() if part_of(each) == part]
    check_all([of_part[rng.integers(len(of_part))]], rng)


# The report


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Subjects that only write down what is checked; one combination is wrong."""
    checked: list[str] = []

    class Fake:
        def __init__(self, layout: Layout, seed: int) -> None:
            self.layout, self.seed, self.drawn = layout, seed, "nothing"

        def check(self, case: str) -> bool:
            checked.append(f"{self.layout} {case}")
            assert case != "prompt", "not equal"
            return case == REFUSED

    monkeypatch.setattr(campaign, "Subject", Fake)
    return checked


def command(monkeypatch: pytest.MonkeyPatch, report: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["equality", "--report", str(report), *options])
    return campaign.main()


def test_a_run_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With what the report lacks, and with what was wrong."""
    report = tmp_path / "new" / "report.jsonl"
    only = ("--fraction", "1", "--only", "attend mosaic_hopper int8 page 16 dim [68]* group [123] *")
    count = 3 * len(TREES)
    assert command(monkeypatch, report, *only) == 1
    assert len(fake) == count + 3
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["name"] for line in lines] == fake
    wrong = [line["name"] for line in lines if line["verdict"] == "wrong"]
    assert len(wrong) == 3
    assert all(name.endswith("prompt") for name in wrong)
    assert sum(line["verdict"] == "announced" for line in lines) == 3
    out = capsys.readouterr().out
    assert f"WRONG {wrong[0]}, seed 0, nothing: AssertionError: not equal" in out
    assert f"| attend mosaic_hopper | {216 * len(TREES):,} | {count} | {count - 3} | 0 | 3 |" in out
    assert "| attend mosaic_hopper refused | 360 | 3 | 0 | 3 | 0 |" in out
    report.write_text("".join(report.read_text().splitlines(keepends=True)[:-2]))
    missing = [line["name"] for line in lines[-2:]]
    fake.clear()
    command(monkeypatch, report, *only)
    assert sorted(fake) == sorted({*missing, *wrong})
    fake.clear()
    command(monkeypatch, report, *only, "--seed", "1")
    assert len(fake) == count + 3


def test_no_combination_begins_too_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, tmp_path / "report.jsonl", "--fraction", "0.01", "--minutes", "0") == 0
    assert not fake
    assert "are left" in capsys.readouterr().out


def test_what_waits_for_ever_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The process ends, and the next one goes on behind it."""
    ended = threading.Event()
    monkeypatch.setattr(campaign, "LIMIT_S", 0.05)
    monkeypatch.setattr(campaign.os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(campaign.Subject, "check", lambda *_: ended.wait(60))
    report, only = (
        tmp_path / "report.jsonl",
        ("--fraction", "1", "--only", "move kv_cache_cpu int8 page 16 dim 64 copy"),
    )
    command(monkeypatch, report, *only)
    first = json.loads(report.read_text().splitlines()[0])
    assert (first["verdict"], first["seconds"]) == ("wrong", 0.05)
    assert ended.is_set()
    assert "not done after 0.05 s" in capsys.readouterr().out
    report.write_text(json.dumps(first) + "\n")  # what the process that ended has left
    monkeypatch.setattr(campaign.Subject, "check", lambda *_: pytest.fail("it is run again"))
    assert command(monkeypatch, report, *only) == 1


def test_without_a_fraction_it_only_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, tmp_path / "report.jsonl") == 0
    assert not fake
    assert capsys.readouterr().out.splitlines()[-1] == f"| all | {len(combinations()):,} | 0 | 0 | 0 | 0 |"


# Mistakes


def spoil_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a token tree see what comes before them, whoever's it is."""
    monkeypatch.setattr(reference, "tile_mask", lambda mask, tile, size: jnp.ones_like(of_mask(mask, tile, size)))


of_mask = reference.tile_mask


def spoil_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the items of a row that are computed at once only one counts."""
    monkeypatch.setattr(reference, "add_lanes", lambda same_row, *sums: sums)


def spoil_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values past an item's last token stay."""
    monkeypatch.setattr(pallas_tpu, "clear_values", lambda *_: None)


def spoil_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are not waited for."""
    patient = pltpu.make_async_copy
    hasty = lambda *args: SimpleNamespace(start=patient(*args).start, wait=lambda: None)  # noqa: E731
    without = SimpleNamespace(**{**vars(pltpu), "make_async_copy": hasty})
    for module in (pallas_tpu, pallas_tpu_write, pallas_tpu_pages):
        monkeypatch.setattr(module, "pltpu", without)


def spoil_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step more than should counts as one in which all rows see all tokens."""
    count = gpu_schedule.count_steps

    def spoilt(*of: Any) -> gpu_schedule.StepCounts:
        counts = count(*of)
        return counts._replace(full_steps=counts.full_steps + 1)

    monkeypatch.setattr(gpu_schedule, "count_steps", spoilt)


def spoil_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of the query heads of a KV head are merged without one of the units."""
    merge = mosaic_hopper.merge_partials
    monkeypatch.setattr(mosaic_hopper, "merge_partials", lambda out, *of: merge(out.at[:, 0].multiply(0.5), *of))


def spoil_mma_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither scores nor weights are scaled."""
    monkeypatch.setattr(mosaic_mma, "scale_columns", lambda x, *_: x)


def spoil_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks are not higher by the soft cap, as the first kernel's scores are."""
    of_products = mosaic_mma.sinks_of_products
    uncapped = lambda sinks, heads, config: of_products(sinks, heads, replace(config, soft_cap=None))  # noqa: E731
    monkeypatch.setattr(mosaic_mma, "sinks_of_products", uncapped)


def spoil_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of two rows change places."""
    encode = kv_cache.encode
    monkeypatch.setattr(kv_cache, "encode", lambda rows, dtype: encode(jnp.roll(rows, 1, 0), dtype))


def spoil_rows_of_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keys and values have to spare is not zero."""
    padded = lambda array, axis, size: jnp.where(  # noqa: E731
        jnp.expand_dims(jnp.arange(size) < array.shape[axis], [n for n in range(array.ndim) if n != axis]),
        pad_axis(array, axis, size),
        jnp.ones((), array.dtype),
    )
    monkeypatch.setattr(kv_cache, "pad_axis", padded)


pad_axis = kv_cache.pad_axis


def spoil_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page 1 is taken for padding, too."""
    carry_out = pallas_tpu_pages.carry_out
    monkeypatch.setattr(
        pallas_tpu_pages, "carry_out", lambda count, copies, is_moved: carry_out(count, copies, lambda n: n > 0)
    )


MISTAKES = [
    (spoil_write, "write kv_cache_gpu bfloat16 page 16 dim 64", "prompt"),
    (spoil_rows_of_lanes, "write pallas_tpu float32 page 16 dim 80", "prompt"),
    (spoil_padding, "move pallas_tpu bfloat16 page 32 dim 128", "read"),
]
MORE_MISTAKES = [
    (spoil_group, "attend mosaic_hopper int8 page 32 dim 64 group 3", "lone_row"),
    (spoil_mma_scales, "attend mosaic_mma int8 page 16 dim 80 group 7", "lone_row"),
    (spoil_sinks, "attend mosaic_mma bfloat16 page 32 dim 64 group 4", "windowed_capped_with_sinks"),
    (spoil_lanes, "attend reference_float32 bfloat16 page 128 dim 64 group 1", "lone_row"),
    (spoil_clearing, "attend pallas_tpu bfloat16 page 16 dim 128 group 1", "no_sharing"),
    (spoil_mask, "attend reference_float32 float32 page 16 dim 64 group 2", "token_trees"),
    (spoil_lanes, "attend reference_bfloat16 int8 page 32 dim 80 group 3", "split_rows"),
    (spoil_write, "attend reference_float32 bfloat16 page 16 dim 64 group 1", "prompt"),
    (spoil_waiting, "attend pallas_tpu bfloat16 page 16 dim 128 group 1", "no_sharing"),
    (spoil_waiting, "write pallas_tpu int8 page 32 dim 128", "mixed"),
    (spoil_waiting, "move pallas_tpu bfloat16 page 32 dim 128", "copy"),
    (spoil_steps, "attend mosaic_hopper bfloat16 page 16 dim 64 group 4", "prompt"),
]


@pytest.mark.parametrize(
    ("spoil", "pattern", "case"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MISTAKES),
        *(pytest.param(*each, marks=pytest.mark.campaign) for each in MORE_MISTAKES),
    ],
)
def test_mistakes_are_found(
    rng: Generator,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    pattern: str,
    case: str,
) -> None:
    (layout,) = {layout for layout in layouts() if str(layout) == pattern}
    seed = int(rng.integers(2**31))
    Subject(layout, seed).check(case)
    spoil(monkeypatch)
    with pytest.raises(Exception, match=r"differ|RACE DETECTED|races_found|Computation failed|semaphore"):
        Subject(layout, seed).check(case)
