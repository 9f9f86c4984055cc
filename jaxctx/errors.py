"""Errors: one small hierarchy, the same on the server, on the wire and in the client.

Each class is one gRPC status, named after it; `reason` is one value of `jaxctx.v1.ErrorReason` (without its prefix) and
is what programs should test; the message is for people. An error means that nothing changed, unless its docstring says
otherwise. This module imports nothing of ours, so every floor may raise these.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused: its path in the request message, and what would be accepted."""

    field: str
    description: str


BY_CODE: dict[str, "type[JaxctxError]"] = {}  # the classes of the statuses


class JaxctxError(Exception):
    """Base of every error this project raises on purpose."""

    code = "UNKNOWN"  # the name of the gRPC status
    default_reason = "INTERNAL"  # where none is given; of a subclass: as its status is called, unless it says another

    def __init_subclass__(cls) -> None:
        if cls.__base__ is JaxctxError:  # further down a class is a kind of its status
            cls.code = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).upper()
            cls.default_reason = vars(cls).get("default_reason", cls.code)
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


class InvalidArgument(JaxctxError):
    """A field is wrong whatever the server's state. `violations` names each such field."""

    default_reason = "INVALID_FIELD"

    @classmethod
    def field(cls, field: str, description: str) -> "InvalidArgument":
        """The common case: one field, one reason."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class OutOfRange(JaxctxError):
    """More was asked of a context than it holds (truncate, rewind, commit, release past the end)."""


class FailedPrecondition(JaxctxError):
    """The object, or the server, is not in a state that allows this (a partial page cannot be committed)."""


class NotFound(JaxctxError):
    """No such object in the caller's namespace. Another tenant's object answers exactly the same."""

    default_reason = "CONTEXT_NOT_FOUND"


class AlreadyExists(JaxctxError):
    """The name or client-chosen id is taken."""


class Aborted(JaxctxError):
    """Another writer holds the context (retry when it is done), or saved a later version of the snapshot."""

    default_reason = "CONTEXT_BUSY"


class ResourceExhausted(JaxctxError):
    """Not enough pages, queue places, room in the store or quota; `retry_after_s` is set where waiting helps."""

    default_reason = "OUT_OF_PAGES"


class Unavailable(JaxctxError):
    """The server is loading, draining, or gone, or its store cannot be reached."""

    default_reason = "NOT_SERVING"


class DeadlineExceeded(JaxctxError):
    """The caller's deadline passed. What had been computed until then stays in the context."""


class Cancelled(JaxctxError):
    """The caller went away. What had been computed until then stays in the context."""


class Unauthenticated(JaxctxError):
    """No key, or an unknown one."""


class PermissionDenied(JaxctxError):
    """The key is known and its role does not allow this method."""


class DataLoss(JaxctxError):
    """Stored data failed its checksum and could not be rebuilt. It was not used."""


class Internal(JaxctxError):
    """A defect of the server. Neighbours are not affected."""
