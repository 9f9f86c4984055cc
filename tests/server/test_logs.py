"""Logs: JSON lines, or short ones on a terminal."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import Any

import pytest

from jaxctx_server import logs


@pytest.fixture
def _quiet() -> Any:
    """`main` configures logging for a process of its own."""
    root, level = logging.getLogger(), logging.getLogger("jaxctx").level
    handlers = root.handlers[:]
    yield
    root.handlers[:] = handlers
    logging.getLogger("jaxctx").setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(stream: io.StringIO) -> list[str]:
    """Lines of a message with a field, and of an exception in a function that knows a secret."""
    logs.configure("info", stream)
    log = logging.getLogger("jaxctx.server")
    log.debug("too much")
    log.info("hi %s", "you", extra={"method": "/a/b", "where": ["x", "y"]})
    secret = "a prompt"
    try:
        raise ValueError(len(secret))
    except ValueError:
        log.exception("a defect")
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("_quiet")
def test_logs_are_json_lines_with_fields() -> None:
    first, second = map(json.loads, logged(io.StringIO()))
    assert first.pop("time").endswith("Z")
    fields = {"method": "/a/b", "where": ["x", "y"]}
    assert first == {"level": "info", "logger": "jaxctx.server", "message": "hi you", **fields}
    assert second["exception"].splitlines()[-1] == "ValueError: 8"
    assert "a prompt" not in second["exception"]


@pytest.mark.usefixtures("_quiet")
def test_on_a_terminal_logs_are_for_reading_along() -> None:
    first, *rest = (re.sub(r"\x1b\[[0-9;]*m", "", line) for line in logged(Terminal()))
    assert re.search(r"\[info +\] hi you +\[jaxctx\.server\] method=/a/b where=\['x', 'y'\]$", first)
    assert rest[-1] == "ValueError: 8"
    assert "a prompt" not in "".join(rest)
