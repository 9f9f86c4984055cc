"""Overrides: the position and mask of tokens that were not computed in the default way."""

import pytest

from jaxctx.cache.attention_overrides import decode_override, encode_override, encode_page_overrides

from .stateful.keys import decode_page


def test_the_default_has_no_mark() -> None:
    assert encode_override(5, 5) == b""
    assert encode_override(5, 5, [(0, 6)]) == b""
    assert encode_override(5, 5, [(0, 3), (3, 6)]) == b"", "adjacent ranges are one"


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
    assert decode_override(encode_override(5, position, ranges)) == (position, expected)


def test_equal_masks_have_equal_overrides() -> None:
    assert encode_override(9, 9, [(1, 3), (3, 5)]) == encode_override(9, 9, [(1, 5)])


def test_a_page_holds_the_overrides_of_its_tokens_only() -> None:
    overrides = {
        3: encode_override(3, 9),
        4: encode_override(4, 4, [(4, 5)]),
        7: encode_override(7, 0),
        8: encode_override(8, 0),
    }
    assert encode_page_overrides({}, 4, 4) == b""
    assert encode_page_overrides({3: overrides[3]}, 4, 4) == b""
    assert decode_page(encode_page_overrides(overrides, 4, 4), 4) == {4: overrides[4], 7: overrides[7]}


def test_the_overrides_of_a_page_do_not_depend_on_where_it_is() -> None:
    override = encode_override(5, 9)
    assert encode_page_overrides({5: override}, 4, 4) == encode_page_overrides({9: override}, 8, 4)
