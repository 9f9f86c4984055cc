"""Small unsigned integers in words of 32 bits, the lowest bits first.

compressed-tensors   a row of a matrix [out, in], one after the other; the last word may be padded
GPTQ                 a column of a matrix [in, out]; zeros [groups, out] along their rows
AWQ                  a row of a matrix [in, out], of every 8 the even ones first; zeros [groups, out] likewise
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
Integers = npt.NDArray[np.uint8]

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The place of the integer in the lowest 4 bits, in the next 4, and so on."""

TURNED_AT_ONCE = 64  # rows


def unpack_rows(words: Words, bits: int, columns: int, order: tuple[int, ...] = IN_ORDER) -> Integers:
    """`[rows, words]` → the first `columns` integers of `bits` bits (4 or 8) of each row, `[rows, columns]`."""
    count = 32 // bits
    unpacked = np.empty((words.shape[0], words.shape[1] * count), np.uint8)
    for place in range(count):
        unpacked[:, order[place] :: count] = _integers(words, bits, place)
    return unpacked[:, :columns]


def unpack_columns(words: Words, bits: int, rows: int) -> Integers:
    """`[words, columns]` → the first `rows` integers of each column, `[rows, columns]`."""
    count = 32 // bits
    unpacked = np.empty((words.shape[0] * count, words.shape[1]), np.uint8)
    for place in range(count):
        unpacked[place::count] = _integers(words, bits, place)
    return unpacked[:rows]


def _integers(words: Words, bits: int, place: int) -> npt.NDArray[np.uint32]:
    return (words.view(np.uint32) >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)


def turned(integers: Integers) -> Integers:
    """`[rows, columns]` → `[columns, rows]`, some rows at a time: as a whole each byte is in another page of memory."""
    columns = np.empty(integers.shape[::-1], np.uint8)
    for start in range(0, integers.shape[0], TURNED_AT_ONCE):
        stop = start + TURNED_AT_ONCE
        columns[:, start:stop] = integers[start:stop].T
    return columns
