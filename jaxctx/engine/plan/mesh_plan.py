"""Plans for meshes: what an engine takes on each of several chips, and what these send each other.

The model is compiled with one layer and with two, for all chips; what the second one adds is what every further layer
takes. So a plan for 80 layers takes as long as for two. Used by `jaxctx-serve plan`; an engine never calls it.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan.collectives import find_collectives
from jaxctx.engine.plan.memory_planner import (
    MemoryNeeds,
    MemoryPlan,
    compile_described,
    fit_pages,
    measure_needs,
)
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.compiler_options import CompilerOptions
from jaxctx.engine.runner.model_runner import CompileProgress
from jaxctx.model.functional import DecoderModel, FlatParams
from jaxctx.model.sharding import parameter_sharding


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """Collectives of a step that have kind and type in common. `size_bytes`: of all results, on each chip."""

    kind: str
    dtype: str  # as HLO names it: "bf16"
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Where the memory of each chip goes, and the collectives of the largest step.

    `every_layer` has those that one layer adds, `every_step` all that a step always runs, those of layers included,
    and `sampling` those in branches that only some options of sampling take; in loops each counts once.
    """

    chips: int
    mesh: dict[str, int]  # devices along each axis
    memory: MemoryPlan  # of each chip
    rows: int  # of the step
    every_layer: tuple[CollectiveSum, ...]
    every_step: tuple[CollectiveSum, ...]
    sampling: tuple[CollectiveSum, ...]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What a model of one or two layers takes."""

    needs: MemoryNeeds
    always: dict[tuple[str, str], tuple[int, int]]  # by kind and type: count and bytes
    sometimes: dict[tuple[str, str], tuple[int, int]]


def plan_mesh(
    with_layers: Callable[[int], tuple[DecoderModel, FlatParams]],
    layers: int,
    config: EngineConfig,
    mesh: Mesh,
    memory: int,
    share: float,
    progress: CompileProgress,
) -> MeshPlan:
    """Compile for all chips of `mesh`, each of which has `memory` bytes; `share` of what is left is for KV.

    `with_layers` is the model with so many layers, described; `layers` is how many it has. How many pages `config` has
    is not what is planned: about as many will do.
    """
    one, two = (_compile(*with_layers(count), config, mesh, progress, count) for count in (1, 2))
    needs = MemoryNeeds(
        *(_extended(*each, layers) for each in zip(astuple(one.needs), astuple(two.needs), strict=True))
    )
    added, always = {}, {}
    for key in sorted({*one.always, *two.always}):
        (count, size), (count_of_two, size_of_two) = one.always.get(key, (0, 0)), two.always.get(key, (0, 0))
        added[key] = count_of_two - count, size_of_two - size
        always[key] = _extended(count, count_of_two, layers), _extended(size, size_of_two, layers)
    return MeshPlan(
        chips=mesh.size,
        mesh=dict(mesh.shape),
        memory=fit_pages(needs, config.page_size, memory, share),
        rows=config.max_batch_tokens,
        every_layer=_sums(added),
        every_step=_sums(always),
        sampling=_sums(two.sometimes),
    )


def _extended(one: int, two: int, layers: int) -> int:
    """What `layers` layers take, if one takes `one` and two take `two`; what shrinks with a layer stays as it is."""
    return one + (layers - 1) * max(0, two - one)


def _sums(by_key: dict[tuple[str, str], tuple[int, int]]) -> tuple[CollectiveSum, ...]:
    return tuple(CollectiveSum(*key, *value) for key, value in by_key.items() if value != (0, 0))


def _compile(
    model: DecoderModel, params: FlatParams, config: EngineConfig, mesh: Mesh, progress: CompileProgress, layers: int
) -> _Compiled:
    texts: list[str | None] = []  # the last is of the largest step

    def analyse(lowered: jax.stages.Lowered, options: CompilerOptions) -> Any:
        compiled = compile_described(lowered, options)
        texts.append(compiled.as_text() or "")
        return compiled.memory_analysis()

    def told(what: str, done: int, count: int) -> None:
        progress(f"{what} with {layers} {'layer' if layers == 1 else 'layers'}", done + (layers - 1) * count, 2 * count)

    program = CompiledModel(model, described_on(mesh, model, params), config, mesh)
    needs = measure_needs(program, told, analyse)
    always: dict[tuple[str, str], tuple[int, int]] = {}
    sometimes: dict[tuple[str, str], tuple[int, int]] = {}
    for each in find_collectives(texts[-1]):
        sums = always if each.always else sometimes
        count, size_bytes = sums.get((each.kind, each.dtype), (0, 0))
        sums[each.kind, each.dtype] = count + 1, size_bytes + each.size_bytes
    return _Compiled(needs, always, sometimes)


def described_on(mesh: Mesh, model: DecoderModel, params: Sequence[Any]) -> FlatParams:
    """ShapeDtypeStructs of a model, with their places on `mesh`."""
    with_specs = zip(params, model.specs, strict=True)
    return tuple(param.update(sharding=parameter_sharding(mesh, spec.axes, spec.shape)) for param, spec in with_specs)
