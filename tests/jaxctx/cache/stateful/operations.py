"""Random operations: which ones, with which sizes of pool and tiers, and the shortest sequence that fails."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from .harness import UNBOUNDED, Harness, Setup

Step: TypeAlias = tuple[str, int, int]

MAX_TRIES = 1_000  # to shrink a failing sequence: a few minutes

OPERATIONS = {
    "create": 8,
    "append": 8,
    "match": 5,
    "restore": 10,
    "grow": 3,
    "mark_computed": 4,
    "fill": 16,
    "compute": 12,
    "keep": 5,
    "scribble": 3,
    "switch": 2,
    "fork": 7,
    "publish": 4,
    "truncate": 4,
    "rewind": 8,
    "take_back": 4,
    "reserve": 5,
    "commit": 3,
    "release": 4,
    "suspend": 8,
    "touch": 3,
    "close": 4,
    "clear": 1,
    "arrive": 6,
    "lose": 2,
    "save": 2,
    "revive": 3,
}
NAMES, WEIGHTS = [*OPERATIONS], [*OPERATIONS.values()]
TIERS = ((0, 0), (4, 6), (0, 0), (2, 0), (8, 8), (1, 3), (UNBOUNDED, 0), (3, 2), (8, 3))


def random_steps(seed: int, count: int, often: Sequence[str] = ()) -> list[Step]:
    """Operations with their arguments, the same for the same seed; those in `often` three times as often."""
    source = random.Random(seed)
    weights = [OPERATIONS[name] * (3 if name in often else 1) for name in NAMES] if often else WEIGHTS
    names = source.choices(NAMES, weights, k=count)
    arguments = source.randbytes(2 * count)
    return [*zip(names, arguments[::2], arguments[1::2], strict=True)]


def setup_of(seed: int, every: int = 1) -> Setup:
    """A setup for each seed: pools of 1 to 20 pages, with and without tiers."""
    host, disk = TIERS[seed % len(TIERS)]
    source = random.Random(seed)
    return Setup(source.choice((1, 2, 3, 5, 8, 13, 20)), source.choice((1, 2, 3, 16)), host, disk, every=every)


def run_steps(setup: Setup, steps: Sequence[Step]) -> None:
    """Raises at the first operation that went wrong."""
    harness = Harness(setup)
    for step in steps:
        harness.run_operation(*step)
    harness.end()


def failing_prefix(setup: Setup, steps: Sequence[Step]) -> tuple[int, str] | None:
    """How many steps it takes to fail, and how it fails."""
    harness = Harness(setup)
    try:
        for step in steps:
            harness.run_operation(*step)
        harness.end()
    except Exception:
        return min(harness.operations, len(steps)), traceback.format_exc(limit=-3)
    return None


def run_seed(seed: int, count: int) -> str:
    """How a long random sequence fails, shrunk; "" if it does not. Everything is compared at every 32nd operation."""
    setup, steps = setup_of(seed, every=32), random_steps(seed, count)
    failure = failing_prefix(setup, steps)
    if failure is None:
        return ""
    steps = steps[: failure[0]]
    fewer, reason = shrink(replace(setup, every=1) if failing_prefix(replace(setup, every=1), steps) else setup, steps)
    return f"seed {seed}, {setup}: {fewer}\n{reason}"


def shrink(setup: Setup, steps: Sequence[Step]) -> tuple[list[Step], str]:
    """Fewer steps that fail as well, and how: none of them can be left out, unless that took too many tries."""
    failure = failing_prefix(setup, steps)
    assert failure is not None, "nothing fails"
    steps, reason = [*steps[: failure[0]]], failure[1]
    size, tries = len(steps) // 2, 0
    while size and tries < MAX_TRIES:
        start = 0
        while start < len(steps) and tries < MAX_TRIES:
            tries += 1
            fewer = steps[:start] + steps[start + size :]
            if (failure := failing_prefix(setup, fewer)) is not None:
                steps, reason = fewer[: failure[0]], failure[1]
            else:
                start += size
        size //= 2
    return steps, reason
