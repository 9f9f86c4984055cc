"""Where the parameters of a model are in a checkpoint: whole tensors, parts of a tensor, or several tensors stacked."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxctx.model.families.family import TensorPart, own_name
from jaxctx.model.functional import DecoderModel, ParamSpec, scale_beside
from jaxctx.model.registry import FAMILIES

PartsByName = Mapping[str, tuple[TensorPart, ...]]
"""Parameter name → where it is. Several parts are stacked along a new first axis."""


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint has to hold for a model."""

    shape: tuple[int, ...]
    spec: ParamSpec  # of the first parameter that is in it


def parameter_parts(model: DecoderModel, *, as_published: bool) -> PartsByName:
    """The parts of every parameter, in a checkpoint of the model's makers if `as_published`, else in one of ours.

    Ours have each parameter under its own name. Scales are beside what they scale.
    """
    parts_of = FAMILIES[model.config.architecture].parts_of if as_published else own_name
    return {
        spec.name: tuple(
            TensorPart(scale_beside(part.tensor), part.rows) for part in parts_of(model.config, spec.weight_name)
        )
        if spec.is_scale
        else parts_of(model.config, spec.name)
        for spec in model.specs
        if not spec.is_of_adapters
    }


def expected_tensors(model: DecoderModel, parts: PartsByName) -> dict[str, ExpectedTensor]:
    """Tensor name → what it has to be, for the parameters that `parts` knows. It ends where its last part does."""
    expected: dict[str, ExpectedTensor] = {}
    for spec in model.specs:
        if spec.name not in parts:
            continue
        shape = spec.stored_shape if len(parts[spec.name]) == 1 else spec.stored_shape[1:]
        for part in parts[spec.name]:
            known = expected.get(part.tensor)
            rows = shape[0] if part.rows is None else part.rows[1]
            rows = rows if known is None else max(rows, known.shape[0])
            stored = part.stored_shape((rows, *shape[1:]))
            expected[part.tensor] = ExpectedTensor(stored, spec if known is None else known.spec)
    return expected
