"""What the compile checks call a change for the worse, and that the committed baseline covers every check."""

import json

import pytest

from jaxctx.engine.runner.memory_planner import TARGETS
from scripts.compile_checks import (
    BASELINE,
    COUNTED,
    COUNTS,
    PACKAGES,
    SMALL_BYTES,
    checks,
    compare,
    is_checked,
    matches,
)

BEFORE = {"arguments": 1 << 30, "not_in_place": 6000, "temporaries": 100 << 20, "code": 50 << 20}


def test_what_stays_or_shrinks_is_fine() -> None:
    assert compare("step x", BEFORE, BEFORE) == []
    assert compare("step x", BEFORE | {"temporaries": 101 << 20, "code": 1}, BEFORE) == []


@pytest.mark.parametrize("what", ["temporaries", "code"])
def test_growth_is_named(what: str) -> None:
    (wrong,) = compare("kernel x", BEFORE | {what: int(BEFORE[what] * 1.03)}, BEFORE)
    assert wrong.startswith(f"{what} grew from {BEFORE[what]:,} to ")
    assert compare("kernel x", BEFORE | {what: SMALL_BYTES}, BEFORE | {what: 0}) == []


def test_a_step_that_copies_pages_fails_whatever_the_baseline_says() -> None:
    copies = BEFORE | {"not_in_place": 32 << 20}
    assert "not written in place" in compare("step x", copies, copies)[0]
    assert compare("kernel x", copies, copies) == []  # a kernel's output is new


TPU = {"bundles": 1000, "bundles_run": 5000, "spills": 10, "pool_copies": 0}


@pytest.mark.parametrize("what", COUNTS)
def test_growth_of_counts_is_named(what: str) -> None:
    before = BEFORE | TPU
    assert compare("write x", before | {what: TPU[what]}, before) == []
    more = int(TPU[what] * 1.03) + 1
    assert compare("write x", before | {what: more}, before) == [f"{what} grew from {TPU[what]:,} to {more:,}"]
    assert f"{what} not in the baseline: run with --update" in compare("write x", before, BEFORE)


def test_any_copy_of_a_pool_fails_in_steps_and_writes() -> None:
    copies = BEFORE | TPU | {"pool_copies": 2}
    assert compare("step x", copies, copies) == compare("write x", copies, copies) == ["2 copies of whole pools"]
    assert compare("kernel x", copies, copies) == []


def test_the_baseline_of_tpus_has_counts_and_no_copies() -> None:
    for target, kept in json.loads(BASELINE.read_text()).items():
        if PACKAGES[target] == "libtpu":
            for name, found in kept["functions"].items():
                assert (set(TPU) <= set(found)) == matches(name, COUNTED)
                assert not (name.startswith(("step", "write")) and found["pool_copies"])


def test_some_targets_are_checked_in_part() -> None:
    assert is_checked("v5e", "kernel x")
    assert is_checked("v7x", "write int8, 64 rows, pages of 64")
    assert not is_checked("v7x", "step qwen3-0.6b, 512 rows")


def test_what_the_baseline_lacks_fails() -> None:
    assert compare("step x", BEFORE, None) == ["not in the baseline: run with --update"]


def test_the_baseline_has_every_check() -> None:
    baseline = json.loads(BASELINE.read_text())
    assert list(baseline) == list(PACKAGES)
    assert {*PACKAGES} <= {*TARGETS}
    names = [name for name, _ in checks()]
    assert len(names) == 6 + 8 + 4 + 3 * 4 * 4
    for target, kept in baseline.items():
        assert sorted(kept["functions"]) == sorted(name for name in names if is_checked(target, name))
        assert sorted(kept["versions"]) == sorted(["jax", PACKAGES[target]])
