"""The paths of responses and conversations."""

from starlette.routing import BaseRoute

from jaxctx_server.http.endpoint import CHAT, api_route
from jaxctx_server.http.headers import CONTEXT_CACHE_HEADERS
from jaxctx_server.http.openai.responses.conversations import (
    create_conversation,
    create_items,
    delete_conversation,
    delete_item,
    get_conversation,
    get_item,
    list_items,
    update_conversation,
)
from jaxctx_server.http.openai.responses.create import create_response
from jaxctx_server.http.openai.responses.errors import RESPONSES_ERRORS
from jaxctx_server.http.openai.responses.routes import (
    cancel_response,
    count_input_tokens,
    delete_response,
    get_response,
    list_input_items,
)
from jaxctx_server.http.openai.responses.websocket import answer_create_event, error_event
from jaxctx_server.http.websocket import websocket_route

GENERATE = "/jaxctx.v1.ContextService/Generate"
APPLY_CHAT_TEMPLATE = "/jaxctx.v1.ModelService/ApplyChatTemplate"
GET_SNAPSHOT = "/jaxctx.v1.SnapshotService/GetSnapshot"
DELETE_SNAPSHOT = "/jaxctx.v1.SnapshotService/DeleteSnapshot"
SAVE = "/jaxctx.v1.SnapshotService/Save"
RESPONSE, CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"


def response_routes() -> list[BaseRoute]:
    """All paths of responses and conversations."""
    return [
        websocket_route("/v1/responses", answer_create_event, error_event, method=GENERATE, operation=CHAT),
        api_route(
            "/v1/responses",
            create_response,
            ["POST"],
            method=GENERATE,
            errors=RESPONSES_ERRORS,
            headers=CONTEXT_CACHE_HEADERS,
            operation=CHAT,
        ),
        api_route("/v1/responses/input_tokens", count_input_tokens, ["POST"], method=APPLY_CHAT_TEMPLATE),
        api_route(RESPONSE, get_response, method=GET_SNAPSHOT, errors=RESPONSES_ERRORS),
        api_route(RESPONSE, delete_response, ["DELETE"], method=DELETE_SNAPSHOT),
        api_route(f"{RESPONSE}/input_items", list_input_items, method=GET_SNAPSHOT),
        api_route(f"{RESPONSE}/cancel", cancel_response, ["POST"], method=GET_SNAPSHOT, reads_body=False),
        api_route("/v1/conversations", create_conversation, ["POST"], method=SAVE),
        api_route(CONVERSATION, get_conversation, method=GET_SNAPSHOT),
        api_route(CONVERSATION, update_conversation, ["POST"], method=SAVE),
        api_route(CONVERSATION, delete_conversation, ["DELETE"], method=DELETE_SNAPSHOT),
        api_route(f"{CONVERSATION}/items", create_items, ["POST"], method=SAVE),
        api_route(f"{CONVERSATION}/items", list_items, method=GET_SNAPSHOT),
        api_route(f"{CONVERSATION}/items/{{item_id}}", get_item, method=GET_SNAPSHOT),
        api_route(f"{CONVERSATION}/items/{{item_id}}", delete_item, ["DELETE"], method=SAVE),
    ]
