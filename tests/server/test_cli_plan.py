"""`jaxctx-serve plan`: which model it reads, what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from jaxctx.engine.plan import memory_planner
from jaxctx.engine.plan.memory_planner import TARGETS
from jaxctx.engine.plan.mesh_targets import mesh_target
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.weights import convert
from jaxctx_server.cli import main
from jaxctx_server.errors import MODEL, OK, USAGE
from tests.jaxctx.model.quantization.encode import FORMATS, write_quantized
from tests.server.engine_builder.planners import OnEightDevices, Planned

TINY = {  # as in tests/jaxctx/engine/plan/test_memory_planner.py, so that one of them finds what the other compiled
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Nothing but a configuration."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def test_a_configuration_is_enough(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", directory, "--max-batch", "2", "--max-batch-tokens", "4"], {}) == OK
    captured = capsys.readouterr()
    found = dict(re.findall(r"  (\w[\w ]+\w) +(-?[\d,.]+)", captured.out))
    pages, tokens, contexts = (int(found[each].replace(",", "")) for each in ("pages", "tokens", "contexts of 4096"))
    assert tokens == 16 * pages
    assert contexts == tokens // 4096 > 0
    assert "compiling: 3/3 step of 4 rows" in captured.err


def test_the_table(directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Planned(monkeypatch)
    assert main(["plan", directory, "--target", "here"], {}) == OK
    assert capsys.readouterr().out.splitlines() == [
        f"{directory} on here: page 16, 32 at once, 512 rows a step (defaults of this CPU)",
        "  memory                 16,384.0 MiB",
        "  weights                 1,536.0 MiB",
        "  sampling                    1.0 MiB",
        "  temporaries                 5.0 MiB",
        "  code                        0.0 MiB",
        "  left                      -12.1 MiB",
        "  kv                          0.1 MiB",
        "  pages                       512",
        "  tokens                    8,192",
        "  contexts of 4096              2",
    ]


def test_the_same_as_json(directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Planned(monkeypatch)
    assert main(["plan", directory, "--json", "--max-batch", "4"], {}) == OK
    assert json.loads(capsys.readouterr().out) == {
        "model": directory,
        "target": "here",
        "page_size": 16,
        "max_batch": 4,
        "max_batch_tokens": 512,
        "moving_pages": 2,
        "reason": "requests as set, the rest defaults of this CPU",
        "memory_bytes": 1 << 34,
        "weights_bytes": 3 << 29,
        "sampling_bytes": 1 << 20,
        "temporaries_bytes": 5 << 20,
        "code_bytes": 0,
        "left_bytes": -12345 << 10,
        "kv_bytes": 123456,
        "pages": 512,
        "tokens": 8192,
        "contexts_of_4096": 2,
        "spare_bytes": 0,
        "draft_bytes": 0,
    }
    Planned(monkeypatch, pages=0)
    assert main(["plan", directory, "--json"], {}) == MODEL


@pytest.mark.parametrize(("target", "page_size", "platform"), [("v5e", 128, "TPU"), ("h200", 64, "GPU")])
def test_a_chips_own_sizes_compile_for_it(
    target: str, page_size: int, platform: str, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if jax.__version_info__ < (0, 11, 2) or find_spec(TARGETS[target].module) is None:
        pytest.skip(f"the compiler for {target} is not installed: .ci/run has a stage with it")
    assert main(["plan", directory, "--target", target, "--json"], {}) == OK
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    sizes = (found["page_size"], found["max_batch"], found["max_batch_tokens"])
    assert (sizes, found["reason"]) == ((page_size, 256, 2048), f"defaults of this {platform}")
    assert found["tokens"] == found["pages"] * page_size >= 256 * 64
    assert "compiling: 3/3 step of 2048 rows" in captured.err


def test_settings_and_shapes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch)
    environ = {"JAXCTX_PAGE_SIZE": "64"}
    assert main(["plan", "llama-3.1-8b", "--max-context-tokens", "999", "--kv-tokens", "1024"], environ) == OK
    model = planned.program._model
    assert (model.config.layers, model.config.ffn, model.dtype) == (32, 14336, "bfloat16")
    config = planned.program._config
    assert (config.page_size, config.max_context_tokens, config.pages) == (64, 999, 8)  # half of what was asked for
    assert planned.share == 0.25
    assert main(["plan", "qwen3-0.6b", "--dtype", "float32", "--memory-fraction", "0.5"], {}) == OK
    model = planned.program._model
    assert (model.config.head_dim, model.dtype, model.kv.dtype) == (128, "float32", "float32")
    assert planned.program._config.max_context_tokens <= 40960
    assert planned.share == 0.5
    assert main(["plan", "llama-3.1-8b", "--weights-dtype", "int8"], {}) == OK
    model = planned.program._model
    assert (model.dtype, model.weights_dtype, model.kv.dtype) == ("bfloat16", "int8", "bfloat16")
    assert sum(array.size * array.dtype.itemsize for array in planned.program.params) < 9.1e9  # of 16.1 in bfloat16
    assert main(["plan"], {}) == OK
    assert planned.program._model.config.vocab_size == 4096  # the bundled model


def test_several_chips(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    planned = OnEightDevices(monkeypatch, tokens=160)
    assert main(["plan", "llama-3.1-70b", "--target", "8xh100", "--memory-fraction", "0.5"], {}) == OK
    assert capsys.readouterr().out.startswith(
        "llama-3.1-70b on 8xh100: page 16, 32 at once, 512 rows a step (defaults of this CPU)\n"
        "  chips                         8 (kv 8 × group 1)"
    )
    assert (planned.layers, planned.model.config.layers, planned.model.config.width) == (80, 2, 8192)
    assert (planned.memory, planned.share) == (mesh_target("8xh100").target.memory, 0.5)
    assert main(["plan", "llama-3.1-70b", "--target", "8xh100", "--tensor", "8", "--kv-tokens", "161"], {}) == MODEL
    assert main(["plan", "llama-3.1-70b", "--target", "8xh100", "--tensor", "4"], {}) == USAGE
    assert "--tensor: 8xh100 has 8 devices" in capsys.readouterr().err
    assert main(["plan", "--target", "8xh100"], {}) == USAGE  # the bundled model has four query heads
    assert "8 devices do not divide the model's heads = 4 on kv_heads = 2; these" in capsys.readouterr().err


def test_weights_are_planned_as_a_directory_stores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch)
    convert(BUNDLED, tmp_path / "stored", weights_dtype="float8_e4m3fn")
    assert main(["plan", str(tmp_path / "stored")], {}) == OK
    assert planned.program._model.weights_dtype == "float8_e4m3fn"


def test_quantised_weights_are_planned_as_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that were left out too, where the weights are there."""
    planned = Planned(monkeypatch)
    for name, dtype in (("FP8", "float8_e4m3fn"), ("W4A16", "float32")):
        write_quantized(tmp_path / name, TINY, FORMATS[name], leave_out=("down_proj",))
        assert main(["plan", str(tmp_path / name)], {}) == OK
        model = planned.program._model
        assert model.weights_dtype == dtype
        types = {spec.dtype for spec in model.specs if spec.name.endswith("down_proj.weight")}
        assert types == {"float32"}
        (tmp_path / name / "model.safetensors").unlink()
        assert main(["plan", str(tmp_path / name)], {}) == OK
        assert planned.program._model.weights_dtype == dtype


