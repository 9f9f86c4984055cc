"""Errors as HTTP responses."""

from __future__ import annotations

import jaxctx
from jaxctx_server.http.errors import error_response


async def test_who_may_wait_is_told_how_long() -> None:
    told = error_response(jaxctx.errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.2))
    assert (told.status_code, told.headers["retry-after"]) == (429, "1")
