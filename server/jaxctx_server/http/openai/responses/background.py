"""Responses that are made in the background: by a task of their own, which goes on when the client is gone.

    POST ─▶ context made, stored as begun ─▶ answered ─▶ output … ─▶ stored as complete
                                                │
                                                └─ cancelled, failed, the server stops ─▶ labels of what is stored

The task is a call of its own in the server's pipeline, with the key of the request, so that it has a place in the limit
of calls and ends if the key is revoked. What a response that has ended came to is in what is stored (`progress.py`);
nothing of it stays in memory.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxctx.errors import Cancelled, JaxctxError, NotFound, Unavailable
from jaxctx_server.http.call import HttpCall, make_call
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.generation import close_contexts, prepare
from jaxctx_server.http.large_json import large_json_response
from jaxctx_server.http.openai.responses.event_log import EventLog
from jaxctx_server.http.openai.responses.making import begin_response, lost_base, output_events, store_response
from jaxctx_server.http.openai.responses.progress import (
    INTERRUPTED,
    RENEW_S,
    change_labels,
    ended,
    ended_labels,
    running_labels,
)
from jaxctx_server.http.openai.responses.record import state_document
from jaxctx_server.http.openai.responses.replay import Deltas, beginning, begun_as, ending, in_progress
from jaxctx_server.http.openai.responses.request import ResponsesRequest
from jaxctx_server.http.openai.responses.response_run import ResponseRun, error_json
from jaxctx_server.http.stored import save_state, ttl_of
from jaxctx_server.service.pipeline import Call
from jaxctx_server.services import make_caller

Json = dict[str, Any]
log = logging.getLogger("jaxctx.http")


async def respond_in_background(call: HttpCall, request: ResponsesRequest) -> Response:
    """Begin a response in the background: it as it has begun, or its events from the first one on.

    Raises what keeps it from beginning, and ResourceExhausted (QUEUE_FULL) if there are too many already.
    """
    response = BackgroundResponse(call, request)
    await response.begin()
    if request.stream:
        return EventStream(response.log.follow(-1))
    return await large_json_response(call, response.resource())


class BackgroundResponse:
    """One response (`registry.RunningResponse`). Used on the event loop."""

    def __init__(self, call: HttpCall, request: ResponsesRequest) -> None:
        """`call` is that of the request that asks for it."""
        self.tenant = call.caller.tenant
        self.response_id = ""
        self.log = EventLog()
        self._request = request
        self._frontend = call.frontend
        self._key = call.call.key
        self._metadata = call.call.metadata
        self._http_request = Request(call.request.scope)  # without its body and its connection
        self._call: HttpCall | None = None  # of the task
        self._made: ResponseRun | None = None
        self._begun = asyncio.Event()  # or it cannot begin, and has ended
        self._ended = asyncio.Event()
        self._refusal: JaxctxError | None = None  # why it could not begin
        self._final: Json | None = None  # what it has come to
        self._has_output = False
        self._is_ending = False  # how it ends is decided: it is not stopped any more
        self._stopped_as: tuple[str, Json | None] | None = None  # status and error of one that is stopped
        self._labelling = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Return when it is stored as begun. Raises what keeps it from beginning. A client that leaves before ends it,
        as nobody knows its id.
        """
        self._frontend.background_responses.add(self)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._leave)  # also if it was cancelled before it began
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            self._stop("cancelled", None)
            raise
        if self._refusal is not None:
            raise self._refusal

    def resource(self) -> Json:
        """It as the API returns it, as far as it has come."""
        if self._final is not None:
            return self._final
        assert self._made is not None, "it has begun"
        return begun_as(self._made.object(), "in_progress" if self._has_output else "queued")

    async def wait_until_ended(self) -> None:
        """Return when it has ended and is stored."""
        await self._ended.wait()

    async def cancel(self) -> None:
        """End it, and return when that is stored. One that is being stored already ends as it is."""
        self._stop("cancelled", None)
        await self._ended.wait()

    async def interrupt(self) -> None:
        """As `cancel`, because the server stops."""
        self._stop("failed", INTERRUPTED)
        await self._ended.wait()

    def _stop(self, status: str, error: Json | None) -> None:
        if self._is_ending or self._task is None:
            return
        self._is_ending = True
        self._stopped_as = status, error
        self._task.cancel()

    async def _run(self) -> None:
        """Make the response, whatever comes. The task of it."""
        error: JaxctxError | None = None
        call = Call(self._metadata)
        try:
            async with self._frontend.backend.pipeline.admit(call):
                self._call = make_call(self._http_request, b"", self._frontend, call)
                await self._respond(self._call)
        except JaxctxError as raised:
            error = raised
        except asyncio.CancelledError:
            error = Cancelled("the response was stopped")
            if self._task is not None:
                self._task.uncancel()  # what follows is not cancelled
        self._is_ending = True
        await self._end(error)

    def _leave(self, task: asyncio.Task[None]) -> None:
        """The task has ended: whoever waits for the response goes on."""
        if not task.cancelled() and task.exception() is not None:
            log.error("a response in the background ended by a defect", exc_info=task.exception())
        if self._renewing is not None:
            self._renewing.cancel()
        self._frontend.background_responses.discard(self)
        self.log.end()
        self._begun.set()
        self._ended.set()

    async def _respond(self, call: HttpCall) -> None:
        """Begin, generate, and store what was generated. Raises JaxctxError."""
        request = self._request
        try:
            made = self._made = await begin_response(call, request)
            if made.generation.generate is not None:  # what is wrong with it is told now, not by the stored response
                made.generation.generate.context_id = made.response_id  # until it has a context
                await call.check(made.generation.generate)
            await prepare(call, made.generation)
        except JaxctxError as error:
            raise lost_base(error, request) or renamed(error, request.field_names) from None
        await self._store_begun(call, made)
        for event in beginning(made.object()):
            self.log.add(event)
        self.response_id = made.response_id
        self._begun.set()
        self._renewing = asyncio.create_task(self._renew(made))
        try:
            async with aclosing(output_events(call, made)) as parts:
                async for events in parts:
                    self._tell_output(made, events)
            self._tell_output(made, ())
            self._is_ending = True
            made.deltas = Deltas.of(self.log).document()
            await store_response(call, made)
        except JaxctxError as error:
            raise renamed(error, request.field_names) from None
        self._tell_end(made.object())

    def _tell_output(self, made: ResponseRun, events: Sequence[Json]) -> None:
        if not self._has_output:
            self._has_output = True
            self.log.add(in_progress(made.object()))
        for event in events:
            self.log.add(event)

    async def _store_begun(self, call: HttpCall, made: ResponseRun) -> None:
        """Store that it has begun: its id, its input, and that this server makes it."""
        document = state_document(begun_as(made.object(), "in_progress"), made.conversation, made.generation.model_id)
        labels = running_labels(self._frontend.background_responses.server_id, self._frontend.wall_time())
        ttl, context_id = ttl_of(self._frontend.response_ttl_s), made.generation.context_id
        saved = await save_state(
            call, context_id, made.response_id, document, ttl, labels=labels, field="input", name_is_drawn=True
        )
        made.begun_version = saved.version

    async def _end(self, error: JaxctxError | None) -> None:
        """Store how it ended, unless it is complete, and give back what it holds."""
        made, call = self._made, self._call
        if made is None or call is None or made.begun_version is None:
            self._refusal = stopping() if self._stopped_as is not None else error
        elif self._final is None:
            status, told = self._stopped_as or ("failed", error_json(error or stopping()))
            resource = ended(begun_as(made.object(), status), status, told)
            async with self._labelling:
                await self._change_labels(made, ended_labels(resource, self.log.next_number))
            self._tell_end(resource)
        if made is not None and call is not None:
            self._frontend.run_in_background(close_contexts(call, made.generation.context_ids))

    def _tell_end(self, resource: Json) -> None:
        self._final = resource
        self.log.add(ending(resource))

    async def _renew(self, made: ResponseRun) -> None:
        """Say again and again that it is alive, to other servers and to the next run of this one."""
        server_id = self._frontend.background_responses.server_id
        while not self._is_ending:
            await asyncio.sleep(RENEW_S)
            async with self._labelling:
                if not self._is_ending:
                    await self._change_labels(made, running_labels(server_id, self._frontend.wall_time()))

    async def _change_labels(self, made: ResponseRun, labels: dict[str, str]) -> None:
        """Change the labels of what was stored at the beginning. If that fails, the response counts as interrupted."""
        request = change_labels(made.response_id, made.begun_version or 1, labels)
        backend = self._frontend.backend
        try:
            await backend.services.snapshots.update_snapshot(make_caller(self._key, backend.clock), request)
        except NotFound:
            pass  # it was deleted, or is complete
        except JaxctxError as error:
            log.warning("the state of a response in the background was not stored: %s", error.message)


def stopping() -> Unavailable:
    """The error of a response that was stopped before it had begun."""
    return Unavailable("the server stops", reason="NOT_SERVING", retry_after_s=5.0)
