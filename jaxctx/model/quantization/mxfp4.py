"""MXFP4, as gpt-oss is published: values of 4 bits, and a power of two for each 32 of them (OCP Microscaling Formats).

`X_blocks` uint8 [experts, out, blocks, 16], two values a byte, the lower bits first; `X_scales` uint8 [experts, out,
blocks], exponents with a bias of 127. A value is one of float4_e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
Each times its scale is a bfloat16 exactly.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxctx.model.config_reader import CheckpointError, Reader
from jaxctx.model.quantization.fields import refuse_unknown
from jaxctx.model.quantization.scheme import WeightScheme
from jaxctx.model.stored_tensor import StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"  # how the names of the two tensors end
IN_BLOCK = 32  # values that share a scale
BIAS = 127  # of a scale's exponent
AT_ONCE = 1 << 16  # bytes: what is made of them stays in the processor's cache
SCALE_RANGE = (BIAS - 120, BIAS + 120)  # in which values are normal numbers of bfloat16, and finite
BYTE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], ml_dtypes.bfloat16)

KNOWN = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
SCHEME = WeightScheme("values", "float4_e2m1", (1, IN_BLOCK), ())


def read_mxfp4(read: Reader) -> tuple[WeightScheme, ...]:
    """Of matrices: none, as only experts are stored so. Raises CheckpointError."""
    refuse_unknown(read, KNOWN)
    return ()


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The matrices of a layer's experts, stored in MXFP4."""

    name: str  # of the tensor, were it not stored so
    shape: tuple[int, int, int]  # experts, out, in
    file: str

    @property
    def tensors(self) -> frozenset[str]:
        """The names of both."""
        return frozenset({self.name + BLOCKS, self.name + SCALES})

    @property
    def shown(self) -> StoredTensor:
        """The tensor that it would be: with its inputs first."""
        experts, out, inside = self.shape
        return StoredTensor((experts, inside, out), "bfloat16", self.file, SCHEME.bits)


def find_experts(tensors: Mapping[str, StoredTensor]) -> Iterator[StoredExperts]:
    """What is stored in MXFP4. Raises CheckpointError, naming a tensor, where two tensors do not fit each other."""
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        whole = name.removesuffix(BLOCKS)
        scales = tensors.get(whole + SCALES)
        if scales is None:
            raise CheckpointError(f"{blocks.file}: {whole}{SCALES}: missing, beside {name}")
        expected = (*scales.shape, IN_BLOCK // 2)
        if blocks.dtype != "U8" or scales.dtype != "U8" or len(expected) != 4 or blocks.shape != expected:
            found = f"type {blocks.dtype} and shape {list(blocks.shape)}"
            beside = f"{whole}{SCALES} has type {scales.dtype} and shape {list(scales.shape)}"
            raise CheckpointError(f"{blocks.file}: {name}: {found}, but {beside}")
        experts, out, count, _ = blocks.shape
        yield StoredExperts(whole, (experts, out, count * IN_BLOCK), blocks.file)


def read_experts(stored: StoredExperts, read: Callable[[str], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The matrices as bfloat16 `[experts, in, out]`, a view of `[experts, out, in]`.

    Raises CheckpointError for a scale that is no number, or beyond what bfloat16 holds exactly.
    """
    blocks, scales = read(stored.name + BLOCKS), read(stored.name + SCALES)
    least, most = SCALE_RANGE
    beyond = (scales < least) | (scales > most)
    beyond &= ((blocks & 0x77) != 0).any(-1) | (scales > most)  # a block of zeros may have any small scale
    if beyond.any():
        wrong = int(scales[beyond][0])
        raise CheckpointError(f"{stored.file}: {stored.name}{SCALES}: holds {wrong}, not within {least} and {most}")
    pairs = _values_of_pairs()
    wide = np.empty(stored.shape, ml_dtypes.bfloat16)
    rows = scales.shape[0] * scales.shape[1]
    by_pair = wide.view(np.uint32).reshape(rows, -1)
    bytes_of_row, scales_of_row = blocks.reshape(rows, -1, IN_BLOCK // 2), scales.reshape(rows, -1, 1)
    step = max(1, AT_ONCE // by_pair.shape[1])

    def fill(start: int) -> None:
        part = slice(start, start + step)
        place = scales_of_row[part].astype(np.intp) << 8 | bytes_of_row[part]
        np.take(pairs, place.reshape(len(place), -1), out=by_pair[part], mode="clip")  # to check places takes a copy

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, range(0, rows, step)):
            pass
    return wide.swapaxes(1, 2)


@cache
def _values_of_pairs() -> npt.NDArray[np.uint32]:
    """By a scale and, in the lower eight bits, a byte: its two values as bfloat16, one behind the other in memory.

    What SCALE_RANGE leaves out is anything.
    """
    scale = np.exp2(np.clip(np.arange(256), *SCALE_RANGE) - BIAS).astype(np.float32)
    byte = np.arange(256)
    values = BYTE_VALUES.astype(np.float32)[np.stack([byte & 15, byte >> 4], axis=1)]
    scaled = (scale[:, None, None] * values).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(scaled).view(np.uint32).reshape(-1)
