"""A quantised safetensors checkpoint, seen as if its matrices were stored in our forms.

X.weight of 8 bits, a scale for each output channel ──▶ X.weight of 8 bits, X.weight_scale [out]
4 bits that a kernel multiplies                     ──▶ X.weight codes, X.weight_scale [out, groups, 1 or 2]
anything else in fewer bits                         ──▶ X.weight float32
experts in MXFP4                                    ──▶ X bfloat16
scales of activations and of KV                     ──▶ nothing
the rest                                            ──▶ itself
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import CheckpointError, Reader, read_json
from jaxctx.model.families.family import TensorPart
from jaxctx.model.functional import INT4, Int4Form, ParamSpec, abstract, scale_beside
from jaxctx.model.quantization.config import FIELD, read_quantization
from jaxctx.model.quantization.grouped import dequantise
from jaxctx.model.quantization.matrix import (
    OF_ACTIVATIONS,
    OF_KV,
    ReadTensor,
    StoredMatrix,
    find_matrix,
    quantized_modules,
    read_matrix,
    read_scales,
)
from jaxctx.model.quantization.mxfp4 import find_experts, read_experts
from jaxctx.model.quantization.scheme import Quantization
from jaxctx.model.registry import FAMILIES
from jaxctx.model.stored_tensor import NUMPY_DTYPES, StoredTensor
from jaxctx.model.weights.formats import CONFIG, HostArray, OrbaxSource, SafetensorsSource, open_source, read_in_order
from jaxctx.model.weights.int4 import Int4Device, Int4Rules, form_of, read_codes, read_int4_scales
from jaxctx.model.weights.parts import PartsByName, parameter_parts

WeightSource: TypeAlias = "SafetensorsSource | OrbaxSource | QuantizedSource"


def open_weights(directory: Path, config: ModelConfig, int4: Int4Device | None = None) -> WeightSource:
    """The weights in `directory` of a model, in whichever format, as `config.json` says that they are stored.

    Tensors that the model's family does not read are left out. `int4`: what the devices do with weights of 4 bits,
    which may stay so; None: all become wide. Raises CheckpointError if there are none that can be read.
    """
    source = open_source(directory, FAMILIES[config.architecture].unread)
    quantization = read_quantization(Reader(read_json(directory / CONFIG), CONFIG))
    if quantization is None:
        return source
    if isinstance(source, OrbaxSource):
        raise CheckpointError(f"{CONFIG}: {FIELD}: not in an Orbax checkpoint, which has our own forms alone")
    rules = None if int4 is None else int4_rules(quantization, config, int4)
    return QuantizedSource(source, quantization, _layers_matrices(config), rules)


def int4_rules(quantization: Quantization, config: ModelConfig, device: Int4Device) -> Int4Rules:
    """Which matrices of such a checkpoint stay in 4 bits."""
    model, _ = abstract(config, "float32", weights_dtype="int8")
    parts = parameter_parts(model, as_published=True)
    parameters: dict[str, tuple[ParamSpec, ...]] = {}
    for spec in model.specs:
        if spec.dtype == "int8" and len(spec.shape) == 2:
            (part,) = parts[spec.name]
            parameters[part.tensor] = (*parameters.get(part.tensor, ()), spec)
    rules = partial(Int4Rules, device, config, parameters)
    if device.kernel is None:
        return rules(None, device.why_no_kernel)
    if quantization.kept_dtype is not None:
        return rules(None, f"others have 8 bits, {quantization.kept_dtype}, and stay so")
    forms = [form_of(scheme, device.kernel) for scheme in quantization.schemes]
    form = next((each for each in forms if each is not None), None)
    return rules(form, "no kernel takes such groups" if form is None else "")


def _layers_matrices(config: ModelConfig) -> frozenset[str]:
    """The tensors in which a checkpoint has what may have 8 bits here: not the head."""
    model, _ = abstract(config, "float32", weights_dtype="int8")
    parts = parameter_parts(model, as_published=True)
    return frozenset(part.tensor for spec in model.specs if spec.dtype == "int8" for part in parts[spec.name])


@dataclass(frozen=True, slots=True)
class Shown:
    """A tensor that is shown and not stored, and how it is made."""

    tensor: StoredTensor
    matrix: StoredMatrix
    make: Callable[[StoredMatrix, ReadTensor], HostArray]


class QuantizedSource:
    """A `WeightSource` of the checkpoint's matrices in our forms."""

    def __init__(
        self,
        stored: SafetensorsSource,
        quantization: Quantization,
        may_be_narrow: Collection[str],
        int4: Int4Rules | None = None,
    ) -> None:
        """`may_be_narrow`: the tensors that may stay in 8 bits; `int4`: which stay in 4. All others become wide.

        Raises CheckpointError, naming a tensor, where tensors contradict each other or `quantization`."""
        self._stored = stored
        self.file = stored.file
        self.dequantised: list[StoredMatrix] = []
        """The matrices that become wide."""
        self.dequantised_experts = {experts.name: experts for experts in find_experts(stored.tensors)}
        """The experts that do, by the name of their tensor as it is shown."""
        self.why_wide: list[str] = []
        """Why those of 4 bits do, each reason once."""
        self.int4: Int4Form | None = None
        """Of the matrices that stay in 4 bits; None: none does."""
        self._shown: dict[str, Shown] = {}
        self.quantized = self._shown.keys()
        """Tensors of few bits as they are shown, scales too."""
        hidden: set[str] = set().union(*(experts.tensors for experts in self.dequantised_experts.values()))
        with stored.opened() as read_part:

            def read(name: str) -> HostArray:
                return read_part(TensorPart(name))

            for module in quantized_modules(stored.tensors):
                matrix = find_matrix(module, stored.tensors, quantization, read)
                hidden |= matrix.tensors | {f"{module}.{leaf}" for leaf in OF_ACTIVATIONS}
                may_be_kept = f"{module}.weight" in may_be_narrow
                if may_be_kept and quantization.keeps(matrix.scheme):
                    self._show_eight_bits(matrix)
                elif int4 is None or not self._show_int4(matrix, int4, read):
                    self._show_wide(matrix)
        self.tensors: dict[str, StoredTensor] = {
            name: tensor for name, tensor in stored.tensors.items() if name not in hidden and not name.endswith(OF_KV)
        }
        self.tensors |= {name: shown.tensor for name, shown in self._shown.items()}
        self.tensors |= {name: experts.shown for name, experts in self.dequantised_experts.items()}

    def _show_wide(self, matrix: StoredMatrix) -> None:
        self.dequantised.append(matrix)
        wide = StoredTensor(matrix.shape, "float32", matrix.file, matrix.scheme.bits)
        self._shown[f"{matrix.module}.weight"] = Shown(wide, matrix, _widened)

    def _show_eight_bits(self, matrix: StoredMatrix) -> None:
        values = StoredTensor(matrix.shape, matrix.scheme.dtype, matrix.file)
        scales = StoredTensor(matrix.shape[:1], "float32", matrix.file)
        self._shown[f"{matrix.module}.weight"] = Shown(values, matrix, _values)
        self._shown[scale_beside(f"{matrix.module}.weight")] = Shown(scales, matrix, _scale_of_each_row)

    def _show_int4(self, matrix: StoredMatrix, rules: Int4Rules, read: ReadTensor) -> bool:
        """Whether the matrix stays in 4 bits; else the reason is kept."""
        if matrix.scheme.bits != 4:
            return False
        why = rules.why_wide(matrix, read)
        if why or rules.form is None:
            self.why_wide += [why] if why not in self.why_wide else []
            return False
        form, groups = rules.form, matrix.shape[1] // rules.form.group
        codes = StoredTensor(matrix.shape, INT4, matrix.file, matrix.scheme.bits)
        scales = StoredTensor((matrix.shape[0], groups, 1 + form.has_zeros), "float32", matrix.file)
        self.int4 = form
        self._shown[f"{matrix.module}.weight"] = Shown(codes, matrix, read_codes)
        self._shown[scale_beside(f"{matrix.module}.weight")] = Shown(scales, matrix, partial(read_int4_scales, form))
        return True

    def read(self, parts: PartsByName) -> Iterator[tuple[str, HostArray]]:
        """As of `SafetensorsSource`. Raises CheckpointError also for scales that are not finite."""
        latest: dict[str, HostArray] = {}  # of experts: one that several parameters are parts of, one after the other
        with self._stored.opened() as read_part:

            def read_shown(part: TensorPart) -> HostArray:
                def read_whole(name: str) -> HostArray:
                    return read_part(TensorPart(name))

                shown, experts = self._shown.get(part.tensor), self.dequantised_experts.get(part.tensor)
                if experts is not None:
                    if part.tensor not in latest:
                        latest.clear()
                        latest[part.tensor] = read_experts(experts, read_whole)
                    whole = latest[part.tensor]
                elif shown is not None:
                    whole = shown.make(shown.matrix, read_whole)
                else:
                    return read_part(part)
                return whole if part.rows is None else whole[slice(*part.rows)]

            yield from read_in_order(self.tensors, parts, read_shown)


def _widened(matrix: StoredMatrix, read: ReadTensor) -> HostArray:
    return dequantise(read_matrix(matrix, read))


def _values(matrix: StoredMatrix, read: ReadTensor) -> HostArray:
    """Of 8 bits, as stored."""
    values = read_matrix(matrix, read).values
    return values.view(NUMPY_DTYPES[matrix.scheme.dtype])


def _scale_of_each_row(matrix: StoredMatrix, read: ReadTensor) -> HostArray:
    return np.broadcast_to(read_scales(matrix, read).reshape(-1), matrix.shape[:1])
