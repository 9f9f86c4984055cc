"""Attention overrides: the position and mask of a token that was not computed in the default way.

By default a token's position is its index in the sequence, and it attends to every token up to and including itself.
The override of any other token is called its *mark*: bytes that hold its position and the index ranges that it attends
to. Keys and values depend on both. Hence marks are part of a page's identity, and they are stored with the tokens, so
that a page can be computed again. The default is always written as no mark at all: an explicit causal mask equals it.

    mark of a token:  position, start, stop, start, stop, …     int32 each; no range: attends to all up to itself
    marks of a page:  offset, length of mark, mark, …           int32 each; ascending offsets of marked tokens only
"""

from array import array
from collections.abc import Iterable, Mapping


def encode_mark(index: int, position: int, ranges: Iterable[tuple[int, int]] = ()) -> bytes:
    """The mark of the token at `index`; b"" if it is computed in the default way.

    `ranges` are `[start, stop)`, ascending, within `0 .. index`. Adjacent ranges are joined, so that equal masks have
    equal marks.
    """
    bounds: list[int] = []  # start, stop, start, stop, …
    for start, stop in ranges:
        if bounds and bounds[-1] == start:
            bounds[-1] = stop
        else:
            bounds += start, stop
    if bounds == [0, index + 1]:  # the causal mask
        bounds = []
    if position == index and not bounds:
        return b""
    return array("i", [position, *bounds]).tobytes()


def decode_mark(mark: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Position and ranges of a mark that is not empty. No ranges: the token attends to everything up to itself."""
    position, *bounds = array("i", mark)
    return position, list(zip(bounds[::2], bounds[1::2], strict=True))


def encode_page(marks: Mapping[int, bytes], first: int, size: int) -> bytes:
    """The marks of the page whose tokens have the indices `first .. first + size - 1`; b"" if it has none."""
    if not marks:
        return b""
    page = bytearray()
    for offset in range(size):
        mark = marks.get(first + offset)
        if mark:
            page += array("i", [offset, len(mark)]).tobytes()
            page += mark
    return bytes(page)
