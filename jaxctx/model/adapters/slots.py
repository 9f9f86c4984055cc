"""Adapters as parameters: those of all slots of a matrix are one `lora_a` and one `lora_b`, see `layers.linear.Linear`.

Parameters are made anew and replaced, never written in place: a step that was sent before has what it began with.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxctx.model.adapters.peft import Adapter
from jaxctx.model.functional import DecoderModel, ParamSpec
from jaxctx.model.sharding import put, put_parameter
from jaxctx.model.stored_tensor import NUMPY_DTYPES


def adapter_parameters(
    model: DecoderModel, slots: Sequence[Adapter | None], mesh: Mesh | None = None
) -> Iterator[tuple[int, jax.Array]]:
    """Every parameter of adapters with these in slots 1, 2, and so on (None: zeros), and its index in `model.specs`.

    One after the other, so that memory holds few of them twice. Compiles nothing.
    """
    for index, spec in enumerate(model.specs):
        if spec.is_of_adapters:
            stacked = _stack(model, spec, slots)
            yield index, put(stacked, None) if mesh is None else put_parameter(stacked, spec.axes, model.config, mesh)


def _stack(model: DecoderModel, spec: ParamSpec, slots: Sequence[Adapter | None]) -> npt.NDArray[Any]:
    """The numbers of one parameter. Columns beyond an adapter's rank, and those of empty slots, are zeros."""
    assert model.adapter_slots is not None
    stacked = np.zeros(spec.shape, NUMPY_DTYPES[spec.dtype])
    is_a = spec.name.endswith(".lora_a")
    changed = spec.name.rpartition(".")[0] + ".weight"
    for number, adapter in enumerate(slots):
        change = None if adapter is None else adapter.changes.get(changed)
        if change is None:
            continue
        first = number * model.adapter_slots.rank
        rank = change.a.shape[0]
        if is_a:
            stacked[first : first + rank] = change.a
        else:
            stacked[:, first : first + rank] = change.b
    return stacked
