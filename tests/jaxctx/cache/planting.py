"""Planting: one bug at a time in the room's source, and whether random play would notice."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from .plays import failing_prefix, random_steps, setup_of


@dataclass(frozen=True)
class Bug:
    """In the source of `owner.method`, `text` becomes `instead`."""

    name: str
    owner: type
    method: str
    text: str
    instead: str
    digest: Callable[[bytes], bytes] | None = None  # only shows under this hash

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function: Any = inspect.getattr_static(self.owner, self.method)
        function = getattr(function, "fget", function)  # of a property
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.text) == 1, f"{self.text!r} is not, or not only once, in\n{source}"
        namespace: dict[str, Any] = {}
        exec(source.replace(self.text, self.instead), function.__globals__, namespace)
        monkeypatch.setattr(self.owner, self.method, namespace[self.method])


def caught(bug: Bug | None) -> bool:
    """Whether any of some short plays goes wrong."""
    for seed in range(56):
        setup = setup_of(seed)
        if bug is not None and bug.digest is not None:
            setup = replace(setup, digest=bug.digest)
        if failing_prefix(setup, random_steps(seed, 300)) is not None:
            return True
    return False
