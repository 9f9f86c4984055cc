"""Where a value of JSON ends: as Python's own parser sees it, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxctx.model.text.tool_calls.json_scanner import MAX_DEPTH, JsonScanner, Malformed, is_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def scanned(text: str, size: int) -> int:
    """The position behind the value at the start of a text that comes in pieces of this size."""
    scanner, at = JsonScanner(), 0
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        at = start + scanner.feed(piece, 0)
        if scanner.done:
            return at
        assert at == start + len(piece)
    raise EOFError


@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.integers(1, 7))
def test_a_value_ends_where_it_ends(value: object, is_ascii: bool, indent: int | None, size: int) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    for behind in (" ", ",", "}", "]}"):
        assert scanned(text + behind, size) == len(text)


@given(st.text(alphabet='{}[]",:\\ u0123.eE+-truefalsn\n', max_size=12), st.integers(1, 4))
def test_what_python_refuses_is_malformed(text: str, size: int) -> None:
    try:
        end: int | None = json.JSONDecoder().raw_decode(text.lstrip(" \n"))[1] + len(text) - len(text.lstrip(" \n"))
    except json.JSONDecodeError:
        end = None
    try:
        found: int | None = scanned(text + "\0", size)
    except (Malformed, EOFError):
        found = None
    # Python's ends a number at its longest part that is one ("1.e" at 1); here the whole run must be a number.
    assert found == end or (found is None and end is not None and text[end : end + 1] in "0123456789.eE+-")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "'a'", "{a: 1}", '"\t"', "-", "+1", "1" * 500 + " ", "tru "])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises((Malformed, EOFError)):
        scanned(text, len(text))


def test_depth_is_limited() -> None:
    assert scanned("[" * MAX_DEPTH + "]" * MAX_DEPTH, 3) == 2 * MAX_DEPTH
    with pytest.raises(Malformed) as raised:
        scanned("[" * (MAX_DEPTH + 1), MAX_DEPTH + 1)
    assert raised.value.position == MAX_DEPTH


@pytest.mark.parametrize("text", ["1", " -0.5e9 ", '"a"', "\n[1, {}]\t", "1e999", "null"])
def test_a_text_that_is_one_value(text: str) -> None:
    assert is_json(text)
    assert not is_json(text + "1 1")


@pytest.mark.parametrize("text", ["", " ", "[1", '"a', "1 2", "[] x", "NaN", "'a'", "01", "tru"])
def test_a_text_that_is_not_one_value(text: str) -> None:
    assert not is_json(text)
