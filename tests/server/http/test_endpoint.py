"""Routes: admission by the pipeline, responses as they come, and the end of the work when the client leaves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxctx.errors import NotFound, ResourceExhausted
from jaxctx_server.auth import Key, Role
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream, Handler, api_route, call_metadata, ended_by_disconnect
from jaxctx_server.http.frontend import Frontend
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.http.unrouted import EXCEPTION_HANDLERS
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.services import Backend
from tests.server.harness import eventually
from tests.server.http.client import HttpClient

CHECK = "/grpc.health.v1.Health/Check"
FILL = "/jaxctx.v1.ContextService/Fill"
STATS = "/jaxctx.v1.AdminService/GetStats"


@asynccontextmanager
async def serving(
    handler: Handler, method: str = FILL, *, keys: Any = None, max_calls: int = 8, methods: tuple[str, ...] = ("GET",)
) -> AsyncIterator[HttpClient]:
    """A server with one route, at /path."""
    backend = Backend.make(ServerLifecycle(), keys, max_calls=max_calls)
    routes = [api_route("/path", handler, methods, method=method)]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    app.state.frontend = Frontend(backend=backend)
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    try:
        yield HttpClient(server.port)
    finally:
        await server.close()


def key(name: str, role: Role = Role.USER) -> Key:
    return Key(name, hashlib.sha256(name.encode()).digest(), name, role)


async def whose(call: HttpCall) -> Response:
    return PlainTextResponse(f"{call.caller.tenant} {call.call.request_id} {call.body.decode()}")


async def raw_request(web: HttpClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"GET /path HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return reader, writer


class Work:
    """Work that never ends by itself, and how it ended."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise


class TestKeys:
    async def test_a_key_says_whose_call_it_is(self) -> None:
        async with serving(whose, keys=[key("alice"), key("bob")]) as web:
            assert (await web("GET", "/path", key="bob", headers={"x-request-id": "r1"})).text == "bob r1 "
            assert (await web("GET", "/path", headers={"x-api-key": "alice", "x-request-id": "r2"})).text == "alice r2 "

    async def test_without_a_right_key_nothing_is_handled(self) -> None:
        handled: list[HttpCall] = []

        async def handler(call: HttpCall) -> Response:
            handled.append(call)
            return Response()

        async with serving(handler, STATS, keys=[key("alice"), key("root", Role.ADMIN)]) as web:
            assert (await web("GET", "/path")).error == (401, "UNAUTHENTICATED", None)
            assert (await web("GET", "/path", key="nobody")).error[0] == 401
            assert (await web("GET", "/path", key="alice")).error[0] == 403
            assert not handled
            assert (await web("GET", "/path", key="root")).status == 200

    async def test_a_stream_ends_when_its_key_is_revoked(self, tmp_path: Any) -> None:
        path = tmp_path / "keys"
        line = f"alice:{hashlib.sha256(b'alice').hexdigest()}:red\n"
        path.write_text(line + line.replace("alice:", "bob:").replace(hashlib.sha256(b"alice").hexdigest(), "0" * 64))
        keys, work = KeyStore(None, path), Work()

        async def events(call: HttpCall) -> AsyncGenerator[str, None]:
            yield "data: 1\n\n"
            await work()

        async def handler(call: HttpCall) -> Response:
            return EventStream(events(call))

        async with serving(handler, keys=keys) as web:
            asked = asyncio.create_task(web("GET", "/path", key="alice"))
            await asyncio.wait_for(work.begun.wait(), 60)
            path.write_text(line.replace("alice:", "bob:").replace(hashlib.sha256(b"alice").hexdigest(), "0" * 64))
            await keys.reload()
            first, last, _ = (await asked).text.split("\n\n")
            assert first == "data: 1"
            assert '"code":"UNAUTHENTICATED"' in last
            assert work.ended == ["CancelledError"]


