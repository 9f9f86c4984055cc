"""HTTP of a router: what clients learn of an engine that is lost, and that answers are those of an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.conftest import CONFIG, backend_of
from tests.e2e.router_cluster import RouterCluster, wait_until
from tests.engines import Clock
from tests.server.http.client import HttpClient, http_server

TEXT = "Tell a story of a page that is shared by many. "
MESSAGES = [{"role": "user", "content": TEXT}]
EXACT: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG = 1200  # tokens: the output goes on until something happens to it
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": LONG, **EXACT}),
    "several outputs": ("/v1/completions", {"prompt": TEXT, "max_tokens": LONG, "n": 3, **EXACT}),
    "several prompts": ("/v1/completions", {"prompt": [TEXT, TEXT + "!"], "max_tokens": LONG, **EXACT}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": LONG, **EXACT}),
    "context": ("/v1/context", {"prompt": TEXT, "max_tokens": LONG, **EXACT}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": LONG, "temperature": 0}),
    "messages": ("/v1/messages", {"model": "echo", "messages": MESSAGES, "max_tokens": LONG, "temperature": 0}),
}


@pytest.fixture
async def routed(router_cluster: RouterCluster) -> AsyncIterator[HttpClient]:
    async with http_server(router_cluster.backend) as web:
        yield web


class Stream:
    """A stream of server-sent events, as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer  # who lets go of it closes the connection
        self.text = ""

    async def read_to(self, mark: str) -> None:
        """Read until the text has this."""
        async with asyncio.timeout(60):
            while mark not in self.text:
                data = await self._reader.read(1 << 16)
                assert data, self.text[-500:]
                self.text += data.decode()

    async def read_to_end(self) -> str:
        """The text until the server ends it."""
        async with asyncio.timeout(60):
            return self.text + (await self._reader.read(-1)).decode()


async def stream_of(web: HttpClient, path: str, body: dict[str, Any]) -> Stream:
    """The stream that a request gets; over HTTP 1.0, so that it comes without the lengths of its parts."""
    data = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = f"POST {path} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return Stream(reader, writer)


async def lose_busy_engines(router_cluster: RouterCluster) -> None:
    """Cut the router off from the engines that run something."""
    busy: set[str] = set()
    async with asyncio.timeout(60):
        while not busy:
            await asyncio.sleep(0.005)
            engines = router_cluster.engines.items()
            busy = {address for address, engine in engines if (await engine.stats()).running}
    for address in busy:
        router_cluster.leave(address)
    await wait_until(lambda: not busy & router_cluster.handles.keys())


@pytest.mark.parametrize("name", CALLS)
async def test_an_engine_that_is_lost_in_the_middle_of_a_stream(
    routed: HttpClient, router_cluster: RouterCluster, name: str
) -> None:
    """The stream ends with an error in the form of its API, and not as if it were whole."""
    path, body = CALLS[name]
    stream = await stream_of(routed, path, body)
    await stream.read_to("data: ")
    await lose_busy_engines(router_cluster)
    text = await stream.read_to_end()
    assert text.startswith("HTTP/1.1 200 OK")
    events = text.split("\n\n")
    assert events[-1] == ""
    *lines, data = events[-2].splitlines()
    told = json.loads(data.removeprefix("data: "))
    assert told["error"]["code"] == "ENGINE_LOST"
    assert told["error"]["type"] == "overloaded_error"
    match path:
        case "/v1/messages":
            assert (lines, told["type"]) == (["event: error"], "error")
        case "/v1/responses":
            assert (lines, told["type"], told["code"]) == (["event: error"], "error", "ENGINE_LOST")
            failed = json.loads(events[-3].splitlines()[1].removeprefix("data: "))
            assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        case _:
            assert lines == []
    for end in ("[DONE]", "message_stop", "response.completed", "response.incomplete"):
        assert end not in text


@pytest.mark.parametrize("name", CALLS)
async def test_an_engine_that_is_lost_before_an_answer(
    routed: HttpClient, router_cluster: RouterCluster, name: str
) -> None:
    path, body = CALLS[name]
    asked = asyncio.create_task(routed("POST", path, body))
    await lose_busy_engines(router_cluster)
    answer = await asked
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert (answer.json["error"]["code"], answer.json["error"]["type"]) == ("ENGINE_LOST", "overloaded_error")


async def test_a_kept_context_can_be_made_again_after_its_engine_was_lost(
    routed: HttpClient, router_cluster: RouterCluster
) -> None:
    """The claim of its id ends with the request."""
    path, body = CALLS["context"]
    asked = asyncio.create_task(routed("POST", path, body, headers={"x-session-id": "mine"}))
    await lose_busy_engines(router_cluster)
    assert (await asked).status == 503
    again = await routed("POST", path, {**body, "max_tokens": 4}, headers={"x-session-id": "mine"})
    assert (again.status, again.json["session_id"]) == (200, "mine")


LOGPROBS: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": (
        "/v1/completions",
        {"prompt": TEXT * 8, "max_tokens": 5, "echo": True, "logprobs": 3, **EXACT},  # more than one pass
    ),
    "only the prompt": ("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0, **EXACT}),
    "several": (
        "/v1/completions",
        {"prompt": [TEXT, TEXT[:9]], "max_tokens": 6, "n": 2, "logprobs": 20, "seed": 5, "ignore_eos": True},
    ),
    "best of": ("/v1/completions", {"prompt": TEXT, "max_tokens": 6, "best_of": 3, "logprobs": 1, "seed": 5}),
    "a format": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 9, "logprobs": 2, "guided_choice": ["yes", "no"], "seed": 5},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 4, **EXACT},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": TEXT,
            "max_output_tokens": 6,
            "temperature": 0,
            "top_logprobs": 4,
            "include": ["message.output_text.logprobs"],
            "store": False,
        },
    ),
}


def parts_with_logprobs(body: dict[str, Any]) -> Any:
    """What an answer says, without ids and times, and what it cost."""
    if "output" in body:
        return [item["content"] for item in body["output"]], body["usage"]
    return body["choices"], body["usage"]


@pytest.mark.parametrize("name", LOGPROBS)
async def test_log_probabilities_are_those_of_an_engine(
    routed: HttpClient, make_engine: Any, clock: Clock, name: str
) -> None:
    path, body = LOGPROBS[name]
    answer = await routed("POST", path, body)
    assert answer.status == 200, answer.text
    async with backend_of(make_engine(CONFIG), CONFIG, clock) as backend, http_server(backend) as alone:
        expected = await alone("POST", path, body)
    assert parts_with_logprobs(answer.json) == parts_with_logprobs(expected.json)
    assert "logprob" in answer.text
    if path != "/v1/responses":
        assert answer.json["choices"][0]["logprobs"] is not None
