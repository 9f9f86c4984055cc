"""From a model directory to an engine: what is refused, before anything is compiled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.default_sizes import Sizes
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.check.whole_step import StepsDiffer
from jaxctx.model.weights import read_config
from jaxctx_kernels import KernelChoice
from jaxctx_server.config import ServeConfig
from jaxctx_server.engine_builder import build
from jaxctx_server.engine_builder.build import build_engine
from jaxctx_server.errors import MODEL, USAGE, StartError
from scripts.checkpoints import write_adapter, write_random
from tests.planted_kernels import plant_kernel, right
from tests.server.engine_builder.settings import FEW, Silent, StandInEngine, refused, windowed


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "missing", "no such directory"),
        (Path(__file__), "not a directory"),
        (tmp_path, "tokenizer.json: missing"),
    ]:
        error = refused(model=str(path))
        assert error.exit_status == MODEL
        assert str(error).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_context_tokens": 8193}, "--max-context-tokens: the model has 8192 positions"),
        ({"tensor": 64}, "--tensor: must be from 1 to "),
    ],
)
def test_sizes_that_do_not_go_together(settings: dict[str, Any], message: str, echo: None) -> None:
    error = refused(**settings)
    assert error.exit_status == USAGE
    assert message in str(error)


def test_a_window_that_limits_a_context_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(model=windowed(tmp_path), max_context_tokens=100)
    assert error.exit_status == USAGE
    assert str(error).startswith(
        "--max-context-tokens: the model has 64 positions, as many as its attention window has"
    )
    configs = []
    monkeypatch.setattr(build, "open_engine", lambda served, config, **_: configs.append(config) or StandInEngine())
    for asked in (None, 32):
        build_engine(ServeConfig(model=str(tmp_path), compile_cache=None, max_context_tokens=asked), Silent())
    assert [config.longest for config in configs] == ["64 tokens, as many as its attention window has", "32 tokens"]


def test_contexts_beyond_the_original_positions_take_long_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's setting decides, and the two computations share no page."""
    windowed(tmp_path)
    raw = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    }
    write_random(tmp_path, raw, seed=0)
    opened: list[tuple[ServedModel, EngineConfig]] = []
    monkeypatch.setattr(
        build, "open_engine", lambda served, config, **_: opened.append((served, config)) or StandInEngine()
    )
    for asked in (None, 40, 65, 256):
        build_engine(ServeConfig(model=str(tmp_path), compile_cache=None, max_context_tokens=asked), Silent())
    long = "for which all take LongRoPE's long factors, as beyond 64"
    assert [config.longest for _, config in opened] == [
        "64 tokens, as many as take LongRoPE's short factors; max_context_tokens may be 256",
        "40 tokens",
        f"65 tokens, {long}",
        f"256 tokens, {long}",
    ]
    default, short, first, second = (served.revision for served, _ in opened)
    assert default == short != first == second
    error = refused(model=str(tmp_path), max_context_tokens=257)
    assert error.exit_status == USAGE
    assert str(error).startswith(f"--max-context-tokens: the model has 256 positions, {long}")


def refused_model(path: Path, message: str) -> None:
    error = refused(model=str(path))
    assert error.exit_status == MODEL
    assert str(error).startswith(f"{path}: {message}")
    assert "\n" not in str(error)


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1024}, "config.json: num_hidden_layers: must be an integer from 1 to 256, not 1024"),
        ({"num_hidden_layers": 256}, "model.safetensors: model.layers.1.input_layernorm.weight: missing"),
        ({"max_position_embeddings": 2**31 - 1}, "config.json: max_position_embeddings: must be an integer from 1 to"),
        ({"rope_parameters": {"rope_theta": 1e-300}}, "config.json: rope_parameters.rope_theta: must be a number from"),
        ({"vocab_size": 300}, "tokenizer.json: larger than the model's vocabulary"),
        ({"vocab_size": 2**22, "hidden_size": 2**16}, "model.safetensors: model.embed_tokens.weight: shape"),
    ],
)
def test_a_directory_that_is_hostile_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    change(Path(windowed(tmp_path)) / "config.json", **changes)
    refused_model(tmp_path, message)


