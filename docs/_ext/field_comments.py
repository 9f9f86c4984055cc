"""Python reference: the text of a field is the comment beside it, or above it.

    temperature: float = 1.0  # 0 to 100; 0 is greedy
    # Only the smallest set of most likely tokens with at least this probability together; above 0, up to 1. 1: off.
    top_p: float = 1.0

Sphinx reads docstrings and comments that begin with `#:`. This extension gives it the others, for fields of the modules
in `field_comment_modules` that have no docstring.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

Comments = Mapping[int, str]  # by line, from 1


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.add_config_value("field_comment_modules", [], "env", list)
    app.connect("builder-inited", add_field_comments)


def add_field_comments(app: Sphinx) -> None:
    """Add the comments of fields to what Sphinx has read of each module."""
    from sphinx.pycode import ModuleAnalyzer

    for module in app.config.field_comment_modules:
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        for field, comment in field_comments(analyzer.code).items():
            # After an empty comment, since napoleon takes a first line such as `0: off` for a type and a description.
            analyzer.attr_docs.setdefault(field, ["..", "", comment, ""])


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
