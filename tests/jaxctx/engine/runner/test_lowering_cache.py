"""Traced steps on disk: the same program in another process, and never one of other code, sizes or types."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner import lowering_cache
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.lowering_cache import SOURCES, LoweringCache, _read
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepShape, write_metadata
from jaxctx.model import products
from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import abstract
from jaxctx_kernels import Segment
from scripts.checkpoints import init_random
from tests.tiny_models import QWEN3

TINY = replace(QWEN3, vocab_size=64)
CONFIG = EngineConfig(pages=8, max_batch=4, max_batch_tokens=8, max_context_tokens=64)


def described(
    model: ModelConfig = TINY, config: EngineConfig = CONFIG, dtype: str = "float32", kv_dtype: str | None = None
) -> CompiledModel:
    return CompiledModel(*abstract(model, dtype, kv_dtype=kv_dtype), config, jax.devices()[0])


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def small_sources(tmp_path: Path) -> Path:
    """A folder of code in place of the product's, which reads quicker and may be changed."""
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/step.py").write_text("rows = 1\n")
    return folder


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), pytest.param("bfloat16", "int8", marks=pytest.mark.campaign)],
)
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(lambda runner: runner.custom_mask_shapes[-1:], marks=pytest.mark.slow),
        pytest.param(lambda runner: runner.shapes[-1:], marks=pytest.mark.campaign),
    ],
    ids=["under a mask", "of causal rows"],
)
def test_what_another_process_traced_is_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: Callable, dtype: str, kv_dtype: str
) -> None:
    model, params = init_random(TINY, seed=3, dtype=dtype, kv_dtype=kv_dtype)

    def outputs(cache: LoweringCache | None) -> list[np.ndarray]:
        runner = ModelRunner(model, params, CONFIG, lowering_cache=cache)
        found: list[np.ndarray] = []
        for shape in shapes(runner):
            runner._compile(shape)
            packed, views = runner.make_step_inputs(shape)
            views.tokens[:], views.positions[:] = np.arange(8) * 7 + 3, np.arange(8)
            views.kv_slots[:] = 2 * CONFIG.page_size + np.arange(8)
            views.sample_rows[:], views.slots[:4] = np.arange(len(views.sample_rows)), np.arange(4)
            write_metadata([Segment(0, 8, 0, np.array([2], np.int32))], shape, views)
            logits, output = runner.run(shape, packed, logits=shape.mask_words > 0)
            found += [np.asarray(output), *([] if logits is None else [np.asarray(logits)])]
        return [*found, *(np.asarray(array) for array in jax.tree.leaves((runner._pools, runner._state)))]

    traced = outputs(None)
    first = outputs(LoweringCache(tmp_path))
    assert len(entries(tmp_path)) == 1
    monkeypatch.setattr(CompiledModel, "export_step", None)  # nothing may be traced any more
    for one, other, direct in zip(first, outputs(LoweringCache(tmp_path)), traced, strict=True):
        np.testing.assert_array_equal(one, direct)
        np.testing.assert_array_equal(other, direct)


def test_pages_and_state_are_updated_in_place(tmp_path: Path, small_sources: Path) -> None:
    model = described()
    cache, shape = LoweringCache(tmp_path / "kept", [small_sources]), model.shapes[-1]
    wanted = model.lower(shape).compile().memory_analysis()
    for _ in range(2):  # traced, then read
        found = cache.lower(model, shape).compile().memory_analysis()
        assert found.alias_size_in_bytes == wanted.alias_size_in_bytes > 0
        assert found.temp_size_in_bytes <= wanted.temp_size_in_bytes


@pytest.mark.skipif(not products.SUMS_ARE_FAST, reason="rows are not summed in parts")
def test_a_step_that_sums_long_rows_in_parts_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_sources: Path
) -> None:
    """JAX keeps no layout of a step by itself, as it promises nothing of it to other versions."""
    monkeypatch.setattr(products, "LONG_ROW", TINY.ffn - 1)
    model = CompiledModel(*abstract(TINY, "bfloat16", weights_dtype="int8"), CONFIG, jax.devices()[0])
    shape = model.shapes[0]
    assert shape.rows == 1
    assert "LayoutConstraint" in model.export_step(shape).mlir_module()
    cache = LoweringCache(tmp_path / "kept", [small_sources])
    steps = [cache.lower(model, shape).compile() for _ in range(2)]  # traced, then read
    assert len(entries(tmp_path / "kept")) == 1
    assert steps[0].cost_analysis() == steps[1].cost_analysis()


