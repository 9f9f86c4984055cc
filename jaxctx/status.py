"""What every error says. The errors themselves are `jaxctx.errors`. This module imports nothing of ours, so that every
floor may raise them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused: its path in the request message, and what would be accepted."""

    field: str
    description: str


BY_CODE: dict[str, "type[JaxctxError]"] = {}  # the classes of the statuses


class JaxctxError(Exception):
    """Base of every error this project raises on purpose.

    `violations` names each field that an InvalidArgument refused; `retry_after_s` is set where waiting helps.
    """

    code = "UNKNOWN"  # the name of the gRPC status
    default_reason = "INTERNAL"  # where none is given

    def __init_subclass__(cls) -> None:
        if cls.__base__ is JaxctxError:  # further down a class is a kind of its status
            BY_CODE[cls.code] = cls

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
