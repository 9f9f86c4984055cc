"""Overrides: the position and mask of tokens that were not computed in the default way."""

import random

import pytest

from jaxctx.cache.attention_overrides import (
    decode_override,
    encode_override,
    encode_page_overrides,
    rows_with_other_windows,
)

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


def rows_by_definition(positions: list[int], overridden: set[int], windows: list[int]) -> set[int]:
    """Rows without an override that see others by positions than by indices."""
    rows: set[int] = set()
    for row in set(range(len(positions))) - overridden:
        for window in windows:
            by_position = [positions[index] > row - window for index in range(row)]
            if by_position != [index > row - window for index in range(row)]:
                rows.add(row)
    return rows


@pytest.mark.parametrize("windows", [[], [1], [5], [3, 20], [200]])
def test_rows_whose_windows_begin_among_tokens_of_other_positions(windows: list[int]) -> None:
    rng = random.Random(len(windows))
    for _ in range(200):
        length, overridden = 60, set(rng.sample(range(40), rng.randint(0, 6)))
        positions = [rng.randrange(80) if index in overridden else index for index in range(length)]
        overrides = {index: encode_override(index, positions[index]) for index in overridden}
        expected = rows_by_definition(positions, overridden, windows)
        start, stop = rng.randint(0, 30), rng.randint(30, length)
        got = rows_with_other_windows(overrides, windows, start, stop)
        assert got == {row for row in expected if start <= row < stop}


def test_spans_that_lie_over_each_other_are_not_counted_one_by_one() -> None:
    """All of these reach to the end: one by one they are 300 million rows."""
    overrides = {index: encode_override(index, 30_000) for index in range(20_000)}
    assert rows_with_other_windows(overrides, [512], 0, 30_000) == set(range(20_000, 30_000))
    assert rows_with_other_windows(overrides, [512], 30_000, 30_000) == set()


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
