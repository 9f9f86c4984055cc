"""What the requests of a server share."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jaxctx_server.http import frontend as frontend_module
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


async def test_the_end_waits_for_what_is_still_to_be_done(backend: Backend) -> None:
    frontend, done = Frontend(backend=backend), list[str]()
    may_end = asyncio.Event()

    async def close(name: str) -> None:
        await may_end.wait()
        done.append(name)
        if name == "first":
            frontend.run_in_background(close("second"))

    frontend.run_in_background(close("first"))
    ending = asyncio.create_task(frontend.end())
    await asyncio.sleep(0.01)
    assert not ending.done()
    may_end.set()
    async with asyncio.timeout(10):
        await ending
    assert done == ["first", "second"]


async def test_the_end_does_not_wait_for_ever(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frontend_module, "END_TIMEOUT_S", 0.01)
    frontend = Frontend(backend=backend)
    frontend.run_in_background(asyncio.sleep(3600))
    with caplog.at_level(logging.WARNING, "jaxctx.http"):
        await frontend.end()
    assert "tidy up after 1 requests" in caplog.text
    for task in frontend.background_tasks:
        task.cancel()
