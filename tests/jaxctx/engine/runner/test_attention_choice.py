"""What computes attention: by the user's wish, the device and the comparison, which is scripted here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxctx.engine.attention import AttentionChoice, AttentionMode, AttentionReason
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner import attention_choice
from jaxctx.engine.runner.attention_choice import choose_attention, kernel_of, require_kernel, unchecked, wanted_kernel
from jaxctx.engine.runner.check.comparison import OnCase, empty_report
from jaxctx.engine.runner.check.remembered import CheckMemory, key_of
from jaxctx.engine.runner.check.report import CaseReport, Difference, KernelReport, Verdict
from jaxctx.engine.runner.check.time_limit import PREPARATION, NeverEnds
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import InvalidArgument
from jaxctx_kernels import KernelChoice
from tests.echo import EchoModel

CONFIG = EngineConfig(pages=40, max_batch=4, max_batch_tokens=8, max_context_tokens=128)
SMALL = Difference(0.001, 0.0001, 0)
NOWHERE = CheckMemory(None)
LIMIT_S = 300


def program(kernel: KernelChoice | None = None) -> CompiledModel:
    return CompiledModel(EchoModel(), (), CONFIG, jax.devices()[0], kernel)


HAS_KERNEL = KernelChoice("tpu")
HAS_NONE = KernelChoice("reference", "it has compute capability 8.0")


class Comparison:
    """In place of the check."""

    def __init__(self) -> None:
        self.calls = 0
        self.verdict = Verdict.EQUAL
        self.reference = Verdict.EQUAL
        self.error: BaseException | None = None
        self.never_ends = ""  # the case

    def __call__(self, program: CompiledModel, model_name: str, on_case: OnCase) -> KernelReport:
        self.calls += 1
        if self.never_ends:
            raise NeverEnds(self.never_ends, LIMIT_S)
        if self.error is not None:
            raise self.error
        cases = [
            CaseReport("decoding", 8, "reference", self.reference, "far", None, SMALL, 0, 0.1),
            CaseReport("decoding", 8, "tpu", self.verdict, "row 3", SMALL, SMALL, 0, 0.1),
        ]
        return replace(empty_report(program, model_name), cases=cases)


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Comparison]:
    comparison = Comparison()
    monkeypatch.setattr(attention_choice, "check_kernels", comparison)
    return comparison


def test_a_cpu_has_the_reference_and_compares_nothing(comparison: Comparison) -> None:
    choice = choose_attention(program(), "auto", NOWHERE, LIMIT_S)
    assert choice == AttentionChoice("reference", AttentionReason.PLATFORM)
    assert choice.describe() == "plain JAX"
    with pytest.raises(InvalidArgument, match="attention: kernel: there is none here: the path of a CPU is plain JAX"):
        choose_attention(program(), "kernel", NOWHERE, LIMIT_S)
    assert comparison.calls == 0


def test_a_device_without_a_kernel_says_why(comparison: Comparison) -> None:
    choice = choose_attention(program(HAS_NONE), "auto", NOWHERE, LIMIT_S)
    assert choice == AttentionChoice("reference", AttentionReason.NO_KERNEL, "it has compute capability 8.0")
    with pytest.raises(InvalidArgument, match="attention: kernel: there is none here: it has compute") as raised:
        choose_attention(program(HAS_NONE), "kernel", NOWHERE, LIMIT_S)
    assert [each.field for each in raised.value.violations] == ["attention"]
    assert comparison.calls == 0


def test_who_asks_for_the_reference_gets_it_without_a_warning(comparison: Comparison) -> None:
    choice = choose_attention(program(HAS_KERNEL), "reference", NOWHERE, LIMIT_S)
    assert choice == AttentionChoice("reference", AttentionReason.REQUESTED)
    assert choice.describe() == "plain JAX (--attention reference)"
    assert comparison.calls == 0
    assert wanted_kernel("reference") == KernelChoice("reference")
    assert wanted_kernel("auto") is None


@pytest.mark.parametrize("mode", ["auto", "kernel"])
def test_a_kernel_that_is_equal_serves(comparison: Comparison, mode: AttentionMode) -> None:
    choice = choose_attention(program(HAS_KERNEL), mode, NOWHERE, LIMIT_S)
    assert (choice.implementation, choice.reason, choice.why_no_kernel) == ("tpu", AttentionReason.CHECKED, "")
    assert choice.describe().startswith("tpu kernel, equal to the reference on this device in 1 cases (largest diff")
    assert kernel_of(choice) == KernelChoice("tpu")


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Verdict.DIFFERS, AttentionReason.DIFFERS),
        (Verdict.DOES_NOT_COMPILE, AttentionReason.DOES_NOT_COMPILE),
        (Verdict.CRASHED, AttentionReason.CRASHED),
    ],
)
def test_a_kernel_that_fails_is_replaced_loudly_or_refused(
    comparison: Comparison, verdict: Verdict, reason: AttentionReason, caplog: pytest.LogCaptureFixture
) -> None:
    comparison.verdict = verdict
    with caplog.at_level(logging.WARNING, "jaxctx.engine"):
        choice = choose_attention(program(HAS_KERNEL), "auto", NOWHERE, LIMIT_S)
    assert (choice.implementation, choice.reason) == ("reference", reason)
    assert f"tpu: decoding, 8 rows: {verdict}: row 3: run jaxctx-serve check" in choice.why_no_kernel
    assert choice.why_no_kernel in caplog.text
    assert kernel_of(choice) == KernelChoice("reference", choice.why_no_kernel)
    with pytest.raises(InvalidArgument, match=f"attention: kernel: tpu: decoding, 8 rows: {verdict}"):
        choose_attention(program(HAS_KERNEL), "kernel", NOWHERE, LIMIT_S)


def test_a_wrong_reference_is_an_error_in_the_log(comparison: Comparison, caplog: pytest.LogCaptureFixture) -> None:
    comparison.reference = Verdict.DIFFERS
    assert choose_attention(program(HAS_KERNEL), "auto", NOWHERE, LIMIT_S).implementation == "tpu"
    assert "plain JAX is wrong on this device: reference: decoding, 8 rows: differs: far" in caplog.text


def test_what_passed_is_not_compared_again(comparison: Comparison, tmp_path: Path) -> None:
    memory = CheckMemory(tmp_path)
    first, second = (choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S) for _ in range(2))
    assert comparison.calls == 1
    assert second.compared == f"{first.compared}, at an earlier start"
    assert (second.implementation, second.reason) == (first.implementation, first.reason)


def test_what_failed_is_compared_at_every_start(comparison: Comparison, tmp_path: Path) -> None:
    comparison.verdict = Verdict.DIFFERS
    memory = CheckMemory(tmp_path)
    for _ in range(3):
        assert choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S).reason is AttentionReason.DIFFERS
    assert comparison.calls == 3


def test_an_error_is_no_verdict(comparison: Comparison, tmp_path: Path) -> None:
    comparison.error = KeyboardInterrupt()
    memory = CheckMemory(tmp_path)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S)
    comparison.error = None
    assert choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S).reason is AttentionReason.CHECKED


def test_a_kernel_that_ended_two_starts_is_not_tried_again(comparison: Comparison, tmp_path: Path) -> None:
    memory, key = CheckMemory(tmp_path), key_of(program(HAS_KERNEL))
    memory.begin(key)
    memory.begin(key)
    choice = choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S)
    assert (choice.implementation, choice.reason) == ("reference", AttentionReason.CRASHED)
    assert "ended this process when it was compared" in choice.why_no_kernel
    assert str(memory.file(key)) in choice.why_no_kernel
    with pytest.raises(InvalidArgument, match="ended this process"):
        choose_attention(program(HAS_KERNEL), "kernel", memory, LIMIT_S)
    assert comparison.calls == 0
    memory.file(key).unlink()
    assert choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S).reason is AttentionReason.CHECKED


def test_after_a_kernel_that_never_ends_the_next_start_takes_the_reference(
    comparison: Comparison, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    comparison.never_ends = "tpu: decoding, 8 rows"
    memory, key = CheckMemory(tmp_path), key_of(program(HAS_KERNEL))
    message = "tpu: decoding, 8 rows: did not end within 300 s; the next start takes plain JAX"
    with pytest.raises(NeverEnds, match=message) as raised:
        choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S)
    assert str(memory.file(key)) in str(raised.value)
    assert [(each.levelname, each.message) for each in caplog.records] == [("CRITICAL", f"attention: {raised.value}")]
    choice = choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S)
    assert (choice.implementation, choice.reason) == ("reference", AttentionReason.NEVER_ENDS)
    assert choice.why_no_kernel.startswith("tpu: decoding, 8 rows: never ends: run jaxctx-serve check")
    assert str(memory.file(key)) in choice.why_no_kernel
    with pytest.raises(InvalidArgument, match="attention: kernel: tpu: decoding, 8 rows: never ends"):
        choose_attention(program(HAS_KERNEL), "kernel", memory, LIMIT_S)
    assert comparison.calls == 1
    memory.file(key).unlink()
    comparison.never_ends = ""
    assert choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S).reason is AttentionReason.CHECKED


def test_who_remembers_nothing_is_told_what_starts_the_server(comparison: Comparison) -> None:
    comparison.never_ends = "tpu: decoding, 8 rows"
    with pytest.raises(NeverEnds, match="start with --attention reference"):
        choose_attention(program(HAS_KERNEL), "auto", NOWHERE, LIMIT_S)


@pytest.mark.parametrize("case", [PREPARATION, "reference: decoding, 8 rows"])
def test_what_is_not_the_kernel_is_not_held_against_it(comparison: Comparison, tmp_path: Path, case: str) -> None:
    comparison.never_ends = case
    memory = CheckMemory(tmp_path)
    for _ in range(3):
        with pytest.raises(NeverEnds, match=f"{case}: did not end within 300 s; that is not the kernel"):
            choose_attention(program(HAS_KERNEL), "auto", memory, LIMIT_S)
    assert comparison.calls == 3
    assert list(tmp_path.iterdir()) == []


def test_a_plan_wants_what_the_server_wants() -> None:
    require_kernel(program(HAS_KERNEL), "kernel")
    require_kernel(program(HAS_NONE), "auto")
    with pytest.raises(InvalidArgument, match="attention: kernel: there is none here"):
        require_kernel(program(HAS_NONE), "kernel")


def test_a_runner_attends_with_what_was_chosen() -> None:
    choice = AttentionChoice("tpu", AttentionReason.CHECKED)
    runner = ModelRunner(EchoModel(), (), CONFIG, attention=choice)
    assert runner.attention is choice
    assert {shape.metadata[0].kernel for shape in runner.shapes} == {"tpu"}
    assert ModelRunner(EchoModel(), (), CONFIG).attention == AttentionChoice("reference", AttentionReason.PLATFORM)
    assert unchecked(program(HAS_KERNEL)) == AttentionChoice("tpu", AttentionReason.UNCHECKED)
    assert unchecked(program(HAS_KERNEL)).describe() == "tpu kernel, not compared with the reference"
    assert unchecked(program(HAS_NONE)).reason is AttentionReason.NO_KERNEL
