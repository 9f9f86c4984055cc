"""Marks in a text."""

from __future__ import annotations

import pytest

from jaxctx.model.text.tool_calls.marks import partial_length, split_markers


@pytest.mark.parametrize(
    ("text", "length"), [("", 0), ("x", 0), ("<", 1), ("a<<", 2), ("<<a", 3), ("<<a>", 0), ("<<a<", 1)]
)
def test_what_may_begin_a_mark(text: str, length: int) -> None:
    assert partial_length(text, "<<a>") == length


def test_a_text_in_parts() -> None:
    assert split_markers("<a>x<b><a>", ["<a>", "<b>"]) == ["<a>", "x", "<b>", "<a>"]
    assert split_markers("x", ["<a>"]) == ["x"]
    assert split_markers("", ["<a>"]) == []
