"""The stages of a call, in the order in which `server.py` puts them."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jaxctx.errors import JaxctxError, ResourceExhausted
from jaxctx_server.access import METHODS, Authoriser, Role
from jaxctx_server.grpc.pipeline import Call, Stage

log = logging.getLogger("jaxctx.calls")
MAX_OPEN_CALLS = 64  # of methods that need no key
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")


def authorisation(authoriser: Authoriser) -> Stage:
    """Find out who calls, and whether they may. Nothing of the request has been looked at before."""

    @asynccontextmanager
    async def stage(call: Call) -> AsyncIterator[None]:
        call.principal = authoriser.authorise(call.method, call.header("authorization"))
        yield

    return stage


@asynccontextmanager
async def request_id(call: Call) -> AsyncIterator[None]:
    """Take the caller's `x-request-id`, or make one up; tell it in the trailers and in the log of calls."""
    given = call.header("x-request-id") or ""
    call.request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    call.add_trailer("x-request-id", call.request_id)
    if not log.isEnabledFor(logging.DEBUG):
        yield
        return
    started, outcome = time.monotonic(), "CANCELLED"
    try:
        yield
        outcome = "OK"
    except Exception as error:
        outcome = error.code if isinstance(error, JaxctxError) else "INTERNAL"
        raise
    finally:
        facts = {"method": call.method, "request_id": call.request_id, "caller": call.principal.name}
        log.debug("call", extra={**facts, "code": outcome, "seconds": round(time.monotonic() - started, 6)})


def limits(max_calls: int) -> Stage:
    """Refuse calls beyond so many at once, over all connections. What each may ask for is the validator's business.

    Methods that need no key have a limit of their own, so that whoever has none cannot use up the places of others.
    """
    running = {True: 0, False: 0}  # by whether the method is open to anyone
    most = {True: MAX_OPEN_CALLS, False: max_calls}

    @asynccontextmanager
    async def stage(call: Call) -> AsyncIterator[None]:
        is_open = METHODS.get(call.method) is Role.ANYONE
        if running[is_open] >= most[is_open]:
            raise ResourceExhausted("too many calls at once", reason="QUEUE_FULL", retry_after_s=1.0)
        running[is_open] += 1
        try:
            yield
        finally:
            running[is_open] -= 1

    return stage
