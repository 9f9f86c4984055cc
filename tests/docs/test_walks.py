"""docs/walks.md, docs/where.md: every file and every name in them exists, so that a reader finds it by search."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALKS = ROOT / "docs" / "walks.md"
STEP = re.compile(r"(\d+)\. `([^`]+)` `([^`]+)` — (\S.*)")
CALLS = {"Generate", "Fill", "Save", "SubmitCall"}
PACKAGES = ("jaxctx", "kernels", "server")


@dataclass(frozen=True)
class Step:
    """One line of a walk: what happens, and where."""

    walk: str
    number: int
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.walk} {self.number}: {self.name}"


def read_steps(text: str) -> Iterator[Step]:
    """The steps of all walks. A numbered line that is not of the form of a step is an error."""
    walk = ""
    for line in text.splitlines():
        if line.startswith("## "):
            walk = line.removeprefix("## ").strip()
        elif re.match(r"\s*\d+\.", line):
            found = STEP.fullmatch(line.strip())
            assert found is not None, f"not of the form NUMBER. `PATH` `NAME` — WORDS: {line}"
            yield Step(walk, int(found[1]), found[2], found[3])


STEPS = list(read_steps(WALKS.read_text("utf-8")))


def read_places() -> Iterator[tuple[str, str, str]]:
    """Page, file and name, wherever a page other than the walks names a file and right after it a name in it."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page != WALKS and "generated" not in page.parts:
            for path, first, second in PLACE.findall(page.read_text("utf-8")):
                yield from ((page.name, path, name) for name in (first, second) if name)


PLACE = re.compile(r"`([\w/]+\.(?:py|proto))` `([\w.]+)`(?: and `([\w.]+)`)?")
PLACES = list(dict.fromkeys(read_places()))


@cache
def names_in_python(path: Path) -> frozenset[str]:
    """The qualified names that a module defines: classes, functions, and what is assigned in a module or a class."""
    return frozenset(qualified_names(ast.parse(path.read_text("utf-8")), ""))


def qualified_names(node: ast.AST, prefix: str) -> Iterator[str]:
    """The names defined in the body of a module or a class; nested functions are not looked into."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef):
            yield prefix + each.name
            yield from qualified_names(each, f"{prefix}{each.name}.")
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + each.name
        elif isinstance(each, ast.Assign):
            yield from (prefix + target.id for target in each.targets if isinstance(target, ast.Name))
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield prefix + each.target.id
        elif isinstance(each, ast.If | ast.Try):
            yield from qualified_names(each, prefix)


@cache
def names_in_proto(path: Path) -> frozenset[str]:
    """Services with their methods, messages and enums of a proto file."""
    names: set[str] = set()
    service = ""
    for line in path.read_text("utf-8").splitlines():
        if found := re.match(r"(service|message|enum) (\w+)", line):
            names.add(found[2])
            service = found[2] if found[1] == "service" else ""
        elif service and (found := re.match(r"  rpc (\w+)", line)):
            names.add(f"{service}.{found[1]}")
    return frozenset(names)


def names_in(path: Path) -> frozenset[str]:
    """The names that a file of the repository defines."""
    return names_in_proto(path) if path.suffix == ".proto" else names_in_python(path)


def alike(name: str) -> list[str]:
    """Where the last part of a name is defined now, for the message of a failure."""
    last = name.rpartition(".")[2]
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return [
        f"{file.relative_to(ROOT)} {each}"
        for file in files
        for each in sorted(names_in_python(file))
        if each.rpartition(".")[2].strip("_") == last.strip("_")
    ]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_exists(step: Step) -> None:
    path = ROOT / step.path
    assert path.is_file(), f"{step.path} does not exist; {step.name} may be one of {alike(step.name)}"
    assert step.name in names_in(path), f"{step.path} has no {step.name}; it may be one of {alike(step.name)}"


@pytest.mark.parametrize(("page", "path", "name"), PLACES)
def test_a_place_exists(page: str, path: str, name: str) -> None:
    """A file and a name in it, one after the other in a page."""
    assert (ROOT / path).is_file(), f"{path} does not exist; {name} may be one of {alike(name)}"
    assert name in names_in(ROOT / path), f"{path} has no {name}; it may be one of {alike(name)}"


def test_walks_are_whole() -> None:
    """Each of the four calls has a walk, which begins in the contract and whose steps are counted from 1."""
    walks = {name: [step for step in STEPS if step.walk == name] for name in sorted({step.walk for step in STEPS})}
    assert walks.keys() >= CALLS
    for name, steps in walks.items():
        assert [step.number for step in steps] == list(range(1, len(steps) + 1))
        assert steps[0].path.startswith("protos/")
        assert steps[0].name.endswith(f".{name}")
    for name in CALLS - {"Save"}:
        assert any(step.path.startswith("kernels/") for step in walks[name]), f"{name} does not reach a kernel"
    assert walks["Save"][-1].path.startswith("jaxctx/store/")


def test_names_are_found() -> None:
    source = "A = 1\nclass B:\n    x: int\n    def m(self): ...\n    class C:\n        async def n(self): ...\n"
    source += "if A:\n    def f(): ...\n"
    assert set(qualified_names(ast.parse(source), "")) == {"A", "B", "B.x", "B.m", "B.C", "B.C.n", "f"}
    with pytest.raises(AssertionError, match="not of the form"):
        list(read_steps("## Fill\n1. a step in words\n"))
