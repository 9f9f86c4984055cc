"""Values with a scale for each group, and what they are in floating numbers."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

AT_ONCE = 1 << 18  # elements: of float32 a megabyte

FLOAT8_VALUES: npt.NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""By the bits of a float8_e4m3fn; looking them up is ten times as fast as ml_dtypes' conversion."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix `[out, in]`: `(values - zeros) * scales`, with scales and zeros of whole blocks.

    `values` are integers, or float8_e4m3fn as its bits in uint8 if `is_float8`. `scales` and `zeros` are `[out blocks,
    in blocks]`. `group_of` is the block of each input; None: they are in order.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.float32] | None
    block: tuple[int, int]  # output and input channels; 0: all of them
    is_float8: bool = False
    group_of: npt.NDArray[np.int32] | None = None


def dequantise(matrix: GroupedMatrix) -> npt.NDArray[np.float32]:
    """The matrix in float32 `[out, in]`: each element is rounded once."""
    out, inside = matrix.values.shape
    wide = np.empty((out, inside), np.float32)
    step = max(1, AT_ONCE // inside)
    rows_of_block = matrix.block[0] or out
    group_of = matrix.group_of
    if group_of is None:
        group_of = (np.arange(inside) // (matrix.block[1] or inside)).astype(np.int32)

    def fill(start: int) -> None:
        stop = min(start + step, out)
        blocks = np.arange(start, stop) // rows_of_block
        part, values = wide[start:stop], matrix.values[start:stop]
        if matrix.is_float8:
            np.take(FLOAT8_VALUES, values, out=part)
        else:
            part[:] = values
        if matrix.zeros is not None:
            part -= matrix.zeros[blocks][:, group_of]
        with np.errstate(over="ignore"):  # what overflows is refused when the parameter is checked
            part *= matrix.scales[blocks][:, group_of]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(0, out, step)):
            pass
    return wide
