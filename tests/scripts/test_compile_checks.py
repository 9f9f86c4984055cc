"""What the compile checks call a change for the worse, and that the committed baseline covers every check."""

import json

import pytest
from compiler_output.sass import Loop, MachineCode

from jaxctx.engine.runner.memory_planner import TARGETS
from scripts.compile_checks import BASELINE, MACHINE_CODE, PACKAGES, SMALL_BYTES, checks, compare, count_loops

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


LOOPS = (
    Loop(0, 96, {"UTMALDG": 8, "SYNCS": 2}, 71),
    Loop(100, 500, {"HGMMA": 12, "BAR": 3, "SYNCS": 4, "FSEL": 400}, 611),
    Loop(500, 800, {"HGMMA": 12, "BAR": 2, "SYNCS": 4, "FFMA": 300}, 300),
)
COUNTS = count_loops(MachineCode("attend_unit_0", 168, 0, 182272, LOOPS))


def test_loops_are_counted() -> None:
    assert COUNTS == {
        "registers": 168,
        "spills": 0,
        "shared_bytes": 182272,
        "loop_instructions": 300,
        "masked_loop_instructions": 611,
        "loop_barriers": 6,
        "loop_copies": 8,
    }


@pytest.mark.parametrize(
    ("what", "count"), [("spills", 1), ("loop_copies", 9), ("loop_instructions", 307), ("loop_barriers", 7)]
)
def test_growth_of_machine_code_is_named(what: str, count: int) -> None:
    before = BEFORE | COUNTS
    assert compare("kernel x", before | {"loop_instructions": 306}, before) == []
    assert compare("kernel x", before | {what: count}, before) == [f"{what} grew from {before[what]} to {count}"]
    assert compare("kernel x", BEFORE, before) == []  # where the tools are not installed
    assert compare("kernel x", before, BEFORE) == ["its machine code is not in the baseline: run with --update"]


def test_the_baseline_has_the_machine_code() -> None:
    kept = json.loads(BASELINE.read_text())["h200"]
    assert sorted(kept["tools"]) == ["nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm"]
    assert {name for name, found in kept["functions"].items() if "registers" in found} == set(MACHINE_CODE)


def test_the_baseline_has_every_check() -> None:
    baseline = json.loads(BASELINE.read_text())
    assert list(baseline) == list(PACKAGES)
    assert {*PACKAGES} <= {*TARGETS}
    names = [name for name, _ in checks()]
    assert len(names) == 6 + 4 + 2 + 3 * 4 * 4
    for target, kept in baseline.items():
        assert sorted(kept["functions"]) == sorted(names)
        assert sorted(kept["versions"]) == sorted(["jax", PACKAGES[target]])
