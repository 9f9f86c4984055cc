"""Requests that were admitted, for tests of what happens to them then."""

from __future__ import annotations

from starlette.requests import Request

from jaxctx_server.auth import Key, Role
from jaxctx_server.http.call import HttpCall, make_call
from jaxctx_server.http.frontend import Frontend
from jaxctx_server.service.pipeline import Call, CallMetadata
from jaxctx_server.services import Backend

USER = Key("alice", b"", "red", Role.USER)
CREATE = "/jaxctx.v1.ContextService/CreateContext"


def call_of(backend: Backend, key: Key = USER, body: bytes = b"") -> HttpCall:
    metadata = CallMetadata(
        method=CREATE, peer="peer", authorization=None, request_id=None, tenant=None, incarnation=None
    )
    request = Request({"type": "http", "headers": []})
    return make_call(request, body, Frontend(backend=backend), Call(metadata, key))
