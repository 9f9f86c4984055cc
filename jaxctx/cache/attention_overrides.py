"""Attention overrides: the position and mask of a token that was not computed in the default way.

By default a token's position is its index in the sequence, and it attends to every token up to and including itself.
The override of any other token is a byte string with its position and the index ranges that it attends to. Keys and
values depend on both. Hence overrides are part of a page's identity, and they are stored with the tokens, so that a
page can be computed again. The default has no override: an explicit causal mask is written as the default.

    override of a token:  position, start, stop, start, stop, …            int32 each; no range: all up to itself
    overrides of a page:  offset, length of the override, override, …      offset and length int32, in bytes;
                                                                           ascending offsets of overridden tokens only
"""

from array import array
from collections.abc import Collection, Iterable, Mapping

import numpy as np


def encode_override(index: int, position: int, ranges: Iterable[tuple[int, int]] = ()) -> bytes:
    """The override of the token at `index`; b"" if it is computed in the default way.

    `ranges` are `[start, stop)`, ascending, within `0 .. index`. Adjacent ranges are joined, so that equal masks have
    equal overrides.
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


def decode_override(override: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Position and ranges of an override that is not empty. No ranges: the token attends to everything up to itself."""
    position, *bounds = array("i", override)
    return position, list(zip(bounds[::2], bounds[1::2], strict=True))


def rows_with_other_windows(
    overrides: Mapping[int, bytes], windows: Collection[int], start: int, stop: int
) -> set[int]:
    """Of the indices `start .. stop - 1` those of tokens without an override whose windows hide others than the first
    indices.

    A window of w tokens hides from the token at index i, which is its position too, the positions up to i - w. Where
    earlier tokens have overrides, these may be others than the indices up to i - w. `windows`: in tokens.
    """
    if stop <= start:
        return set()
    changes = np.zeros(stop - start + 1, np.int32)  # how many spans more begin at an index than end there
    for index, encoded in overrides.items():
        if not encoded:
            continue
        low, high = sorted((index, decode_override(encoded)[0]))
        for window in windows:
            first, end = max(start, index + 1, low + window), min(stop, high + window)
            if first < end:
                changes[first - start] += 1
                changes[end - start] -= 1
    rows: list[int] = (np.flatnonzero(changes.cumsum()) + start).tolist()
    return set(rows).difference(overrides)


def encode_page_overrides(overrides: Mapping[int, bytes], first: int, size: int) -> bytes:
    """The overrides of the page whose tokens have the indices `first .. first + size - 1`; b"" if it has none."""
    if not overrides:
        return b""
    page = bytearray()
    for offset in range(size):
        override = overrides.get(first + offset)
        if override:
            page += array("i", [offset, len(override)]).tobytes()
            page += override
    return bytes(page)
