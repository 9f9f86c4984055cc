"""Which options each platform's compiler gets, and that all who compile an engine's functions give it the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan.memory_planner import memory_analysis
from jaxctx.engine.runner.compiled_model import CompiledModel, StateFunction
from jaxctx.engine.runner.compiler_options import CPU_OPTIONS, GPU_OPTIONS, compiler_options
from jaxctx.engine.runner.model_runner import ModelRunner
from scripts.checkpoints import init_random
from tests.tiny_models import LLAMA

IN_COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
TINY = replace(LLAMA, head_dim=16)
CONFIG = EngineConfig(pages=4, max_batch=2, max_batch_tokens=4, max_context_tokens=64)


def test_each_platform_has_its_own() -> None:
    assert compiler_options("cpu", {}) == CPU_OPTIONS
    assert compiler_options("gpu", {}) == GPU_OPTIONS
    assert compiler_options("tpu", {}) == {}


def test_all_that_sampling_and_collectives_need_is_in_command_buffers() -> None:
    captured = compiler_options("gpu", {})[IN_COMMAND_BUFFERS]
    assert {"CONDITIONAL", "WHILE", "COLLECTIVES", "FUSION", "CUSTOM_CALL"} <= set(str(captured).split(","))


def test_what_xla_flags_sets_is_left_to_it() -> None:
    name = IN_COMMAND_BUFFERS
    others = {option: value for option, value in GPU_OPTIONS.items() if option != name}
    assert compiler_options("gpu", {"XLA_FLAGS": f"--xla_dump_to=/x --{name}="}) == others
    assert compiler_options("gpu", {"XLA_FLAGS": f"--{name}_unroll_loops=true"}) == GPU_OPTIONS  # another one
    assert compiler_options("cpu", {"XLA_FLAGS": f"--{name}=FUSION"}) == CPU_OPTIONS


def test_an_engine_compiles_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    compile_lowered = jax.stages.Lowered.compile

    def note(lowered: jax.stages.Lowered, compiler_options: Any = None) -> Any:
        given.append(compiler_options)
        return compile_lowered(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", note)
    runner = ModelRunner(*init_random(TINY, seed=0, dtype="float32"), CONFIG)
    runner._compile(StateFunction.LOAD_ALLOWED)
    program: CompiledModel = runner.program
    assert given == [program.compiler_options] == [compiler_options(jax.devices()[0].platform)]
    memory_analysis(program.lower(StateFunction.LOAD_ALLOWED), program.compiler_options)
    assert given[1] == {**given[0], "xla_gpu_autotune_level": 0}
