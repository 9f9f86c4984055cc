"""The factory: an engine of a model, its settings and its store."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.factory import ServedModel, build_engine, engine_info, kv_layout_name, open_engine, open_store
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.check.whole_step import StepsDiffer
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepShape
from jaxctx.errors import FailedPrecondition
from jaxctx.model.interface import KVSpec
from jaxctx.types import CreateContextRequest, EngineInfo, SaveRequest
from jaxctx_kernels import head_rows
from scripts.checkpoints import init_random
from tests.engines import SMALL, on_demand
from tests.jaxctx.engine.echo_generation import greedy
from tests.jaxctx.engine.runner.check.test_whole_step import TINY
from tests.planted_kernels import first_layer_only, plant_kernel, right

ME = Caller()


def test_what_an_engine_reports_of_itself(echo_served: ServedModel) -> None:
    config = EngineConfig(pages=9, page_size=8, max_batch=3, max_context_tokens=77, default_max_tokens=5)
    told = engine_info(echo_served, config, jax.make_mesh((2, 1), ("kv", "group")))
    assert told == EngineInfo(
        model_id=echo_served.model_id,
        model_revision=echo_served.revision,
        architecture=echo_served.architecture,
        parameters=echo_served.parameters,
        vocab_size=echo_served.model.vocab_size,
        max_context_tokens=77,
        page_size=8,
        pages_total=9,
        dtype=echo_served.dtype,
        weights_dtype=echo_served.weights_dtype,
        kv_dtype=echo_served.model.kv.dtype,
        max_batch=3,
        platform="cpu",
        mesh=told.mesh,
        default_max_tokens=5,
    )
    assert told.mesh == {"kv": 2, "group": 1}
    assert engine_info(echo_served, config).mesh == {}


@pytest.mark.parametrize(
    ("kv_heads", "dim", "parts", "platform", "name"),
    [
        (4, 64, 1, "gpu", "bfloat16"),
        (4, 64, 1, "tpu", "bfloat16, 2 heads side by side"),
        (4, 64, 2, "tpu", "bfloat16, 2 heads side by side"),
        (4, 64, 4, "tpu", "bfloat16, rows of 128 lanes"),
        (3, 64, 1, "tpu", "bfloat16, 2 heads side by side, 3 heads in 2 rows"),
        (6, 64, 2, "tpu", "bfloat16, 2 heads side by side, 3 heads in 2 rows"),
        (6, 64, 1, "tpu", "bfloat16, 2 heads side by side"),
        (32, 96, 1, "tpu", "bfloat16, rows of 128 lanes"),
        (32, 96, 4, "tpu", "bfloat16, rows of 128 lanes"),
        (32, 96, 1, "gpu", "bfloat16"),
        (8, 256, 1, "tpu", "bfloat16"),
    ],
)
def test_pages_of_another_layout_have_another_name(
    kv_heads: int, dim: int, parts: int, platform: str, name: str
) -> None:
    kv = KVSpec(layers=2, kv_heads=kv_heads, head_dim=dim, dtype="bfloat16")
    program = SimpleNamespace(kv=kv, kv_parts=parts, head_rows=head_rows(kv_heads // parts, dim, platform))
    assert kv_layout_name(program) == name  # type: ignore[arg-type]


async def test_an_engine_is_built_then_started(echo_served: ServedModel) -> None:
    """Without a store it keeps snapshots in memory, and says so of durable ones."""
    deps = RuntimeDeps()
    config = replace(SMALL, max_batch_tokens=16)
    runner = on_demand(echo_served, config)
    engine = build_engine(echo_served, config, runner, deps, open_store(None, config, deps))
    engine.start()
    try:
        assert engine.info.pages_total == config.pages
        context = (await engine.create(ME, CreateContextRequest())).context_id
        await engine.fill(ME, context, [1, 2, 3])
        assert (await engine.save(ME, SaveRequest(context_id=context, name="a"))).tokens == 3
        with pytest.raises(FailedPrecondition) as error:
            await engine.save(ME, SaveRequest(context_id=context, name="b", durable=True))
        assert error.value.reason == "NO_STORE"
    finally:
        engine.stop()


async def test_an_engine_serves_while_smaller_steps_are_compiled(
    echo_served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest steps, and no request waits for a compilation; then with the smaller ones."""
    may_go_on, run = threading.Event(), []
    compile_next, run_step = ModelRunner.compile_next, ModelRunner.run

    def gated(runner: ModelRunner) -> StepShape:
        assert may_go_on.wait(60)
        return compile_next(runner)

    def recorded(runner: ModelRunner, shape: StepShape, *args: Any, **kwargs: Any) -> Any:
        run.append(shape.rows)
        return run_step(runner, shape, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "compile_next", gated)
    engine = open_engine(echo_served, replace(SMALL, max_batch_tokens=32, draft_tokens=0))
    monkeypatch.setattr(ModelRunner, "run", recorded)
    try:
        smaller = len(engine.core.runner.shapes) - 1 + len(engine.core.runner.custom_mask_shapes) - 1
        assert (await engine.stats()).functions_compiling == smaller
        context = (await engine.create(ME, CreateContextRequest())).context_id
        await engine.fill(ME, context, [1, 2, 3])
        padded = await greedy(engine, context, 6)
        assert {*run} == {32}
        may_go_on.set()
        while (await engine.stats()).functions_compiling:
            await asyncio.sleep(0.01)
        run.clear()
        await engine.rewind(ME, context, 3)
        assert await greedy(engine, context, 6) == padded
        assert max(run) < 32
        assert (await engine.stats()).compilations_after_ready == 0
    finally:
        may_go_on.set()
        engine.stop()


@pytest.mark.slow
def test_all_is_compiled_before_the_engine_is_ready_if_that_is_asked(echo_served: ServedModel) -> None:
    engine = open_engine(echo_served, replace(SMALL, max_batch_tokens=16), compile_all=True)
    engine.stop()
    runner = engine.core.runner
    assert runner.functions_left == 0
    assert {*runner._compiled} == {*runner.program.functions}


@pytest.mark.campaign
def test_a_kernel_is_compared_in_the_compiled_step(echo_served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that was compared by itself; and nothing is left of an engine whose steps differ."""
    model, params = init_random(TINY, seed=1, dtype="bfloat16")
    served = replace(echo_served, model=model, params=params)
    config = EngineConfig(pages=40, max_batch=4, max_batch_tokens=16, max_context_tokens=256)
    checked = AttentionChoice("tpu", AttentionReason.CHECKED, compared="equal")
    runners = []
    compile_needed = ModelRunner.compile_needed
    monkeypatch.setattr(
        ModelRunner, "compile_needed", lambda self, *rest: runners.append(self) or compile_needed(self, *rest)
    )
    with plant_kernel(right):
        engine = open_engine(served, config, attention=checked)
        engine.stop()
    assert engine.attention.compared.startswith("equal, and in whole steps of 16 rows (mean difference ")
    with plant_kernel(first_layer_only):
        with pytest.raises(StepsDiffer, match=r"^tpu: whole steps, 16 rows: differs: "):
            open_engine(served, config, attention=checked)
        assert all(array.is_deleted() for array in jax.tree.leaves((runners[-1]._pools, runners[-1]._state)))
        assert not any(array.is_deleted() for array in params)
        engine = open_engine(served, config, attention=AttentionChoice("tpu", AttentionReason.UNCHECKED))
        engine.stop()
        assert engine.attention.compared == ""
