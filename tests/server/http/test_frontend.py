"""What the requests of a server share."""

from __future__ import annotations

import logging

import pytest

from jaxctx_server.http.frontend import MAX_LOGGED_FIELDS, Frontend
from jaxctx_server.services import Backend


def test_unknown_fields_are_logged_once_and_take_little_memory(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = Frontend(backend=backend)
    with caplog.at_level(logging.WARNING, "jaxctx.http"):
        for _ in range(2):
            frontend.log_unknown_fields(["x" * 1_000_000, "a\nb"])
    assert len(caplog.records) == 2
    assert not any("\n" in record.getMessage() for record in caplog.records)
    frontend.log_unknown_fields([f"{number}" * 100 for number in range(2 * MAX_LOGGED_FIELDS)])
    assert len(frontend.logged_fields) == MAX_LOGGED_FIELDS
    assert sum(len(name) for name in frontend.logged_fields) <= 64 * MAX_LOGGED_FIELDS
