"""README says only what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_first_example_parses_and_needs_only_the_client(first_example: str) -> None:
    tree = ast.parse(first_example)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported == ["jaxctx"]
    for step in ("fill", "fork", "generate"):
        assert any(isinstance(node, ast.Attribute) and node.attr == step for node in ast.walk(tree))


def test_links_and_commands_exist() -> None:
    for page in ("README.md", "BUILD.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text) + re.findall(
            r"(?<![\w/])\./?((?:scripts|\.ci)/\w+)", text
        )
        assert targets
        for target in targets:
            assert (ROOT / target).exists(), f"{page} names {target}"


def test_every_operation_named_is_in_the_contract() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [row.split("|")[2] for row in readme.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    contract = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "protos").rglob("*_service.proto"))
    defined = set(re.findall(r"(?:rpc|service) (\w+)", contract))
    assert named
    assert named <= defined
