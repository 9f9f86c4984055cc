"""Logs, on standard error: JSON lines, or short ones on a terminal. A record's `extra` becomes its fields.

Nothing that a request holds is ever logged: no prompt, no output, no key. Of an incident (an exception that nobody
raised on purpose) it has the type and where it was raised; its message, which may quote a request, only at level DEBUG.
"""

import json
import logging
import secrets
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from jaxctx.errors import Internal, JaxctxError

PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
log = logging.getLogger("jaxctx.server")


def configure(level: str, stream: TextIO) -> None:
    """Log ours from `level` ("debug", …) on, and of others what is at least a warning."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(ShortFormatter() if stream.isatty() else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jaxctx").setLevel(level.upper())


def as_error(exception: Exception, facts: Mapping[str, str]) -> JaxctxError:
    """What to tell a caller: an error of ours as it is, and of any other nothing but the number of its incident.

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


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class ShortFormatter(logging.Formatter):
    """For reading along."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()}: {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in PLAIN}
