"""What tests of the repository's own files share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def first_example() -> str:
    """README's first example, as a reader would paste it: the fenced block that follows its marker."""
    return example("first")


def example(name: str) -> str:
    """The fenced block of README that follows the marker of this name."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} example -->\s*```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None, f"README.md has no block after <!-- {name} example -->"
    return found[1]
