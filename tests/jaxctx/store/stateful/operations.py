"""Random operations on a snapshot store: which ones, how often, and with which arguments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias
from unittest import mock

from tests.jaxctx.store.builders import PAGE_BYTES

from .harness import Harness

Step: TypeAlias = tuple[str, int]  # an operation and the seed of its arguments

OPERATIONS = {
    "put": 10,
    "save": 18,
    "begin": 6,
    "add": 8,
    "finish": 5,
    "abort": 2,
    "open": 8,
    "read": 6,
    "close": 4,
    "see": 8,
    "take": 5,
    "touch": 6,
    "remove": 5,
    "update": 5,
    "expire": 8,
    "collect": 4,
    "wait": 12,
    "reopen": 3,
}


def random_steps(seed: int, count: int, often: Sequence[str] = ()) -> list[Step]:
    """The same for the same seed; operations in `often` three times as often."""
    source = random.Random(seed)
    weights = [weight * (3 if name in often else 1) for name, weight in OPERATIONS.items()]
    names = source.choices([*OPERATIONS], weights, k=count)
    return [(name, source.getrandbits(32)) for name in names]


def run_steps(url: str, steps: Sequence[Step]) -> None:
    """On the objects at `url`, of which there are none yet; raises at the first operation that went wrong.

    Packs are small, so that there are many of them.
    """
    with (
        mock.patch("jaxctx.store.transfer.PACK_BYTES", 2 * PAGE_BYTES),
        mock.patch("jaxctx.store.objects.Objects.part_bytes", 2 * PAGE_BYTES),
        mock.patch("jaxctx.store.objects.FileObjects.part_bytes", 2 * PAGE_BYTES),
    ):
        harness = Harness(url)
        for number, step in enumerate(steps):
            try:
                harness.run_operation(*step)
            except BaseException as error:
                error.add_note(f"operation {number}: {step}")
                raise
        harness.end()
