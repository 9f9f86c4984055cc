"""What an engine compiles: the sizes of its steps, their kernels, and the functions beside them."""

from dataclasses import replace

import jax
import pytest
from jax.sharding import AxisType

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.compiled_model import ONE_ROW, CompiledModel, StateFunction
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepShape
from jaxctx.model.sharding import EVERY_DEVICE, mesh_shape
from jaxctx_kernels import KernelChoice, kv_pages_struct
from scripts.checkpoints import init_random
from tests.echo import EchoModel
from tests.engines import shard
from tests.tiny_models import QWEN3 as TINY

CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=8, max_context_tokens=128)
SMALL_PAGES = EngineConfig(pages=24, page_size=4, max_batch=4, max_batch_tokens=64, max_context_tokens=90)


def test_the_functions_of_an_engine_the_longest_first() -> None:
    model = CompiledModel(EchoModel(), (), CONFIG, jax.devices()[0])
    assert [str(function) for function in model.functions] == [
        "custom-mask step of 8 rows",
        "custom-mask step of 4 rows",
        "step of 8 rows",
        *(["step of 1 rows"] if ONE_ROW else []),
        "page copy",
        "page save",
        "page load",
        "slot load",
        "mask load",
    ]
    assert set(StateFunction) < set(model.functions)
    assert model.pages_per_call == CONFIG.moving_pages
    assert CompiledModel(EchoModel(), (), replace(CONFIG, moving_pages=40), jax.devices()[0]).pages_per_call == 16


def test_nothing_that_it_describes_is_an_array() -> None:
    model = CompiledModel(EchoModel(), (), CONFIG, jax.devices()[0])
    described = jax.tree.leaves((model.params, model.pools, model.state, model.page))
    assert {type(each) for each in described} == {jax.ShapeDtypeStruct}


def test_steps_come_in_powers_of_two_from_sixteen_and_on_a_cpu_of_one_row() -> None:
    model, params = init_random(TINY, seed=3, dtype="float32")
    for most, rows in [(4, (4,)), (40, (16, 32, 40)), (512, (16, 32, 64, 128, 256, 512))]:
        config = replace(CONFIG, max_batch=4, max_batch_tokens=most)
        assert config.row_buckets() == rows
        program = CompiledModel(model, params, config, jax.devices()[0])
        assert tuple(shape.rows for shape in program.shapes) == ONE_ROW + rows
        assert config.padding(1) == min(most, 16) - 1  # what a guess may take, in the step beside


@pytest.mark.parametrize(("platform", "is_whole"), [("cpu", False), ("tpu", True)])
def test_a_mesh_has_its_kernel(platform: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of 64 are one row of a TPU's pools: both devices have all of it, with half of the query heads."""
    monkeypatch.setattr("jaxctx.engine.runner.compiled_model.select_kernel", lambda *_, **__: KernelChoice("tpu"))
    monkeypatch.setattr(
        "jaxctx.engine.runner.compiled_model.kv_pages_struct", lambda *sizes: kv_pages_struct(*sizes[:-1], platform)
    )
    config = replace(TINY, head_dim=64)
    model, params = init_random(config, seed=3, dtype="float32")
    sizes = mesh_shape(config, 2, platform)
    mesh = jax.make_mesh(sizes, EVERY_DEVICE, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    program = CompiledModel(model, shard(mesh, model, params), CONFIG, mesh)
    assert {shape.metadata[0].kernel for shape in program.shapes} == {"tpu"}
    assert program.pools[0].k.sharding.is_fully_replicated == is_whole
    assert program.pools[0].k.shape[0] == (1 if is_whole else 2)


@pytest.mark.parametrize(
    ("limit", "shapes"), [(4, [(4, 4)]), (8, [(4, 4), (8, 8)]), (48, [(4, 4), (48, 16)]), (512, [(4, 4), (64, 16)])]
)
def test_custom_mask_shapes_follow_the_step_limit(limit: int, shapes: list[tuple[int, int]]) -> None:
    device = ModelRunner(EchoModel(), (), replace(SMALL_PAGES, max_batch_tokens=limit))

    def size(shape: StepShape) -> tuple[int, int]:
        return shape.rows, shape.samples

    assert [size(shape) for shape in device.custom_mask_shapes] == shapes
    assert size(device.select_bucket(4, 4)) == (4, 4)
    assert size(device.select_bucket(limit, 1)) == shapes[-1] if limit <= 64 else True
    assert all(shape.mask_words == 3 for shape in device.custom_mask_shapes)
    assert not any(shape.mask_words for shape in device.shapes)
