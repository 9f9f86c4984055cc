"""What a family file gives the registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Where a parameter is in a checkpoint: a whole tensor, or rows of one; or some channels of experts' matrices."""

    tensor: str
    rows: tuple[int, int] | None = None  # from, to: of the first axis; None: all
    inputs_first: bool = False  # its last two axes are inputs and outputs, and not outputs and inputs
    channels: tuple[int, int] | None = None  # first, step: of the outputs, which are the second axis; None: all

    def arrange(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is read of the tensor, as the parameter has it."""
        outputs_first = stored.swapaxes(-1, -2) if self.inputs_first else stored
        if self.channels is None:
            return outputs_first
        first, step = self.channels
        return outputs_first[:, first::step]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, of which the parameter's part has this one."""
        if self.channels is not None:
            shape = (shape[0], shape[1] * self.channels[1], *shape[2:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.inputs_first else shape


PartsOf = Callable[[ModelConfig, str], tuple[TensorPart, ...]]
"""A parameter's name → its part of a checkpoint; several are stacked along a new first axis."""


def own_name(config: ModelConfig, parameter: str) -> tuple[TensorPart, ...]:
    """The parts of families whose tensors are named as our parameters are."""
    return (TensorPart(parameter),)


@dataclass(frozen=True, slots=True)
class Family:
    """What is special about one class of models."""

    architecture: str
    """As `architectures[0]` names it."""
    defaults: Mapping[str, Any]
    """What a key means that `config.json` leaves out: the default of the class in transformers."""
    fields: frozenset[str]
    """The keys that `read` understands, beside those of `defaults`."""
    read: Callable[[Reader], ModelConfig]
    """Raises CheckpointError, naming the key, for what is malformed, out of bounds or unsupported."""
    ignored: frozenset[str] = frozenset()
    """Keys that change no computed value, beside `fields.CHANGE_NOTHING`."""
    parts_of: PartsOf = own_name
    unread: tuple[str, ...] = ()
    """What the names of tensors begin with that are not read: those of images, in a model that is served for text."""
