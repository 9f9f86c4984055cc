"""What the compile checks call a change for the worse, and that the committed baseline covers every check."""

import json

import pytest

from jaxctx.engine.runner.memory_planner import TARGETS
from scripts.compile_checks import BASELINE, MAX_SORTED, PACKAGES, SMALL_BYTES, checks, compare

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


GPU_STEP = BEFORE | {"launches": 1, "sorts": 4, "sorted": 4096}


def test_a_step_of_a_gpu_is_one_launch_and_sorts_no_vocabulary() -> None:
    """Whatever the baseline says; what is in it of other chips says nothing of either."""
    assert compare("step x", GPU_STEP, GPU_STEP) == []
    launches = GPU_STEP | {"launches": 3}
    assert compare("step x", launches, launches) == ["3 launches and waits of the host, which should be one launch"]
    sorted_whole = GPU_STEP | {"sorted": 151936}
    assert compare("step x", sorted_whole, sorted_whole) == ["151,936 numbers of a row are sorted"]


def test_more_sorts_are_named() -> None:
    assert compare("step x", GPU_STEP | {"sorts": 5}, GPU_STEP) == ["sorts grew from 4 to 5"]
    assert compare("step x", GPU_STEP | {"sorts": 3}, GPU_STEP) == []
    assert compare("step x", GPU_STEP, BEFORE) == ["sorts grew from 0 to 4"]  # an old baseline


def test_the_baseline_has_launches_and_sorts_of_all_steps_of_a_gpu() -> None:
    functions = json.loads(BASELINE.read_text())["h200"]["functions"]
    steps = [kept for name, kept in functions.items() if name.startswith("step")]
    assert len(steps) == 5
    for kept in steps:
        assert kept["launches"] == 1
        assert 0 < kept["sorted"] <= MAX_SORTED
        assert kept["sorts"] > 0


def test_what_the_baseline_lacks_fails() -> None:
    assert compare("step x", BEFORE, None) == ["not in the baseline: run with --update"]


def test_the_baseline_has_every_check() -> None:
    baseline = json.loads(BASELINE.read_text())
    assert list(baseline) == list(PACKAGES)
    assert {*PACKAGES} <= {*TARGETS}
    names = [name for name, _ in checks()]
    assert len(names) == 5 + 4 + 3 * 4 * 4
    for target, kept in baseline.items():
        assert sorted(kept["functions"]) == sorted(names)
        assert sorted(kept["versions"]) == sorted(["jax", PACKAGES[target]])
