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
    """Paths between backticks, alone or in a command, and in code blocks. `jaxctx/v1/` and `jaxctx/v1` are the same."""
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {path.rstrip("/") for each in [*blocks, *inline] for path in PATH.findall(each)}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    missing = [path for path in sorted(paths_in((ROOT / page).read_text("utf-8"))) if not (ROOT / path).exists()]
    assert [path for path in missing if not path.startswith(tuple(NOT_TRACKED))] == []


def test_paths_are_found() -> None:
    text = (
        "`jaxctx/v1/` and `pytest tests/server\ntests/e2e/router/test_watch.py`, not `gs://docs/x`, jaxctx/none "
        "or `a/tests/b`\n```sh\nscripts/stubs --check\n```\nprose on docs/none"
    )
    assert paths_in(text) == {"jaxctx/v1", "tests/server", "tests/e2e/router/test_watch.py", "scripts/stubs"}
