"""From settings to an engine: what is refused, before anything is compiled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.config import EngineConfig, page_bytes
from jaxctx.engine.default_sizes import Sizes
from jaxctx.engine.factory import ServedModel
from jaxctx.engine.interface import Caller
from jaxctx.engine.plan.memory_planner import MemoryPlan
from jaxctx.engine.runner import matmul_choice
from jaxctx.engine.runner.check.comparison import empty_report
from jaxctx.engine.runner.check.report import KernelReport, Verdict
from jaxctx.engine.runner.check.whole_step import StepsDiffer
from jaxctx.engine.runner.compiled_model import ONE_ROW, CompiledModel
from jaxctx.engine.runner.model_runner import CompileProgress
from jaxctx.model.config import ModelConfig
from jaxctx.model.functional import DecoderModel
from jaxctx.model.weights import read_config
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from jaxctx_kernels import KernelChoice
from jaxctx_server import engine_builder, engine_settings
from jaxctx_server.config import CheckConfig, PlanConfig, ServeConfig
from jaxctx_server.errors import MODEL, USAGE, StartError
from scripts.checkpoints import write_adapter, write_random
from tests.echo import echo_model, echo_text
from tests.jaxctx.engine.runner.check.test_report import case
from tests.jaxctx.model.quantization.encode import FORMATS, write_quantized
from tests.planted_kernels import WRONG, plant_kernel, right
from tests.serve_echo import put_echo_in_place


class Silent:
    def weights(self, done: int, total: int) -> None:
        pass

    def compiled(self, name: str, done: int, total: int) -> None:
        pass


def refused(**settings: Any) -> StartError:
    with pytest.raises(StartError) as raised:
        engine_builder.build_engine(ServeConfig(compile_cache=None, **settings), Silent())
    return raised.value


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_builder, "_model", engine_builder._model)  # and back afterwards
    put_echo_in_place()


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


def windowed(path: Path) -> str:
    """A directory with a Llama that has 64 of its 8192 positions, as its cache would have a window."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        max_positions=64,
        declared_positions=8192,
    )
    write_random(path, config, seed=0)
    (path / "tokenizer.json").write_text(echo_text().tokenizer._backend.to_str(), "utf-8")
    return str(path)


def test_a_window_that_limits_a_context_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(model=windowed(tmp_path), max_context_tokens=100)
    assert error.exit_status == USAGE
    assert str(error).startswith(
        "--max-context-tokens: the model has 64 positions, as many as its attention window has"
    )
    configs = []
    monkeypatch.setattr(engine_builder, "open_engine", lambda served, config, **_: configs.append(config) or _Engine())
    for asked in (None, 32):
        engine_builder.build_engine(
            ServeConfig(model=str(tmp_path), compile_cache=None, max_context_tokens=asked), Silent()
        )
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
        engine_builder, "open_engine", lambda served, config, **_: opened.append((served, config)) or _Engine()
    )
    for asked in (None, 40, 65, 256):
        engine_builder.build_engine(
            ServeConfig(model=str(tmp_path), compile_cache=None, max_context_tokens=asked), Silent()
        )
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


