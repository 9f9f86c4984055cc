"""`jaxctx-serve plan`: which model it reads, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxctx.engine import targets
from jaxctx.engine.targets import MemoryPlan
from jaxctx_server import assemble
from jaxctx_server.command import main
from jaxctx_server.start import MODEL, OK, USAGE

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
SMALL = ("--max-batch", "2", "--max-batch-tokens", "4")


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Nothing but a configuration."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def test_a_configuration_is_enough(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", directory, *SMALL, "--json"], {}) == OK
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["token_bytes"] == 2 * 16 * 2
    assert found["page_bytes"] == 16 * found["token_bytes"]
    assert found["contexts_of_4096"] == found["tokens"] // 4096 > 0
    assert "compiling: 3/3 step of 4 rows" in captured.err


class Planned:
    """In place of compiling: what was asked for, and the same answer to all."""

    def __init__(self, tokens: int = 8192) -> None:
        self.tokens = tokens

    def __call__(self, name: str, model: Any, params: Any, config: Any, progress: Any) -> MemoryPlan:
        self.name, self.model, self.config = name, model, config
        return MemoryPlan(1 << 34, 3 << 29, 1 << 20, 5 << 20, 0, 12345 << 10, 2048, 128, self.tokens, 2)


def test_the_table(directory: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(assemble, "plan_memory", Planned())
    assert main(["plan", directory, "--target", "here"], {}) == OK
    rows = [line.rsplit("  ", 1) for line in capsys.readouterr().out.replace("    \n", "\n").splitlines()]
    assert {name.strip(): value.strip() for name, value in rows} == {
        "target": "here",
        "memory": "16.0 GiB",
        "weights": "1.5 GiB",
        "sampling": "1.0 MiB",
        "temporaries": "5.0 MiB",
        "code": "0.0 B",
        "left": "12.1 MiB",
        "page": "2.0 KiB",
        "token": "128.0 B",
        "tokens": "8,192",
        "contexts of 4096": "2",
    }


def test_settings_and_shapes_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    planned = Planned()
    monkeypatch.setattr(assemble, "plan_memory", planned)
    environ = {"JAXCTX_PAGE_SIZE": "64", "JAXCTX_JSON": "true"}
    assert main(["plan", "llama-3.1-8b", "--target", "here", "--max-context-tokens", "9999"], environ) == OK
    assert planned.name == "here"
    assert (planned.model.config.layers, planned.model.config.ffn, planned.model.dtype) == (32, 14336, "bfloat16")
    assert (planned.config.page_size, planned.config.max_context_tokens) == (64, 9999)
    assert json.loads(capsys.readouterr().out)["tokens"] == 8192
    assert main(["plan", "qwen3-0.6b", "--dtype", "float32"], {}) == OK
    assert (planned.model.config.head_dim, planned.model.dtype, planned.model.kv.dtype) == (128, "float32", "float32")
    assert planned.config.max_context_tokens == 40960
    assert main(["plan"], {}) == OK
    assert planned.model.config.width == 256  # the bundled model


def test_what_does_not_fit_has_a_status(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "plan_memory", Planned(tokens=0))
    assert main(["plan", directory], {}) == MODEL


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--tensor", "2"], USAGE, "--tensor: a plan is for one chip"),
        (["/no/such/model"], MODEL, "/no/such/model: no such directory"),
        (["--kv-tokens", "9", "--memory-fraction", "0.5"], USAGE, "only one of them may be set"),
        (["--target", "v5e"], USAGE, "v5e: "),
        (["--target", "h200"], USAGE, "h200: "),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    assert main(["plan", *argv], {}) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxctx-serve: ")
    assert message in captured.err
    assert captured.out == ""


def test_compiling_ahead_needs_somewhere_to_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--compile-cache", "None"], {}) == USAGE
    assert "--compile-cache: must be a directory" in capsys.readouterr().err
