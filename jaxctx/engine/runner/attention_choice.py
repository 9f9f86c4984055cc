"""`choose_attention`: what computes attention of an engine, by the user's wish, the device, and the check of kernels.

See `jaxctx.engine.attention` for the table of all outcomes. It is called before the memory is planned, as a plan
compiles a whole step: with a kernel that does not compile there would be none.
"""

import logging

from jaxctx.engine.attention import AttentionChoice, AttentionMode, AttentionReason
from jaxctx.engine.runner.check.comparison import check_kernels
from jaxctx.engine.runner.check.remembered import CheckMemory, key_of
from jaxctx.engine.runner.check.report import KernelReport, Verdict
from jaxctx.engine.runner.check.time_limit import NeverEnds, within_limit
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.errors import InvalidArgument
from jaxctx_kernels import KernelChoice

log = logging.getLogger("jaxctx.engine")

REASON_OF = {
    Verdict.DIFFERS: AttentionReason.DIFFERS,
    Verdict.DOES_NOT_COMPILE: AttentionReason.DOES_NOT_COMPILE,
    Verdict.CRASHED: AttentionReason.CRASHED,
    Verdict.NEVER_ENDS: AttentionReason.NEVER_ENDS,
}
WHAT_TO_DO = "run jaxctx-serve check with the same settings, and attach the file that its --json writes to an issue"


def wanted_kernel(mode: AttentionMode) -> KernelChoice | None:
    """What a `CompiledModel` is to be told: the reference, or nothing, which lets it choose by the device."""
    return KernelChoice("reference") if mode == "reference" else None


def kernel_of(choice: AttentionChoice) -> KernelChoice:
    """What a `CompiledModel` is to be told of a choice."""
    return KernelChoice(choice.implementation, choice.why_no_kernel)


def unchecked(program: CompiledModel) -> AttentionChoice:
    """What suits the device of `program`, as it chose itself: a kernel that nobody compared, or the reference."""
    name, why = program.kernel.name, program.kernel.why_no_kernel
    if name != "reference":
        return AttentionChoice(name, AttentionReason.UNCHECKED)
    return AttentionChoice(name, AttentionReason.NO_KERNEL if why else AttentionReason.PLATFORM, why)


def choose_attention(
    program: CompiledModel, mode: AttentionMode, memory: CheckMemory, limit_s: float, model_name: str = ""
) -> AttentionChoice:
    """What is to compute attention. Compares the kernel of `program` with the reference, if it has one, for seconds.

    Raises InvalidArgument, for the field "attention", if that is to be a kernel and none serves. A kernel that does not
    work is no error in the mode "auto": the reference is chosen, with a warning in the log. But one that does not end
    within `limit_s` is NeverEnds, whose message says what to do: then nothing can run on the device in this process.
    """
    if mode == "reference":
        return AttentionChoice("reference", AttentionReason.REQUESTED)
    require_kernel(program, mode)
    if program.kernel.name == "reference":
        return unchecked(program)
    choice = compare(program, memory, limit_s, model_name)
    if choice.implementation == "reference" and mode == "kernel":
        raise no_kernel(choice.why_no_kernel)
    return choice


def require_kernel(program: CompiledModel, mode: AttentionMode) -> None:
    """Raise InvalidArgument, for the field "attention", if `mode` wants a kernel where none is made for the device."""
    if mode == "kernel" and program.kernel.name == "reference":
        raise no_kernel(f"there is none here: {program.kernel.why_no_kernel or 'the path of a CPU is plain JAX'}")


def compare(program: CompiledModel, memory: CheckMemory, limit_s: float, model_name: str) -> AttentionChoice:
    """The kernel of `program` if it equals the reference on its devices, else the reference. Raises NeverEnds."""
    key = key_of(program)
    before = memory.passed_before(key)
    if before is not None:
        return AttentionChoice(program.kernel.name, AttentionReason.CHECKED, compared=f"{before}, at an earlier start")
    if memory.crashes(key):
        why = (
            f"the {program.kernel.name} kernel ended this process when it was compared with the reference, twice: "
            f"{WHAT_TO_DO}; to try it again, delete {memory.file(key)}"
        )
        return refused(AttentionReason.CRASHED, why)
    case = memory.case_without_end(key)
    if case is not None:
        why = f"{case}: never ends: {WHAT_TO_DO}; to try it again, delete {memory.file(key)}"
        return refused(AttentionReason.NEVER_ENDS, why)
    memory.begin(key)
    try:
        report = within_limit(limit_s, lambda tell: check_kernels(program, model_name, lambda _, case: tell(case)))
    except NeverEnds as error:
        told = never_ended(error, program.kernel.name, memory, key)
        log.critical("attention: %s", told)
        raise told from None
    except BaseException:  # no verdict on the kernel: out of memory, or interrupted
        memory.forget(key)
        raise
    log_reference(report)
    if report.kernel_verdict is not Verdict.EQUAL:
        memory.forget(key)
        return refused(REASON_OF[report.kernel_verdict], f"{report.summary}: {WHAT_TO_DO}")
    memory.passed(key, report.kernel_summary)
    log.info("attention: %s kernel, %s", program.kernel.name, report.kernel_summary)
    return AttentionChoice(program.kernel.name, AttentionReason.CHECKED, compared=report.kernel_summary)


def never_ended(error: NeverEnds, kernel: str, memory: CheckMemory, key: str) -> NeverEnds:
    """The same with what to do. If it is the kernel that never ends, the next start takes the reference."""
    if not error.case.startswith(f"{kernel}: "):
        memory.forget(key)
        return NeverEnds(error.case, error.limit_s, "that is not the kernel, but JAX or the device")
    memory.never_ends(key, error.case)
    if memory.case_without_end(key) is None:
        what_now = "start with --attention reference: it is not remembered, for want of a --compile-cache to write to"
    else:
        what_now = f"the next start takes plain JAX; to try the kernel again, delete {memory.file(key)}"
    return NeverEnds(error.case, error.limit_s, what_now)


def without_kernel(why: str, mode: AttentionMode) -> AttentionChoice:
    """The reference in place of a kernel with which whole steps differ. Raises as `choose_attention`."""
    why = f"{why}: {WHAT_TO_DO}"
    if mode == "kernel":
        raise no_kernel(why)
    return refused(AttentionReason.DIFFERS, why)


def refused(reason: AttentionReason, why: str) -> AttentionChoice:
    """The reference in place of a kernel that does not work, with a warning."""
    log.warning("attention is computed by plain JAX, which is slower than a kernel: %s", why)
    return AttentionChoice("reference", reason, why)


def log_reference(report: KernelReport) -> None:
    """Warn if plain JAX is wrong on this device. Nothing can take its place, and a kernel that differs may be right."""
    for case in report.cases:
        if case.implementation == "reference" and case.verdict is not Verdict.EQUAL:
            log.error("plain JAX is wrong on this device: %s: %s: %s", case.name, case.verdict, case.detail)


def no_kernel(why: str) -> InvalidArgument:
    """The error of a start that wants a kernel and cannot have it."""
    return InvalidArgument.field("attention", f"kernel: {why}")