def test_a_hostile_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = Path(windowed(tmp_path)) / "tokenizer.json"
    doubling = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
    change(file, normalizer={"type": "Sequence", "normalizers": doubling})
    refused_model(tmp_path, "tokenizer.json: normalizer.normalizers[10]: with the steps before it")
    change(file, normalizer=None, added_tokens=[], model={"type": "BPE", "vocab": {}, "merges": []})
    refused_model(tmp_path, "tokenizer.json: model.vocab: empty")


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    file = Path(windowed(tmp_path)) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = np.nan
    save_file(tensors, file)
    refused_model(tmp_path, f"model.safetensors: {name}: holds values that are not finite")


def test_where_whole_steps_differ_the_reference_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sizes that are measured anew, as its step takes other memory."""
    opened: list[AttentionChoice] = []
    planned: list[KernelChoice] = []

    def open_engine(
        served: ServedModel, config: EngineConfig, *, attention: AttentionChoice, **_: Any
    ) -> StandInEngine:
        opened.append(attention)
        if attention.implementation != "reference":
            raise StepsDiffer("tpu: whole steps, 4 rows: differs: row 3")
        return StandInEngine()

    def fitting(
        config: Any, served: Any, draft: Any, mesh: Any, kernel: KernelChoice, progress: Any
    ) -> tuple[Sizes, int]:
        planned.append(kernel)
        return Sizes(16, 4, 4, moving_pages=2, reason=""), 16

    monkeypatch.setattr(build, "open_engine", open_engine)
    monkeypatch.setattr(build, "fitting_sizes", fitting)
    sizes = {"model": windowed(tmp_path), "max_batch": 4, "max_batch_tokens": 4, "compile_cache": None}
    with plant_kernel(right):
        build_engine(ServeConfig(**sizes), Silent())
        with pytest.raises(StartError, match=r"^--attention: kernel: tpu: whole steps, 4 rows: differs: row 3: run"):
            build_engine(ServeConfig(**sizes, attention="kernel"), Silent())
    first, second, last = opened
    assert [each.reason for each in opened] == ["checked", "differs", "checked"]
    assert second.why_no_kernel.startswith("tpu: whole steps, 4 rows: differs: row 3: run jaxctx-serve check")
    assert [each.name for each in planned] == ["tpu", "reference", "tpu"]
    assert (first.implementation, last.implementation) == ("tpu", "tpu")


class OpenedAgain:
    """The running engine `engine` in place of one that another start would open and compile."""

    def __init__(self, engine: LocalEngine) -> None:
        self.load_adapter_now = engine.load_adapter_now
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


def test_adapters_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed(tmp_path / "model")
    config = read_config(model)
    for name, seed in (("a", 1), ("b", 2)):
        write_adapter(tmp_path / name, config, seed=seed, rank=seed)
    write_adapter(tmp_path / "wide", config, seed=1, rank=17)

    def adapters(*named: str) -> tuple[str, ...]:
        return tuple(f"{name}={tmp_path / name}" for name in named)

    settings = ServeConfig(model, compile_cache=None, adapter=adapters("a", "b"), adapter_dir=tmp_path, **FEW)
    engine, _ = build_engine(settings, Silent())
    try:
        assert set(engine.adapter_revisions) == {"a", "b"}
        assert (engine.info.adapter_slots, engine.info.adapter_rank) == (4, 16)
        assert engine.adapters_in_words == "a, b (2 of 4 slots, rank 16)"
        assert asyncio.run(engine.load_adapter(Caller(), "again", "a")).revision == engine.adapter_revisions["a"]
        for name, message in [("wide", "adapter_config.json: r: "), ("none", "does not exist")]:
            again = OpenedAgain(engine)
            monkeypatch.setattr(build, "open_engine", lambda *_, again=again, **__: again)
            error = refused(model=model, adapter=adapters(name), **FEW)
            assert error.exit_status == MODEL
            assert str(error).startswith(f"--adapter {name}={tmp_path / name}: ")
            assert message in str(error)
            assert again.stopped
    finally:
        engine.stop()


def test_an_adapter_directory_that_is_none_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    error = refused(model="/no/such/model", adapter_dir=tmp_path / "none")
    assert str(error) == f"--adapter-dir: {tmp_path / 'none'}: not a directory"
