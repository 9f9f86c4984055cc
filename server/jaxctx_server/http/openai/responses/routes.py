"""Responses that are stored: read, delete, list the items of the input, count tokens."""

from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.model_service_pb2 import ApplyChatTemplateRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import json_response
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.openai.responses.create import begin_conversation, whole_conversation
from jaxctx_server.http.openai.responses.lists import page_of_items
from jaxctx_server.http.openai.responses.record import RESPONSE_PREFIX, load_conversation
from jaxctx_server.http.openai.responses.request import parse_responses_request
from jaxctx_server.http.stored import delete_state

Json = dict[str, Any]
FIELD = "response_id"


async def get_response(call: HttpCall) -> Response:
    """GET /v1/responses/{response_id}."""
    if call.request.query_params.get("stream", "false") != "false":
        raise InvalidArgument.field("stream", "is not supported here: the response is complete")
    stored = await load_conversation(call, call.request.path_params[FIELD], FIELD, RESPONSE_PREFIX)
    return json_response(stored.resource)


async def delete_response(call: HttpCall) -> Response:
    """DELETE /v1/responses/{response_id}. Responses that continue it remain."""
    response_id = call.request.path_params[FIELD]
    await load_conversation(call, response_id, FIELD, RESPONSE_PREFIX)
    await delete_state(call, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(call: HttpCall) -> Response:
    """GET /v1/responses/{response_id}/input_items: all items before its output, those of earlier responses too."""
    stored = await load_conversation(call, call.request.path_params[FIELD], FIELD, RESPONSE_PREFIX)
    return json_response(page_of_items(stored.input_items, call.request.query_params))


async def cancel_response(call: HttpCall) -> Response:
    """POST /v1/responses/{response_id}/cancel: only responses in the background could be, and there are none."""
    await load_conversation(call, call.request.path_params[FIELD], FIELD, RESPONSE_PREFIX)
    raise InvalidArgument.field(FIELD, "is complete: only a response that is made in the background can be cancelled")


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
