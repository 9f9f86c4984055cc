"""Mesh targets: the names of machines of several chips that a plan can be made for, as `8xh100` or `v5e-16`.

4xh200    so many GPUs of one host, all connected
v5e-16    a slice of TPUs by its accelerator type, whose number counts chips; of v5p and v7x it counts cores, two of
          a chip. A device is a chip, but of v7x half of one
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxctx.engine.plan.memory_planner import TARGETS, Target
from jaxctx.errors import InvalidArgument

_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"}
SLICES: Mapping[str, Mapping[int, str]] = MappingProxyType({"v5e": _FLAT, "v6e": _FLAT, "v5p": _CUBES, "v7x": _CUBES})
"""The topology of each slice, by its TPU and number."""
_TPU_NAMES = {"v7x": "tpu7x"}  # where the compiler has another

GPUS_OF_A_HOST = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class MeshTarget:
    """A machine of several chips, as its name says."""

    name: str
    target: Target  # of each chip, with the topology of all


def mesh_target(name: str) -> MeshTarget:
    """The machine of this name. Raises InvalidArgument, which names all that are known."""
    gpus = re.fullmatch(r"(\d{1,4})x(h100|h200)", name)
    if gpus and int(gpus[1]) in GPUS_OF_A_HOST:
        return MeshTarget(name, _gpus(int(gpus[1]), gpus[2]))
    tpus = re.fullmatch(r"(v\d\w)-(\d{1,4})", name)
    if tpus and int(tpus[2]) in SLICES.get(tpus[1], ()):
        chip, number = tpus[1], int(tpus[2])
        topology = f"{_TPU_NAMES.get(chip, chip)}:{SLICES[chip][number]}"
        return MeshTarget(name, replace(TARGETS[chip], topology={"topology_name": topology}))
    raise InvalidArgument.field("target", f"{name!r} is not known; known are here, {', '.join(known_targets())}")


def machines_of(chip: str) -> list[tuple[int, str]]:
    """The machines of several of these chips, smallest first: how many devices each has, and its name."""
    if chip in ("h100", "h200"):
        return [(count, f"{count}x{chip}") for count in GPUS_OF_A_HOST]
    cores_of_a_device = 2 if chip == "v5p" else 1  # of v7x a device is a core, and so is what the number counts
    return [(number // cores_of_a_device, f"{chip}-{number}") for number in SLICES.get(chip, ())]


def known_targets() -> list[str]:
    """All names of targets: of one chip and, with the numbers that there may be, of several."""
    gpus = "|".join(map(str, GPUS_OF_A_HOST))
    slices = [f"{chip}-{'|'.join(map(str, numbers))}" for chip, numbers in SLICES.items()]
    return [*TARGETS, f"{gpus}xh100", f"{gpus}xh200", *slices]


def _gpus(count: int, chip: str) -> Target:
    one = TARGETS[chip]
    return replace(one, topology={**one.topology, "topology": f"1x1x{count}"})
