"""The check of kernels: without weights, and whole steps where there are some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxctx.engine.runner.check.comparison import empty_report
from jaxctx.engine.runner.check.report import KernelReport, Verdict
from jaxctx.engine.runner.compiled_model import ONE_ROW, CompiledModel
from jaxctx_server.config import CheckConfig
from jaxctx_server.engine_builder import check as checking
from jaxctx_server.errors import StartError
from tests.jaxctx.engine.runner.check.test_report import case
from tests.planted_kernels import plant_kernel, right
from tests.server.engine_builder.settings import windowed


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

    monkeypatch.setattr(checking, "check_kernels", check_kernels)
    monkeypatch.setattr(checking, "time_kernels", lambda program: timed.append(program) or ())

    def check(**settings: Any) -> KernelReport:
        return checking.check(CheckConfig(compile_cache=None, **settings), lambda _, name: begun.append(name))

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


@pytest.mark.slow
def test_a_check_compares_whole_steps_where_there_are_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "check_kernels", lambda program, name, on_case: empty_report(program, name))
    monkeypatch.setattr(checking, "time_kernels", lambda program: ())
    begun: list[str] = []

    def check(model: str) -> KernelReport:
        begun.clear()
        config = CheckConfig(compile_cache=None, model=model, max_batch=4, max_batch_tokens=4, kv_tokens=256)
        return checking.check(config, lambda _, name: begun.append(name))

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

    monkeypatch.setattr(checking, "check_whole_steps", too_small)
    with plant_kernel(right):
        report = check(windowed(tmp_path))
    assert report.why_no_steps == "the device's memory is too small for the weights and a step"
    monkeypatch.setattr(checking, "check_whole_steps", lambda *_: (case("tpu", Verdict.DIFFERS),))
    with plant_kernel(right):
        assert check(str(tmp_path)).verdict is Verdict.DIFFERS
    assert "timings" not in begun
