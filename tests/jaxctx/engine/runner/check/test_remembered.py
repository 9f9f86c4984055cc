"""What is remembered of comparisons from start to start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.check.remembered import CheckMemory, key_of
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx_kernels import KernelChoice
from tests.echo import EchoModel


def test_a_comparison_that_passed_is_remembered(tmp_path: Path) -> None:
    memory = CheckMemory(tmp_path / "new")
    assert memory.passed_before("k") is None
    memory.begin("k")
    memory.passed("k", "equal")
    assert CheckMemory(tmp_path / "new").passed_before("k") == "equal"
    assert memory.passed_before("other") is None
    assert not memory.crashes("k")
    memory.forget("k")
    assert memory.passed_before("k") is None
    memory.forget("k")
    assert list((tmp_path / "new").iterdir()) == []


def test_the_second_start_that_ends_in_a_comparison_is_the_last(tmp_path: Path) -> None:
    memory = CheckMemory(tmp_path)
    memory.begin("k")
    assert not memory.crashes("k")  # the first may have been ended by somebody
    memory.begin("k")
    assert memory.crashes("k")
    assert not memory.crashes("other")
    memory.passed("k", "equal")
    memory.begin("k")
    assert not memory.crashes("k")


def test_one_start_that_never_ends_is_enough(tmp_path: Path) -> None:
    memory = CheckMemory(tmp_path)
    memory.begin("k")
    assert memory.case_without_end("k") is None
    memory.never_ends("k", "tpu: decoding, 8 rows")
    assert CheckMemory(tmp_path).case_without_end("k") == "tpu: decoding, 8 rows"
    assert memory.case_without_end("other") is memory.passed_before("k") is None
    assert not memory.crashes("k")
    memory.forget("k")
    assert memory.case_without_end("k") is None


def test_without_a_directory_nothing_is_remembered() -> None:
    memory = CheckMemory(None)
    for _ in range(3):
        memory.begin("k")
    memory.passed("k", "equal")
    memory.never_ends("k", "tpu: decoding, 8 rows")
    memory.forget("k")
    assert memory.passed_before("k") is None
    assert memory.case_without_end("k") is None
    assert not memory.crashes("k")
    with pytest.raises(ValueError, match="nothing is remembered"):
        memory.file("k")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"equal": 3, "begun": "2", "never_ends": 1}', "\x00"])
def test_a_broken_file_is_as_none(tmp_path: Path, text: str) -> None:
    memory = CheckMemory(tmp_path)
    memory.file("k").write_text(text)
    assert memory.passed_before("k") is None
    assert memory.case_without_end("k") is None
    assert not memory.crashes("k")
    memory.begin("k")
    memory.begin("k")
    assert memory.crashes("k")


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = CheckMemory(tmp_path / "file" / "directory")
    memory.begin("k")
    memory.passed("k", "equal")
    assert memory.passed_before("k") is None


def test_a_key_changes_with_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(kernel: KernelChoice | None = None, has_sinks: bool = False, **sizes: int) -> str:
        config = EngineConfig(
            **({"pages": 40, "max_batch": 4, "max_batch_tokens": 8, "max_context_tokens": 128} | sizes)
        )
        program = CompiledModel(EchoModel(), (), config, jax.devices()[0], kernel)
        program.kv = replace(program.kv, sinks=has_sinks)
        return key_of(program)

    keys = [key(), key(page_size=32), key(max_batch_tokens=16), key(pages=50), key(KernelChoice("tpu"))]
    keys.append(key(has_sinks=True))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    keys.append(key())
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
