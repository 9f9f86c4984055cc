"""Collectives of a compiled function: what devices send each other, read from the text of its HLO.

Used by plans for meshes and by the compile checks, which say how many there are; an engine never calls it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
# An operation that is under way while others run is two, "-start" and "-done": only the latter's type is the result's.
_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(KINDS)})(?:-done)?\(")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
_ALWAYS = ("calls", "to_apply")  # what calls the others chooses whether, or how often
_ARRAY = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation. `dtype` is HLO's name of what is sent: "bf16", "f32"; of several arrays that of the first."""

    kind: str  # one of KINDS
    dtype: str
    size_bytes: int  # of the result on one device
    always: bool  # else it stands in a branch or in a loop, and runs never, once or often


def find_collectives(hlo: str | None) -> tuple[Collective, ...]:
    """All collectives in the text of a compiled function (`compiled.as_text()`), in its order.

    Raises ValueError where a compiler gives no text.
    """
    if hlo is None:
        raise ValueError("the compiler gives no text of what it compiled")
    bodies = dict(_computations(hlo))
    always = _called_always(bodies)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            operation = _COLLECTIVE.match(line)
            if operation:
                arrays = _ARRAY.findall(operation[1])
                size_bytes = (
                    sum(_bits(dtype) * math.prod(map(int, filter(None, size.split(",")))) for dtype, size in arrays)
                    // 8
                )
                found.append(Collective(operation[2], arrays[0][0], size_bytes, name in always))
    return tuple(found)


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of each; that of the entry is empty."""
    name: str | None = None
    lines: list[str] = []
    for line in hlo.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            name, lines = "" if start[1] else start[2], []
        elif line == "}" and name is not None:
            yield name, lines
            name = None
        else:
            lines.append(line)


def _called_always(bodies: dict[str, list[str]]) -> set[str]:
    """Computations that run whenever the entry does."""
    reached, left = {""}, [""]
    while left:
        for line in bodies.get(left.pop(), ()):
            for attribute, names in _CALLED.findall(line):
                if attribute in _ALWAYS:
                    new = set(re.findall(r"[\w.-]+", names)) - reached
                    reached |= new
                    left += new
    return reached


def _bits(dtype: str) -> int:
    """Of one number: "bf16" has 16, "f8e4m3fn" 8, "pred" 8."""
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8
