"""Errors: one small hierarchy, the same on the server, on the wire and in the client.

Each class is one gRPC status; `reason` is one value of `jaxctx.v1.ErrorReason` (without its prefix) and is what
programs should test; the message is for people. An error means that nothing changed, unless its docstring says
otherwise. This module imports nothing, so every floor may raise these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused: its path in the request message, and what would be accepted."""

    field: str
    description: str


class JaxctxError(Exception):
    """Base of every error this project raises on purpose. `code` is the name of its gRPC status."""

    code = "UNKNOWN"
    default_reason = "INTERNAL"

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


class InvalidArgument(JaxctxError):
    """A field is wrong whatever the server's state. `violations` names each such field."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_FIELD"

    @classmethod
    def field(cls, field: str, description: str) -> InvalidArgument:
        """The common case: one field, one reason."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class OutOfRange(JaxctxError):
    """More was asked of a context than it holds (truncate, rewind, commit, release past the end)."""

    code = "OUT_OF_RANGE"
    default_reason = "OUT_OF_RANGE"


class FailedPrecondition(JaxctxError):
    """The object, or the server, is not in a state that allows this (a partial page cannot be committed)."""

    code = "FAILED_PRECONDITION"
    default_reason = "FAILED_PRECONDITION"


class NotFound(JaxctxError):
    """No such object in the caller's namespace. Another tenant's object answers exactly the same."""

    code = "NOT_FOUND"
    default_reason = "CONTEXT_NOT_FOUND"


class AlreadyExists(JaxctxError):
    """The name or client-chosen id is taken."""

    code = "ALREADY_EXISTS"
    default_reason = "ALREADY_EXISTS"


class Aborted(JaxctxError):
    """Another writer holds the context (retry when it is done), or saved a later version of the snapshot."""

    code = "ABORTED"
    default_reason = "CONTEXT_BUSY"


class ResourceExhausted(JaxctxError):
    """Not enough pages, queue places, room in the store or quota; `retry_after_s` is set where waiting helps."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "OUT_OF_PAGES"


class Unavailable(JaxctxError):
    """The server is loading, draining, or gone, or its store cannot be reached."""

    code = "UNAVAILABLE"
    default_reason = "NOT_SERVING"


class DeadlineExceeded(JaxctxError):
    """The caller's deadline passed. What had been computed until then stays in the context."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(JaxctxError):
    """The caller went away. What had been computed until then stays in the context."""

    code = "CANCELLED"
    default_reason = "CANCELLED"


class Unauthenticated(JaxctxError):
    """No key, or an unknown one."""

    code = "UNAUTHENTICATED"
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(JaxctxError):
    """The key is known and its role does not allow this method."""

    code = "PERMISSION_DENIED"
    default_reason = "PERMISSION_DENIED"


class DataLoss(JaxctxError):
    """Stored data failed its checksum and could not be rebuilt. It was not used."""

    code = "DATA_LOSS"
    default_reason = "DATA_LOSS"


class Internal(JaxctxError):
    """A defect of the server. Neighbours are not affected."""

    code = "INTERNAL"
    default_reason = "INTERNAL"


BY_CODE: dict[str, type[JaxctxError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        OutOfRange,
        FailedPrecondition,
        NotFound,
        AlreadyExists,
        Aborted,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Unauthenticated,
        PermissionDenied,
        DataLoss,
        Internal,
    )
}
