"""README.md and the pages in docs/: their examples and the commands that they tell a reader to type."""

from __future__ import annotations

import itertools
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
USER_PAGES = ("quick-start", "contexts", "programs", "clients", "http", "deployment", "models")
PAGES = {"README.md": README} | {
    f"docs/{name}.md": (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in USER_PAGES
}
"""What users read, by path. Commands in pages for developers are for an active environment, and are not in here."""


@pytest.fixture
def first_example() -> str:
    """README's first example, as a reader would paste it: the fenced block that follows its marker."""
    return example("first")


def example(name: str) -> str:
    """The fenced block of README that follows the marker of this name."""
    found = re.search(rf"<!-- {name} example -->\s*```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README.md has no block after <!-- {name} example -->"
    return found[1]


def commands() -> list[str]:
    """Every command of every page, in the order of the pages."""
    return [command for page in PAGES.values() for command in commands_of(page)]


def commands_of(page: str) -> list[str]:
    """Each command of a page: lines of its shell blocks, joined where they belong together, and then what stands in the
    text between backticks and begins as a command does.
    """
    found: list[str] = []
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        pending = ""
        for line in block.splitlines():
            pending = f"{pending}\n{line}" if pending else line
            with suppress(ValueError):  # a quote is open: the next line belongs to it
                shlex.split(pending, comments=True)
                found.append(pending)
                pending = ""
        assert not pending, f"a quote without an end: {pending}"
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    inline = [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", prose)]
    return found + [
        each
        for each in inline
        if re.match(r"(\S+=\S+ )?[.\w/]*(scripts|bin)/[\w.]+( |$)|(jaxctx-serve|pip|python) ", each)
    ]


def words(command: str) -> list[str]:
    """The words of a command, without variables that are set before it, and up to a pipe or redirection."""
    split = shlex.split(re.sub(r"^\w+=\$\((.*)\)", r"\1", command, flags=re.DOTALL), comments=True)
    while split and re.fullmatch(r"\w+=.*", split[0]):
        split = split[1:]
    return list(itertools.takewhile(lambda word: word not in ("|", ">", "<<<"), split))