def test_what_goes_to_disk_passes_host_memory(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    """On a CPU, where there is no tier unless somebody asks for one."""
    configs = []
    monkeypatch.setattr(engine_builder, "open_engine", lambda served, config, **_: configs.append(config) or _Engine())

    def tiers(**settings: Any) -> tuple[int, int]:
        engine_builder.build_engine(ServeConfig(compile_cache=None, kv_tokens=1600, **settings), Silent())
        return configs[-1].host_pages, configs[-1].disk_pages

    assert tiers() == (0, 0)
    assert configs[-1].host_tier_in_words == ""
    assert tiers(disk_tokens=320) == (20, 20)
    assert configs[-1].host_tier_in_words == "320 tokens in 20 pages (as many as on the disk)"
    assert tiers(disk_tokens=16) == (2, 1)
    assert tiers(disk_tokens=32000) == (100, 2000)
    assert tiers(disk_tokens=320, host_tokens=160) == (10, 20)


def test_sizes(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    configs = []
    monkeypatch.setattr(engine_builder, "open_engine", lambda served, config, **_: configs.append(config) or _Engine())

    def sizes(**settings: Any) -> tuple[int, int]:
        engine_builder.build_engine(ServeConfig(compile_cache=None, **settings), Silent())
        return configs[-1].pages, configs[-1].max_context_tokens

    assert sizes() == (32 * 8192 // 16, 8192)
    assert configs[-1].sizes_in_words == "page 16, 32 at once, 512 rows a step (defaults of this CPU)"
    assert sizes(max_batch=2, max_context_tokens=100) == (13, 100)
    assert sizes(kv_tokens=1000, page_size=64) == (16, 1024)  # a context cannot be longer than the room there is
    assert configs[-1].pin_budget == 8
    sizes(kv_tokens=1000, page_size=64, pinned_tokens=200, max_contexts_per_tenant=5, max_snapshot_bytes_per_tenant=6)
    config = configs[-1]
    assert (config.pin_budget, config.max_contexts_per_tenant, config.max_snapshot_bytes_per_tenant) == (3, 5, 6)
    pages, longest = sizes(memory_fraction=0.01)
    assert pages > 1000
    assert longest == 8192


def test_how_long_an_output_may_be_that_does_not_say(
    monkeypatch: pytest.MonkeyPatch, echo: None, tmp_path: Path
) -> None:
    configs = []
    monkeypatch.setattr(engine_builder, "open_engine", lambda served, config, **_: configs.append(config) or _Engine())

    def default(**settings: Any) -> int:
        engine_builder.build_engine(ServeConfig(compile_cache=None, **settings), Silent())
        return int(configs[-1].default_max_tokens)

    assert (default(), default(default_max_tokens=9)) == (256, 9)
    assert (default(model=str(tmp_path)), default(model=str(tmp_path), default_max_tokens=9)) == (4096, 9)


class Accelerator:
    """A CPU that says it is an accelerator, and a planner that answers with `tokens` of each plan, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, platform: str, memory: int = 64 << 20) -> None:
        self.tokens: list[int | Exception] = []
        self.planned: list[tuple[EngineConfig, int, float]] = []
        self.configs: list[EngineConfig] = []
        self.memory = memory
        monkeypatch.setattr(engine_builder, "open_engine", self._open)
        monkeypatch.setattr(engine_builder, "compiling_for", self._compiling_for)
        monkeypatch.setattr(engine_builder, "plan_memory", self._plan)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

    def build(self, **settings: Any) -> EngineConfig:
        engine_builder.build_engine(ServeConfig(compile_cache=None, **settings), Silent())
        return self.configs[-1]

    def _open(self, served: object, config: EngineConfig, **_: object) -> _Engine:
        self.configs.append(config)
        return _Engine()

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


def test_an_accelerator_has_the_pages_that_its_plan_says(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    accelerator = Accelerator(monkeypatch, "tpu")
    accelerator.tokens = [9600]

    def sizes(**settings: Any) -> tuple[int, int]:
        config = accelerator.build(page_size=16, max_batch_tokens=512, **settings)
        return config.pages, config.host_pages

    echo_page = page_bytes(echo_model().model.kv, 16)
    assert sizes(max_batch=32, memory_fraction=0.7) == (600, 600)
    (config, memory, share) = accelerator.planned[0]
    assert (memory, share) == (64 << 20, 0.7)
    assert 0.4 < config.pages * echo_page / memory <= 0.5  # such an engine fits surely
    assert sizes(max_batch=32) == (600, 600)
    assert sizes(max_batch=1) == (512, 512)  # for one context of full length
    assert len(accelerator.planned) == 3
    assert sizes(max_batch=32, kv_tokens=16) == (1, 2)
    assert len(accelerator.planned) == 3  # nothing is compiled where nothing depends on it


@pytest.mark.parametrize(("platform", "page_size", "moving_pages"), [("gpu", 64, 8), ("tpu", 128, 4)])
def test_an_accelerator_has_its_own_sizes(
    platform: str, page_size: int, moving_pages: int, monkeypatch: pytest.MonkeyPatch, echo: None
) -> None:
    accelerator = Accelerator(monkeypatch, platform, memory=1 << 30)
    accelerator.tokens = [65536]
    config = accelerator.build()
    assert (config.page_size, config.max_batch, config.max_batch_tokens) == (page_size, 256, 2048)
    assert config.moving_pages == moving_pages
    assert config.pages * page_size == 65536
    assert config.sizes_reason == f"defaults of this {platform.upper()}"
    assert config.host_tier_in_words == f"65,536 tokens in {config.pages:,} pages (as many as on the device)"
    assert len(accelerator.planned) == 1, "the first choice fits: nothing is planned again"
    assert accelerator.planned[0][0].max_batch == 256
    config = accelerator.build(kv_tokens=4096)
    assert (config.page_size, config.max_batch, len(accelerator.planned)) == (page_size, 256, 1)


def test_sizes_that_leave_too_little_are_made_smaller(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    """What temporaries take is known only when it is compiled."""
    accelerator = Accelerator(monkeypatch, "gpu", memory=1 << 30)
    no_memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    accelerator.tokens = [65535 // 64 * 64, no_memory, 16384]
    config = accelerator.build()
    assert [planned.max_batch for planned, *_ in accelerator.planned] == [256, 128, 64]
    assert (config.max_batch, config.max_batch_tokens, config.pages) == (64, 512, 256)
    assert config.sizes_reason == "defaults of this GPU, made smaller to leave memory for KV"
    accelerator.planned.clear()
    accelerator.tokens = [64]  # the smallest, though they have too little
    config = accelerator.build()
    assert [planned.max_batch for planned, *_ in accelerator.planned] == [256, 128, 64, 32, 16]
    assert (config.max_batch, config.pages) == (16, 1)
    accelerator.planned.clear()
    assert accelerator.build(max_batch=256, max_batch_tokens=2048).max_batch == 256
    assert len(accelerator.planned) == 1, "what is set is not changed"
    accelerator.tokens = [no_memory]
    with pytest.raises(StartError, match="memory is too small"):
        accelerator.build()
    accelerator.tokens = [jax.errors.JaxRuntimeError("INTERNAL: a defect")]
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        accelerator.build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_tokens": 127}, "--host-tokens: must be 0, or at least two pages, of 64 tokens"),
        ({"disk_tokens": 63}, "--disk-tokens: must be 0, or at least a page, of 64 tokens"),
        ({"max_batch": 4096, "max_batch_tokens": 4096}, "--max-batch: what sampling remembers of 4,096 requests takes"),
        ({"max_context_tokens": 65, "kv_tokens": 64}, "--max-context-tokens: there are only 64 tokens of KV"),
    ],
)
def test_settings_that_cannot_work_on_an_accelerator(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, echo: None
) -> None:
    accelerator = Accelerator(monkeypatch, "gpu", memory=8 << 20)
    accelerator.tokens = [65536]
    error = refused(**settings)
    assert error.exit_status == USAGE
    assert message in str(error)
    assert accelerator.configs == []


def test_a_host_tier_says_why_it_has_its_size(monkeypatch: pytest.MonkeyPatch, echo: None) -> None:
    accelerator = Accelerator(monkeypatch, "gpu")
    accelerator.tokens = [65536]
    assert accelerator.build(host_tokens=128).host_tier_in_words == "128 tokens in 2 pages (as set)"
    assert accelerator.build(host_tokens=0).host_tier_in_words == ""
    monkeypatch.setattr(engine_settings, "pages_in_host_memory", lambda *_: 100)
    words = "6,400 tokens in 100 pages (what fits into 25% of the machine's memory)"
    assert accelerator.build().host_tier_in_words == words


@pytest.mark.parametrize("mistake", [None, "page", "does not compile"])
def test_attention_is_chosen_by_the_check_before_memory_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str | None
) -> None:
    """On a CPU that has a kernel, right or wrong."""
    chosen, planned = [], []

    def open_engine(served: ServedModel, config: EngineConfig, *, attention: AttentionChoice, **_: Any) -> _Engine:
        chosen.append(attention)
        return _Engine()

    def fitting(
        config: ServeConfig, served: ServedModel, draft: Any, mesh: Any, kernel: KernelChoice, progress: Any
    ) -> tuple[Sizes, int]:
        planned.append(kernel)
        return Sizes(16, 4, 4, moving_pages=2, reason=""), 16

    monkeypatch.setattr(engine_builder, "open_engine", open_engine)
    monkeypatch.setattr(engine_builder, "_fitting_sizes", fitting)
    sizes = {"model": windowed(tmp_path), "max_batch": 4, "max_batch_tokens": 4, "compile_cache": None}
    with plant_kernel(right if mistake is None else WRONG[mistake][0]):
        engine_builder.build_engine(ServeConfig(**sizes), Silent())
        if mistake is not None:
            config = ServeConfig(**sizes, attention="kernel")
            with pytest.raises(StartError, match=r"^--attention: kernel: tpu: ") as raised:
                engine_builder.build_engine(config, Silent())
            assert raised.value.exit_status == USAGE
        engine_builder.build_engine(ServeConfig(**sizes, attention="reference"), Silent())
    first, last = chosen
    reason = {None: "checked", "page": "differs", "does not compile": "does_not_compile"}[mistake]
    assert (first.implementation, first.reason) == ("tpu" if mistake is None else "reference", reason)
    assert planned[0] == KernelChoice(first.implementation, first.why_no_kernel)
    assert last == AttentionChoice("reference", AttentionReason.REQUESTED)
    assert planned[-1] == KernelChoice("reference")


def test_a_cpu_has_no_kernel_to_demand(tmp_path: Path) -> None:
    error = refused(model=windowed(tmp_path), attention="kernel")
    assert str(error) == "--attention: kernel: there is none here: the path of a CPU is plain JAX"
    with pytest.raises(StartError, match="--attention: kernel: there is none here"):
        engine_builder.plan(PlanConfig(model=str(tmp_path), attention="kernel"), Silent())


def test_weights_are_multiplied_as_the_faster_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured by the first start, and said by both."""
    caplog.set_level("INFO", "jaxctx")
    measured = []

    def measure(*weight: object) -> dict[str, tuple[float, ...]]:
        measured.append(weight)
        return {"bfloat16": (2.0, 2.0, 2.0), "float32": (1.0, 1.0, 1.0)}

    monkeypatch.setattr(matmul_choice, "measure", measure)
    settings: dict[str, Any] = {"compile_cache": tmp_path / "cache", "dtype": "bfloat16", "weights_dtype": "int8"}
    config = ServeConfig(model=windowed(tmp_path / "model"), **settings)
    for _ in range(2):
        model = engine_builder._model(config, None, Silent()).model
        assert isinstance(model, DecoderModel)
        assert (model.dtype, model.weights_dtype, model.matmul_dtype) == ("bfloat16", "int8", "float32")
        assert "weights of 8 bits are multiplied as float32 (ms a product" in caplog.messages[-1]
    assert measured == [(16, 16, "int8")]
    asked = engine_builder._model(replace(config, matmul_dtype="int8"), None, Silent()).model
    assert isinstance(asked, DecoderModel)
    assert asked.matmul_dtype == "int8"
    assert len(measured) == 1


def test_a_model_that_computes_in_float32_multiplies_so(tmp_path: Path) -> None:
    """Though its configuration declares bfloat16: what is stored decides."""
    windowed(tmp_path)
    declared = json.loads((tmp_path / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        declared[key] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(declared))
    config = ServeConfig(model=str(tmp_path), compile_cache=None, weights_dtype="int8")
    model = engine_builder._model(config, None, Silent()).model
    assert isinstance(model, DecoderModel)
    assert (model.dtype, model.matmul_dtype) == ("float32", "float32")


def test_weights_of_16_bits_are_multiplied_as_they_are(tmp_path: Path) -> None:
    error = refused(model=windowed(tmp_path), matmul_dtype="float32")
    assert str(error) == "--matmul-dtype: is for weights of 8 bits"
    for refuses in (engine_builder.plan, engine_builder.check):
        settings = PlanConfig if refuses is engine_builder.plan else CheckConfig
        with pytest.raises(StartError, match="--matmul-dtype: is for weights of 8 bits"):
            refuses(settings(model=str(tmp_path), matmul_dtype="float32"), Silent())  # type: ignore[operator]


def test_weights_that_were_made_wide_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(windowed(tmp_path))
    config = json.loads((directory / "config.json").read_text())
    write_quantized(directory, config, FORMATS["awq"])
    served = []
    monkeypatch.setattr(engine_builder, "open_engine", lambda model, *_, **__: served.append(model) or _Engine())
    engine_builder.build_engine(ServeConfig(model=str(directory), compile_cache=None), Silent())
    words = "7 matrices of 4-bit integers with a scale for each 16 inputs were made float32, which takes 8 times"
    assert served[0].widened.startswith(words)
    assert served[0].widened in caplog.messages


def test_a_check_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a mesh, too; and where the kernel fails nothing is timed."""
    windowed(tmp_path)
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).unlink()
    programs, timed, begun = [], [], []
    verdict = Verdict.EQUAL

    def check_kernels(program: CompiledModel, name: str, on_case: Any) -> KernelReport:
        programs.append((program, name))
        return replace(empty_report(program, name), cases=[case("tpu", verdict)])

    monkeypatch.setattr(engine_builder, "check_kernels", check_kernels)
    monkeypatch.setattr(engine_builder, "time_kernels", lambda program: timed.append(program) or ())

    def check(**settings: Any) -> KernelReport:
        return engine_builder.check(CheckConfig(compile_cache=None, **settings), lambda _, name: begun.append(name))

    assert check(model=str(tmp_path)).cases[0].verdict is Verdict.EQUAL
    verdict = Verdict.DIFFERS
    assert check(model=str(tmp_path)).cases[0].verdict is Verdict.DIFFERS
    assert [name for _, name in programs] == [tmp_path.name] * 2
    assert timed == [programs[0][0]]
    assert begun == ["timings"]
    check(model="qwen3-0.6b", tensor=2)
    program, name = programs[-1]
    assert (name, program.mesh.size) == ("qwen3-0.6b", 2)
    with pytest.raises(StartError, match="--attention: kernel: there is none here"):
        check(attention="kernel")


def test_where_whole_steps_differ_the_reference_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sizes that are measured anew, as its step takes other memory."""
    opened: list[AttentionChoice] = []
    planned: list[KernelChoice] = []

    def open_engine(served: ServedModel, config: EngineConfig, *, attention: AttentionChoice, **_: Any) -> _Engine:
        opened.append(attention)
        if attention.implementation != "reference":
            raise StepsDiffer("tpu: whole steps, 4 rows: differs: row 3")
        return _Engine()

    def fitting(
        config: Any, served: Any, draft: Any, mesh: Any, kernel: KernelChoice, progress: Any
    ) -> tuple[Sizes, int]:
        planned.append(kernel)
        return Sizes(16, 4, 4, moving_pages=2, reason=""), 16

    monkeypatch.setattr(engine_builder, "open_engine", open_engine)
    monkeypatch.setattr(engine_builder, "_fitting_sizes", fitting)
    sizes = {"model": windowed(tmp_path), "max_batch": 4, "max_batch_tokens": 4, "compile_cache": None}
    with plant_kernel(right):
        engine_builder.build_engine(ServeConfig(**sizes), Silent())
        with pytest.raises(StartError, match=r"^--attention: kernel: tpu: whole steps, 4 rows: differs: row 3: run"):
            engine_builder.build_engine(ServeConfig(**sizes, attention="kernel"), Silent())
    first, second, last = opened
    assert [each.reason for each in opened] == ["checked", "differs", "checked"]
    assert second.why_no_kernel.startswith("tpu: whole steps, 4 rows: differs: row 3: run jaxctx-serve check")
    assert [each.name for each in planned] == ["tpu", "reference", "tpu"]
    assert (first.implementation, last.implementation) == ("tpu", "tpu")


@pytest.mark.slow
def test_a_check_compares_whole_steps_where_there_are_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_builder, "check_kernels", lambda program, name, on_case: empty_report(program, name))
    monkeypatch.setattr(engine_builder, "time_kernels", lambda program: ())
    begun: list[str] = []

    def check(model: str) -> KernelReport:
        begun.clear()
        config = CheckConfig(compile_cache=None, model=model, max_batch=4, max_batch_tokens=4, kv_tokens=256)
        return engine_builder.check(config, lambda _, name: begun.append(name))

    with plant_kernel(right):
        report = check(windowed(tmp_path))
        assert [(case.rows, case.verdict, case.whole_step) for case in report.cases] == [
            (each, Verdict.EQUAL, True) for each in ((4,) if ONE_ROW == () else (1, 4))
        ]
        assert report.step_tolerance is not None
        assert report.why_no_steps == ""
        assert list(dict.fromkeys(begun)) == ["weights", "tpu: whole steps, 4 rows", "timings"]
        (tmp_path / "model.safetensors").unlink()
        report = check(str(tmp_path))
        assert (report.cases, report.step_tolerance) == ((), None)
        assert "no weights: neither model.safetensors" in report.why_no_steps
        assert check("qwen3-0.6b").why_no_steps == "a built-in shape has no weights"

    def too_small(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine_builder, "check_whole_steps", too_small)
    with plant_kernel(right):
        report = check(windowed(tmp_path))
    assert report.why_no_steps == "the device's memory is too small for the weights and a step"
    monkeypatch.setattr(engine_builder, "check_whole_steps", lambda *_: (case("tpu", Verdict.DIFFERS),))
    with plant_kernel(right):
        assert check(str(tmp_path)).verdict is Verdict.DIFFERS
    assert "timings" not in begun


class _Engine:
    def stop(self) -> None:
        pass


def test_adapters_of_the_settings(tmp_path: Path) -> None:
    model = windowed(tmp_path / "model")
    config = read_config(model)
    for name, seed in (("a", 1), ("b", 2)):
        write_adapter(tmp_path / name, config, seed=seed, rank=seed)
    write_adapter(tmp_path / "wide", config, seed=1, rank=17)
    sizes = {"kv_tokens": 64, "max_batch": 1, "max_batch_tokens": 4, "host_tokens": 0}

    def adapters(*named: str) -> tuple[str, ...]:
        return tuple(f"{name}={tmp_path / name}" for name in named)

    settings = ServeConfig(model, compile_cache=None, adapter=adapters("a", "b"), adapter_dir=tmp_path, **sizes)
    engine, _ = engine_builder.build_engine(settings, Silent())
    try:
        assert set(engine.adapter_revisions) == {"a", "b"}
        assert (engine.info.adapter_slots, engine.info.adapter_rank) == (4, 16)
        assert engine.adapters_in_words == "a, b (2 of 4 slots, rank 16)"
        assert asyncio.run(engine.load_adapter(Caller(), "again", "a")).revision == engine.adapter_revisions["a"]
    finally:
        engine.stop()
    error = refused(model=model, adapter=adapters("wide"), **sizes)
    assert error.exit_status == MODEL
    assert str(error).startswith(f"--adapter wide={tmp_path / 'wide'}: adapter_config.json: r: ")
    error = refused(model=model, adapter=adapters("none"), **sizes)
    assert "none: does not exist" in str(error)
    error = refused(model=model, adapter_dir=tmp_path / "none", **sizes)
    assert str(error) == f"--adapter-dir: {tmp_path / 'none'}: not a directory"


def test_a_plan_counts_the_slots_for_adapters(tmp_path: Path) -> None:
    model = windowed(tmp_path / "model")
    plain = engine_builder._described(ServeConfig(model), engine_builder._shape(ServeConfig(model)))[1]
    wide_config = ServeConfig(model, adapter_slots=2, adapter_rank=8)
    wide = engine_builder._described(wide_config, engine_builder._shape(wide_config))[1]
    added = sum(each.size for each in wide) - sum(each.size for each in plain)
    # Two slots of rank 8: A and B of q, k, v, o, gate, up and down, of width 16, heads 2 x 8, KV heads 1 x 8.
    assert added == 16 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 16))


def small(path: Path, seed: int = 0) -> str:
    """A directory with a tiny Llama of echo's tokenizer."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        max_positions=64,
    )
    write_random(path, config, seed=seed)
    (path / "tokenizer.json").write_text(echo_text().tokenizer.to_json(), "utf-8")
    return str(path)


FEW = {"kv_tokens": 64, "max_batch": 1, "max_batch_tokens": 4, "host_tokens": 0}


@pytest.mark.slow
def test_a_draft_model_of_the_settings(tmp_path: Path) -> None:
    """It guesses for whoever asks, and changes no token."""
    model, another = small(tmp_path / "model"), small(tmp_path / "another", seed=1)
    answers = []
    for draft in (model, another):
        sizes = FEW | {"max_batch_tokens": 16, "draft_kv_tokens": 48}
        settings = ServeConfig(model, compile_cache=None, draft_model=Path(draft), **sizes)
        engine, _ = engine_builder.build_engine(settings, Silent())
        try:
            tokens, drafted, accepted = asyncio.run(_generate(engine))
            answers.append(tokens)
            words = "guesses up to 15 tokens, with 48 tokens of KV"
            assert engine.draft_in_words == f"{Path(draft).name} ({_parameters(model):,} parameters) {words}"
            assert drafted >= accepted
            assert accepted == drafted > 5 if draft == model else accepted < drafted
        finally:
            engine.stop()
    assert answers[0] == answers[1]


async def _generate(engine: Any) -> tuple[list[int], int, int]:
    context_id = (await engine.create(Caller(), CreateContextRequest())).context_id
    await engine.fill(Caller(), context_id, [3, 1, 4])
    sampling = SamplingParams(seed=1, temperature=1.0)
    request = GenerateRequest(context_id=context_id, max_tokens=40, sampling=sampling, ignore_eos=True)
    tokens = [token async for piece in engine.generate(Caller(), request) for token in piece.token_ids]
    stats = await engine.stats()
    return tokens, stats.tokens_drafted_by_model, stats.tokens_accepted_by_model


def _parameters(model: str) -> int:
    return sum(tensor.size for tensor in load_file(Path(model) / "model.safetensors").values())


def test_draft_models_that_are_refused(tmp_path: Path) -> None:
    model, draft = small(tmp_path / "model"), small(tmp_path / "draft")
    tokenizer = json.loads((Path(draft) / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["et"], vocabulary["ea"] = vocabulary["ea"], vocabulary["et"]  # of the same size
    (Path(draft) / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (Path(draft) / "model.safetensors").unlink()  # so that it is refused before any weights are read
    error = refused(model=model, draft_model=Path(draft), **FEW)
    assert error.exit_status == USAGE
    assert str(error).startswith("--draft-model: another tokenizer: token ")
    for path, message in [(tmp_path / "none", "no such directory"), (Path(__file__), "not a directory")]:
        error = refused(model=model, draft_model=path, **FEW)
        assert error.exit_status == MODEL
        assert str(error) == f"--draft-model: {path}: {message}"
    small(Path(draft))
    (Path(draft) / "config.json").write_text("{}", "utf-8")
    error = refused(model=model, draft_model=Path(draft), **FEW)
    assert error.exit_status == MODEL
    assert str(error).startswith(f"--draft-model: {draft}: config.json: ")


@pytest.mark.slow
def test_a_plan_counts_the_draft_model(tmp_path: Path) -> None:
    model, draft = small(tmp_path / "model"), small(tmp_path / "draft")
    settings = {"max_batch": 1, "max_batch_tokens": 4, "max_context_tokens": 64, "kv_tokens": 64}
    alone = engine_builder.plan(PlanConfig(model, **settings), Silent()).memory
    beside = engine_builder.plan(PlanConfig(model, draft_model=Path(draft), **settings), Silent()).memory
    assert (alone.draft_bytes, beside.memory_bytes) == (0, alone.memory_bytes)
    weights = sum(tensor.nbytes for tensor in load_file(Path(draft) / "model.safetensors").values())
    kv = 64 * 2 * 8 * 4  # tokens, keys and values of one head of 8 in float32
    assert weights + kv < beside.draft_bytes < weights + kv + (1 << 22)
    assert alone.left_bytes - beside.left_bytes == beside.draft_bytes
    with pytest.raises(StartError, match="--draft-model: runs on one device: not with a --target of several"):
        engine_builder.plan(PlanConfig(model, draft_model=Path(draft), target="8xh100"), Silent())


def test_on_a_cpu_the_draft_models_pages_are_taken_from_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(tmp_path / "model")
    monkeypatch.setattr(engine_builder, "pages_in_host_memory", lambda *_: 10)
    monkeypatch.setattr(engine_builder, "open_engine", lambda served, config, **_: config)
    monkeypatch.setattr(engine_builder, "_load_adapters", lambda *_: None)
    settings = ServeConfig(model, compile_cache=None, draft_model=Path(model), draft_kv_tokens=48, max_batch=4)
    config, _ = engine_builder.build_engine(settings, Silent())
    assert config.pages == 10 - 3  # three pages of the draft model, which are as large
