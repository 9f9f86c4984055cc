"""Paths of the repository that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "generated" not in page.parts
)
TOP = "jaxctx|kernels|server|protos|scripts|tests|docs"
PATH = re.compile(rf"(?<![\w./:-])((?:{TOP})/[\w./-]*\w/?)")
NOT_TRACKED = {"docs/reference/generated"}  # written when the site is built


def paths_in(text: str) -> set[str]:
    """Paths that a text names between backticks, alone or in a command. `jaxctx/v1/` and `jaxctx/v1` are the same."""
    quoted = re.findall(r"`([^`\n]+)`", text)
    return {path.rstrip("/") for each in quoted for path in PATH.findall(each)}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    missing = [path for path in sorted(paths_in((ROOT / page).read_text("utf-8"))) if not (ROOT / path).exists()]
    assert [path for path in missing if not path.startswith(tuple(NOT_TRACKED))] == []


def test_paths_are_found() -> None:
    text = (
        "`jaxctx/v1/` and `pytest tests/server tests/e2e/test_router.py`, not `gs://docs/x`, jaxctx/none or `a/tests/b`"
    )
    assert paths_in(text) == {"jaxctx/v1", "tests/server", "tests/e2e/test_router.py"}