class TestResponses:
    async def test_a_request_id_comes_back(self) -> None:
        async with serving(whose) as web:
            assert (await web("GET", "/path", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
            chosen = (await web("GET", "/path")).headers["x-request-id"]
            assert len(chosen) == 16
            forged = await web("GET", "/path", headers={"x-request-id": "a b"})
            assert forged.headers["x-request-id"] not in ("a b", chosen)

    async def test_a_body_is_there_for_methods_that_have_one(self) -> None:
        async with serving(whose, methods=("GET", "POST")) as web:
            assert (await web("POST", "/path", {"a": 1})).text.endswith('{"a": 1}')

    async def test_an_error_before_the_first_event_has_a_status(self) -> None:
        async def events() -> AsyncGenerator[str, None]:
            raise NotFound("none", reason="SESSION_NOT_FOUND")
            yield ""

        async def handler(call: HttpCall) -> Response:
            return EventStream(events())

        async with serving(handler) as web:
            assert (await web("GET", "/path")).error == (404, "SESSION_NOT_FOUND", None)

    async def test_an_error_behind_it_is_the_last_event(self) -> None:
        async def events() -> AsyncGenerator[str, None]:
            yield "data: 1\n\n"
            raise ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=1)

        async def handler(call: HttpCall) -> Response:
            return EventStream(events())

        async with serving(handler) as web:
            answer = await web("GET", "/path")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.text.startswith("data: 1\n\ndata: {")
        assert '"code":"QUEUE_FULL"' in answer.text

    async def test_a_stream_without_events_is_empty(self) -> None:
        async def events() -> AsyncGenerator[str, None]:
            for event in ():
                yield event

        async def handler(call: HttpCall) -> Response:
            return EventStream(events())

        async with serving(handler) as web:
            answer = await web("GET", "/path")
            assert (answer.status, answer.text) == (200, "")

    async def test_a_defect_is_an_error_without_its_text(self, caplog: pytest.LogCaptureFixture) -> None:
        async def handler(call: HttpCall) -> Response:
            raise ValueError("a secret")

        async with serving(handler) as web:
            answer = await web("GET", "/path")
        assert answer.error == (500, "INTERNAL", None)
        assert "secret" not in answer.text + caplog.text

    async def test_too_many_calls(self) -> None:
        work = Work()

        async def handler(call: HttpCall) -> Response:
            await work()
            return Response()

        async with serving(handler, max_calls=1) as web:
            _, writer = await raw_request(web)
            await asyncio.wait_for(work.begun.wait(), 60)
            answer = await web("GET", "/path")
            assert answer.error == (429, "QUEUE_FULL", None)
            assert answer.headers["retry-after"] == "1"
            writer.close()
            await eventually(lambda: bool(work.ended))
            work.begun.clear()
            again = asyncio.create_task(web("GET", "/path"))
            await asyncio.wait_for(work.begun.wait(), 60)
            again.cancel()


class TestClientsThatLeave:
    @pytest.mark.parametrize("phase", ["before the response", "in a stream", "before the first event"])
    async def test_the_work_ends_with_its_client(self, phase: str, caplog: pytest.LogCaptureFixture) -> None:
        work = Work()
        closed: list[bool] = []

        async def events() -> AsyncGenerator[str, None]:
            try:
                if phase == "in a stream":
                    yield "data: 1\n\n"
                await work()
                yield "data: 2\n\n"
            finally:
                closed.append(True)

        async def handler(call: HttpCall) -> Response:
            if phase == "before the response":
                await work()
            return EventStream(events())

        async with serving(handler) as web:
            reader, writer = await raw_request(web)
            await asyncio.wait_for(work.begun.wait(), 60)
            if phase == "in a stream":
                assert b"200" in await reader.readline()
            await asyncio.sleep(0.02)
            assert not work.ended
            writer.close()
            await eventually(lambda: bool(work.ended))
            assert work.ended == ["CancelledError"]
            assert closed == ([] if phase == "before the response" else [True])
        assert "Traceback" not in caplog.text

    async def test_a_timeout_of_the_work_itself_is_no_disconnect(self) -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        with pytest.raises(TimeoutError):
            async with ended_by_disconnect(receive):
                raise TimeoutError

    async def test_a_slow_reader_stops_its_own_stream_only(self) -> None:
        sent = 0

        async def events() -> AsyncGenerator[str, None]:
            nonlocal sent
            for _ in range(10_000):
                yield "data: " + "x" * 10_000 + "\n\n"
                sent += 1

        async def handler(call: HttpCall) -> Response:
            return EventStream(events())

        async with serving(handler) as web:
            reader, writer = await raw_request(web)
            assert b"200" in await reader.readline()
            before = -1
            while before != sent:  # until its buffers are full
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 5_000
            assert (await web("POST", "/path", {})).status == 405  # others are answered meanwhile
            writer.close()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": "Bearer a"}, "Bearer a"),
        ({"x-api-key": "a"}, "Bearer a"),
        ({"authorization": "Bearer a", "x-api-key": "b"}, "Bearer a"),
        ({}, None),
    ],
)
def test_where_the_key_is(headers: dict[str, str], expected: str | None) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = Request({"type": "http", "headers": encoded, "client": ("127.0.0.1", 5)})
    metadata = call_metadata(CHECK, request)
    assert (metadata.method, metadata.peer, metadata.authorization) == (CHECK, "127.0.0.1:5", expected)