def test_what_does_not_fit_has_a_status(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Planned(monkeypatch)
    assert main(["plan", directory, "--kv-tokens", "8192"], {}) == OK
    assert main(["plan", directory, "--kv-tokens", "8193"], {}) == MODEL
    Planned(monkeypatch, pages=0)
    assert main(["plan", directory], {}) == MODEL
    monkeypatch.setattr(memory_planner, "physical_memory", lambda: 1 << 12)  # not even for the weights
    assert main(["plan", directory, "--max-context-tokens", "64"], {}) == MODEL


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--tensor", "2"], USAGE, "--tensor: a plan is for one chip"),
        (["--target", "v5e-17"], USAGE, "--target: 'v5e-17' is not known; known are here, v5e, "),
        (["--target", "h100x8"], USAGE, "--target: 'h100x8' is not known; known are here, v5e, "),
        (["--target", "v5e-16"], USAGE, "v5e-16: "),
        (["/no/such/model"], MODEL, "/no/such/model: does not exist"),
        (["--kv-tokens", "9", "--memory-fraction", "0.5"], USAGE, "only one of them may be set"),
        (["--target", "v5e"], USAGE, "v5e: "),
        (["--target", "h200"], USAGE, "h200: "),
        (["--target", "a100-80gb"], USAGE, "a100-80gb: "),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_planner, "find_spec", lambda name: None)
    assert main(["plan", *argv], {}) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxctx-serve: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_compiling_ahead_needs_somewhere_to_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--compile-cache", "None"], {}) == USAGE
    assert "--compile-cache: must be a directory" in capsys.readouterr().err
