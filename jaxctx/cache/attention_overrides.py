"""Marks: how a token was computed, where that was not the usual way.

The usual token stands at the position that is its index, and sees every token up to itself. Any other one bears a
*mark*: bytes that name its position and the ranges of indices that it saw. KV depends on both, so marks are part of a
page's identity, and lineage keeps them, to compute the same again. The usual way is always written as no mark at all:
an explicit causal mask equals the default.

    mark:          position, start, stop, start, stop, …        int32 each; no range: sees everything up to itself
    marks of a page: offset, length of mark, mark, …            int32 each; ascending offsets, none for usual tokens
"""

from array import array
from collections.abc import Iterable, Mapping


def encode_mark(index: int, position: int, ranges: Iterable[tuple[int, int]] = ()) -> bytes:
    """The mark of the token at `index`; b"" for the usual way.

    `ranges` `[start, stop)` are ascending, within `0 .. index`; those that touch are joined: equal masks, equal marks.
    """
    joined: list[int] = []
    for start, stop in ranges:
        if joined and joined[-1] == start:
            joined[-1] = stop
        else:
            joined += start, stop
    if joined == [0, index + 1]:
        joined = []
    return array("i", [position, *joined]).tobytes() if joined or position != index else b""


def decode_mark(mark: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Position and ranges of a mark that is not empty; no ranges where the token saw everything up to itself."""
    position, *bounds = array("i", mark)
    return position, list(zip(bounds[::2], bounds[1::2], strict=True))


def encode_page(marks: Mapping[int, bytes], first: int, size: int) -> bytes:
    """The marks of the page whose tokens have the indices `first .. first + size - 1`; b"" if it has none."""
    page = bytearray()
    for offset in range(size) if marks else ():
        if mark := marks.get(first + offset):
            page += array("i", [offset, len(mark)]).tobytes() + mark
    return bytes(page)
