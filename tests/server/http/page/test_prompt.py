"""Prompts of the page: where they go, what comes back, what is left when they end early, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import CONTEXT_STATE_IDLE, Context
from jaxctx_server.auth import LOCAL, Key, Role
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.page.prompt import PagePrompt, parse_prompt, prompt_events
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left
from tests.server.http.page.page_events import PageEvent, all_events, read_events, until

TEXT = "A page is shared by all who fork it. "
BOB = Key("bob", b"", "blue", Role.USER)


@pytest.fixture
def call(backend: Backend) -> HttpCall:
    return call_of(backend, LOCAL)


def prompt_of(text: str = TEXT, **fields: Any) -> PagePrompt:
    body = {"text": text, "max_tokens": 8, "temperature": 0, **fields}
    return parse_prompt(json.dumps(body).encode())


async def run(call: HttpCall, prompt: PagePrompt) -> list[PageEvent]:
    return await all_events(prompt_events(call, prompt))


def texts(events: list[PageEvent]) -> dict[int, str]:
    """The text of each branch."""
    found: dict[int, str] = {}
    for event in events:
        if event.type == "part":
            found[event.data["index"]] = found.get(event.data["index"], "") + event.data["text"]
    return found


async def context_of(call: HttpCall, context_id: str) -> Context:
    request = pb.GetContextRequest(context_id=context_id)
    return (await call.unary(call.services.contexts.get_context, request)).context


async def alone(client: jaxctx.aio.Client, text: str, tokens: int = 8) -> str:
    async with await client.create(text, salt="alone") as context:
        return str(await context.complete(max_tokens=tokens, temperature=0))


async def test_a_new_context_stays_for_ten_minutes(call: HttpCall, client: jaxctx.aio.Client) -> None:
    events = await run(call, prompt_of())
    assert [events[0].type, events[-1].type] == ["begin", "end"]
    assert texts(events) == {0: await alone(client, TEXT)}
    end = events[-1].data
    assert (end["finish"], end["completion_tokens"]) == ("length", 8)
    assert end["cached_tokens"] + end["computed_tokens"] == end["prompt_tokens"]
    context = await context_of(call, events[0].data["context_id"])
    assert (context.expiry.duration.seconds, context.expiry.sliding) == (600, True)
    assert dict(context.labels) == {"jaxctx": "page"}


async def test_a_context_is_continued(call: HttpCall, client: jaxctx.aio.Client) -> None:
    async with await client.create(TEXT, labels={"mine": "yes"}) as context:
        events = await run(call, prompt_of("More. ", context_id=context.id))
        assert texts(events) == {0: await alone(client, TEXT + "More. ")}
        assert {event.data["context_id"] for event in events} == {context.id}
        now = await context_of(call, context.id)
        assert dict(now.labels) == {"mine": "yes"}
        assert not now.HasField("expiry")


async def test_without_a_text_a_context_just_goes_on(call: HttpCall, client: jaxctx.aio.Client) -> None:
    async with await client.create(TEXT) as context:
        assert texts(await run(call, prompt_of("", context_id=context.id))) == {0: await alone(client, TEXT)}


async def test_a_fork_has_a_life_of_its_own(call: HttpCall, client: jaxctx.aio.Client) -> None:
    """Also of a context that lives for ever."""
    async with await client.create(TEXT, labels={"mine": "yes"}) as parent:
        before = (await parent.refresh()).seq_len
        events = await run(call, prompt_of("More. ", fork_of=parent.id))
        assert texts(events) == {0: await alone(client, TEXT + "More. ")}
        assert events[0].data["forked_from"] == parent.id
        child = await context_of(call, events[0].data["context_id"])
        assert child.parent_id == parent.id
        assert child.expiry.duration.seconds == 600
        assert dict(child.labels) == {"jaxctx": "page"}
        assert (await parent.refresh()).seq_len == before


@pytest.mark.parametrize("source", ["context_id", "fork_of"])
async def test_branches_leave_a_context_as_it_is(call: HttpCall, client: jaxctx.aio.Client, source: str) -> None:
    async with await client.create(TEXT) as parent:
        before = (await parent.refresh()).seq_len
        events = await run(call, prompt_of("More. ", branches=3, **{source: parent.id}))
        assert texts(events) == dict.fromkeys(range(3), await alone(client, TEXT + "More. "))
        assert (await parent.refresh()).seq_len == before
        middle = events[0].data["context_id"]
        assert events[0].data["computed_tokens"] > 0
        for end in [event.data for event in events if event.type == "end"]:
            child = await context_of(call, end["context_id"])
            assert child.parent_id == middle
            assert child.expiry.duration.seconds == 600


async def test_a_message_is_written_by_the_template(call: HttpCall, client: jaxctx.aio.Client) -> None:
    events = await run(call, prompt_of("Hello", as_message=True))
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokens = await client.tokenize(expected)
    assert events[-1].data["prompt_tokens"] == len(tokens)


async def test_what_cannot_be_continued_leaves_no_context(call: HttpCall, client: jaxctx.aio.Client) -> None:
    with pytest.raises(errors.JaxctxError):
        await run(call, prompt_of("x" * 2000))  # longer than the longest context
    with pytest.raises(errors.NotFound):
        await run(call, prompt_of(fork_of="nothing"))
    await no_context_left(client)


async def test_the_end_of_the_reader_ends_the_request(call: HttpCall, engine: Any) -> None:
    async with aclosing(prompt_events(call, prompt_of(max_tokens=1000))) as stream:
        (begin, *_, _) = await until(stream, lambda event: event.type == "part")
        assert (await engine.stats()).running == 1
    async with asyncio.timeout(60):
        while (await engine.stats()).running:
            await asyncio.sleep(0.01)
    context = await context_of(call, begin.data["context_id"])
    assert context.state == CONTEXT_STATE_IDLE
    assert context.seq_len < 1000


async def test_a_context_of_another_tenant_is_unknown(backend: Backend, client: jaxctx.aio.Client) -> None:
    async with await client.create(TEXT) as context:
        for source in ("context_id", "fork_of"):
            with pytest.raises(errors.NotFound):
                await run(call_of(backend, BOB), prompt_of("More. ", **{source: context.id}))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": 5}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"text": ""}, "text"),
        ({"text": None}, "text"),
        ({"context_id": 7}, "context_id"),
        ({"context_id": "a", "fork_of": "b"}, "fork_of"),
        ({"branches": 0}, "branches"),
        ({"branches": 9}, "branches"),
        ({"branches": True}, "branches"),
        ({"branches": 1.5}, "branches"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 1 << 31}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"as_message": "yes"}, "as_message"),
        ({"model": "echo"}, "model"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        prompt_of(**{"text": TEXT, **fields})
    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"{", b'{"text": "a"', b"\xff", b"[" * 50000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(errors.InvalidArgument):
        parse_prompt(body)


async def test_values_that_are_null_are_unset() -> None:
    prompt = prompt_of(context_id="a", fork_of=None, branches=None, max_tokens=None, temperature=None, seed=None)
    assert prompt == PagePrompt(
        context_id="a",
        fork_of=None,
        text=TEXT,
        as_message=False,
        branches=1,
        max_tokens=None,
        temperature=None,
        seed=None,
    )


async def test_an_id_that_is_none_is_refused_by_its_name(web: HttpClient) -> None:
    answer = await web("POST", "/page/prompt", {"text": "a", "context_id": "../a"})
    assert answer.error == (400, "INVALID_FIELD", "context_id")


async def test_too_many_tokens_end_the_stream_with_an_error(web: HttpClient) -> None:
    answer = await web("POST", "/page/prompt", {"text": "a", "max_tokens": 100_000})
    assert answer.status == 200
    last = answer.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"]["param"] == "max_tokens"


async def test_a_form_of_another_page_is_refused(web: HttpClient) -> None:
    """It could be sent without asking this server first."""
    answer = await web("POST", "/page/prompt", b'{"text": "a"}', headers={"content-type": "text/plain"})
    assert answer.status == 415


class TestOverHttp:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in ("alice", "bob")]

    async def test_leaving_frees_the_request(self, web: HttpClient, engine: Any) -> None:
        body = {"text": TEXT, "max_tokens": 1000, "branches": 2}
        async with (
            aiohttp.ClientSession(headers={"authorization": "Bearer alice"}) as http,
            http.post(f"http://127.0.0.1:{web.port}/page/prompt", json=body) as response,
        ):
            async with aclosing(read_events(response)) as stream:
                await until(stream, lambda event: event.type == "part")
            response.close()
            async with asyncio.timeout(60):
                while (await engine.stats()).running:
                    await asyncio.sleep(0.01)
