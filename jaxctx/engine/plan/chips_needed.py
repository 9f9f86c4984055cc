"""Chips needed: the smallest machine of a kind that holds a model, by the bytes of its weights and the least KV.

    machines, ascending ──▶ does the model divide? ──▶ weights + requests + KV ≤ the memory of each? ──▶ first one

Arithmetic only: nothing is compiled, so temporaries and code are not counted, and a machine that is named may turn out
to be a little too small. Used by `jaxctx-serve plan` where a model does not fit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxctx.engine.config import page_bytes
from jaxctx.engine.default_sizes import LEAST_MAX_BATCH, TOKENS_FOR_EACH, default_page_size
from jaxctx.engine.plan.memory_planner import TARGETS
from jaxctx.engine.plan.mesh_targets import machines_of
from jaxctx.model.functional import DecoderModel, FlatParams
from jaxctx.model.sampling import slot_state_bytes
from jaxctx.model.sharding import GROUP, KV, mesh_that_divides, parameter_axes


@dataclass(frozen=True, slots=True)
class ChipsNeeded:
    """A machine that holds a model. `target` is its name; None: no plan can be made for so many of these chips."""

    devices: int
    target: str | None

    def describe(self, chip: str) -> str:
        """In words, for a message."""
        if self.target is None:
            return f"{self.devices} of {chip} hold it (--tensor {self.devices})"
        return f"--target {self.target} holds it, with {self.devices} devices"


def chips_needed(model: DecoderModel, params: FlatParams, chip: str, *, more_than: int = 0) -> ChipsNeeded | None:
    """The fewest chips of this target that hold the weights, and the KV of as few requests as a server takes.

    `params`: arrays or ShapeDtypeStructs. `more_than`: so many devices are known to be too few. None: no machine of
    the kind that the model divides over does.
    """
    platform = "gpu" if TARGETS[chip].platform == "cuda" else "tpu"
    for devices, name in _machines(chip, model.config.heads):
        sizes = mesh_that_divides(model.config, devices, platform)
        if devices <= more_than or sizes is None:
            continue
        if least_bytes(model, params, *sizes, platform) <= TARGETS[chip].memory:
            return ChipsNeeded(devices, name)
    return None


def least_bytes(model: DecoderModel, params: FlatParams, kv: int, group: int, platform: str) -> int:
    """Bytes of each of `kv` × `group` devices: weights, and what sampling and KV of the fewest requests take."""
    page_size = default_page_size(platform)
    tokens = LEAST_MAX_BATCH * min(TOKENS_FOR_EACH, model.max_positions)
    pages = math.ceil(tokens / page_size) + 1  # one is scratch
    return (
        weights_bytes(model, params, kv, group)
        + slot_state_bytes(LEAST_MAX_BATCH, model.vocab_size)
        + pages * page_bytes(model.kv, page_size, platform, kv) // kv
    )


def weights_bytes(model: DecoderModel, params: FlatParams, kv: int, group: int) -> int:
    """Bytes of the parameters that each of `kv` × `group` devices holds."""
    sizes = {KV: kv, GROUP: group}
    return sum(
        _size_bytes(param)
        // math.prod(sizes[axis] for axis in _mesh_axes(parameter_axes(spec.axes, spec.shape, kv * group)))
        for param, spec in zip(params, model.specs, strict=True)
    )


def _size_bytes(param: Any) -> int:
    size: int = param.size * param.dtype.itemsize
    return size


def _mesh_axes(spec: Any) -> Iterator[str]:
    """The axes of the mesh that an array is split over."""
    for each in spec:
        if each is not None:
            yield from (each,) if isinstance(each, str) else each


def _machines(chip: str, most: int) -> Iterator[tuple[int, str | None]]:
    """Numbers of devices, ascending, with the targets that have so many; up to `most` where there are no targets."""
    yield 1, chip
    named = machines_of(chip)
    if named:
        yield from named
    else:
        yield from ((devices, None) for devices in range(2, most + 1))
