"""A stored matrix: which tensors it is, whether they agree with each other and with the configuration, and what it is.

Tensors of the matrix of module `X`, by layout:

    values       X.weight [out, in] of 8 bits, X.weight_scale; X.weight_zero_point
    packed       X.weight_packed [out, words], X.weight_scale, X.weight_shape; X.weight_zero_point, X.weight_g_idx
    awq, gptq    X.qweight, X.qzeros, X.scales; X.g_idx
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.quantization.grouped import GroupedMatrix
from jaxctx.model.quantization.packing import AWQ_ORDER, IN_ORDER, turned, unpack_columns, unpack_rows
from jaxctx.model.quantization.scheme import Quantization, WeightScheme
from jaxctx.model.stored_tensor import StoredTensor

Tensors = Mapping[str, StoredTensor]
ReadTensor = Callable[[str], npt.NDArray[Any]]
"""The data of a tensor by its name."""

VALUES = {"I8": "int8", "F8_E4M3": "float8_e4m3fn"}
"""What safetensors calls the types of values that are tensors of their own."""

MAIN = {"weight_packed": "packed", "qweight": "awq or gptq"}
"""The last part of the name of a matrix' main tensor, where it shows the layout."""

ZEROS = "weight_zero_point"
"""The last part of the name of zeros that weights need not have, in layouts `values` and `packed`."""

SCALE_TYPES = ("float32", "bfloat16", "float16")
OF_ACTIVATIONS = frozenset(
    {
        "input_scale",
        "input_zero_point",
        "activation_scale",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
    }
)
"""Last parts of the names of scales of a module's activations, by which nothing is rounded here."""

