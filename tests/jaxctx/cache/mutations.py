"""Mutations: one change at a time in the source of a method, and whether random operations against the oracle fails."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from .stateful.harness import Setup
from .stateful.operations import failing_prefix, random_steps

TIERS = ((4, 8), (0, 0), (2, 3), (10_000, 0), (3, 6), (0, 0), (1, 4))


@dataclass(frozen=True)
class Mutation:
    """A change in the source of `owner.method`: `text` becomes `instead`."""

    name: str
    owner: type | ModuleType
    method: str
    text: str
    instead: str
    often: tuple[str, ...] = ()  # operations to draw more often, with which it shows sooner

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function: Any = inspect.getattr_static(self.owner, self.method)
        function = getattr(function, "fget", function)  # of a property
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.text) == 1, f"{self.text!r} is not, or not only once, in\n{source}"
        namespace: dict[str, Any] = {}
        exec(source.replace(self.text, self.instead), function.__globals__, namespace)
        monkeypatch.setattr(self.owner, self.method, namespace[self.method])


def is_caught(mutation: Mutation | None, seeds: int = 240) -> bool:
    """Whether any of `seeds` short runs of random operations fails, in pools and tiers that are soon full."""
    for seed in range(seeds):
        pages, page_size, (host, disk) = (8, 5, 16, 3)[seed % 4], (1, 2, 3)[seed % 3], TIERS[seed % len(TIERS)]
        steps = random_steps(seed, 300, mutation.often if mutation is not None else ())
        if failing_prefix(Setup(pages, page_size, host, disk), steps) is not None:
            return True
    return False
