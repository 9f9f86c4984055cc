"""The record of a plan: what a server takes on a chip, or on each of several."""

from dataclasses import dataclass

from jaxctx.engine.default_sizes import Sizes
from jaxctx.engine.plan.memory_planner import MemoryPlan
from jaxctx.engine.plan.mesh_plan import MeshPlan


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The sizes that depend on the platform, and where the memory of a chip goes."""

    sizes: Sizes
    memory: MemoryPlan
    mesh: MeshPlan | None = None  # of several chips
    larger: str = ""  # in words, a machine that is large enough where nothing is left for KV, if one is known
