"""/v1/responses over WebSocket, by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import jaxctx
from jaxctx_server.auth import Key
from jaxctx_server.http import websocket
from jaxctx_server.http.app import HttpAccess
from jaxctx_server.http.openai.responses.websocket import parse_create_event
from jaxctx_server.key_store import KeyStore
from jaxctx_server.services import Backend
from tests.server.harness import eventually
from tests.server.http.client import HttpClient, http_server
from tests.server.http.openai.harness import no_context_left, openai_client
from tests.server.http.scripted import scripted_server
from tests.server.key_files import key_line, replace_file

ASKED: dict[str, Any] = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "ignore_eos": True}
LONG = ASKED | {"input": "x", "max_output_tokens": 1000}
GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 4, "extra_body": {"ignore_eos": True}}
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "error")


def opened(web: HttpClient, **options: Any) -> connect:
    return connect(f"ws://127.0.0.1:{web.port}/v1/responses", **options)


async def ask(connection: ClientConnection, **fields: Any) -> list[Any]:
    """The events of a response."""
    await connection.send(json.dumps({"type": "response.create", **fields}))
    return await answered(connection)


async def answered(connection: ClientConnection) -> list[Any]:
    events: list[Any] = []
    while not events or events[-1]["type"] not in LAST_EVENTS:
        events.append(json.loads(await asyncio.wait_for(connection.recv(), 60)))
    return events


async def test_the_official_client(api: openai.AsyncOpenAI) -> None:
    sent: Any = {name: value for name, value in ASKED.items() if name != "ignore_eos"}
    async with api.responses.connect() as connection:
        await connection.response.create(**sent, input="One")
        first: Any = [event async for event in until_complete(connection)]
        await connection.response.create(**sent, input="Two", previous_response_id=first[-1].response.id)
        second: Any = [event async for event in until_complete(connection)]
    assert [event.sequence_number for event in first] == list(range(len(first)))
    assert first[0].type == "response.created"
    text = "".join(event.delta for event in first if event.type == "response.output_text.delta")
    assert text == first[-1].response.output_text
    assert text == (await api.responses.create(input="One", **sent)).output_text
    usage = second[-1].response.usage
    assert usage.input_tokens_details.cached_tokens >= first[-1].response.usage.total_tokens - 1
    assert (await api.responses.retrieve(second[-1].response.id)).output_text == second[-1].response.output_text


async def until_complete(connection: Any) -> Any:
    async for event in connection:
        yield event
        if event.type in LAST_EVENTS:
            return


async def test_the_events_are_those_of_the_stream(web: HttpClient) -> None:
    answer = await web("POST", "/v1/responses", ASKED | {"input": "One", "stream": True})
    streamed = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    async with opened(web) as connection:
        events = await ask(connection, **ASKED, input="One", stream_id="a")
    assert kinds(events) == kinds(streamed)
    assert {event["stream_id"] for event in events} == {"a"}


def kinds(events: list[Any]) -> list[str]:
    """The types of events; text comes in as many parts as it happens to."""
    return list(dict.fromkeys(event["type"] for event in events))


async def test_errors_are_events_and_the_connection_goes_on(web: HttpClient, client: jaxctx.aio.Client) -> None:
    async with opened(web) as connection:
        for fields, code, param in (
            ({"input": 5}, "INVALID_FIELD", "input"),
            ({"input": "x", "temperature": 1000}, "INVALID_FIELD", "temperature"),
            ({"input": "x", "previous_response_id": "resp_none"}, "SNAPSHOT_NOT_FOUND", "previous_response_id"),
            ({"input": "x", "stream_id": 5}, "INVALID_FIELD", "stream_id"),
            ({"input": "x", "background": True}, "INVALID_FIELD", "background"),
            ({"type": "response.steer"}, "INVALID_FIELD", "type"),
        ):
            (event,) = await ask(connection, **{**ASKED, **fields})
            assert (event["type"], event["error"]["code"], event["error"]["param"]) == ("error", code, param)
            assert event["status"] == (404 if code == "SNAPSHOT_NOT_FOUND" else 400)
        await connection.send("no JSON")
        assert (await answered(connection))[0]["type"] == "error"
        assert (await ask(connection, **ASKED, input="x"))[-1]["type"] == "response.incomplete"
    await no_context_left(client)


async def test_a_prompt_that_is_only_prepared(web: HttpClient) -> None:
    async with opened(web) as connection:
        prepared = await ask(connection, **ASKED, input="One", generate=False)
        assert [event["type"] for event in prepared] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert [event["response"]["status"] for event in prepared] == ["in_progress", "in_progress", "completed"]
        response = prepared[-1]["response"]
        assert (response["status"], response["output"]) == ("completed", [])
        assert response["usage"]["output_tokens"] == 0
        following = await ask(connection, **ASKED, input="Two", previous_response_id=response["id"])
        details = following[-1]["response"]["usage"]["input_tokens_details"]
        assert details["cached_tokens"] >= response["usage"]["input_tokens"] - 1
        whole = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
        alone = await ask(connection, **ASKED, input=whole)
        assert alone[-1]["response"]["output"][0]["content"] == following[-1]["response"]["output"][0]["content"]


async def test_messages_that_come_during_an_answer_wait(web: HttpClient) -> None:
    async with opened(web) as connection:
        for _ in range(3):
            await connection.send(json.dumps({"type": "response.create", **ASKED, "input": "x"}))
        ids = {(await answered(connection))[-1]["response"]["id"] for _ in range(3)}
    assert len(ids) == 3


async def test_too_many_messages_that_wait(web: HttpClient, client: jaxctx.aio.Client) -> None:
    async with opened(web) as connection:
        with pytest.raises(ConnectionClosed) as raised:
            for _ in range(websocket.MAX_WAITING + 2):
                await connection.send(json.dumps({"type": "response.create", **LONG}))
            while True:
                await connection.recv()
        assert raised.value.rcvd is not None
        assert raised.value.rcvd.code == websocket.REFUSED
    await no_context_left(client)


async def test_a_socket_that_is_closed_ends_the_work(web: HttpClient, client: jaxctx.aio.Client) -> None:
    async with opened(web) as connection:
        await connection.send(json.dumps({"type": "response.create", **LONG}))
        await connection.recv()
    await no_context_left(client)
    assert [each async for each in client.snapshots()] == []


async def test_a_message_that_is_too_large(web: HttpClient) -> None:
    async with opened(web) as connection:
        with pytest.raises(ConnectionClosed) as raised:
            await connection.send("x" * ((8 << 20) + 1))
            await connection.recv()
        assert raised.value.rcvd is not None
        assert raised.value.rcvd.code == 1009


async def test_bytes_are_refused(web: HttpClient) -> None:
    async with opened(web) as connection:
        await connection.send(b"{}")
        with pytest.raises(ConnectionClosed) as raised:
            await connection.recv()
        assert raised.value.rcvd is not None
        assert raised.value.rcvd.code == websocket.NOT_TEXT


async def test_a_connection_that_asks_nothing_ends(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "IDLE_S", 0.05)
    async with opened(web) as connection:
        with pytest.raises(ConnectionClosed) as raised:
            await asyncio.wait_for(connection.recv(), 30)
        assert raised.value.rcvd is not None
        assert raised.value.rcvd.code == websocket.GOING_AWAY


async def test_only_so_many_are_open(web: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_WEBSOCKETS", 1)
    async with opened(web):
        with pytest.raises(InvalidStatus) as raised:
            await opened(web)
        assert raised.value.response.status_code == 429
    for _ in range(100):
        try:
            async with opened(web):
                return
        except InvalidStatus:  # the server has not seen yet that the other one is closed
            await asyncio.sleep(0.02)
    pytest.fail("no place became free")


class TestOrigins:
    async def test_a_page_of_another_origin_is_refused(self, web: HttpClient) -> None:
        with pytest.raises(InvalidStatus) as raised:
            await opened(web, origin="https://example.org")
        assert raised.value.response.status_code == 403
        async with opened(web, origin=f"http://127.0.0.1:{web.port}"):
            pass

    async def test_an_origin_that_is_allowed(self, backend: Backend) -> None:
        async with http_server(backend, HttpAccess(cors_origins=("https://example.org",))) as web:
            async with opened(web, origin="https://example.org"):
                pass
            with pytest.raises(InvalidStatus):
                await opened(web, origin="https://example.com")

    async def test_another_host_is_refused(self, web: HttpClient) -> None:
        with pytest.raises(InvalidStatus) as raised:
            await connect(f"ws://evil.example:{web.port}/v1/responses", host="127.0.0.1", port=web.port)
        assert raised.value.response.status_code == 400

    async def test_a_path_that_has_none(self, web: HttpClient) -> None:
        with pytest.raises(InvalidStatus):
            await connect(f"ws://127.0.0.1:{web.port}/v1/models")


class TestKeys:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_the_handshake_needs_a_key(self, web: HttpClient) -> None:
        with pytest.raises(InvalidStatus) as raised:
            await opened(web)
        assert raised.value.response.status_code == 401
        assert json.loads(raised.value.response.body)["error"]["code"] == "UNAUTHENTICATED"

    async def test_each_key_has_its_own_responses(self, web: HttpClient) -> None:
        async with openai_client(web, "alice") as alice:
            response = await alice.responses.create(input="One", **GREEDY)
        for key, last in (("alice", "response.incomplete"), ("bob", "error")):
            async with opened(web, additional_headers={"authorization": f"Bearer {key}"}) as connection:
                events = await ask(connection, **ASKED, input="Two", previous_response_id=response.id)
                assert events[-1]["type"] == last


class TestRevokedKeys:
    @pytest.fixture
    def keys_file(self, tmp_path: Path) -> Path:
        path = tmp_path / "keys"
        path.write_text(key_line("alice") + key_line("bob"))
        return path

    @pytest.fixture
    def keys(self, keys_file: Path) -> Any:
        return KeyStore(None, keys_file)

    @pytest.mark.parametrize("is_answering", [False, True])
    async def test_it_ends_the_sockets_of_that_key(
        self, web: HttpClient, keys: KeyStore, keys_file: Path, is_answering: bool
    ) -> None:
        alice, bob = ({"authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))
        async with opened(web, additional_headers=alice) as revoked, opened(web, additional_headers=bob) as other:
            if is_answering:
                await revoked.send(json.dumps({"type": "response.create", **LONG}))
                await revoked.recv()
            else:
                await ask(revoked, **ASKED, input="x")
            replace_file(keys_file, key_line("bob"))
            await keys.reload()
            last: Any = None
            with pytest.raises(ConnectionClosed) as raised:
                async with asyncio.timeout(60):
                    while True:
                        last = json.loads(await revoked.recv())
            assert raised.value.rcvd is not None
            assert raised.value.rcvd.code == websocket.REFUSED
            if is_answering:
                assert (last["type"], last["error"]["code"]) == ("error", "UNAUTHENTICATED")
            assert (await ask(other, **ASKED, input="x"))[-1]["type"] == "response.incomplete"


class CountedPieces(list[str]):
    """The pieces of an output, which notes how many of them were made."""

    made = 0

    def __iter__(self) -> Iterator[str]:
        for piece in super().__iter__():
            self.made += 1
            yield piece


async def test_a_slow_reader_holds_up_its_own_answer_only() -> None:
    """What waits for it is bounded by the buffers of its connection; others are answered."""
    async with scripted_server() as scripted:
        pieces = CountedPieces(["x" * 50_000] * 2000)
        scripted.engine.script = pieces
        async with opened(scripted.web, max_size=None, max_queue=1) as slow:
            await slow.send(json.dumps({"type": "response.create", "input": "x", "store": False}))
            before = -1
            while before != pieces.made:  # until the buffers are full
                before = pieces.made
                await asyncio.sleep(0.2)
            assert 0 < pieces.made < 1000
            scripted.engine.script = ["a", "b"]
            async with opened(scripted.web) as other:
                assert (await ask(other, input="x"))[-1]["type"] == "response.completed"
            assert pieces.made == before
            assert (await scripted.web("GET", "/health")).status == 200
            slow.transport.abort()
        await eventually(lambda: not scripted.engine.contexts)


def test_what_a_message_says() -> None:
    event = parse_create_event(b'{"type": "response.create", "input": "x", "stream_id": "a"}')
    assert (event.common_fields, event.request.unknown_fields) == ({"stream_id": "a"}, ())
    assert event.request.items[0]["content"][0]["text"] == "x"
