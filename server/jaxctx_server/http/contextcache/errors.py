"""Errors of the context cache. Their codes are those of the API: in small letters, unlike those of the contract."""

from jaxctx.errors import Aborted, AlreadyExists, InvalidArgument, NotFound
from jaxctx_server.http.headers import ID_HEADER

BUSY_RETRY_S = 1.0


def not_found(session_id: str) -> NotFound:
    """The caller has no context of this id. That of another tenant gives exactly the same."""
    return NotFound(f"there is no context {session_id[:64]!r}", reason="context_not_found")


def expired(session_id: str) -> NotFound:
    """The caller had a context of this id, and its time to live ended."""
    return NotFound(f"the context {session_id!r} has expired", reason="context_expired")


def busy(session_id: str) -> Aborted:
    """Another request uses the context, or used it meanwhile."""
    message = f"another request uses the context {session_id!r}; to continue it in two ways, fork it"
    return Aborted(message, reason="context_busy", retry_after_s=BUSY_RETRY_S)


def other_model(session_id: str, model_id: str) -> Aborted:
    """The context is one of another model."""
    violations = InvalidArgument.field("model", f"must be {model_id}, the model of the context").violations
    message = f"the context {session_id!r} is one of the model {model_id!r}"
    return Aborted(message, reason="model_mismatch", violations=violations)


def other_revision(session_id: str) -> Aborted:
    """The context was computed by another revision of its model, so that nothing can be appended to it."""
    message = f"the context {session_id!r} was computed by another revision of the model; send the whole prompt"
    return Aborted(message, reason="model_mismatch")


def taken(session_id: str) -> AlreadyExists:
    """The caller has a context of this id already."""
    violations = InvalidArgument.field(ID_HEADER, "is the id of a context that exists").violations
    return AlreadyExists(f"there is a context {session_id!r} already", reason="context_exists", violations=violations)