OF_KV = tuple(f".self_attn.{name}" for name in ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"))
"""Ends of the names of scales for queries, keys and values, which have scales of their own here."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that is stored in one of the schemes, as its tensors' headers have it."""

    module: str
    scheme: WeightScheme
    shape: tuple[int, int]  # out, in
    main: str  # the tensor that holds the values
    scales: str
    zeros: str | None
    groups: str | None  # of the tensor that says which group an input is in
    file: str  # of the values, for messages

    @property
    def tensors(self) -> frozenset[str]:
        """The names of all."""
        names = {self.main, self.scales, self.zeros, self.groups}
        if self.scheme.layout == "packed":
            names.add(f"{self.module}.weight_shape")
        return frozenset(name for name in names if name is not None)


def quantized_modules(tensors: Tensors) -> Iterator[str]:
    """The modules whose matrix is stored in fewer bits, by what is in the file."""
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in MAIN or (leaf == "weight" and tensor.dtype in VALUES):
            yield module


def _file_of(module: str, tensors: Tensors) -> str:
    """The file of a module that `quantized_modules` found, for messages.

    By its main tensor, not by a search: where schemes are in another order than modules, each expert has a message.
    """
    names = (f"{module}.{leaf}" for leaf in ("weight", *MAIN))
    return next(tensors[name].file for name in names if name in tensors)


def find_matrix(module: str, tensors: Tensors, quantization: Quantization, read: ReadTensor) -> StoredMatrix:
    """The matrix of `module`, in the first scheme that its tensors agree with.

    A module with zeros is of a scheme with zeros, if one agrees: a scheme without them would take it too. Of the data
    only `weight_shape` is read. Raises CheckpointError, which names a tensor, if there is no such scheme.
    """
    first: CheckpointError | None = None
    schemes = quantization.schemes
    if f"{module}.{ZEROS}" in tensors:
        schemes = tuple(sorted(schemes, key=lambda scheme: not scheme.has_zeros))
    for scheme in schemes:
        try:
            return _Finder(module, tensors, scheme, read).find()
        except CheckpointError as error:
            first = first or error
    if first is None:
        file = _file_of(module, tensors)
        raise CheckpointError(f"{file}: {module}: quantised, but quantization_config has no scheme for weights")
    raise first


@dataclass(frozen=True, slots=True)
class _Finder:
    """Compares the tensors of one module with one scheme."""

    module: str
    tensors: Tensors
    scheme: WeightScheme
    read: ReadTensor

    def find(self) -> StoredMatrix:
        scheme = self.scheme
        leaf = {"values": "weight", "packed": "weight_packed"}.get(scheme.layout, "qweight")
        main = self._present(leaf)
        if scheme.layout == "values" and VALUES.get(main.dtype) != scheme.dtype:
            self._refuse(leaf, f"type {main.dtype}, but quantization_config says {scheme.describe()}")
        if scheme.layout != "values" and main.dtype != "I32":
            self._refuse(leaf, f"type {main.dtype}, but must be I32")
        if len(main.shape) != 2 or 0 in main.shape:
            self._refuse(leaf, f"shape {list(main.shape)}, but a matrix is expected")
        shape = self._shape(main.shape)
        scales = next((name for name in scheme.scale_names if self._name(name) in self.tensors), scheme.scale_names[0])
        self._check_scales(scales, shape)
        return StoredMatrix(
            module=self.module,
            scheme=scheme,
            shape=shape,
            main=self._name(leaf),
            scales=self._name(scales),
            zeros=self._zeros(shape),
            groups=self._groups(shape[1]),
            file=main.file,
        )

    def _shape(self, main: tuple[int, ...]) -> tuple[int, int]:
        """Of the matrix, of which `main` is the shape of the main tensor."""
        layout, count = self.scheme.layout, 32 // self.scheme.bits
        if layout == "values":
            return main[0], main[1]
        if layout == "awq":
            return main[1] * count, main[0]
        if layout == "gptq":
            return main[1], main[0] * count
        leaf = "weight_shape"
        stored = self._present(leaf)
        if stored.dtype not in ("I64", "I32") or stored.shape != (2,):
            self._refuse(leaf, f"type {stored.dtype} and shape {list(stored.shape)}, but must be two integers")
        out, inside = (int(size) for size in self.read(self._name(leaf)))
        if inside < 1 or main != (out, math.ceil(inside / count)):
            self._refuse(leaf, f"[{out}, {inside}], but weight_packed has shape {list(main)}")
        return out, inside

    def _blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many blocks there are, along the outputs and the inputs."""
        out, inside = shape
        rows, columns = self.scheme.block
        if rows == 1 and columns and inside % columns:
            leaf = {"values": "weight", "packed": "weight_packed"}.get(self.scheme.layout, "qweight")
            self._refuse(leaf, f"groups of {columns} do not divide {inside} inputs")
        return math.ceil(out / (rows or out)), math.ceil(inside / (columns or inside))

    def _check_scales(self, leaf: str, shape: tuple[int, int]) -> None:
        stored, blocks = self._present(leaf), self._blocks(shape)
        if stored.dtype not in SCALE_TYPES:
            self._refuse(leaf, f"type {stored.dtype} is not one of {', '.join(SCALE_TYPES)}")
        inputs_first = self.scheme.layout in ("awq", "gptq")
        self._check_shape(leaf, stored, blocks[::-1] if inputs_first else blocks)

    def _check_shape(self, leaf: str, stored: StoredTensor, blocks: tuple[int, int]) -> None:
        """Scales of whole rows may be without the axis of inputs, one scale for all without any."""
        allowed: list[tuple[int, ...]] = [blocks]
        if self.scheme.layout in ("values", "packed"):
            if blocks[1] == 1:
                allowed.append((blocks[0],))
            if blocks == (1, 1):
                allowed.append(())
        if stored.shape not in allowed:
            expected = f"{self.scheme.describe()}, which is shape {list(blocks)}"
            self._refuse(leaf, f"shape {list(stored.shape)}, but quantization_config says {expected}")

    def _zeros(self, shape: tuple[int, int]) -> str | None:
        """The name of the zeros. Symmetric weights may have some too, which must be 0, see `_of_values`."""
        scheme, blocks = self.scheme, self._blocks(shape)
        if scheme.layout in ("awq", "gptq"):
            stored = self._present("qzeros")
            words = blocks[1], math.ceil(shape[0] / (32 // scheme.bits))
            if stored.dtype != "I32" or stored.shape != words:
                found = f"type {stored.dtype} and shape {list(stored.shape)}"
                self._refuse("qzeros", f"{found}, but must be I32 and {list(words)}")
            return self._name("qzeros")
        if not scheme.has_zeros and self._name(ZEROS) not in self.tensors:
            return None
        stored = self._present(ZEROS)
        if scheme.layout == "values":
            if stored.dtype not in ("I8", "F8_E4M3"):
                self._refuse(ZEROS, f"type {stored.dtype}, but must be that of the values")
            self._check_shape(ZEROS, stored, blocks)
        else:
            packed = math.ceil(blocks[0] / (32 // scheme.bits)), blocks[1]
            if stored.dtype not in ("I32", "I8") or stored.shape != (packed if stored.dtype == "I32" else blocks):
                found = f"type {stored.dtype} and shape {list(stored.shape)}"
                self._refuse(ZEROS, f"{found}, but must be I32 and {list(packed)}")
        return self._name(ZEROS)

    def _groups(self, inside: int) -> str | None:
        leaf = "weight_g_idx" if self.scheme.layout == "packed" else "g_idx"
        if self.scheme.layout not in ("packed", "gptq"):
            return None
        if self._name(leaf) not in self.tensors and not self.scheme.input_groups:
            return None
        stored = self._present(leaf)
        if stored.dtype not in ("I32", "I64") or stored.shape != (inside,):
            found = f"type {stored.dtype} and shape {list(stored.shape)}"
            self._refuse(leaf, f"{found}, but must be I32 and [{inside}]")
        return self._name(leaf)

    def _name(self, leaf: str) -> str:
        return f"{self.module}.{leaf}"

    def _present(self, leaf: str) -> StoredTensor:
        stored = self.tensors.get(self._name(leaf))
        if stored is None:
            file = _file_of(self.module, self.tensors)
            says = f"quantization_config says {self.scheme.describe()}"
            raise CheckpointError(f"{file}: {self._name(leaf)}: missing, {says}")
        return stored

    def _refuse(self, leaf: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.tensors[self._name(leaf)].file}: {self._name(leaf)}: {why}")


def read_matrix(matrix: StoredMatrix, read: ReadTensor) -> GroupedMatrix:
    """The data of a matrix. Raises CheckpointError for what cannot be known from headers."""
    return _awq_or_gptq(matrix, read) if matrix.scheme.layout in ("awq", "gptq") else _of_values(matrix, read)


def read_scales(matrix: StoredMatrix, read: ReadTensor) -> npt.NDArray[np.float32]:
    """The scales, in the shape in which they are stored. Raises CheckpointError for NaN and infinity."""
    scales = np.asarray(read(matrix.scales)).astype(np.float32)
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{matrix.file}: {matrix.scales}: holds values that are not finite")
    return scales


def read_scales_and_zeros(
    matrix: StoredMatrix, read: ReadTensor
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Those of a `GroupedMatrix`. Raises CheckpointError for what cannot be known from headers."""
    scales = read_scales(matrix, read)
    if matrix.scheme.layout in ("awq", "gptq"):
        zeros = _zeros_of_awq_or_gptq(matrix, read)
        return np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T)
    blocks = (scales.shape[0] if scales.ndim else 1, scales.shape[1] if scales.ndim == 2 else 1)
    return scales.reshape(blocks), _zeros_of_values(matrix, blocks, read)


