"""Conversations: items under an id, to which responses add theirs. Each is a stored state, as a response is.

To add items is to open the state, fill them and save it as the next version. To delete one, the conversation is
written anew without it; what stands before the item is found in the cache.
"""

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from jaxctx.errors import Aborted, InvalidArgument, NotFound
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import CreateContextRequest, FillRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import json_response
from jaxctx_server.http.generation import Generation, OpenedFrom, close_contexts, run
from jaxctx_server.http.openai.request import parse_object
from jaxctx_server.http.openai.responses.items import chat_messages, new_id, parse_items
from jaxctx_server.http.openai.responses.lists import page_of_items
from jaxctx_server.http.openai.responses.making import whole_conversation
from jaxctx_server.http.openai.responses.record import (
    CONVERSATION_PREFIX,
    Conversation,
    StoredConversation,
    conversation_ttl,
    load_conversation,
    state_document,
)
from jaxctx_server.http.openai.responses.request import check_metadata
from jaxctx_server.http.stored import check_document, delete_state, save_state

Json = dict[str, Any]
FIELD = "conversation_id"
MAX_NEW_ITEMS = 20


async def create_conversation(call: HttpCall) -> Response:
    """POST /v1/conversations."""
    fields = await call.parse_body(parse_object)
    metadata, items = fields.get("metadata", {}), list_of_items(fields)
    check_metadata(metadata)
    resource: Json = {
        "id": new_id("conv"),
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": metadata,
    }
    conversation = Conversation(instructions=None, tools=(), items=items)
    await write(call, resource, conversation, "", replaces=None)
    return json_response(resource)


async def get_conversation(call: HttpCall) -> Response:
    """GET /v1/conversations/{conversation_id}."""
    return json_response((await stored_conversation(call)).resource)


async def update_conversation(call: HttpCall) -> Response:
    """POST /v1/conversations/{conversation_id}: other notes."""
    fields = await call.parse_body(parse_object)
    metadata = fields.get("metadata", {})
    check_metadata(metadata)
    stored = await stored_conversation(call)
    resource = {**stored.resource, "metadata": metadata}
    await extend(call, stored, resource, ())
    return json_response(resource)


async def delete_conversation(call: HttpCall) -> Response:
    """DELETE /v1/conversations/{conversation_id}. Responses that were made in it remain."""
    stored = await stored_conversation(call)
    await delete_state(call, stored.state.name)
    return json_response({"id": stored.state.name, "object": "conversation.deleted", "deleted": True})


async def create_items(call: HttpCall) -> Response:
    """POST /v1/conversations/{conversation_id}/items."""
    items = list_of_items(await call.parse_body(parse_object))
    if not items:
        raise InvalidArgument.field("items", "must have at least one item")
    stored = await stored_conversation(call)
    await extend(call, stored, stored.resource, items)
    return json_response(page_of_items(items, {"order": "asc", "limit": "100"}))


async def list_items(call: HttpCall) -> Response:
    """GET /v1/conversations/{conversation_id}/items."""
    stored = await stored_conversation(call)
    return json_response(page_of_items(stored.conversation.items, call.request.query_params))


async def get_item(call: HttpCall) -> Response:
    """GET /v1/conversations/{conversation_id}/items/{item_id}."""
    stored = await stored_conversation(call)
    return json_response(item_of(stored, call.request.path_params["item_id"]))


async def delete_item(call: HttpCall) -> Response:
    """DELETE /v1/conversations/{conversation_id}/items/{item_id}: the conversation without it."""
    stored = await stored_conversation(call)
    item = item_of(stored, call.request.path_params["item_id"])
    held = stored.conversation
    items = [each for each in held.items if each["id"] != item["id"]]
    conversation = Conversation(instructions=held.instructions, tools=held.tools, items=items)
    await write(call, stored.resource, conversation, stored.model_id, replaces=stored.state.version)
    return json_response(stored.resource)


def list_of_items(fields: Json) -> list[Json]:
    """The items of a body. Raises InvalidArgument naming the field."""
    values = fields.get("items", [])
    if not isinstance(values, list) or len(values) > MAX_NEW_ITEMS:
        raise InvalidArgument.field("items", f"must be a list of up to {MAX_NEW_ITEMS} items")
    return parse_items(values, "items")


def item_of(stored: StoredConversation, item_id: str) -> Json:
    """An item of a conversation. Raises NotFound."""
    for item in stored.conversation.items:
        if item["id"] == item_id:
            return item
    raise NotFound(f"item_id: there is no {item_id[:80]!r}", reason="SNAPSHOT_NOT_FOUND")


async def stored_conversation(call: HttpCall) -> StoredConversation:
    """The conversation that the path names. Raises NotFound."""
    return await load_conversation(call, call.request.path_params[FIELD], FIELD, CONVERSATION_PREFIX)


async def extend(call: HttpCall, stored: StoredConversation, resource: Json, items: Sequence[Json]) -> None:
    """Save the next version of a conversation, with more items."""
    held = stored.conversation
    conversation = Conversation(instructions=held.instructions, tools=held.tools, items=[*held.items, *items])
    if not held.items and held.instructions is None:
        await write(call, resource, conversation, stored.model_id, replaces=stored.state.version)
        return
    source = OpenedFrom(stored.state.name, stored.state.version)
    content = ChatMessages(messages=chat_messages(items), tools=held.tools, add_generation_prompt=False)
    fill = FillRequest(messages=content) if items else None
    generation = Generation(create=CreateContextRequest(), source=source, fill=fill)
    await save_generation(call, generation, resource, conversation, stored.state.version)


async def write(
    call: HttpCall, resource: Json, conversation: Conversation, model_id: str, *, replaces: int | None
) -> None:
    """Save a conversation that is written from its start, computed by this model ("": the server's)."""
    messages = whole_conversation(conversation)
    content = ChatMessages(messages=messages, tools=conversation.tools, add_generation_prompt=False)
    fill = FillRequest(messages=content) if messages else None
    generation = Generation(create=CreateContextRequest(model_id=model_id), fill=fill)
    await save_generation(call, generation, resource, conversation, replaces)


async def save_generation(
    call: HttpCall, generation: Generation, resource: Json, conversation: Conversation, replaces: int | None
) -> None:
    """Fill, and save the state under the id of the conversation. Raises Aborted if it was changed meanwhile."""
    generation.keep = True
    # Before anything is computed for it; the model is known only then.
    await check_document(call, state_document(resource, conversation, generation.create.model_id), "items")
    try:
        async for _ in run(call, generation):
            pass
        document = state_document(resource, conversation, generation.model_id)
        await save_state(
            call,
            generation.context_id,
            resource["id"],
            document,
            conversation_ttl(call),
            replaces=replaces,
            field="items",
            name_is_drawn=True,
        )
    except Aborted:
        raise Aborted("the conversation was changed meanwhile", reason="VERSION_MISMATCH") from None
    finally:
        call.frontend.run_in_background(close_contexts(call, generation.context_ids))
