"""Plans for meshes: what is said of many layers is what so many layers take."""

from dataclasses import replace
from importlib.util import find_spec

import jax
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.plan import mesh_plan
from jaxctx.engine.plan.collectives import find_collectives
from jaxctx.engine.plan.memory_planner import MemoryNeeds, compile_described, compiling_for, measure_needs
from jaxctx.engine.plan.mesh_plan import CollectiveSum, described_on, plan_mesh
from jaxctx.engine.runner.compiled_model import CompiledModel, StateFunction
from jaxctx.model.functional import DecoderModel, FlatParams, abstract
from jaxctx.model.sharding import make_mesh
from tests.tiny_models import LLAMA

TINY = replace(LLAMA, heads=4, kv_heads=2)
CONFIG = EngineConfig(pages=4, max_batch=2, max_batch_tokens=4, max_context_tokens=64, moving_pages=2)


def with_layers(layers: int) -> tuple[DecoderModel, FlatParams]:
    return abstract(replace(TINY, layers=layers), "float32")


@pytest.mark.campaign
def test_a_plan_for_many_layers_is_what_they_take() -> None:
    mesh = make_mesh(TINY, tensor=4)
    told: list[tuple[str, int, int]] = []
    plan = plan_mesh(with_layers, 4, CONFIG, mesh, 1 << 30, 0.5, lambda *each: told.append(each))
    model, params = with_layers(4)
    program = CompiledModel(model, described_on(mesh, model, params), CONFIG, mesh)
    texts: list[str] = []

    def analyse(lowered, options):
        compiled = compile_described(lowered, options)
        texts.append(compiled.as_text())
        return compiled.memory_analysis()

    needs = measure_needs(program, lambda *_: None, analyse)
    assert (plan.chips, plan.mesh, plan.rows) == (4, {"kv": 2, "group": 2}, 4)
    assert plan.memory.weights_bytes == needs.weights_bytes
    assert plan.memory.sampling_bytes == needs.sampling_bytes
    assert plan.memory.kv_bytes == (plan.memory.pages + 1) * needs.page_bytes
    assert needs.page_bytes == 4 * 2 * 1 * 16 * 128 * 4  # layers, K and V, a KV head, tokens, numbers, bytes
    always = [each for each in find_collectives(texts[-1]) if each.always]
    assert sum(each.count for each in plan.every_step) == len(always)
    assert sum(each.size_bytes for each in plan.every_step) == sum(each.size_bytes for each in always)
    assert plan.every_layer == (CollectiveSum("all-reduce", "f32", 2, 2 * 4 * 32 * 4),)  # 4 rows of 32 numbers, twice
    assert [each[1:] for each in told] == [(done, 6) for done in range(1, 7)]


def test_the_second_layer_is_what_every_further_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = {
        1: mesh_plan._Compiled(MemoryNeeds(100, 5, 50, 7, 10), {("all-reduce", "bf16"): (3, 300)}, {}),
        2: mesh_plan._Compiled(
            MemoryNeeds(130, 5, 40, 9, 20),
            {("all-reduce", "bf16"): (5, 500), ("all-gather", "f32"): (1, 8)},
            {("all-gather", "s32"): (2, 64)},
        ),
    }
    monkeypatch.setattr(mesh_plan, "_compile", lambda model, params, config, mesh, progress, layers: compiled[layers])
    plan = plan_mesh(with_layers, 11, CONFIG, make_mesh(TINY, tensor=4), 3000, 0.5, lambda *_: None)
    assert plan.every_layer == (CollectiveSum("all-gather", "f32", 1, 8), CollectiveSum("all-reduce", "bf16", 2, 200))
    assert plan.every_step == (
        CollectiveSum("all-gather", "f32", 10, 80),
        CollectiveSum("all-reduce", "bf16", 23, 2300),
    )
    assert plan.sampling == (CollectiveSum("all-gather", "s32", 2, 64),)
    memory = plan.memory
    assert (memory.weights_bytes, memory.sampling_bytes, memory.code_bytes) == (400, 5, 27)
    assert memory.temporaries_bytes == 50  # they may shrink with a layer, but not go on to
    assert memory.kv_bytes == (memory.pages + 1) * 110


@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_steps_for_chips_sum_in_bfloat16_and_loads_gather_on_the_chips(target: str) -> None:
    """Of two KV heads on four chips: two sums for a layer; the pages' parts are exchanged by chips and not by hosts."""
    if jax.__version_info__ < (0, 11, 2) or find_spec("libtpu" if target == "v5e" else "jax_cuda13_plugin") is None:
        pytest.skip("the compiler is not installed: .ci/run has a stage with it")
    with compiling_for(target) as (devices, _):
        config = replace(TINY, vocab_size=4096)  # of so few logits as 64 a TPU's compiler shifts some between chips
        mesh = make_mesh(config, tensor=4, devices=devices)
        model, params = abstract(config, "bfloat16")
        program = CompiledModel(model, described_on(mesh, model, params), CONFIG, mesh)
        assert program.kernel.name == program.platform
        step, load = (
            compile_described(program.lower(each), program.compiler_options).as_text()
            for each in (program.shapes[-1], StateFunction.LOAD_PAGES)
        )
    always = [(each.kind, each.dtype) for each in find_collectives(step) if each.always]
    assert always == [("all-reduce", "bf16")] * 3  # and one for the embedding
    assert {(each.kind, each.always) for each in find_collectives(load)} == {("all-gather", True)}
    assert "Megascale" not in load
