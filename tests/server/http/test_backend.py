"""Calls of the gRPC server that requests become: they end with the client, and carry its key and request id."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from jaxctx_server.http import backend
from tests.server.http.client import HttpClient


@pytest.mark.parametrize("path", ["?wait=true&session_id=", "/text?session_id="])
async def test_a_call_ends_with_its_client(
    web: HttpClient, session: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    cancel_on_disconnect = backend.cancel_on_disconnect

    def recorded(request: Request, call: Any) -> None:
        calls.append(call)
        cancel_on_disconnect(request, call)

    monkeypatch.setattr(backend, "cancel_on_disconnect", recorded)
    made = await web("POST", "/v1/semantic_var", {"session_id": session, "name": "never set"})
    variable = made.json["variable"]["variable_id"]
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(f"GET /v1/semantic_var/{variable}{path}{session} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    async with asyncio.timeout(120):
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not calls[1].done()
        writer.close()
        while not calls[1].done():
            await asyncio.sleep(0.01)
    assert calls[1].cancelled()
    assert reader.at_eof() or not await reader.read()


async def test_a_request_id_goes_along(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, str]]] = []
    forwarded_headers = backend.forwarded_headers

    def recorded(request: Request) -> list[tuple[str, str]]:
        seen.append(forwarded_headers(request))
        return seen[-1]

    monkeypatch.setattr(backend, "forwarded_headers", recorded)
    await web("GET", "/v1/session", headers={"x-request-id": "mine", "x-other": "not", "cookie": "no"})
    assert seen == [[("x-request-id", "mine")]]
