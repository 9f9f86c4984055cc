"""Weights of 4 bits that stay so: which matrices of a checkpoint do, and what becomes of their tensors.

    AWQ, GPTQ, packed ──▶ codes [out, in], scales and zeros [out, groups, 1 or 2] ──▶ words and scales, as kernels want

All matrices of a model that stay in 4 bits have one form: groups of so many inputs, with zeros or without. Others
become wide, and a reason says why. Groups of more inputs than a kernel takes are stored as several with the same scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import Int4Form, ParamSpec
from jaxctx.model.quantization.matrix import (
    ReadTensor,
    StoredMatrix,
    first_value,
    read_matrix,
    read_scales_and_zeros,
)
from jaxctx.model.quantization.scheme import WeightScheme
from jaxctx.model.sharding import GROUP, KV, partition_spec
from jaxctx_kernels.int4_weights import CHUNK, GROUPS, ProductKernel, why_not_packed

Parameters = Mapping[str, tuple[ParamSpec, ...]]
"""Tensor of a checkpoint → the matrices of a model that are in it."""


@dataclass(frozen=True, slots=True)
class Int4Device:
    """What the devices of a model do with weights of 4 bits.

    `kernel` multiplies them; None: nothing does, for a reason. `kv` and `group` are the sizes of the mesh's axes.
    """

    kernel: ProductKernel | None
    why_no_kernel: str = ""
    kv: int = 1
    group: int = 1

    def computing_in(self, dtype: str) -> "Int4Device":
        """The same for a model that computes in this type."""
        if dtype == "bfloat16" or self.kernel is None:
            return self
        return replace(self, kernel=None, why_no_kernel=f"products of 4 bits are of bfloat16, and not of {dtype}")


@dataclass(frozen=True, slots=True)
class Int4Rules:
    """Which matrices of a checkpoint stay in 4 bits on a device."""

    device: Int4Device
    config: ModelConfig
    parameters: Parameters
    form: Int4Form | None  # of those that do; None: none does
    why_none: str = ""

    def why_wide(self, matrix: StoredMatrix, read: ReadTensor) -> str:
        """Why a stored matrix of 4 bits becomes wide; empty: it does not."""
        if self.form is None:
            return self.why_none
        if form_of(matrix.scheme, self.form.kernel) != self.form:
            return "most others have another form"
        if not is_in_order(matrix, read):
            return "their inputs are in the order of activations"
        specs = self.parameters.get(f"{matrix.module}.weight")
        if specs is None:
            return "they are no matrices of layers, or of experts"
        return next(filter(None, (self.why_not(spec) for spec in specs)), "")

    def why_not(self, spec: ParamSpec) -> str:
        """Why this matrix cannot have 4 bits, by its shape and what devices have of it; empty: it can."""
        assert self.form is not None
        sizes = {KV: self.device.kv, GROUP: self.device.group}
        parts = [1, 1]
        for axis, names in enumerate(partition_spec(spec.axes)):
            for name in (names,) if isinstance(names, str) else names or ():
                parts[axis] *= sizes[name]
        if spec.axes[1] == "heads" and self.device.group > 1 and self.config.head_dim % CHUNK:
            return f"heads of {self.config.head_dim} are no whole chunks of {CHUNK} that devices could have"
        out, inside = (size // count for size, count in zip(spec.shape, parts, strict=True))
        return why_not_packed(out, inside, self.form.group)


def form_of(scheme: WeightScheme, kernel: ProductKernel) -> Int4Form | None:
    """The form in which kernels take matrices of a scheme; None: in none."""
    rows, columns = scheme.block
    if scheme.bits != 4 or rows > 1 or (columns and columns not in GROUPS and columns % CHUNK):
        return None
    return Int4Form(kernel, columns if columns in GROUPS else CHUNK, scheme.has_zeros)


def is_in_order(matrix: StoredMatrix, read: ReadTensor) -> bool:
    """Whether groups are of inputs that follow each other; a tensor that says which they are may say so."""
    if matrix.groups is None:
        return True
    inside, group = matrix.shape[1], matrix.scheme.block[1] or matrix.shape[1]
    return bool((read(matrix.groups) == np.arange(inside) // group).all())


def read_codes(matrix: StoredMatrix, read: ReadTensor) -> npt.NDArray[np.uint8]:
    """Codes from 0 to 15, `[out, in]`. Raises CheckpointError."""
    values = read_matrix(matrix, read).values
    codes: npt.NDArray[np.uint8] = (values - values.dtype.type(first_value(matrix.scheme))).view(np.uint8)
    return codes


def read_int4_scales(form: Int4Form, matrix: StoredMatrix, read: ReadTensor) -> npt.NDArray[np.float32]:
    """Scales, and if the form has them zeros of the codes, of each of the form's groups: `[out, groups, 1 or 2]`.

    Raises CheckpointError.
    """
    out, inside = matrix.shape
    groups = inside // form.group
    scales, zeros = read_scales_and_zeros(matrix, read)
    found = [scales] if zeros is None else [scales, zeros - first_value(matrix.scheme)]
    repeated = [np.repeat(np.broadcast_to(each, (out, each.shape[1])), groups // each.shape[1], 1) for each in found]
    return np.stack(repeated, axis=2).astype(np.float32)
