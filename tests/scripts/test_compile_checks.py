"""What the compile checks call a change for the worse, and that the committed baseline covers every check."""

import json

import pytest

from jaxctx.engine.runner.memory_planner import TARGETS
from scripts.compile_checks import BASELINE, PACKAGES, SMALL_BYTES, checks, compare

BEFORE = {"arguments": 1 << 30, "not_in_place": 6000, "temporaries": 100 << 20, "code": 50 << 20}
SENT = {"all_reduces": 57, "all_reduce_bytes": 57 << 15, "other_collectives": 0}
BEFORE |= SENT


def test_what_stays_or_shrinks_is_fine() -> None:
    assert compare("step x", BEFORE, BEFORE) == []
    assert compare("step x", BEFORE | {"temporaries": 101 << 20, "code": 1}, BEFORE) == []


@pytest.mark.parametrize("what", ["temporaries", "code"])
def test_growth_is_named(what: str) -> None:
    (wrong,) = compare("kernel x", BEFORE | {what: int(BEFORE[what] * 1.03)}, BEFORE)
    assert wrong.startswith(f"{what} grew from {BEFORE[what]:,} to ")
    assert compare("kernel x", BEFORE | {what: SMALL_BYTES}, BEFORE | {what: 0}) == []


@pytest.mark.parametrize("what", SENT)
def test_not_one_more_collective_is_fine(what: str) -> None:
    (wrong,) = compare("step x", BEFORE | {what: BEFORE[what] + 1}, BEFORE)
    assert wrong == f"{what.replace('_', ' ')} grew from {BEFORE[what]:,} to {BEFORE[what] + 1:,}"
    of_one_chip = {name: size for name, size in BEFORE.items() if name not in SENT}
    assert compare("step x", BEFORE | dict.fromkeys(SENT, 0), of_one_chip) == []
    assert len(compare("step x", BEFORE, of_one_chip)) == 2


def test_a_step_that_copies_pages_fails_whatever_the_baseline_says() -> None:
    copies = BEFORE | {"not_in_place": 32 << 20}
    assert "not written in place" in compare("step x", copies, copies)[0]
    assert compare("kernel x", copies, copies) == []  # a kernel's output is new


def test_what_the_baseline_lacks_fails() -> None:
    assert compare("step x", BEFORE, None) == ["not in the baseline: run with --update"]


def test_the_baseline_has_every_check() -> None:
    baseline = json.loads(BASELINE.read_text())
    assert list(baseline) == list(PACKAGES)
    assert {*PACKAGES} <= {*TARGETS}
    names = [name for name, _ in checks()]
    assert len(names) == 6 + 4 + 3 * 4 * 4
    for target, kept in baseline.items():
        assert sorted(kept["functions"]) == sorted(names)
        assert sorted(kept["versions"]) == sorted(["jax", PACKAGES[target]])
