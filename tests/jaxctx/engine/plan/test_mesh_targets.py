"""The names of machines of several chips."""

from importlib.util import find_spec

import jax
import pytest

from jaxctx.engine.plan.memory_planner import TARGETS, compiling_for_target
from jaxctx.engine.plan.mesh_targets import SLICES, known_targets, mesh_target
from jaxctx.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5e-16", {"topology_name": "v5e:4x4"}),
        ("v6e-8", {"topology_name": "v6e:2x4"}),
        ("v6e-64", {"topology_name": "v6e:8x8"}),
        ("v5p-8", {"topology_name": "v5p:2x2x1"}),
        ("v7x-8", {"topology_name": "tpu7x:2x2x1"}),
    ],
)
def test_slices_of_tpus(name: str, topology: dict[str, str]) -> None:
    target = mesh_target(name).target
    assert target.topology == topology
    assert (target.memory, target.module) == (TARGETS[name[:3]].memory, "libtpu")


def test_gpus_of_a_host() -> None:
    h200, h100 = (mesh_target(name).target for name in ("4xh200", "8xh100"))
    assert (h200.topology["topology"], h100.topology["topology"]) == ("1x1x4", "1x1x8")
    assert h200.memory == TARGETS["h200"].memory
    assert h100.memory * 150 == pytest.approx(h200.memory * 85.5)
    assert "device_memory_size: 85500000000" in h100.topology["target_config"]
    assert "H200" not in h100.topology["target_config"].split("\n", 1)[1]


@pytest.mark.parametrize(
    "name",
    ["", "v5e-", "v5e-17", "v5e-0016x", "v9e-8", "3xh100", "0xh200", "8xa100", "8xh100 ", "١xh100", "v5e-16-2", "h300"],
)
def test_what_is_not_known_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is not known; known are here, v5e, .*2\|4\|8xh100.*v5e-4") as raised:
        mesh_target(name)
    assert [violation.field for violation in raised.value.violations] == ["target"]


def test_all_that_is_named_is_known() -> None:
    told = known_targets()
    assert {*TARGETS} < {*told}
    assert len(told) == len(TARGETS) + 2 + len(SLICES)


@pytest.mark.parametrize(
    ("name", "count"), [("v5e-16", 16), ("v6e-64", 64), ("v5p-8", 4), ("v5p-32", 16), ("v7x-8", 8), ("8xh100", 8)]
)
def test_a_machine_has_as_many_devices_as_it_says(name: str, count: int) -> None:
    machine = mesh_target(name)
    if jax.__version_info__ < (0, 11, 2) or find_spec(machine.target.module) is None:
        pytest.skip(f"the compiler for {name} is not installed: .ci/run has a stage with it")
    with compiling_for_target(name, machine.target) as devices:
        assert len(devices) == count
