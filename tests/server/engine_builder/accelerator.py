"""A CPU that says it is an accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan.memory_planner import MemoryPlan
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.model_runner import CompileProgress
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder import build, fitting_sizes
from jaxctx_server.engine_builder.build import build_engine
from tests.server.engine_builder.settings import Silent, StandInEngine


class Accelerator:
    """A CPU that says it is an accelerator, and a planner that answers with `tokens` of each plan, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, platform: str, memory: int = 64 << 20) -> None:
        self.tokens: list[int | Exception] = []
        self.planned: list[tuple[EngineConfig, int, float]] = []
        self.configs: list[EngineConfig] = []
        self.memory = memory
        monkeypatch.setattr(build, "open_engine", self._open)
        monkeypatch.setattr(fitting_sizes, "compiling_for", self._compiling_for)
        monkeypatch.setattr(fitting_sizes, "plan_memory", self._plan)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

    def build(self, **settings: Any) -> EngineConfig:
        build_engine(ServeConfig(compile_cache=None, **settings), Silent())
        return self.configs[-1]

    def _open(self, served: object, config: EngineConfig, **_: object) -> StandInEngine:
        self.configs.append(config)
        return StandInEngine()

    @contextmanager
    def _compiling_for(self, name: str) -> Iterator[tuple[Sequence[jax.Device], int]]:
        assert name == "here"
        yield jax.devices(), self.memory

    def _plan(self, program: CompiledModel, memory: int, share: float, progress: CompileProgress) -> MemoryPlan:
        config = program._config
        self.planned.append((config, memory, share))
        tokens = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        if isinstance(tokens, Exception):
            raise tokens
        return MemoryPlan(0, 0, 0, 0, 0, 0, 0, tokens // config.page_size, tokens, tokens // 4096)
