"""Marks: the position and mask of tokens that were not computed in the default way."""

import pytest

from jaxctx.cache.attention_overrides import decode_mark, encode_mark, encode_page

from .stateful.keys import decode_page


def test_the_default_has_no_mark() -> None:
    assert encode_mark(5, 5) == b""
    assert encode_mark(5, 5, [(0, 6)]) == b""
    assert encode_mark(5, 5, [(0, 3), (3, 6)]) == b"", "adjacent ranges are one"


@pytest.mark.parametrize(
    ("position", "ranges", "expected"),
    [
        (7, [], []),
        (7, [(0, 6)], []),
        (5, [(0, 2), (4, 6)], [(0, 2), (4, 6)]),
        (5, [(1, 2), (2, 4), (5, 6)], [(1, 4), (5, 6)]),
    ],
)
def test_a_mark_says_position_and_ranges(
    position: int, ranges: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert decode_mark(encode_mark(5, position, ranges)) == (position, expected)


def test_equal_masks_have_equal_marks() -> None:
    assert encode_mark(9, 9, [(1, 3), (3, 5)]) == encode_mark(9, 9, [(1, 5)])


def test_a_page_holds_the_marks_of_its_tokens_only() -> None:
    marks = {3: encode_mark(3, 9), 4: encode_mark(4, 4, [(4, 5)]), 7: encode_mark(7, 0), 8: encode_mark(8, 0)}
    assert encode_page({}, 4, 4) == b""
    assert encode_page({3: marks[3]}, 4, 4) == b""
    assert decode_page(encode_page(marks, 4, 4), 4) == {4: marks[4], 7: marks[7]}


def test_the_marks_of_a_page_do_not_depend_on_where_it_is() -> None:
    mark = encode_mark(5, 9)
    assert encode_page({5: mark}, 4, 4) == encode_page({9: mark}, 8, 4)
