"""The report of the check: which verdict counts, what is said, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jaxctx.engine.runner.check.report import (
    CaseReport,
    Device,
    Difference,
    KernelReport,
    Layout,
    Timing,
    Tolerance,
    Verdict,
)

EMPTY = KernelReport(
    model="tiny",
    device=Device("tpu", "TPU v5 lite", 4, "", 16 << 30, "libtpu 0.0.52"),
    versions={"jax": "0.12"},
    environment={},
    layout=Layout(8, 4, 128, "bfloat16", 64, 4),
    implementation="tpu",
    why_no_kernel="",
    tolerance=Tolerance(0.04, 0.003),
)


def case(implementation: str, verdict: Verdict, rows: int = 16, largest: float = 0.001) -> CaseReport:
    found = Difference(largest, largest / 10, 0)
    detail = "" if verdict is Verdict.EQUAL else f"of {rows}"
    return CaseReport(
        "decoding",
        rows,
        implementation,
        verdict,
        detail,
        None if implementation == "reference" else found,
        found,
        0,
        1.0,
    )


def test_the_worst_verdict_counts() -> None:
    assert EMPTY.verdict is EMPTY.kernel_verdict is Verdict.EQUAL
    equal, differs = case("reference", Verdict.EQUAL), case("tpu", Verdict.DIFFERS)
    report = replace(
        EMPTY, cases=[equal, differs, case("tpu", Verdict.EQUAL), case("tpu", Verdict.DOES_NOT_COMPILE, 64)]
    )
    assert report.verdict is report.kernel_verdict is Verdict.DOES_NOT_COMPILE
    assert report.summary == "tpu: decoding, 64 rows: does not compile: of 64"
    assert replace(report, cases=[equal, differs]).summary == "tpu: decoding, 16 rows: differs: of 16"


def test_the_kernel_is_named_before_the_reference() -> None:
    report = replace(EMPTY, cases=[case("reference", Verdict.DIFFERS, 4), case("tpu", Verdict.DIFFERS, 8)])
    assert report.summary.startswith("tpu: decoding, 8 rows")
    report = replace(EMPTY, cases=[case("reference", Verdict.CRASHED, 4), case("tpu", Verdict.EQUAL, 8)])
    assert report.summary.startswith("reference: decoding, 4 rows: crashed")
    assert report.kernel_verdict is Verdict.EQUAL


def test_what_is_equal_says_to_what() -> None:
    cases = [case("reference", Verdict.EQUAL, largest=0.002), case("tpu", Verdict.EQUAL, largest=0.003)]
    report = replace(EMPTY, cases=cases)
    said = "on this device in 1 cases (largest difference 0.00"
    assert report.summary == f"equal to the reference {said}3, tolerance 0.04)"
    assert (
        replace(report, implementation="reference", cases=cases[:1]).summary
        == f"equal to float64 {said}2, tolerance 0.04)"
    )


def test_whole_steps_are_told_apart() -> None:
    step = replace(case("tpu", Verdict.EQUAL, 16, largest=0.9), whole_step=True)
    report = replace(EMPTY, cases=[case("tpu", Verdict.EQUAL, largest=0.003)], step_tolerance=Tolerance(1.0, 0.5))
    said = "equal to the reference on this device in 1 cases (largest difference 0.003, tolerance 0.04)"
    assert report.summary == said
    report = replace(report, cases=[*report.cases, step, replace(step, rows=512, to_reference=Difference(0.5, 0.2, 0))])
    steps = "whole steps of 16 and 512 rows (mean difference 0.2 of the logits' spread, tolerance 0.5)"
    assert report.summary == f"{said}, and in {steps}"
    report = replace(
        report, cases=[*report.cases, replace(step, verdict=Verdict.DIFFERS, batch="whole steps", detail="x")]
    )
    assert report.kernel_verdict is Verdict.DIFFERS
    assert report.summary == "tpu: whole steps, 16 rows: differs: x"
    assert json.loads(report.as_json())["step_tolerance"] == {"largest": 1.0, "mean": 0.5}


def test_the_json_has_everything() -> None:
    report = replace(
        EMPTY,
        cases=[case("tpu", Verdict.DIFFERS)],
        timings=[Timing("copy", 0.001, 1e12, 0.0, 1.0, 0.0)],
    )
    found = json.loads(report.as_json())
    assert (found["verdict"], found["summary"]) == ("differs", report.summary)
    assert found["device"]["kind"] == "TPU v5 lite"
    assert found["cases"][0]["to_reference"] == {"largest": 0.001, "mean": 0.0001, "not_finite": 0}
    assert found["cases"][0]["verdict"] == "differs"
    assert found["timings"][0]["bytes_per_second"] == 1e12
    assert found["layout"]["page_size"] == 64
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(EMPTY, tolerance=Tolerance(float("nan"), 0.0)).as_json()  # nobody could read it
