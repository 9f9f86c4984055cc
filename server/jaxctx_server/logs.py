"""Logs, on standard error: JSON lines, or short ones on a terminal. A record's `extra` becomes its fields.

Nothing that a request holds is ever logged: no prompt, no output, no key.
"""

from __future__ import annotations

import json
import logging
from typing import Any, TextIO

PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(level: str, stream: TextIO) -> None:
    """Log ours from `level` ("debug", …) on, and of others what is at least a warning."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(ShortFormatter() if stream.isatty() else JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jaxctx").setLevel(level.upper())


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in PLAIN}


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class ShortFormatter(logging.Formatter):
    """For reading along."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={value}" for key, value in fields(record).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()}: {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
