"""Responses that are stored: read, stream again, cancel, delete, list the items of the input, count tokens."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.model_service_pb2 import ApplyChatTemplateRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import json_response
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.large_json import large_json_response
from jaxctx_server.http.openai.responses.lists import page_of_items
from jaxctx_server.http.openai.responses.making import begin_conversation, whole_conversation
from jaxctx_server.http.openai.responses.progress import is_begun, last_event_of, response_resource
from jaxctx_server.http.openai.responses.record import RESPONSE_PREFIX, StoredConversation, load_conversation
from jaxctx_server.http.openai.responses.replay import Deltas, has_output, numbered_replay
from jaxctx_server.http.openai.responses.request import parse_responses_request
from jaxctx_server.http.stored import delete_state

Json = dict[str, Any]
FIELD = "response_id"
MAX_NUMBER_DIGITS = 12


async def get_response(call: HttpCall) -> Response:
    """GET /v1/responses/{response_id}: it as it is now, or with `stream` its events behind `starting_after`."""
    response_id, query = call.request.path_params[FIELD], call.request.query_params
    streams, starting_after = query_truth(query, "stream"), event_number(query)
    running = call.frontend.background_responses.find(call.caller.tenant, response_id)
    if running is not None:
        if streams:
            return EventStream(running.log.follow(starting_after))
        return await large_json_response(call, running.resource())
    stored = await load_conversation(call, response_id, FIELD, RESPONSE_PREFIX)
    resource = response_resource(call, stored)
    if streams:
        return EventStream(past_events(stored, resource, starting_after))
    return await large_json_response(call, resource)


async def past_events(stored: StoredConversation, resource: Json, starting_after: int) -> AsyncGenerator[str, None]:
    """The events of a response that has ended, once more. Raises InvalidArgument if there are none to be had."""
    if resource.get("background") is not True or not has_output(resource):
        raise InvalidArgument.field("stream", "must be false: only a response in the background is streamed again")
    if is_begun(resource):
        raise InvalidArgument.field("stream", "must be false: another server makes the response, and has its events")
    last_event = last_event_of(stored) if is_begun(stored.resource) else 0
    for event in numbered_replay(resource, Deltas.read(stored.state.document), last_event, starting_after):
        yield event


def query_truth(query: Mapping[str, str], name: str) -> bool:
    """A truth value of the query, false if it is not there. Raises InvalidArgument."""
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidArgument.field(name, "must be true or false")
    return text == "true"


def event_number(query: Mapping[str, str]) -> int:
    """The number of the event behind which the events begin; -1: all of them. Raises InvalidArgument."""
    text = query.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS):
        raise InvalidArgument.field("starting_after", "must be the number of an event")
    return int(text)


async def delete_response(call: HttpCall) -> Response:
    """DELETE /v1/responses/{response_id}. Responses that continue it remain; one that is being made is ended."""
    response_id = call.request.path_params[FIELD]
    running = call.frontend.background_responses.find(call.caller.tenant, response_id)
    if running is not None:
        await running.cancel()
    await load_conversation(call, response_id, FIELD, RESPONSE_PREFIX)
    await delete_state(call, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(call: HttpCall) -> Response:
    """GET /v1/responses/{response_id}/input_items: all items before its output, those of earlier responses too."""
    stored = await load_conversation(call, call.request.path_params[FIELD], FIELD, RESPONSE_PREFIX)
    return json_response(page_of_items(stored.input_items, call.request.query_params))


async def cancel_response(call: HttpCall) -> Response:
    """POST /v1/responses/{response_id}/cancel: end a response in the background; one that has ended is as it was.

    Raises InvalidArgument for any other response.
    """
    response_id = call.request.path_params[FIELD]
    running = call.frontend.background_responses.find(call.caller.tenant, response_id)
    if running is not None:
        await running.cancel()
        return await large_json_response(call, running.resource())
    stored = await load_conversation(call, response_id, FIELD, RESPONSE_PREFIX)
    resource = response_resource(call, stored)
    if resource.get("background") is not True:
        raise InvalidArgument.field(FIELD, "must be that of a response in the background: no other can be cancelled")
    if is_begun(resource):
        raise InvalidArgument.field(FIELD, "is that of a response that another server makes, which alone can end it")
    return await large_json_response(call, resource)


async def count_input_tokens(call: HttpCall) -> Response:
    """POST /v1/responses/input_tokens: the tokens that a response would have as its prompt."""
    request = await call.parse_body(parse_responses_request)
    try:
        _, conversation = await begin_conversation(call, request)
        messages = ChatMessages(
            messages=whole_conversation(conversation), tools=conversation.tools, add_generation_prompt=True
        )
        message = ApplyChatTemplateRequest(model_id=request.create.model_id, messages=messages)
        rendered = await call.unary(call.services.models.apply_chat_template, message)
    except JaxctxError as error:
        raise renamed(error, request.field_names) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(rendered.tokens)})
