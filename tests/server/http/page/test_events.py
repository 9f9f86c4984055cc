"""The events of the page: what they tell, whom, how often, and that they end."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.session_service_pb2 import CreateSessionRequest
from jaxctx_server.auth import LOCAL, Key, Role
from jaxctx_server.http.page import events as page_events
from jaxctx_server.http.page.events import MAX_OPEN_PAGES_OF_KEY, PageEvents
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.e2e.router.conftest import cluster, router_cluster
from tests.e2e.router_cluster import RouterCluster
from tests.engines import Clock
from tests.server.harness import eventually
from tests.server.http.calls import call_of
from tests.server.http.client import HttpClient
from tests.server.http.page.page_events import PageEvent, read_events, until

__all__ = ["cluster", "router_cluster"]
ADMIN = Key("root", b"", "red", Role.ADMIN)
ALICE, BOB = Key("alice", b"", "red", Role.USER), Key("bob", b"", "blue", Role.USER)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_events, "TURN_S", 0.01)


async def make_context(backend: Backend, context_id: str, key: Key = LOCAL, text: str = "x" * 40) -> None:
    call = call_of(backend, key)
    await call.unary(call.services.contexts.create_context, pb.CreateContextRequest(context_id=context_id))
    await call.unary(call.services.contexts.fill, pb.FillRequest(context_id=context_id, text=text))


def tells_of(event_type: str, context_id: str) -> Any:
    """Whether an event tells of a context, as a function of the event."""

    def tells(event: PageEvent) -> bool:
        entries = event.data["changed"] if event.type == "contexts" else event.data
        return event.type == event_type and any(entry["context_id"] == context_id for entry in entries)

    return tells


async def test_the_events_of_a_server(backend: Backend) -> None:
    await make_context(backend, "a")
    async with aclosing(PageEvents().events(call_of(backend, LOCAL))) as stream:
        found = await until(stream, tells_of("pages", "a"))
        assert [event.type for event in found[:3]] == ["hello", "engines", "sessions"]
        hello = found[0].data
        assert (hello["models"], hello["sees_engines"]) == (["echo"], True)
        assert found[1].data[0]["pages_total"] == 256
        (pages,) = [entry for entry in found[-1].data if entry["context_id"] == "a"]
        assert pages["count"] == len(pages["page_ids"]) == 3  # of 40 tokens, 16 a page
        assert pages["tiers"] == "ddd"


async def test_forks_have_the_pages_of_their_parent(backend: Backend) -> None:
    await make_context(backend, "a")
    call = call_of(backend, LOCAL)
    async with aclosing(PageEvents().events(call)) as stream:
        await until(stream, tells_of("pages", "a"))
        await call.unary(call.services.contexts.fork, pb.ForkRequest(context_id="a", child_ids=["b"]))
        found = await until(stream, tells_of("pages", "b"))
        if not any(event.type == "pages" and tells_of("pages", "a")(event) for event in found):
            found += await until(stream, tells_of("pages", "a"))
        entries = {entry["context_id"]: entry for event in found if event.type == "pages" for entry in event.data}
        assert entries["b"]["page_ids"][:2] == entries["a"]["page_ids"][:2]
        assert entries["a"]["refcounts"][:2] == [2, 2]  # read again, though it did not change itself
        (forked,) = [
            entry
            for event in found
            if event.type == "contexts"
            for entry in event.data["changed"]
            if entry["context_id"] == "b"
        ]
        assert forked["parent_id"] == "a"


async def test_a_context_that_is_closed_is_told(backend: Backend) -> None:
    await make_context(backend, "a")
    call = call_of(backend, LOCAL)
    async with aclosing(PageEvents().events(call)) as stream:
        await until(stream, tells_of("contexts", "a"))
        await call.unary(call.services.contexts.close_context, pb.CloseContextRequest(context_id="a"))
        await until(stream, lambda event: event.type == "contexts" and event.data["removed"] == ["a"])


async def test_sessions_are_told_when_they_change(backend: Backend) -> None:
    call = call_of(backend, LOCAL)
    async with aclosing(PageEvents().events(call)) as stream:
        await until(stream, lambda event: event.type == "sessions" and event.data == [])
        await call.unary(call.services.sessions.create_session, CreateSessionRequest(session_id="mine"))
        found = await until(stream, lambda event: event.type == "sessions")
        assert found[-1].data == [{"session_id": "mine", "variables": 0, "calls": 0, "started": 0}]


async def test_what_does_not_change_is_not_sent_again(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_events, "KEEP_ALIVE_TURNS", 20)
    async with aclosing(PageEvents().events(call_of(backend, LOCAL))) as stream:
        async with asyncio.timeout(60):
            texts = []
            async for text in stream:
                texts.append(text)
                if text == page_events.KEEP_ALIVE:
                    break
    types = [text.partition("\n")[0] for text in texts]
    assert types.count("event: engines") == types.count("event: sessions") == types.count("event: contexts") == 1


async def test_only_a_key_of_role_admin_sees_engines(backend: Backend) -> None:
    async with aclosing(PageEvents().events(call_of(backend, ALICE))) as stream:
        found = await until(stream, lambda event: event.type == "contexts")
        assert not found[0].data["sees_engines"]
        assert "engines" not in [event.type for event in found]
    async with aclosing(PageEvents().events(call_of(backend, ADMIN))) as stream:
        found = await until(stream, lambda event: event.type == "engines")
        assert found[0].data["sees_engines"]


async def test_tenants_see_their_own_contexts_only(backend: Backend) -> None:
    await make_context(backend, "of-alice", ALICE)
    await make_context(backend, "of-bob", BOB)
    async with aclosing(PageEvents().events(call_of(backend, BOB))) as stream:
        found = await until(stream, tells_of("pages", "of-bob"))
    assert "of-alice" not in str(found)


async def test_a_caller_has_a_limit_of_open_pages(backend: Backend) -> None:
    pages = PageEvents()
    streams = [pages.events(call_of(backend, ALICE)) for _ in range(MAX_OPEN_PAGES_OF_KEY + 1)]
    try:
        for stream in streams[:-1]:
            await anext(stream)
        with pytest.raises(errors.ResourceExhausted) as raised:
            await anext(streams[-1])
        assert raised.value.reason == "QUEUE_FULL"
        async with aclosing(pages.events(call_of(backend, BOB))) as other:
            await anext(other)
    finally:
        for stream in streams:
            await stream.aclose()
    assert pages.open_pages.total() == 0


async def test_a_closed_page_leaves_no_watch(backend: Backend, engine: Any) -> None:
    await make_context(backend, "a")
    stream = PageEvents().events(call_of(backend, LOCAL))
    await until(stream, tells_of("contexts", "a"))
    assert any(engine._lifecycle.watches.values())
    await stream.aclose()
    await eventually(lambda: not any(engine._lifecycle.watches.values()))


async def test_while_the_server_loads_there_is_a_status() -> None:
    backend = Backend.make(ServerLifecycle(), None, max_calls=8)
    with pytest.raises(errors.Unavailable):
        await anext(PageEvents().events(call_of(backend, LOCAL)))


async def test_many_changes_are_few_events(
    backend: Backend, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is open costs the same however much is generated."""
    monkeypatch.setattr(page_events, "TURN_S", 0.1)
    count, loop = 0, asyncio.get_running_loop()
    async with (
        aclosing(PageEvents().events(call_of(backend, LOCAL))) as stream,
        await client.create("busy") as context,
    ):
        await until(stream, lambda event: event.type == "contexts")
        generating = asyncio.create_task(context.complete(max_tokens=400, temperature=0, ignore_eos=True))
        start = loop.time()
        while not generating.done():
            await anext(stream)
            count += 1
        turns = (loop.time() - start) / 0.1 + 2
    assert count <= 4 * turns  # at most one event of each type a turn