def test_other_code_sizes_and_types_are_other_entries(tmp_path: Path, small_sources: Path) -> None:
    kept = tmp_path / "kept"
    cache = LoweringCache(kept, [small_sources])
    models = [
        described(),
        described(model=replace(TINY, norm_eps=1e-5)),
        described(config=replace(CONFIG, pages=9)),
        described(dtype="bfloat16"),
        described(kv_dtype="int8"),
    ]
    names = {cache._name(model, shape) for model in models for shape in model.shapes + model.custom_mask_shapes}
    assert len(names) == sum(len(model.shapes + model.custom_mask_shapes) for model in models)
    model, shape = models[0], models[0].shapes[0]
    assert LoweringCache(kept, [small_sources])._name(described(), shape) in names
    (small_sources / "inner/step.py").write_text("rows = 2\n")
    changed = LoweringCache(kept, [small_sources])._name(model, shape)
    assert changed not in names
    (small_sources / "inner/step.py").rename(small_sources / "step.py")
    assert LoweringCache(kept, [small_sources])._name(model, shape) not in {*names, changed}
    with jax.default_matmul_precision("highest"):
        assert cache._name(model, shape) not in names


@pytest.mark.parametrize("name", ["CPU_HAS_LONG_VECTORS", "CPU_MULTIPLIES_BFLOAT16"])
def test_another_cpu_s_steps_are_other_entries(
    name: str, tmp_path: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where machines of two kinds share the folder."""
    cache, model = LoweringCache(tmp_path, [small_sources]), described()
    here = cache._name(model, model.shapes[0])
    monkeypatch.setattr(lowering_cache, name, not getattr(lowering_cache, name))
    assert cache._name(model, model.shapes[0]) != here


def test_the_product_s_own_code_is_part_of_a_name() -> None:
    files = {path.name for folder in SOURCES for path in folder.rglob("*.py")}
    assert {"step.py", "decoder.py", "sampling.py", "products.py", "reference.py", "kv_cache.py"} <= files


def test_a_damaged_entry_is_made_anew(tmp_path: Path, small_sources: Path) -> None:
    kept = tmp_path / "kept"
    model = described()
    shape = model.shapes[0]
    LoweringCache(kept, [small_sources]).lower(model, shape)
    (entry,) = kept.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:-100], b"x" * len(whole)):
        entry.write_bytes(damaged)
        assert _read(entry) is None
    LoweringCache(kept, [small_sources]).lower(model, shape)
    assert entries(kept) == {entry.name}
    assert _read(entry) is not None


def test_a_disk_that_takes_nothing_costs_no_start(
    tmp_path: Path, small_sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    cache = LoweringCache(kept, [small_sources])
    shutil.rmtree(kept)
    model = described()
    with caplog.at_level(logging.WARNING, "jaxctx.engine"):
        cache.lower(model, model.shapes[0])
    assert "could not be kept" in caplog.text


def test_a_step_that_calls_back_is_traced_each_time(
    tmp_path: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called_back(self: CompiledModel, shape: StepShape) -> export.Exported:
        return export.export(jax.jit(lambda x: jax.pure_callback(np.sin, x, x)))(np.float32(0)).serialize()

    monkeypatch.setattr(CompiledModel, "export_step", called_back)
    model, kept = described(), tmp_path / "kept"
    lowered = LoweringCache(kept, [small_sources]).lower(model, model.shapes[0])
    assert lowered.as_text() == model.lower(model.shapes[0]).as_text()
    assert entries(kept) == set()


def test_split_models_are_traced_at_every_start(tmp_path: Path) -> None:
    from jaxctx.model.sharding import make_mesh

    model, params = init_random(TINY, seed=3, dtype="float32")
    runner = ModelRunner(model, params, CONFIG, make_mesh(TINY, tensor=1), lowering_cache=LoweringCache(tmp_path))
    runner._lower(runner.shapes[0])
    assert entries(tmp_path) == set()
