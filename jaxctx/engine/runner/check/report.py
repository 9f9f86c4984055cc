"""`KernelReport`: what the check of kernels found on a device. One JSON, which a user can attach to an issue.

Plain data, without JAX, so that the process that started a check can complete the report of one that crashed.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


class Verdict(enum.StrEnum):
    """What a comparison came to; of several the last in this order counts."""

    EQUAL = "equal"  # within the tolerance
    DIFFERS = "differs"
    DOES_NOT_COMPILE = "does not compile"
    CRASHED = "crashed"  # raised an error when it ran, or ended the process
    NEVER_ENDS = "never ends"  # took longer than the limit


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a result is from what it is compared with, over all numbers that are finite in both."""

    largest: float
    mean: float
    not_finite: int  # numbers that are NaN or infinite in the result; none may be


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a `Difference` may be; see `comparison.tolerance_of`."""

    largest: float
    mean: float


@dataclass(frozen=True, slots=True)
class CaseReport:
    """One batch through one implementation, pages moved by it, or whole steps of the model with it."""

    batch: str  # what is in the batch, see `cases`; or `comparison.PAGES_MOVED`
    rows: int  # of the step, padding included; or tokens of the pages
    implementation: str  # "reference", "gpu", "tpu"
    verdict: Verdict
    detail: str  # where it differs most, or what was raised; empty where it is equal
    to_reference: Difference | None  # on the same device; None for the reference, and where there is no result
    to_float64: Difference | None  # on the host, for some of the rows; None where there is no result
    wrong_slots: int  # slots of pages whose keys or values are not what was to be written there, or to be left alone
    seconds: float  # of compiling and running it
    whole_step: bool = False  # `to_reference` is then of log probabilities, as a share of the logits' spread

    @property
    def name(self) -> str:
        """For messages: "gpu: prompts and decoding, 512 rows"."""
        return f"{self.implementation}: {self.batch}, {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Layout:
    """What attention works on."""

    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    kv_dtype: str
    page_size: int  # tokens
    devices: int  # that the KV heads are split over


@dataclass(frozen=True, slots=True)
class Device:
    """The device, as JAX knows it."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # "NVIDIA H200"
    count: int  # of this process
    compute_capability: str  # of a GPU, "9.0"; else empty
    memory_bytes: int  # that a process gets of one device; 0: not known
    runtime: str  # version of the platform's runtime: of CUDA, of libtpu


@dataclass(frozen=True, slots=True)
class Timing:
    """What was timed: medians of rounds, and as shares of the ceilings of the same rounds."""

    name: str
    seconds: float
    bytes_per_second: float
    flops_per_second: float
    of_copy: float  # share of the bytes per second of a large copy
    of_product: float  # share of the FLOP per second of a large bfloat16 product


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the check of one engine's kernels found."""

    model: str
    device: Device
    versions: Mapping[str, str]  # of jaxctx, Python, JAX and what brings the platform's compiler
    environment: Mapping[str, str]  # variables with flags of the compilers, where they are set
    layout: Layout
    implementation: str  # what is made for the device: "gpu", "tpu", or "reference" where no kernel is
    why_no_kernel: str  # a clause; empty where there is a kernel, and on a CPU
    tolerance: Tolerance
    cases: Sequence[CaseReport] = ()
    step_tolerance: Tolerance | None = None  # of whole steps; None: they were not compared
    why_no_steps: str = ""  # a clause: why whole steps were not compared, where they could be
    timings: Sequence[Timing] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all cases."""
        return self._worst().verdict if self.cases else Verdict.EQUAL

    @property
    def kernel_verdict(self) -> Verdict:
        """The worst verdict of the cases of the kernel; EQUAL where there is none."""
        verdicts = [case.verdict for case in self.cases if case.implementation != "reference"]
        return max(verdicts, key=list(Verdict).index, default=Verdict.EQUAL)

    @property
    def summary(self) -> str:
        """A clause: what the implementation equals, or the case that is worst of all, with its detail."""
        if self.verdict is Verdict.EQUAL:
            return self.kernel_summary
        worst = self._worst()
        return f"{worst.name}: {worst.verdict}: {worst.detail}"

    @property
    def kernel_summary(self) -> str:
        """A clause: "equal to the reference on this device in 8 cases (largest difference 0.003, tolerance 0.039)".

        Where there is no kernel it is about the reference, which is compared with float64.
        """
        own = [case for case in self.cases if case.implementation == self.implementation]
        cases = [case for case in own if not case.whole_step]
        yardstick = "float64" if self.implementation == "reference" else "the reference"
        found = [case.to_float64 if self.implementation == "reference" else case.to_reference for case in cases]
        largest = max((each.largest for each in found if each is not None), default=0.0)
        said = (
            f"equal to {yardstick} on this device in {len(cases)} cases "
            f"(largest difference {largest:.2g}, tolerance {self.tolerance.largest:.2g})"
        )
        steps = [case for case in own if case.whole_step]
        return said if self.step_tolerance is None else f"{said}{steps_in_words(steps, self.step_tolerance)}"

    def as_json(self) -> str:
        """The report as an object of JSON, indented, with what can be derived from it at the top."""
        fields = {"verdict": self.verdict, "summary": self.summary, **asdict(self)}
        return json.dumps(fields, indent=1, allow_nan=False) + "\n"

    def _worst(self) -> CaseReport:
        """Of several with the worst verdict the first; the kernel's cases before the reference's."""
        order = list(Verdict)
        return max(self.cases, key=lambda case: (order.index(case.verdict), case.implementation != "reference"))


def steps_in_words(cases: Sequence[CaseReport], tolerance: Tolerance) -> str:
    """A clause behind that of the attention: ", and in whole steps of 16 and 512 rows (…)"; empty without cases."""
    means = [case.to_reference.mean for case in cases if case.to_reference is not None]
    if not means:
        return ""
    rows = " and ".join(str(case.rows) for case in cases)
    return (
        f", and in whole steps of {rows} rows (mean difference {max(means):.2g} of the logits' spread, "
        f"tolerance {tolerance.mean:.2g})"
    )
