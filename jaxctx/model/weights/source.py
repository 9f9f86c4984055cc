"""What the loader needs of a checkpoint format: the tensors that are there, and their data in bounded amounts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

HostArray = npt.NDArray[Any]

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, before its data is read."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of NUMPY_DTYPES, or whatever else the file says
    file: str  # relative to the checkpoint, for messages

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


class WeightSource(Protocol):
    """An open checkpoint. `file` is what to name when a tensor is nowhere."""

    @property
    def file(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, HostArray]]:
        """The named tensors in the order that reads fastest, holding few of them at a time.

        Raises CheckpointError if a file turns out to be cut short or unreadable.
        """
        ...
