"""Logs, on standard error: JSON lines, or short ones on a terminal. A record's `extra` becomes its fields.

Nothing that a request holds is ever logged: no prompt, no output, no key. Of an incident (an exception that nobody
raised on purpose) it has the type and where it was raised, at level DEBUG with the lines of code there; never its
message, which may quote a request.
"""

import logging
import secrets
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.processors import EventRenamer, JSONRenderer, TimeStamper, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict

from jaxctx.errors import Internal, JaxctxError

FACTS = (TimeStamper("iso", key="time"), add_log_level, add_logger_name, ExtraAdder())
OWN_LOGGERS = "jaxctx"  # and those below it
JSON = (format_exc_info, EventRenamer("message"), JSONRenderer())
SHORT = (ConsoleRenderer(exception_formatter=plain_traceback, timestamp_key="time"),)  # others show what variables hold
log = logging.getLogger("jaxctx.server")


def configure(level: str, stream: TextIO) -> None:
    """Log ours from `level` ("debug", …) on, and of others what is at least a warning."""
    handler = logging.StreamHandler(stream)
    steps = [
        ProcessorFormatter.remove_processors_meta,
        hide_messages_of_libraries,
        *(SHORT if stream.isatty() else JSON),
    ]
    handler.setFormatter(ProcessorFormatter(foreign_pre_chain=FACTS, processors=steps))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jaxctx").setLevel(level.upper())
    # Its warnings are of what is no HTTP: whoever can connect could fill the log with them.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def hide_messages_of_libraries(logger: Any, method: str, event: EventDict) -> EventDict:
    """Of an exception that a library logs: its type and those of its causes, and the lines of code, without messages.

    A processor of structlog. asyncio quotes the exception of a task also in its own message, behind the first line.
    """
    name, exc_info = str(event.get("logger", "")), event.get("exc_info")
    if name.partition(".")[0] == OWN_LOGGERS:
        return event
    if name == "asyncio" or exc_info:
        event["event"] = str(event["event"]).partition("\n")[0]
    if exc_info:
        del event["exc_info"]
        event["exception"] = without_message(exc_info[1])
    return event


def without_message(exception: BaseException | None) -> str:
    """Where an exception and its causes were raised, the last cause first, and their types."""
    parts: list[str] = []
    while exception is not None:
        stack = "".join(traceback.format_tb(exception.__traceback__))
        parts.append(f"{stack}{type(exception).__name__}")
        exception = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)
    return "\n\n".join(reversed(parts))


def as_error(exception: Exception, facts: Mapping[str, str]) -> JaxctxError:
    """The error that a caller gets: one of ours as it is, and for any other one Internal, with the id of an incident.

    `facts` (method, request id) go to the log with it.
    """
    if isinstance(exception, JaxctxError):
        return exception
    incident = secrets.token_hex(8)
    frames = traceback.extract_tb(exception.__traceback__)
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    extra = {"incident": incident, "exception": type(exception).__name__, "where": where, **facts}
    log.error("a request met a defect of the server", extra=extra)
    stack = "".join(traceback.format_tb(exception.__traceback__))
    log.debug("incident %s, %s:\n%s", incident, type(exception).__name__, stack)
    return Internal(f"internal error, incident {incident}")
