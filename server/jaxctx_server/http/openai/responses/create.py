"""POST /v1/responses: the response, whole, as events, or made in the background."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.contextcache.use import ContextUse, UsingResponse, find_use
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.events import typed_event
from jaxctx_server.http.large_json import large_json_response, write_json
from jaxctx_server.http.openai.responses.background import respond_in_background
from jaxctx_server.http.openai.responses.making import response_events
from jaxctx_server.http.openai.responses.request import ResponsesRequest, parse_responses_request

Json = dict[str, Any]


async def create_response(call: HttpCall) -> Response:
    """POST /v1/responses."""
    request = await call.parse_body(parse_responses_request)
    call.frontend.log_unknown_fields(request.unknown_fields)
    use = await find_use(call, request.create.model_id)
    if use is None:
        return await (respond_in_background(call, request) if request.background else respond(call, request, None))
    try:
        return UsingResponse(call, use, await respond(call, in_kept_context(request, use), use))
    except BaseException:
        use.release(call)
        raise


def in_kept_context(request: ResponsesRequest, use: ContextUse) -> ResponsesRequest:
    """The same request, for a kept context: that is its state, so no response is stored beside it.

    Raises InvalidArgument for a field that asks for another state, or for another beginning of the context.
    """
    if request.previous_response_id is not None or request.conversation_id is not None:
        name = "conversation" if request.previous_response_id is None else "previous_response_id"
        raise InvalidArgument.field(name, "must not be set together with a kept context")
    if request.fields.get("store"):
        raise InvalidArgument.field("store", "must be false: the kept context is the state of the response")
    if request.background:
        raise InvalidArgument.field("background", "must not be true with a kept context, which has no stored response")
    if use.appends and request.instructions is not None:
        raise InvalidArgument.field("instructions", "must not be set with x-session-mode append: they come first")
    return replace(request, store=False)


async def respond(call: HttpCall, request: ResponsesRequest, use: ContextUse | None) -> Response:
    """The response that uses a kept context, or none."""
    events = response_events(call, request, use)
    if request.stream:
        return EventStream(numbered(call, events))
    last: Json = {}
    async with aclosing(events):
        async for event in events:
            last = event
    return await large_json_response(call, last["response"])


async def numbered(call: HttpCall, events: AsyncGenerator[Json, None]) -> AsyncGenerator[str, None]:
    """The events as server-sent events, with their numbers."""
    number = 0
    async with aclosing(events):
        async for event in events:
            numbered = {**event, "sequence_number": number}
            write = partial(typed_event, event["type"])
            yield await write_json(call, numbered, write, patient=True) if "response" in event else write(numbered)
            number += 1
