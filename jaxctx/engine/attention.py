"""What computes attention of an engine: what a user may ask for, and what was decided, with the reason.

    mode         device has a kernel    comparison       what computes attention    reason
    reference    —                      —                reference                  REQUESTED
    auto         no, and needs none     —                reference                  PLATFORM
    auto         no                     —                reference                  NO_KERNEL
    auto         yes                    equal            kernel                     CHECKED
    auto         yes                    another          reference                  that of the verdict
    kernel       yes                    equal            kernel                     CHECKED
    kernel       anything else                           the start is refused

While a kernel is compared that never ends, the start ends; the next one then has the reason NEVER_ENDS.

Without JAX: the server's metrics and banner read it on machines that have none. Who decides: `runner.attention_choice`.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from jaxctx.types import Attention

if TYPE_CHECKING:
    from jaxctx_kernels import KernelName

AttentionMode: TypeAlias = Literal["auto", "kernel", "reference"]


class AttentionReason(enum.StrEnum):
    """Why attention is computed by what computes it. A closed set: these are labels of a metric."""

    CHECKED = "checked"  # a kernel, which equals the reference on this device
    UNCHECKED = "unchecked"  # a kernel that nobody compared
    PLATFORM = "platform"  # the reference is the fastest that there is for a CPU
    REQUESTED = "requested"  # the reference: the user asked for it
    NO_KERNEL = "no_kernel"  # the reference: no kernel is made for this device, or for such pages
    DIFFERS = "differs"  # the reference: the kernel computes something else on this device
    DOES_NOT_COMPILE = "does_not_compile"  # the reference: the compiler refuses the kernel
    CRASHED = "crashed"  # the reference: the kernel raised an error when it ran, or ended the process
    NEVER_ENDS = "never_ends"  # the reference: an earlier start waited for the kernel in vain


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What computes attention of an engine, and why."""

    implementation: "KernelName"
    reason: AttentionReason
    why_no_kernel: str = ""  # a clause, where a kernel would be faster: "it has compute capability 8.0, …"
    compared: str = ""  # a clause about the comparison with the reference, where there was one

    def as_status(self) -> Attention:
        """The same for those who ask the engine."""
        return Attention(
            implementation=self.implementation,
            reason=self.reason.value,
            why_no_kernel=self.why_no_kernel,
            compared=self.compared,
        )

    def describe(self) -> str:
        """For the banner: "gpu kernel, equal to the reference …", or "plain JAX"."""
        if self.implementation != "reference":
            return f"{self.implementation} kernel, {self.compared or 'not compared with the reference'}"
        return "plain JAX" + (" (--attention reference)" if self.reason is AttentionReason.REQUESTED else "")
