"""`jaxctx-serve check`: its process, its table, its statuses. With planted kernels: tests/e2e/test_kernel_check.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxctx.engine.runner.check.report import CaseReport, KernelReport, Timing, Tolerance, Verdict
from jaxctx_server import kernel_check
from jaxctx_server.cli import main
from jaxctx_server.config import CheckConfig
from jaxctx_server.errors import CHECK, MODEL, OK, USAGE, StartError
from jaxctx_server.kernel_check import Begun, Finished, Refused, check_apart, how_it_ended, report_lines
from tests.jaxctx.engine.runner.check.test_report import EMPTY, case

REPORT = replace(
    EMPTY,
    cases=[case("reference", Verdict.EQUAL), case("tpu", Verdict.EQUAL)],
    timings=[Timing("copy", 0.001, 2e12, 0.0, 1.0, 0.0)],
)
WRONG = replace(REPORT, cases=[*REPORT.cases, case("tpu", Verdict.DIFFERS, 512)])


SILENCE = "silence"


class Connection:
    """Of a checking process that says this and ends."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said
        self.waited_s: list[float] = []

    def poll(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return self.said[:1] != [SILENCE]

    def recv(self) -> Any:
        if not self.said:
            raise EOFError
        return self.said.pop(0)

    def close(self) -> None: ...


class Process:
    """A checking process that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode
        self.terminated = self.killed = False

    def start(self) -> None: ...

    def join(self) -> None: ...

    def terminate(self) -> None:
        self.terminated = True

    def kill(self) -> None:
        self.killed = True
        self.exitcode = -signal.SIGKILL


Says = Callable[..., Process]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Have the next checking process say this, and end with this status."""

    def says(*said: Any, exitcode: int = 0) -> Process:
        process = Process(exitcode)

        class Context:
            def Pipe(self, duplex: bool) -> tuple[Connection, Connection]:  # noqa: N802
                return Connection(list(said)), Connection([])

            def Process(self, **_: Any) -> Process:  # noqa: N802
                return process

        monkeypatch.setattr(kernel_check.multiprocessing, "get_context", lambda method: Context())
        return process

    return says


def test_the_report_of_a_process_that_ends_well(says: Says) -> None:
    process, shown = (
        says(Begun(EMPTY, "reference: a, 4 rows"), Begun(EMPTY, "timings"), Begun(EMPTY, "timings"), Finished(REPORT)),
        [],
    )
    assert check_apart(CheckConfig(), shown.append) == REPORT
    assert shown == ["reference: a, 4 rows", "timings"]
    assert not process.terminated


@pytest.mark.parametrize(
    ("begun", "case_name", "rows"),
    [
        ("tpu: prompts and decoding, 512 rows", "tpu: prompts and decoding, 512 rows", 512),
        ("timings", "tpu: timings, 0 rows", 0),
    ],
)
def test_a_process_that_crashes_leaves_the_cases_before(says: Says, begun: str, case_name: str, rows: int) -> None:
    says(Begun(EMPTY, "reference: decoding, 4 rows"), Begun(REPORT, begun), exitcode=-signal.SIGSEGV)
    report = check_apart(CheckConfig(), lambda line: None)
    assert list(report.cases[:-1]) == REPORT.cases
    crashed = report.cases[-1]
    assert (crashed.name, crashed.rows, crashed.verdict) == (case_name, rows, Verdict.CRASHED)
    assert crashed.detail == "the process was ended by SIGSEGV; what comes after it was not compared"
    assert report.verdict is Verdict.CRASHED
    json.loads(report.as_json())


def test_a_process_that_never_ends_is_ended(says: Says) -> None:
    process = says(Begun(EMPTY, "reference: decoding, 4 rows"), Begun(REPORT, "tpu: decoding, 4 rows"), SILENCE)
    report = check_apart(CheckConfig(check_timeout_s=7), lambda line: None)
    assert process.killed
    assert list(report.cases[:-1]) == REPORT.cases
    assert (report.cases[-1].name, report.verdict) == ("tpu: decoding, 4 rows", Verdict.NEVER_ENDS)
    assert report.cases[-1].detail == "the process said nothing for 7 s; what comes after it was not compared"
    process = says(SILENCE)
    with pytest.raises(StartError, match="nothing was compared: the process said nothing for 300 s") as raised:
        check_apart(CheckConfig(), lambda line: None)
    assert (process.killed, raised.value.exit_status) == (True, CHECK)


def test_a_process_that_compares_nothing(says: Says) -> None:
    says(exitcode=-signal.SIGABRT)
    with pytest.raises(StartError, match="nothing was compared: the process was ended by SIGABRT") as raised:
        check_apart(CheckConfig(), lambda line: None)
    assert raised.value.exit_status == CHECK
    says(Refused("no such model", MODEL), exitcode=0)
    with pytest.raises(StartError, match="no such model") as raised:
        check_apart(CheckConfig(), lambda line: None)
    assert raised.value.exit_status == MODEL


def test_who_interrupts_it_ends_the_process_too(says: Says) -> None:
    process = says(Begun(EMPTY, "reference: decoding, 4 rows"), exitcode=-signal.SIGTERM)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_apart(CheckConfig(), interrupt)
    assert process.terminated


def test_how_a_process_ended() -> None:
    assert how_it_ended(1) == "ended with status 1"
    assert how_it_ended(-signal.SIGKILL) == "was ended by SIGKILL"
    assert how_it_ended(-250) == "was ended by signal 250"


def test_the_table() -> None:
    lines = list(report_lines(WRONG))
    assert lines[0] == "tiny on TPU v5 lite (tpu), JAX 0.12"
    assert lines[1] == "8 KV heads × 4 queries of 128, bfloat16, pages of 64 tokens, split over 4 devices"
    assert "decoding                    16  tpu             equal                  0.001    0.0001      1.0" in lines
    assert "    of 512" in lines
    assert any(line.startswith("copy ") and "2000.0" in line and "100%" in line for line in lines)
    assert lines[-1] == "tpu: decoding, 512 rows: differs: of 512"
    gpu = replace(
        EMPTY, device=replace(EMPTY.device, platform="gpu", compute_capability="8.0"), why_no_kernel="it is old"
    )
    lines = list(report_lines(gpu))
    assert "(gpu, compute capability 8.0)" in lines[0]
    assert "attention is computed by plain JAX, which is slower than a kernel: it is old" in lines
    assert not any("whole steps" in line for line in lines)
    assert "whole steps were not compared: no weights" in report_lines(replace(EMPTY, why_no_steps="no weights"))
    with_steps = report_lines(replace(EMPTY, step_tolerance=Tolerance(0.5, 0.06)))
    assert any(line.startswith("tolerance of whole steps") and line.endswith("0.5      0.06") for line in with_steps)
    nothing = CaseReport("decoding", 4, "tpu", Verdict.DOES_NOT_COMPILE, "no", None, None, 0, 0.0)
    assert any("does not compile" in line for line in report_lines(replace(EMPTY, cases=[nothing])))


@pytest.mark.parametrize(("report", "status"), [(REPORT, OK), (WRONG, CHECK)])
def test_the_status_and_the_report(
    says: Says, report: KernelReport, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    says(Begun(EMPTY, "a case"), Finished(report))
    assert main(["check", "--json", str(path)], {}) == status
    captured = capsys.readouterr()
    assert captured.err == "a case\n"
    assert captured.out.endswith(f"{report.summary}\nwrote {path}\n")
    assert path.read_text() == report.as_json()
    says(Finished(report))
    assert main(["check", "--json", "-"], {}) == status
    captured = capsys.readouterr()
    assert captured.out == report.as_json()
    assert captured.err.endswith(f"{report.summary}\n")
    says(Finished(report))
    assert main(["check"], {}) == status


def test_mistakes_are_one_line(says: Says, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says(Finished(REPORT))
    assert main(["check", "--json", str(tmp_path)], {}) == USAGE
    assert f"jaxctx-serve: --json: {tmp_path}: Is a directory\n" in capsys.readouterr().err
    says(Refused("/no/such/model: does not exist", MODEL))
    assert main(["check", "/no/such/model"], {}) == MODEL
    assert capsys.readouterr().err == "jaxctx-serve: /no/such/model: does not exist\n"


@pytest.mark.slow
def test_a_process_says_what_is_wrong_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Through a real process."""
    assert main(["check", "/no/such/model", "--compile-cache", ""], {}) == MODEL
    err = capsys.readouterr().err
    assert err.endswith("/no/such/model: does not exist\n")
    assert err.count("\n") == 1
