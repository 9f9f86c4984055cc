"""GET /page/events: all that the page shows, as it changes, as server-sent events.

    hello      once: version, models, and whether the caller may see engines
    contexts   contexts that changed or are gone, at most every TURN_S
    pages      the physical pages of contexts whose pages changed
    engines    engines and their load, if they changed; only for a key of role admin
    sessions   sessions, if they changed

The stream costs little beside the work of the server: what changes is read and sent a few times a second, however often
it changes. A page that reads slowly gets less often what it misses.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from typing import Any

from starlette.responses import Response

from jaxctx.errors import NotFound, PermissionDenied, ResourceExhausted, Unavailable
from jaxctx.v1.admin_service_pb2 import GetStatsRequest
from jaxctx.v1.context_service_pb2 import GetContextRequest, WatchContextsRequest
from jaxctx.v1.model_service_pb2 import ListModelsRequest
from jaxctx.v1.session_service_pb2 import ListSessionsRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.events import typed_event
from jaxctx_server.http.page.as_json import context_json, engine_json, pages_json, session_json
from jaxctx_server.http.page.feed import MAX_CONTEXTS, ContextFeed

TURN_S = 0.25  # between two looks at what has changed
LOAD_TURNS = 2  # so many turns are between two looks at pages and load
SESSION_TURNS = 4  # and between two looks at sessions
KEEP_ALIVE_TURNS = 60  # after so many turns without an event a comment shows whether the page is still there
READ_S = 0.005  # changes of contexts are read for so long in one turn
MAX_CHANGES = 256  # and at most so many
MAX_SESSIONS = 100
MAX_OPEN_PAGES = 64  # in all
MAX_OPEN_PAGES_OF_KEY = 8

KEEP_ALIVE = ": \n\n"


@dataclass(slots=True)
class PageEvents:
    """The streams of one server."""

    open_pages: Counter[str] = field(default_factory=Counter)  # by the name of the caller's key

    async def respond(self, call: HttpCall) -> Response:
        """GET /page/events. Raises ResourceExhausted (QUEUE_FULL) if too many pages are open."""
        return EventStream(self.events(call))

    async def events(self, call: HttpCall) -> AsyncGenerator[str, None]:
        """The events for one page, until the server drains. To be closed as soon as it is no longer read."""
        with self._counted(call.call.key.name):
            view = PageView(call)
            opening = await view.opening_events()  # before anything is sent: an error has a status then
            async with view.watching() as watch:
                for event in opening:
                    yield event
                quiet_turns = 0
                while not watch.done():
                    events = await view.next_turn()
                    quiet_turns = 0 if events else quiet_turns + 1
                    if quiet_turns == KEEP_ALIVE_TURNS:
                        quiet_turns = 0
                        events = [KEEP_ALIVE]
                    for event in events:
                        yield event
                    await asyncio.sleep(TURN_S)
                watch.result()  # raises why it ended

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """While entered, one more page is open."""
        if self.open_pages[name] >= MAX_OPEN_PAGES_OF_KEY or self.open_pages.total() >= MAX_OPEN_PAGES:
            raise ResourceExhausted("too many pages are open", reason="QUEUE_FULL", retry_after_s=5.0)
        self.open_pages[name] += 1
        try:
            yield
        finally:
            self.open_pages[name] -= 1


@dataclass(slots=True)
class PageView:
    """What one open page shows, as it was last sent."""

    call: HttpCall
    feed: ContextFeed = field(default_factory=ContextFeed)
    sees_engines: bool = True  # until it is known that the caller may not
    turn: int = 0
    sent: dict[str, str] = field(default_factory=dict)  # the last event of those types that are sent whole

    async def opening_events(self) -> list[str]:
        """The events that need no watch. Raises Unavailable while the server loads."""
        sessions = await self._sessions()
        engines = await self._engines()
        hello = {
            "version": package_version("jaxctx"),
            "models": await self._models(),
            "sees_engines": self.sees_engines,
            "max_contexts": MAX_CONTEXTS,
        }
        return [typed_event("hello", hello), *engines, *sessions]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[asyncio.Task[None]]:
        """While entered, a task reads the changes of contexts. It ends only with an error."""
        watch = asyncio.create_task(self._read_changes())
        try:
            yield watch
        finally:
            watch.cancel()
            await asyncio.wait([watch])
            if not watch.cancelled():
                watch.exception()  # which the reader of the events has seen, or nobody is there to see it

    async def next_turn(self) -> list[str]:
        """What has changed since the turn before."""
        events: list[str] = []
        changes = self.feed.take_changes()
        if changes is not None:
            body = {
                "reset": changes.reset,
                "changed": [context_json(context) for context in changes.changed],
                "removed": changes.removed,
                "left_out": changes.left_out,
            }
            events.append(typed_event("contexts", body))
        if self.turn % LOAD_TURNS == 0:
            events += await self._pages()
            events += await self._engines()
        if self.turn % SESSION_TURNS == 0:
            events += await self._sessions()
        self.turn += 1
        return events

    async def _read_changes(self) -> None:
        """Read changes into the feed, in short turns. Between turns they wait in the engine, one a context."""
        loop = asyncio.get_running_loop()
        watch_contexts = self.call.services.contexts.watch_contexts
        count, turn_end = 0, loop.time() + READ_S
        async with aclosing(self.call.stream(watch_contexts, WatchContextsRequest())) as changes:
            async for change in changes:
                self.feed.apply(change)
                count += 1
                if count >= MAX_CHANGES or loop.time() >= turn_end:
                    await asyncio.sleep(TURN_S)
                    count, turn_end = 0, loop.time() + READ_S

    async def _pages(self) -> list[str]:
        """The pages of some of the contexts whose pages changed."""
        read = []
        for context_id in self.feed.take_page_requests():
            request = GetContextRequest(context_id=context_id, include_pages=True)
            with suppress(NotFound, Unavailable):  # it was closed meanwhile, or its engine is lost
                response = await self.call.unary(self.call.services.contexts.get_context, request)
                read.append(pages_json(context_id, response.pages))
        return [typed_event("pages", read)] if read else []

    async def _engines(self) -> list[str]:
        """The engines, if they changed and the caller may see them."""
        if not self.sees_engines:
            return []
        try:
            stats = await self.call.unary(self.call.services.admin.get_stats, GetStatsRequest())
        except PermissionDenied:
            self.sees_engines = False
            return []
        return self._if_new("engines", [engine_json(engine) for engine in stats.engines])

    async def _models(self) -> list[str]:
        """The names of the models; none for a router that no engine has come to."""
        try:
            response = await self.call.unary(self.call.services.models.list_models, ListModelsRequest())
        except Unavailable:
            return []
        return [model.model_id for model in response.models]

    async def _sessions(self) -> list[str]:
        """The sessions, if they changed."""
        request = ListSessionsRequest(limit=MAX_SESSIONS)
        response = await self.call.unary(self.call.services.sessions.list_sessions, request)
        return self._if_new("sessions", [session_json(session) for session in response.sessions])

    def _if_new(self, event_type: str, body: Any) -> list[str]:
        """An event, unless it is as the last one of its type."""
        text = json_text(body)
        if self.sent.get(event_type) == text:
            return []
        self.sent[event_type] = text
        return [typed_event(event_type, body)]
