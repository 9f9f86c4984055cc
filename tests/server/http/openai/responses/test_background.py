"""Responses in the background, by the official client: they run on, are read, followed, cancelled and stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx_server import server
from jaxctx_server.auth import Key
from jaxctx_server.http.openai.responses import background, progress, registry
from jaxctx_server.key_store import KeyStore
from jaxctx_server.service.snapshots import LocalSnapshotService
from jaxctx_server.services import Backend
from tests.e2e.conftest import backend_of
from tests.engines import Clock, MakeEngine
from tests.server.http.client import HttpClient, http_server
from tests.server.http.openai.harness import no_context_left, openai_client
from tests.server.http.scripted import scripted_server

GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
LONG: Any = GREEDY | {"max_output_tokens": 1000}
UNFINISHED = ("queued", "in_progress")


async def finished(api: openai.AsyncOpenAI, response_id: str) -> Any:
    """The response when it has ended."""
    async with asyncio.timeout(120):
        while (response := await api.responses.retrieve(response_id)).status in UNFINISHED:
            await asyncio.sleep(0.01)
    return response


async def test_it_is_the_response_that_somebody_would_have_waited_for(api: openai.AsyncOpenAI) -> None:
    begun = await api.responses.create(input="One", metadata={"a": "b"}, background=True, **GREEDY)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    ended = await finished(api, begun.id)
    waited_for = await api.responses.create(input="One", metadata={"a": "b"}, **GREEDY)
    assert (ended.status, ended.output_text) == ("incomplete", waited_for.output_text)
    assert ended.usage.output_tokens == 8
    assert (ended.id, ended.created_at, ended.metadata) == (begun.id, begun.created_at, {"a": "b"})
    items: Any = (await api.responses.input_items.list(begun.id)).data
    assert [item.content[0].text for item in items] == ["One"]


async def test_it_is_continued_without_computing_it_again(api: openai.AsyncOpenAI) -> None:
    first = await api.responses.create(input="One", background=True, **GREEDY)
    first = await finished(api, first.id)
    second = await api.responses.create(input="Two", previous_response_id=first.id, background=True, **GREEDY)
    second = await finished(api, second.id)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1


async def test_it_is_kept_once(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    begun = await api.responses.create(input="One", background=True, **GREEDY)
    await finished(api, begun.id)
    assert [each.version for each in await client.history(begun.id)] == [2]


async def test_it_adds_to_its_conversation(api: openai.AsyncOpenAI) -> None:
    conversation = await api.conversations.create()
    begun = await api.responses.create(input="One", conversation=conversation.id, background=True, **GREEDY)
    ended = await finished(api, begun.id)
    items: Any = [item async for item in api.conversations.items.list(conversation.id, order="asc")]
    assert [item.content[0].text for item in items] == ["One", ended.output_text]


async def test_a_conversation_that_was_changed_meanwhile(api: openai.AsyncOpenAI, backend: Backend) -> None:
    conversation = await api.conversations.create()
    begun = await api.responses.create(
        input="One", conversation=conversation.id, background=True, **(GREEDY | {"max_output_tokens": 200})
    )
    await api.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "Wait!"}]
    )
    ended = await finished(api, begun.id)
    assert (ended.status, ended.error.code, ended.output) == ("failed", "invalid_prompt", [])
    assert (await api.responses.retrieve(begun.id)).to_dict() == ended.to_dict()
    items = [item async for item in api.conversations.items.list(conversation.id)]
    assert len(items) == 1


class TestCancelling:
    async def test_it_ends_at_once_and_only_once(self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
        begun = await api.responses.create(input="One", background=True, **LONG)
        cancelled = await api.responses.cancel(begun.id)
        assert (cancelled.status, cancelled.output, cancelled.error) == ("cancelled", [], None)
        assert (await api.responses.cancel(begun.id)).to_dict() == cancelled.to_dict()
        assert (await api.responses.retrieve(begun.id)).to_dict() == cancelled.to_dict()
        await no_context_left(client)

    async def test_one_that_has_ended_stays_as_it_is(self, api: openai.AsyncOpenAI) -> None:
        begun = await api.responses.create(input="One", background=True, **GREEDY)
        ended = await finished(api, begun.id)
        assert (await api.responses.cancel(begun.id)).to_dict() == ended.to_dict()

    async def test_without_a_body(self, api: openai.AsyncOpenAI, web: HttpClient) -> None:
        """As the official client for Node sends it. A page of another site cannot: it would need a key."""
        begun = await api.responses.create(input="One", background=True, **LONG)
        path = f"/v1/responses/{begun.id}/cancel"
        for headers in ({"origin": "https://elsewhere.example"}, {"content-type": "text/plain"}):
            assert (await web("POST", path, headers=headers)).error == (415, "HTTP", None)
        assert (await web("POST", path)).json["status"] == "cancelled"

    async def test_another_response_cannot_be_cancelled(self, api: openai.AsyncOpenAI) -> None:
        response = await api.responses.create(input="One", **GREEDY)
        with pytest.raises(openai.BadRequestError) as raised:
            await api.responses.cancel(response.id)
        assert raised.value.param == "response_id"
        with pytest.raises(openai.NotFoundError):
            await api.responses.cancel("resp_none")

    async def test_it_cannot_be_continued(self, api: openai.AsyncOpenAI) -> None:
        begun = await api.responses.create(input="One", background=True, **LONG)
        for status in ("queued|in_progress", "cancelled"):
            with pytest.raises(openai.BadRequestError, match=status) as raised:
                await api.responses.create(input="Two", previous_response_id=begun.id, **GREEDY)
            assert raised.value.param == "previous_response_id"
            await api.responses.cancel(begun.id)

    async def test_to_delete_it_ends_it(self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
        begun = await api.responses.create(input="One", background=True, **LONG)
        await api.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(begun.id)
        await no_context_left(client)
        assert [each async for each in client.snapshots()] == []


class TestEvents:
    async def test_a_stream_that_is_left_and_found_again(self, api: openai.AsyncOpenAI) -> None:
        wanted: Any = GREEDY | {"max_output_tokens": 100}
        stream = await api.responses.create(input="One", background=True, stream=True, **wanted)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        response_id = seen[0].response.id
        seen += await followed(api, response_id, seen[-1].sequence_number)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert seen[-1].type == "response.incomplete"
        text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
        ended = await api.responses.retrieve(response_id)
        assert text == seen[-1].response.output_text == ended.output_text
        for starting_after in (-1, 2, len(seen) - 2, len(seen) - 1):  # now out of what is stored
            again = await followed(api, response_id, starting_after)
            assert dicts(again) == dicts(seen[starting_after + 1 :])

    async def test_several_follow_one(self, api: openai.AsyncOpenAI) -> None:
        begun = await api.responses.create(input="One", background=True, **GREEDY)
        first, second = await asyncio.gather(followed(api, begun.id, -1), followed(api, begun.id, -1))
        assert dicts(first) == dicts(second)
        assert first[-1].type == "response.incomplete"

    async def test_one_that_is_cancelled(self, api: openai.AsyncOpenAI) -> None:
        stream = await api.responses.create(input="One", background=True, stream=True, **LONG)
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.in_progress":
                await api.responses.cancel(event.response.id)
        assert (seen[-1].type, seen[-1].response.status) == ("response.incomplete", "cancelled")
        again = await followed(api, seen[0].response.id, seen[-2].sequence_number)
        assert dicts(again) == dicts(seen[-1:])

    async def test_of_another_response_there_are_none(self, api: openai.AsyncOpenAI, web: HttpClient) -> None:
        response = await api.responses.create(input="One", **GREEDY)
        path = f"/v1/responses/{response.id}"
        assert (await web("GET", f"{path}?stream=true")).error == (400, "INVALID_FIELD", "stream")
        assert (await web("GET", f"{path}?stream=5")).error == (400, "INVALID_FIELD", "stream")
        for number in ("-1", "x", "9" * 100, "%D9%A1"):
            answer = await web("GET", f"{path}?starting_after={number}")
            assert answer.error == (400, "INVALID_FIELD", "starting_after")


async def followed(api: openai.AsyncOpenAI, response_id: str, starting_after: int) -> list[Any]:
    more: Any = {} if starting_after < 0 else {"starting_after": starting_after}
    return [event async for event in await api.responses.retrieve(response_id, stream=True, **more)]


def dicts(events: list[Any]) -> list[Any]:
    return [event.to_dict() for event in events]


@pytest.mark.parametrize(
    ("pieces", "options"),
    [
        (("<think>", "well", ", yes", "</think>", "The ", "", "answer"), {"reasoning": "think"}),
        (("Look: ", '<tool_call>\n{"name": "f", "arguments": {"a"', ": 1}}\n</tool_call>"), {}),
        (
            (
                '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
                '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            ),
            {},
        ),
        (("<think>", "only thoughts"), {"reasoning": "think"}),
        (("a", "b", "c"), {"include": ["message.output_text.logprobs"], "top_logprobs": 0}),
        ((" ",), {}),
    ],
)
async def test_what_is_stored_gives_the_same_events(pieces: tuple[str, ...], options: dict[str, Any]) -> None:
    """Thoughts, calls and log probabilities: the events of a response that has ended are those that it had."""
    reasoning = options.pop("reasoning", None)
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
    async with scripted_server(*pieces, reasoning=reasoning) as scripted, openai_client(scripted.web) as api:
        stream = await api.responses.create(
            model="fake", input="x", tools=tools, background=True, stream=True, **options
        )
        seen: list[Any] = [event async for event in stream]
        assert seen[-1].type == "response.completed"
        assert dicts(await followed(api, seen[0].response.id, -1)) == dicts(seen)


class TestRefusals:
    async def test_it_must_be_stored(self, web: HttpClient, client: jaxctx.aio.Client) -> None:
        answer = await web("POST", "/v1/responses", {"input": "x", "background": True, "store": False})
        assert answer.error == (400, "INVALID_FIELD", "store")
        answer = await web("POST", "/v1/responses", {"input": "x", "background": "yes"})
        assert answer.error == (400, "INVALID_FIELD", "background")

    async def test_not_in_a_kept_context(self, web: HttpClient) -> None:
        body = {"input": "x", "background": True, "max_output_tokens": 1}
        answer = await web("POST", "/v1/responses", body, headers={"x-session-ttl": "60"})
        assert answer.error == (400, "INVALID_FIELD", "background")

    async def test_what_is_wrong_is_told_to_who_asks(self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            await api.responses.create(input="x", background=True, temperature=1000, model="echo")
        assert raised.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as lost:
            await api.responses.create(input="x", background=True, previous_response_id="resp_none", **GREEDY)
        assert lost.value.param == "previous_response_id"
        assert [each async for each in client.snapshots()] == []

    async def test_only_so_many_run(self, web: HttpClient, api: openai.AsyncOpenAI, monkeypatch: Any) -> None:
        monkeypatch.setattr(registry, "MAX_OF_TENANT", 2)
        running = [await api.responses.create(input="x", background=True, **LONG) for _ in range(2)]
        body = {"input": "x", "background": True}
        refused = await web("POST", "/v1/responses", body)
        assert refused.error == (429, "QUEUE_FULL", None)
        assert int(refused.headers["retry-after"]) > 0
        await api.responses.cancel(running[0].id)
        another = await api.responses.create(input="x", background=True, **LONG)
        for response in (running[1], another):
            await api.responses.cancel(response.id)


class TestKeys:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_another_tenant_neither_sees_nor_ends_it(self, web: HttpClient, monkeypatch: Any) -> None:
        monkeypatch.setattr(registry, "MAX_OF_TENANT", 1)
        async with openai_client(web, "alice") as alice, openai_client(web, "bob") as bob:
            begun = await alice.responses.create(input="One", background=True, **LONG)
            path, unknown = f"/v1/responses/{begun.id}", f"/v1/responses/{begun.id[:-32]}{'0' * 32}"
            for method, suffix in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
                body = {} if method == "POST" else None
                others = await web(method, path + suffix, body, key="bob")
                none = await web(method, unknown + suffix, body, key="bob")
                assert others.status == none.status == 404
                assert others.text.replace(begun.id, "ID") == none.text.replace(unknown.rpartition("/")[2], "ID")
            own = await bob.responses.create(input="One", background=True, **GREEDY)
            assert (await finished(bob, own.id)).status == "incomplete"
            assert (await alice.responses.retrieve(begun.id)).status in UNFINISHED
            await alice.responses.cancel(begun.id)

    async def test_a_key_that_is_revoked_ends_it(self, web: HttpClient, backend: Backend, two_tenants: Any) -> None:
        store: Any = backend.pipeline._keys
        assert isinstance(store, KeyStore)
        async with openai_client(web, "alice") as alice:
            begun = await alice.responses.create(input="One", background=True, **LONG)
            for key, call in list(store._running):  # as a reload does
                if key.name == "alice":
                    call.reschedule(asyncio.get_running_loop().time())
            ended = await finished(alice, begun.id)
        assert (ended.status, ended.error.message) == ("failed", "the key was revoked")


Start = Callable[..., AbstractAsyncContextManager[HttpClient]]


@pytest.fixture
def start(make_engine: MakeEngine, engine_config: EngineConfig, clock: Clock, tmp_path: Path) -> Start:
    """Servers on one store, one after the other or at once."""

    @asynccontextmanager
    async def server(device: str = "") -> AsyncIterator[HttpClient]:
        engine = make_engine(engine_config, store=str(tmp_path / "store"), whole=False, device=device)
        async with (
            backend_of(engine, engine_config, clock) as backend,
            http_server(backend, wall_time=clock.wall) as web,
        ):
            yield web

    return server


class TestOtherServers:
    async def test_it_is_read_by_another_server(self, start: Start) -> None:
        async with start("a") as one, start("b") as other, openai_client(one) as api, openai_client(other) as there:
            begun = await api.responses.create(input="One", background=True, **LONG)
            assert (await there.responses.retrieve(begun.id)).status == "in_progress"
            for refused in (there.responses.cancel(begun.id), there.responses.retrieve(begun.id, stream=True)):
                with pytest.raises(openai.BadRequestError, match="another server"):
                    await refused
            await api.responses.cancel(begun.id)
            assert (await there.responses.retrieve(begun.id)).status == "cancelled"
            whole = await api.responses.create(input="One", background=True, **GREEDY)
            whole = await finished(api, whole.id)
            assert (await there.responses.retrieve(whole.id)).to_dict() == whole.to_dict()
            assert dicts(await followed(there, whole.id, -1)) == dicts(await followed(api, whole.id, -1))

    async def test_after_a_restart_it_has_failed(self, start: Start, clock: Clock) -> None:
        """A server that is killed says nothing any more; what it had stored tells what became of the response."""
        async with start("a") as one, openai_client(one) as api:
            begun = await api.responses.create(input="One", background=True, **LONG)
            async with start("b") as other, openai_client(other) as there:
                clock.offset += progress.LEASE_S + 1
                lost = await there.responses.retrieve(begun.id)
                assert (lost.status, lost.output) == ("failed", [])
                assert lost.error is not None
                assert lost.error.code == "server_error"
                assert (await there.responses.cancel(begun.id)).to_dict() == lost.to_dict()
                (event,) = await followed(there, begun.id, 2)
                assert (event.type, event.response.status) == ("response.failed", "failed")
                with pytest.raises(openai.BadRequestError, match="failed"):
                    await there.responses.create(input="Two", previous_response_id=begun.id, **GREEDY)
                await there.responses.delete(begun.id)
                with pytest.raises(openai.NotFoundError):
                    await there.responses.retrieve(begun.id)

    async def test_it_says_that_it_is_alive(self, start: Start, clock: Clock, monkeypatch: Any) -> None:
        update = LocalSnapshotService.update_snapshot

        async def slow_update(*args: Any) -> Any:
            updated = await update(*args)
            await asyncio.sleep(0.05)
            return updated

        monkeypatch.setattr(LocalSnapshotService, "update_snapshot", slow_update)
        monkeypatch.setattr(background, "RENEW_S", 0.001)
        async with start("a") as one, start("b") as other, openai_client(one) as api, openai_client(other) as there:
            begun = await api.responses.create(input="One", background=True, **LONG)
            clock.offset += progress.LEASE_S + 1
            async with asyncio.timeout(60):
                while (await there.responses.retrieve(begun.id)).status != "in_progress":
                    await asyncio.sleep(0.01)
            await api.responses.cancel(begun.id)
            await asyncio.sleep(0.05)  # and is not told to be alive again
            assert (await there.responses.retrieve(begun.id)).status == "cancelled"


class TestTheServerStops:
    async def test_a_drain_waits_for_it(self, api: openai.AsyncOpenAI, web: HttpClient, backend: Backend) -> None:
        begun = await api.responses.create(input="One", background=True, **(GREEDY | {"max_output_tokens": 200}))
        draining = asyncio.create_task(backend.lifecycle.drain())
        while not backend.lifecycle.finishes_long_work:
            await asyncio.sleep(0)
        refused = await web("POST", "/v1/responses", {"input": "x"})
        assert (refused.status, refused.json["error"]["code"]) == (503, "DRAINING")
        await draining
        ended = await api.responses.retrieve(begun.id)
        assert (ended.status, ended.usage and ended.usage.output_tokens) == ("incomplete", 200)

    async def test_what_takes_too_long_has_failed(self, api: openai.AsyncOpenAI, backend: Backend) -> None:
        begun = await api.responses.create(input="One", background=True, **LONG)
        events = asyncio.create_task(followed(api, begun.id, -1))
        while backend.lifecycle.long_work[0].is_unfinished and not events.done():
            assert not await server.drain(backend.lifecycle, 0.0)
        ended = await api.responses.retrieve(begun.id)
        assert (ended.status, ended.error and ended.error.code) == ("failed", "server_error")
        assert (await events)[-1].type == "response.failed"
