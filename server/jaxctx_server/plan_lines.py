"""What `jaxctx-serve plan` prints below its first line, and its fields as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from jaxctx.engine.plan.memory_planner import MemoryPlan
from jaxctx.engine.plan.mesh_plan import CollectiveSum, MeshPlan
from jaxctx_server.engine_plan import EnginePlan


def plan_fields(plan: EnginePlan) -> dict[str, Any]:
    """Sizes and the memory of a chip side by side; of several chips also `chips`, `mesh` and what they send."""
    fields = asdict(plan.sizes) | asdict(plan.memory)
    if plan.mesh is not None:
        of_mesh = asdict(plan.mesh)
        del of_mesh["memory"]
        fields |= of_mesh
    return fields


def plan_lines(plan: MemoryPlan | MeshPlan) -> Iterator[str]:
    """Of one chip: where its memory goes. Of several: that of each, then what they send each other."""
    if isinstance(plan, MemoryPlan):
        yield from _memory_lines(plan)
        return
    axes = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield f"  {'chips':<16} {plan.chips:14,} ({axes}), each with"
    yield from _memory_lines(plan.memory)
    yield from _collective_lines(f"sent by a layer in a step of {plan.rows} rows", plan.every_layer)
    yield from _collective_lines("sent by all of the step", plan.every_step)
    yield from _collective_lines("in branches of sampling, of which a step takes some", plan.sampling)


def _memory_lines(plan: MemoryPlan) -> Iterator[str]:
    for name, value in asdict(plan).items():
        if name in ("draft_bytes", "spare_bytes") and not value:
            continue
        amount = f"{value / 2**20:14,.1f} MiB" if name.endswith("_bytes") else f"{value:14,}"
        yield f"  {name.removesuffix('_bytes').replace('_', ' '):<16} {amount}"


def _collective_lines(title: str, sums: Sequence[CollectiveSum]) -> Iterator[str]:
    """How many there are of a kind and a type, and the bytes of their results on each chip."""
    yield f"  {title}"
    for each in sums:
        yield f"    {each.count:5,} {each.kind} of {each.dtype:<5}{each.size_bytes / 2**20:12,.2f} MiB"