def first_value(scheme: WeightScheme) -> int:
    """The value of a `GroupedMatrix` that stands for bits that are all 0, of integers in words."""
    return -(1 << (scheme.bits - 1)) if scheme.layout == "packed" else 0


def _of_values(matrix: StoredMatrix, read: ReadTensor) -> GroupedMatrix:
    """Of layouts `values` and `packed`."""
    scheme, inside = matrix.scheme, matrix.shape[1]
    scales, zeros = read_scales_and_zeros(matrix, read)
    is_float8 = scheme.dtype == "float8_e4m3fn"
    values = read(matrix.main)
    if scheme.layout == "packed":
        values = (unpack_rows(values, scheme.bits, inside) - np.uint8(-first_value(scheme))).view(np.int8)
    return GroupedMatrix(
        values.view(np.uint8) if is_float8 else values,
        scales,
        zeros,
        scheme.block,
        is_float8,
        _group_of(matrix, scales.shape[1], read),
    )


def _zeros_of_values(matrix: StoredMatrix, blocks: tuple[int, int], read: ReadTensor) -> npt.NDArray[np.float32] | None:
    """Of layouts `values` and `packed`; None: they have none."""
    scheme = matrix.scheme
    if matrix.zeros is None:
        return None
    stored = read(matrix.zeros)
    if stored.dtype == np.int32:
        zeros = unpack_columns(stored, scheme.bits, blocks[0]).astype(np.float32) + first_value(scheme)
    else:
        zeros = stored.astype(np.float32).reshape(blocks)
    if scheme.has_zeros:
        return zeros
    if zeros.any():
        why = "not 0, but quantization_config says that weights are symmetric"
        raise CheckpointError(f"{matrix.file}: {matrix.zeros}: {why}")
    return None


def _awq_or_gptq(matrix: StoredMatrix, read: ReadTensor) -> GroupedMatrix:
    """Inputs come first there, so that all is turned."""
    scheme, (out, inside) = matrix.scheme, matrix.shape
    scales, zeros = read_scales_and_zeros(matrix, read)
    words = read(matrix.main)
    is_awq = scheme.layout == "awq"
    values = unpack_rows(words, 4, out, AWQ_ORDER) if is_awq else unpack_columns(words, scheme.bits, inside)
    group_of = _group_of(matrix, scales.shape[1], read)
    return GroupedMatrix(turned(values), scales, zeros, scheme.block, group_of=group_of)


def _zeros_of_awq_or_gptq(matrix: StoredMatrix, read: ReadTensor) -> npt.NDArray[np.float32]:
    """With the inputs first, as stored."""
    scheme = matrix.scheme
    assert matrix.zeros is not None
    order = AWQ_ORDER if scheme.layout == "awq" else IN_ORDER
    zeros = unpack_rows(read(matrix.zeros), scheme.bits, matrix.shape[0], order)
    largest = (1 << scheme.bits) - 1
    if scheme.zeros_minus_one and (zeros == largest).any():
        # 0 or 16, by who reads it: programs add 1 to each, to all that are in a word, or take the rest of a division.
        why = f"holds {largest}, which is not 1 less than a number of {scheme.bits} bits"
        raise CheckpointError(f"{matrix.file}: {matrix.zeros}: {why}")
    return zeros.astype(np.float32) + np.float32(scheme.zeros_minus_one)


def _group_of(matrix: StoredMatrix, groups: int, read: ReadTensor) -> npt.NDArray[np.int32] | None:
    """The group of each input. Raises CheckpointError for one that there is not."""
    if matrix.groups is None:
        return None
    group_of: npt.NDArray[np.int32] = read(matrix.groups).astype(np.int32)
    if group_of.min() < 0 or group_of.max() >= groups:
        wrong = int(group_of[(group_of < 0) | (group_of >= groups)][0])
        raise CheckpointError(f"{matrix.file}: {matrix.groups}: holds {wrong}, and there are {groups} groups")
    return group_of
