"""The HTTP server in the event loop of the process."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from jaxctx_server.http.server import HttpServer, bind_tcp
from tests.server.http.client import HttpClient


async def test_it_serves_until_it_is_closed() -> None:
    server = HttpServer(PlainTextResponse("here"), bind_tcp("127.0.0.1", 0))
    await server.start()
    web = HttpClient(server.port)
    answer = await web("GET", "/")
    assert answer.text == "here"
    assert "server" not in answer.headers  # nobody needs to know what serves
    await server.close()
    await server.close()
    with pytest.raises(ConnectionRefusedError):
        await web("GET", "/")


async def test_closing_what_has_not_begun_frees_the_port() -> None:
    bound = bind_tcp("127.0.0.1", 0)
    await HttpServer(PlainTextResponse("here"), bound).close()
    assert bound.fileno() == -1


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        bind_tcp("127.0.0.1", other.getsockname()[1])


async def test_signals_are_left_to_the_process() -> None:
    before = signal.getsignal(signal.SIGTERM)
    server = HttpServer(PlainTextResponse("here"), bind_tcp("127.0.0.1", 0))
    await server.start()
    assert signal.getsignal(signal.SIGTERM) == before
    await server.close()


async def test_an_answer_that_is_on_its_way_is_sent_before_the_end() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await go_on.wait()
        await PlainTextResponse("late")(scope, receive, send)

    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    answer = asyncio.create_task(HttpClient(server.port)("GET", "/"))
    await asyncio.wait_for(asked.wait(), 60)
    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    go_on.set()
    assert (await answer).text == "late"
    await closing
