"""SIGKILL at every call below the store, and at system calls: old or new, never half, nothing acknowledged lost."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxctx.store.objects import open_objects

from .builders import MemoryObjects, open_store
from .fault_injection import SCENARIOS, Interrupted, check_no_garbage, files, prepare, state

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "tests.jaxctx.store.fault_injection"]
CALLS = 80  # more than any scenario makes, before and after counted


def _prepared(root: Path):
    """A directory to start from; what it holds before and after each scenario."""
    objects = open_objects(str(root / "start"))
    prepare(objects)
    old = state(objects)
    objects.close()
    return old


def _new_state(root: Path, scenario: str):
    shutil.copytree(root / "start", root / "whole")
    objects = open_objects(str(root / "whole"))
    SCENARIOS[scenario](open_store(objects, seed="now"))
    return state(objects)


def _check_after_death(objects, old, new, acknowledged: bool) -> None:
    found = state(objects)
    assert found == new if acknowledged else found in (old, new)
    check_no_garbage(objects)
    assert state(objects, "again") == found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call(tmp_path, scenario):
    old = _prepared(tmp_path)
    new = _new_state(tmp_path, scenario)
    roots = [str(tmp_path / f"{count}") for count in range(CALLS)]
    for root in roots:
        shutil.copytree(tmp_path / "start", root)
    run = subprocess.run([*PROGRAM, "kill", scenario, *roots], cwd=ROOT, capture_output=True, text=True, check=True)
    *deaths, said, status = run.stdout.split()
    assert len(deaths) > 4
    assert {*deaths} == {"9"}
    assert (said, status) == ("acknowledged", "0")  # every call was reached
    for count, root in enumerate(roots[: len(deaths) + 1]):
        objects = open_objects(root)
        _check_after_death(objects, old, new, acknowledged=count == len(deaths))
        assert not [file for file in files(root) if file.endswith(".__lock")]
        objects.close()


class PowerLoss(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("left", [0, 40, 10_000])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_lost_at_every_call(scenario, left):
    """What nobody waited for is gone or cut off: nothing may be acknowledged that relies on it."""
    start = MemoryObjects()
    prepare(start)
    old, new = state(start), state(_whole(start, scenario))
    for count in range(CALLS):
        objects = copy.deepcopy(start)

        def point(calls=[count]):  # noqa: B006  counts down
            if calls[0] == 0:
                raise PowerLoss
            calls[0] -= 1

        acknowledged = True
        try:
            SCENARIOS[scenario](open_store(Interrupted(objects, point), seed="now"))
        except PowerLoss:
            acknowledged = False
        objects.lose_power(left)
        _check_after_death(objects, old, new, acknowledged)
        if acknowledged:
            return
    raise AssertionError("there are more calls")


def _whole(start: MemoryObjects, scenario: str) -> MemoryObjects:
    objects = copy.deepcopy(start)
    SCENARIOS[scenario](open_store(objects, seed="now"))
    return objects
