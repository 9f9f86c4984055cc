"""Incidents: exceptions that nobody raised on purpose. The caller gets a number, the log what happened.

The log has the exception's type and where it was raised; its message, which may quote a request, only at level DEBUG.
"""

from __future__ import annotations

import logging
import secrets
import traceback

from jaxctx.errors import Internal, JaxctxError

log = logging.getLogger("jaxctx.server")


def as_error(exception: Exception, **facts: str) -> JaxctxError:
    """What to tell the caller: an error of ours as it is, and nothing but an incident's number for any other.

    `facts` (method, request id) go to the log with it.
    """
    if isinstance(exception, JaxctxError):
        return exception
    incident = secrets.token_hex(8)
    frames = traceback.extract_tb(exception.__traceback__)
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    extra = {"incident": incident, "exception": type(exception).__name__, "where": where, **facts}
    log.error("a request met a defect of the server", extra=extra)
    log.debug("incident %s", incident, exc_info=exception)
    return Internal(f"internal error, incident {incident}")
