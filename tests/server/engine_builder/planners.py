"""In place of compilers that say what fits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan.memory_planner import TARGETS, MemoryPlan
from jaxctx.engine.plan.mesh_plan import MeshPlan
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.model_runner import CompileProgress
from jaxctx_server.engine_builder import fitting_sizes, plan


class Planned:
    """In place of compiling: what was asked for, and the same answer to all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pages: int = 512) -> None:
        self.pages = pages
        monkeypatch.setattr(fitting_sizes, "plan_memory", self)

    def __call__(self, program: CompiledModel, memory: int, share: float, progress: CompileProgress) -> MemoryPlan:
        self.program, self.memory, self.share = program, memory, share
        return MemoryPlan(1 << 34, 3 << 29, 1 << 20, 5 << 20, 0, -12345 << 10, 123456, self.pages, 16 * self.pages, 2)


class OnEightDevices:
    """In place of a machine that is described, this one's eight devices; and in place of compiling, what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.tokens = tokens
        monkeypatch.setattr(plan, "compiling_for_target", lambda name, target: nullcontext(jax.devices()))
        monkeypatch.setattr(plan, "plan_mesh", self)

    def __call__(self, with_layers: Any, layers: int, config: EngineConfig, mesh: Mesh, *rest: Any) -> MeshPlan:
        self.model, self.layers, self.config, self.mesh = with_layers(2)[0], layers, config, mesh
        self.memory, self.share, _ = rest
        memory = MemoryPlan(1 << 34, 3 << 29, 1 << 20, 5 << 20, 0, 1, 2, self.tokens // 16, self.tokens, 0)
        return MeshPlan(mesh.size, dict(mesh.shape), memory, config.max_batch_tokens, (), (), ())


class Refuses:
    """In place of a target whose compiler refuses every step, this machine's CPU. Remembers what was compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
        self.asked = 0
        described = nullcontext((jax.devices(), TARGETS[target].memory))
        monkeypatch.setattr(plan, "compiling_for", lambda name: described)
        monkeypatch.setattr(fitting_sizes, "plan_memory", self)

    def __call__(self, *_: Any) -> MemoryPlan:
        self.asked += 1
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
