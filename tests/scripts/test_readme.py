"""README and the pages for users say only what is there."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import jaxctx
from jaxctx_server.config import CheckConfig, ConvertConfig, DrawConfig, PlanConfig, RayConfig, ServeConfig
from tests.readme import PAGES, ROOT, commands, commands_of, words

OF_THE_SYSTEM = {"curl", "grpcurl", "grep", "openssl", "echo"}  # programs that a reader has, or knows where from
BROUGHT = {"ray": {"ray"}}  # by extras that not every environment has: modules


def test_the_first_example_parses_and_needs_only_the_client(first_example: str) -> None:
    tree = ast.parse(first_example)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported == ["jaxctx"]
    for step in ("fill", "fork", "generate"):
        assert any(isinstance(node, ast.Attribute) and node.attr == step for node in ast.walk(tree))


PYTHON_BLOCKS = [
    (page, block) for page, text in PAGES.items() for block in re.findall(r"```python\n(.*?)```", text, re.S)
]


@pytest.mark.parametrize(("page", "block"), PYTHON_BLOCKS)
def test_python_parses_and_names_what_is_there(page: str, block: str) -> None:
    """Blocks may be parts of a program; what they take from jaxctx exists."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for node in ast.walk(compile(block, page, "exec", flags)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxctx"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page}: {node.module} has no {alias.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxctx":
            assert hasattr(jaxctx, node.attr), f"{page}: jaxctx has no {node.attr}"


def test_the_python_reference_names_what_is_there() -> None:
    """Objects of the directives, which only the build of the site would tell otherwise."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    current, described = "jaxctx", 0
    for line in page.splitlines():
        if found := re.match(r"\.\. (currentmodule|automodule):: (\S+)", line):
            current = found[2]
            importlib.import_module(current)
        elif found := re.match(r"\.\. auto\w+:: (\S+)", line):
            assert hasattr(importlib.import_module(current), found[1]), f"{current} has no {found[1]}"
            described += 1
    assert described > 10


PAGES_WITH_LINKS = (*PAGES, "BUILD.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("page", PAGES_WITH_LINKS)
def test_links_and_commands_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text) if "reference/generated/" not in link]
    scripts = re.findall(r"(?<![\w/.])(?:\./)?((?:scripts|\.ci)/\w+)(?![\w.])", text)
    targets = [(ROOT / page).parent / link for link in links] + [ROOT / script for script in scripts]
    assert targets or page.startswith("docs/")
    for target in targets:
        assert target.exists(), f"{page} names {target}"


def test_every_operation_named_is_in_the_contract() -> None:
    rows = [row.split("|")[2] for row in PAGES["docs/clients.md"].splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    contract = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "protos").rglob("*_service.proto"))
    defined = set(re.findall(r"(?:rpc|service) (\w+)", contract))
    assert len(named) > 20
    assert named <= defined


# --- commands ---------------------------------------------------------------------------------------------------------


def clean() -> dict[str, str]:
    """The environment of a shell in which nothing is active. Where the package lies is passed on to the interpreter."""
    return {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ} | {"PATH": "/usr/bin:/bin"}


def test_commands_are_found() -> None:
    block = "```sh\nj=1   # one\ncurl a -d '{\"b\":\n 1}'\n\n```\n"
    page = f"Text `scripts/a.py --b` and `x = 1`\n{block}`.venv/bin/python scripts/c.py\nd`"
    assert commands_of(page) == [
        "j=1   # one",
        "curl a -d '{\"b\":\n 1}'",
        "",
        "scripts/a.py --b",
        ".venv/bin/python scripts/c.py d",
    ]
    assert words("j=1   # one") == []
    assert words("call=$(curl a -H 'b c')") == ["curl", "a", "-H", "b c"]
    assert len([each for each in commands() if words(each)]) > 20


COMMANDS = sorted({(page, each) for page, text in PAGES.items() for each in commands_of(text) if words(each)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_of_a_page_needs_no_active_environment(page: str, command: str) -> None:
    """As pasted in a clean shell in a clone: it is there, may be run, and needs nothing that no line before brings.

    `jaxctx-serve` and `pip` are also those of an installed package.
    """
    program, *arguments = words(command)
    if program in OF_THE_SYSTEM:
        return
    if program in (".venv/bin/pip", "pip"):
        assert arguments[0] == "install"
        return
    if program == "jaxctx-serve":
        check_settings(arguments)
        return
    if program == ".venv/bin/python":  # of the environment that `./scripts/serve` makes
        if arguments == ["FILE"]:
            return
        script = ROOT / arguments[0]
        assert script.exists()
        for extra in extras(script):
            text = PAGES[page]
            installed = text.rpartition(command)[0] or text[: text.index(arguments[0])]
            assert f"scripts/environment {extra}" in installed, f"{command} needs {extra}, which nothing installs"
        helped = [sys.executable, str(script), "--help"]
        done = subprocess.run(helped, env=clean(), cwd=ROOT, capture_output=True, text=True, timeout=120)
        if "argparse" in script.read_text("utf-8"):
            assert done.returncode == 0, done.stderr
            for flag in flags(arguments):
                assert flag in done.stdout
        return
    script = ROOT / program
    assert re.match(r"(\./)?scripts/", program), f"{command}: {program} is in no folder that a clean shell looks into"
    assert script.exists()
    assert os.access(script, os.X_OK), f"{program} has no run bit"
    assert script.read_text("utf-8").startswith("#!/usr/bin/env bash"), f"{program}: python3 there is not of .venv"
    if script.name == "serve":
        check_settings(arguments)
    if script.name == "environment":
        extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        assert arguments[0] == "EXTRA" or arguments[0] in extra


def check_settings(arguments: list[str]) -> None:
    """The flags among the arguments of `jaxctx-serve` are settings of it."""
    kinds = (ServeConfig, PlanConfig, CheckConfig, ConvertConfig, DrawConfig, RayConfig)
    named = {name for kind in kinds for name in (each.name for each in fields(kind))}
    assert {flag.lstrip("-").replace("-", "_") for flag in flags(arguments)} - {"help"} <= named


def flags(arguments: list[str]) -> set[str]:
    """Options among these, up to those that are passed on."""
    own = itertools.takewhile(lambda word: word != "--", arguments)
    return {each.partition("=")[0] for each in own if each.startswith("--")}


def extras(script: Path) -> set[str]:
    """What of pyproject.toml's extras a script needs beside the one that the server's environment has."""
    needed, reached, seen = set(), [script], set()
    while reached:
        seen.add(each := reached.pop())
        for node in ast.walk(ast.parse(each.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (name.partition(".")[0] for name in names):
                needed |= {extra for extra, modules in BROUGHT.items() if name in modules}
                beside = script.parent / f"{name}.py"
                reached += [beside] if beside.exists() and beside not in seen else []
    return needed


def test_scripts_may_be_run() -> None:
    """Each that is a program says by which interpreter, and has the run bit, as git knows it and as it lies there."""
    tracked = subprocess.run(["git", "ls-files", "-s", "scripts"], cwd=ROOT, capture_output=True, text=True)
    modes = {line.split("\t")[1]: line.split()[0] for line in tracked.stdout.splitlines()}
    for file in sorted((ROOT / "scripts").rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts or file.name == "__main__.py":
            continue
        text = file.read_text("utf-8")
        is_program = text.startswith("#!") or (file.suffix == ".py" and '__name__ == "__main__"' in text)
        assert text.startswith("#!") == is_program, f"{file} does not say by which interpreter it is run"
        assert os.access(file, os.X_OK) == is_program, f"{file}: the run bit"
        name = file.relative_to(ROOT).as_posix()
        if name in modes:
            assert modes[name] == ("100755" if is_program else "100644"), f"{name}: the run bit in git"
