"""Errors: one small hierarchy, the same in the server, on the wire and in the client.

Each class is one gRPC status and is named after it; `reason` is one value of `jaxctx.v1.ErrorReason` (without its
prefix) and is what programs should test; the message is for people. An error means that nothing changed, unless its
docstring says otherwise. protos/jaxctx/v1/error_reason.proto documents the same reasons for other languages, and
tests/jaxctx/test_errors.py compares the two. This module imports nothing of ours, so every layer may raise its errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Codes of calls that were not answered, or were cut off: they may have been carried out, or not.
_OUTCOME_UNKNOWN = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that was refused: its path in the request message, and what would be accepted."""

    field: str
    description: str


class JaxctxError(Exception):
    """Base of every error that this project raises on purpose.

    `violations` has each field that an InvalidArgument refused; `retry_after_s` is set where waiting helps.
    """

    code = "UNKNOWN"  # the name of the gRPC status
    default_reason = "INTERNAL"  # where none is given

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

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later: the error says when, or nobody knows what became of the call."""
        return self.retry_after_s is not None or self.code in _OUTCOME_UNKNOWN


class Internal(JaxctxError):
    """A defect of the server. Other requests are not affected."""

    code = "INTERNAL"
    default_reason = "INTERNAL"


class InvalidArgument(JaxctxError):
    """A field is wrong, whatever the state of the server."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_FIELD"

    @classmethod
    def field(cls, field: str, description: str) -> "InvalidArgument":
        """The error for one field: its path, and what would be accepted."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class OutOfRange(JaxctxError):
    """An operation reaches beyond a context's end, or beyond the model's longest sequence.

    OUT_OF_RANGE: the context has fewer tokens or pages than that (Truncate, Rewind, CommitPages, ReleasePages).

    CONTEXT_TOO_LONG: the context would be, or is, as long as the model's longest sequence.
    """

    code = "OUT_OF_RANGE"
    default_reason = "OUT_OF_RANGE"


class FailedPrecondition(JaxctxError):
    """The object, or the server, is not in a state that allows this.

    FAILED_PRECONDITION: the object is not in a state that allows this.

    PAGE_NOT_FULL: a page to be committed is not full.

    CONTEXT_EMPTY: the context has no token to continue from.

    NO_CHAT_TEMPLATE: the model has no chat template, so messages have no meaning to it.

    WRONG_ROLE: the method is for servers of another role (a router, or one with an engine of its own).

    NO_OUTPUT_FORMAT: outputs of this model cannot be held to an `output_format`: its tokenizer is of a kind that
    grammars cannot follow, it has no end-of-sequence token, or its vocabulary lacks what must follow.

    NO_STORE: the server has no store, so nothing can be durable.

    MODEL_MISMATCH: the snapshot was computed by another model revision, so its KV means nothing to this one.

    ADAPTER_MISMATCH: the snapshot was computed with an adapter that is not loaded. Loading it helps.

    NO_ADAPTERS: the server has no slots for adapters, or no directory to load them from.
    """

    code = "FAILED_PRECONDITION"
    default_reason = "FAILED_PRECONDITION"


class NotFound(JaxctxError):
    """No such object in the caller's namespace. Another tenant's object gives exactly the same error.

    CONTEXT_NOT_FOUND: the caller has no context of this id.

    MODEL_NOT_FOUND: this server serves no model of this id.

    SERVICE_NOT_FOUND: a health check names no service of this server.

    SNAPSHOT_NOT_FOUND: the caller has no snapshot of this name, or not this version of it.

    PUBLICATION_NOT_FOUND: the caller has no publication of this id.

    CONTEXT_EXPIRED: the caller had a context of this id, which has expired. Later this becomes CONTEXT_NOT_FOUND.

    SESSION_NOT_FOUND: the caller has no session of this id, or its time to live ended.

    VARIABLE_NOT_FOUND: the session has no variable of this id.

    CALL_NOT_FOUND: the session has no call of this id.

    ADAPTER_NOT_FOUND: no adapter of this name is loaded, or there is no directory of this name to load one from.
    """

    code = "NOT_FOUND"
    default_reason = "CONTEXT_NOT_FOUND"


class AlreadyExists(JaxctxError):
    """The name, or the id chosen by the client, is taken."""

    code = "ALREADY_EXISTS"
    default_reason = "ALREADY_EXISTS"


class Aborted(JaxctxError):
    """Another writer holds the context (retry when it is done), or saved a later version of the snapshot.

    CONTEXT_BUSY: another writer holds the context. Retry when it is done. RetryInfo: yes.

    VERSION_MISMATCH: the version to overwrite or to take is not the latest one. Somebody else saved in between.
    RetryInfo: no.
    """

    code = "ABORTED"
    default_reason = "CONTEXT_BUSY"


class ResourceExhausted(JaxctxError):
    """Not enough pages, places in the queue, time, space in the store, or quota.

    OUT_OF_PAGES: not enough free pages now. Waiting may help. RetryInfo: yes.

    NEVER_FITS: needs more pages than the server has in all. Waiting never helps. RetryInfo: no.

    QUEUE_FULL: as many requests wait as may wait, or tasks of a program, or the caller's large requests (64 KiB and
    more) take longer to read than its share of the time, or no process can be started now that reads an output format.
    A waiting request is given up for one of a tenant that has fewer waiting. RetryInfo: yes.

    TOO_MANY_CONTEXTS: the server holds as many contexts as it can. Waiting helps if others close theirs. RetryInfo:
    yes.

    PIN_BUDGET: the caller may not pin so many pages. Unpinning others helps, as does their end. RetryInfo: yes,
    unless this alone is too much.

    QUOTA: the caller may not have so many contexts, sessions, variables, texts, or stored snapshots or bytes. Giving
    up others helps, as does their end. RetryInfo: yes, unless time frees none of it.

    STORE_FULL: the store is full. Nothing of the snapshot was kept. RetryInfo: yes.

    DEADLINE_UNREACHABLE: judged by what steps take, the request cannot end by the caller's deadline. Most are
    refused at once; one that waits or generates may be ended later, when it no longer can make it and others could.
    What was generated until then stays in the context; a request that did not run yet has changed nothing. It may
    succeed after `retry_after_s` with as much time to its deadline, or now with more. RetryInfo: yes.

    ADAPTER_SLOTS: every slot for adapters is taken by one that has a name or that contexts use. Unloading others
    helps, once their contexts are closed. RetryInfo: yes.

    GRAMMAR_LIMIT: the `output_format` of an output took too much to follow. What was generated until then stays in the
    context. RetryInfo: no.
    """

    code = "RESOURCE_EXHAUSTED"
    default_reason = "OUT_OF_PAGES"


class Unavailable(JaxctxError):
    """The server is loading, draining, or gone, or its store cannot be reached.

    NOT_SERVING: the server is still loading, or gone. RetryInfo: yes, if it is the server that says so.

    DRAINING: the server finishes what it has and takes nothing new. RetryInfo: yes.

    ENGINE_FAILED: the engine met an internal error that it cannot recover from. The process ends and may be
    restarted. As the error of a program's output: several engines in turn were lost while they computed it.
    RetryInfo: yes.

    STORE_FAILED: the store cannot be written or read now. Acknowledged snapshots are still there. RetryInfo: yes.

    ENGINE_LOST: the router lost the engine, or has none that could do this now. Work may have been lost; retry.
    RetryInfo: yes.
    """

    code = "UNAVAILABLE"
    default_reason = "NOT_SERVING"


class DeadlineExceeded(JaxctxError):
    """The caller's deadline passed. What was computed until then stays in the context."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(JaxctxError):
    """The caller cancelled, or the context was closed. What was computed stays in a context that is still open."""

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


# The class of each gRPC status that this project raises.
BY_CODE: dict[str, type[JaxctxError]] = {
    Internal.code: Internal,
    InvalidArgument.code: InvalidArgument,
    OutOfRange.code: OutOfRange,
    FailedPrecondition.code: FailedPrecondition,
    NotFound.code: NotFound,
    AlreadyExists.code: AlreadyExists,
    Aborted.code: Aborted,
    ResourceExhausted.code: ResourceExhausted,
    Unavailable.code: Unavailable,
    DeadlineExceeded.code: DeadlineExceeded,
    Cancelled.code: Cancelled,
    Unauthenticated.code: Unauthenticated,
    PermissionDenied.code: PermissionDenied,
    DataLoss.code: DataLoss,
}
