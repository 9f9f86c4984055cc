"""Weights in 8 bits: a scale for each output channel, and values that are rounded to the nearest, half to even.

The greatest magnitude of a channel becomes the greatest value, so that nothing is cut off. Done on the host with numpy,
in parts that stay in the processor's cache and on all of its cores.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxctx.model.weights.formats import HostArray

LARGEST = {"int8": np.float32(127), "float8_e4m3fn": np.float32(448)}
AT_ONCE = 1 << 17  # elements: of float32 half a megabyte
SMALLEST_SCALE = np.finfo(np.float32).tiny  # of a row of zeros too: an accelerator takes smaller numbers for 0


def quantize(weight: HostArray, dtype: str) -> tuple[HostArray, HostArray]:
    """Values `[…, out, in]` of `dtype`, a key of LARGEST, and scales float32 `[…, out]` of a finite weight like them.

    `weight` is of any floating type; `values * scale` differs from it by at most half a step of the values.
    """
    shape = weight.shape
    weight = weight.reshape(-1, shape[-1])
    rows, inside = weight.shape
    values: HostArray = np.empty(weight.shape, np.int8 if dtype == "int8" else np.uint8)
    scale = np.empty(rows, np.float32)
    step = max(1, AT_ONCE // inside)

    def fill(start: int) -> None:
        part = weight[start : start + step].astype(np.float32)
        scales = np.maximum(np.abs(part).max(1) / LARGEST[dtype], SMALLEST_SCALE)
        part /= scales[:, None]
        scale[start : start + step] = scales
        values[start : start + step] = np.rint(part, out=part) if dtype == "int8" else float8_bits(part)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(0, rows, step)):
            pass
    values = values.reshape(shape)
    return (values if dtype == "int8" else values.view(ml_dtypes.float8_e4m3fn)), scale.reshape(shape[:-1])


def float8_bits(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The bits of the nearest float8_e4m3fn of numbers up to 448, half to even.

    ml_dtypes gives the same, one number after the other: it takes ten times as long.
    """
    bits = numbers.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    odd = (magnitude >> np.uint32(20)) & np.uint32(1)  # whether the last bit that is kept is set
    rounded = (magnitude + np.uint32(0x7_FFFF) + odd) >> np.uint32(20)
    normal = rounded - np.uint32(120 << 3)  # exponents are biased by 7 instead of 127
    # Below 2**-6 the step is 2**-9, which is that of float32 at 2**14: adding that rounds.
    shifted = magnitude.view(np.float32) + np.float32(2**14)
    subnormal = shifted.view(np.uint32) & np.uint32(0xF)
    code = np.where(magnitude < np.uint32((127 - 6) << 23), subnormal, normal)
    with_sign: npt.NDArray[np.uint8] = (code | (bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    return with_sign
