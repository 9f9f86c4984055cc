"""Python reference: the text of a field is the comment beside it, or above it.

    temperature: float = 1.0  # 0 to 100; 0 is greedy
    # Only the smallest set of most likely tokens with at least this probability together; above 0, up to 1. 1: off.
    top_p: float = 1.0

Sphinx reads docstrings and comments that begin with `#:`. This extension gives it the others, for fields that have no
docstring.
"""

from __future__ import annotations

import ast
import importlib
import io
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

Comments = Mapping[int, str]  # by line, from 1


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", add_field_comment)


def add_field_comment(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give a field without a docstring the text of its comment. `name`: module, class and field with dots between."""
    if what == "attribute" and not any(lines):
        lines[:] = [comment_of_field(name), ""]


def comment_of_field(name: str) -> str:
    """The comment of a field; empty if it has none, or if its class cannot be found."""
    path, _, field = name.rpartition(".")
    module_name, _, class_name = path.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module_name), class_name)
        source = importlib.import_module(owner.__module__).__file__
    except (ImportError, AttributeError):
        return ""
    return read_comments(Path(str(source))).get((owner.__name__, field), "")


@cache
def read_comments(path: Path) -> Mapping[tuple[str, str], str]:
    """The comments of a module's fields, by class and field."""
    return field_comments(path.read_text("utf-8"))


def field_comments(source: str) -> dict[tuple[str, str], str]:
    """The comments of the fields that a module's classes declare, by class and field."""
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line[: token.start[1]].strip() == ""
            (alone if is_alone else beside)[token.start[0]] = token.string.lstrip("#").strip()
    found: dict[tuple[str, str], str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = beside.get(statement.end_lineno or 0) or comment_above(alone, statement.lineno)
                if text:
                    found[node.name, statement.target.id] = text[0].upper() + text[1:]
    return found


def comment_above(alone: Comments, line: int) -> str:
    """The comment in the lines directly above a line, as one text."""
    first = line
    while first - 1 in alone:
        first -= 1
    return " ".join(alone[each] for each in range(first, line))
