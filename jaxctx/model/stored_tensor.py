"""What a checkpoint's headers say of a tensor, before its data is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxctx.model.config import DTYPES

EIGHT_BIT_DTYPES = ("int8", "float8_e4m3fn")  # of Orbax, and of quantised matrices
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {name: jnp.dtype(name) for name in DTYPES + EIGHT_BIT_DTYPES}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, before its data is read."""

    shape: tuple[int, ...]
    dtype: str  # a key of NUMPY_DTYPES, or whatever else the file says
    file: str  # relative to the checkpoint, for messages
    packed_bits: int | None = None  # of an element in the file; None: those of `dtype`

    @property
    def size_bytes(self) -> int:
        """Of what reading it gives."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def stored_bits(self) -> int:
        """Of an element in the file."""
        return self.packed_bits or 8 * NUMPY_DTYPES[self.dtype].itemsize