class TestOverHttp:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in ("alice", "bob")]

    async def test_a_key_is_needed(self, web: HttpClient) -> None:
        for method, path in [
            ("GET", "/page/events"),
            ("POST", "/page/prompt"),
            ("GET", "/page/context/a"),
            ("DELETE", "/page/context/a"),
        ]:
            body = {} if method == "POST" else None
            assert (await web(method, path, body)).status == 401, path

    async def test_the_stream_ends_with_its_client(self, web: HttpClient, engine: Any) -> None:
        headers = {"authorization": "Bearer alice"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{web.port}/page/events", headers=headers) as response,
        ):
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            async with aclosing(read_events(response)) as stream:
                await until(stream, lambda event: event.type == "contexts")
            await eventually(lambda: any(engine._lifecycle.watches.values()))
        await eventually(lambda: not any(engine._lifecycle.watches.values()))


async def test_a_router_tells_of_all_engines(router_cluster: RouterCluster, clock: Clock) -> None:
    for i in range(8):
        await make_context(router_cluster.backend, f"c{i}")
    async with aclosing(PageEvents().events(call_of(router_cluster.backend, LOCAL))) as stream:
        found: list[PageEvent] = []
        engine_of: dict[str, str] = {}
        while len(engine_of) < 8:
            found += await until(stream, lambda event: event.type == "contexts")
            engine_of |= {entry["context_id"]: entry["engine_id"] for entry in found[-1].data["changed"]}
        (engines,) = [event.data for event in found if event.type == "engines"][:1]
        assert {engine["engine_id"] for engine in engines} == set(router_cluster.engines)
        assert set(engine_of.values()) <= set(router_cluster.engines)
        await until(stream, tells_of("pages", "c0"))


async def test_a_router_without_engines_has_a_page() -> None:
    lifecycle = ServerLifecycle()
    backend = Backend.make(lifecycle, None, max_calls=8, is_router=True)
    lifecycle.set_ready(ServingState.router(Limits(queue_limit=8)))
    async with aclosing(PageEvents().events(call_of(backend, LOCAL))) as stream:
        found = await until(stream, lambda event: event.type == "contexts")
    assert [event.data for event in found if event.type == "engines"] == [[]]
    lifecycle.stop()
