"""`jaxctx-serve check`, the part without JAX: the check in a process of its own, and its report as a table.

A compiler may abort, a fault on the device may end the runtime, and a kernel may never end: then this process is still
here to say in which case that was. It never touches the device, which most accelerators give to one process only.

    this process ──spawn──▶ checking process:  build nothing, read config.json, compare, time
         ◀── Begun(report so far, next case) … Finished(report)  or  Refused(message)  or the end of the process
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TypeAlias

from jaxctx.engine.runner.check.report import CaseReport, Difference, KernelReport, Verdict
from jaxctx_server.config import CheckConfig
from jaxctx_server.errors import CHECK, StartError


@dataclass(frozen=True, slots=True)
class Begun:
    """A case begins."""

    report: KernelReport  # of the cases before
    case: str


@dataclass(frozen=True, slots=True)
class Finished:
    """All is done."""

    report: KernelReport


@dataclass(frozen=True, slots=True)
class Refused:
    """A StartError."""

    message: str
    exit_status: int


Message: TypeAlias = Begun | Finished | Refused


def check_apart(config: CheckConfig, show: Callable[[str], None]) -> KernelReport:
    """Run the check in a process of its own; `show` is called with a line before each case.

    If that process ends before it is done, or says nothing for `check_timeout_s`, the case that it was at has crashed,
    or never ends, and the rest is missing. Raises StartError for what the user can correct, and if that is so before
    the first case.
    """
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    process = spawn.Process(target=run_check, args=(config, sending), name="jaxctx-check")
    process.start()
    sending.close()  # so that the end of the process is the end of the messages
    last: Message | None = None
    verdict, how, shown = Verdict.CRASHED, "", ""
    try:
        for last in messages(receiving, config.check_timeout_s):
            if isinstance(last, Begun) and last.case != shown:  # a case of many parts says that it is alive
                shown = last.case
                show(last.case)
    except TimeoutError:
        process.kill()
        verdict, how = Verdict.NEVER_ENDS, f"said nothing for {config.check_timeout_s:g} s"
    except BaseException:  # interrupted
        process.terminate()
        raise
    finally:
        process.join()
    how = how or how_it_ended(process.exitcode)
    match last:
        case Finished():
            return last.report
        case Refused():
            raise StartError(last.message, last.exit_status)
        case Begun():
            return replace(last.report, cases=(*last.report.cases, last_case(last, verdict, how)))
        case None:
            raise StartError(f"nothing was compared: the process {how}", CHECK)


def messages(receiving: Connection, timeout_s: float) -> Iterator[Message]:
    """What the process says until it ends. Raises TimeoutError when it says nothing for so long."""
    while True:
        if not receiving.poll(timeout_s):
            raise TimeoutError
        try:
            yield receiving.recv()
        except EOFError:
            return


def run_check(config: CheckConfig, sending: Connection) -> None:
    """The checking process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to the whole group; the other process ends this one
    from jaxctx_server.engine_builder.check import check

    try:
        report = check(config, lambda report, case: sending.send(Begun(report, case)))
    except StartError as error:
        sending.send(Refused(str(error), error.exit_status))
    else:
        sending.send(Finished(report))
    sending.close()


def last_case(begun: Begun, verdict: Verdict, how: str) -> CaseReport:
    """The case that the process was at when it ended, or was ended."""
    implementation, _, batch = begun.case.rpartition(": ")
    batch, _, rows = batch.partition(", ")
    return CaseReport(
        batch=batch,
        rows=int(rows.partition(" ")[0] or 0),
        implementation=implementation or begun.report.implementation,
        verdict=verdict,
        detail=f"the process {how}; what comes after it was not compared",
        to_reference=None,
        to_float64=None,
        wrong_slots=0,
        seconds=0.0,
    )


def how_it_ended(exitcode: int | None) -> str:
    """ "was ended by SIGABRT", or "ended with status 1"."""
    if exitcode is None or exitcode >= 0:
        return f"ended with status {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


def report_lines(report: KernelReport) -> Iterator[str]:
    """The report for people."""
    device, layout = report.device, report.layout
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    yield f"{report.model} on {device.kind} ({device.platform}{capability}), JAX {report.versions.get('jax')}"
    split = f", split over {layout.devices} devices" if layout.devices > 1 else ""
    yield (
        f"{layout.kv_heads} KV heads × {layout.group} queries of {layout.head_dim}, {layout.kv_dtype}, "
        f"pages of {layout.page_size} tokens{split}"
    )
    if report.why_no_kernel:
        yield f"attention is computed by plain JAX, which is slower than a kernel: {report.why_no_kernel}"
    yield ""
    yield f"{'batch':<24}{'rows':>6}  {'implementation':<16}{'verdict':<18}{'largest':>10}{'mean':>10}{'seconds':>9}"
    for case in report.cases:
        found: Difference | None = case.to_reference or case.to_float64
        numbers = f"{'':>20}" if found is None else f"{found.largest:>10.2g}{found.mean:>10.2g}"
        line = f"{case.batch:<24}{case.rows:>6}  {case.implementation:<16}{case.verdict:<18}{numbers}"
        yield f"{line}{case.seconds:>9.1f}"
        if case.detail:
            yield f"    {case.detail}"
    yield f"{'tolerance':<66}{report.tolerance.largest:>10.2g}{report.tolerance.mean:>10.2g}"
    if report.step_tolerance is not None:
        tolerance = report.step_tolerance
        title = "tolerance of whole steps, as a share of the logits' spread"
        yield f"{title:<66}{tolerance.largest:>10.2g}{tolerance.mean:>10.2g}"
    if report.why_no_steps:
        yield f"whole steps were not compared: {report.why_no_steps}"
    if report.timings:
        yield ""
        yield f"{'timing':<40}{'seconds':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of copy':>9}{'of product':>12}"
    for each in report.timings:
        yield (
            f"{each.name:<40}{each.seconds:>10.3g}{each.bytes_per_second / 1e9:>9.1f}"
            f"{each.flops_per_second / 1e12:>9.2f}{each.of_copy:>9.0%}{each.of_product:>12.0%}"
        )
    yield ""
    yield report.summary
