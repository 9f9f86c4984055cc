"""The description of the paths of responses and conversations."""

from jaxctx_server.http.api_description import (
    ERRORS_OF_A_BODY,
    ApiDescription,
    Json,
    error_response,
    json_or_events_response,
    json_response,
    nullable,
    operation,
    path_parameter,
    query_parameter,
    schema_ref,
)
from jaxctx_server.http.contextcache.openapi import SESSION_PARAMETERS

TAG = "responses"
DESCRIPTION = "Responses and conversations of the OpenAI API: stored, and continued without computing them again."
TEXT: Json = {"type": "string", "maxLength": 2 << 20}
COUNT: Json = {"type": "integer", "minimum": 0}
METADATA: Json = {
    "type": "object",
    "maxProperties": 16,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
CALL_ID: Json = {"type": "string", "maxLength": 256}


def typed(kind: str, required: list[str], properties: Json) -> Json:
    """The schema of an object with a type."""
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}, **properties}}


CONTENT: Json = {
    "anyOf": [TEXT, {"type": "array", "maxItems": 64, "items": typed("input_text", ["text"], {"text": TEXT})}]
}
SCHEMAS: dict[str, Json] = {
    "InputItem": {
        "anyOf": [
            {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "type": {"const": "message"},
                    "role": {"enum": ["user", "system", "developer"]},
                    "content": CONTENT,
                },
            },
            typed(
                "function_call",
                ["call_id", "name", "arguments"],
                {
                    "call_id": CALL_ID,
                    "name": {"type": "string", "minLength": 1, "maxLength": 256},
                    "arguments": {"type": "string", "description": "JSON", "pattern": r"^\{\}$"},
                },
            ),
            typed("function_call_output", ["call_id", "output"], {"call_id": CALL_ID, "output": CONTENT}),
        ]
    },
    "FunctionTool": typed(
        "function",
        ["name"],
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9_-]+$"},
            "description": {"type": "string"},
            "parameters": nullable({"type": "object"}),
        },
    ),
    "ResponseRequest": {
        "type": "object",
        "required": ["input"],
        "properties": {
            "model": nullable({"type": "string", "maxLength": 256}),
            "input": {
                "anyOf": [
                    {**TEXT, "minLength": 1},
                    {"type": "array", "minItems": 1, "maxItems": 256, "items": schema_ref("InputItem")},
                ]
            },
            "instructions": nullable(TEXT),
            "previous_response_id": nullable({"type": "string"}),
            "conversation": nullable({"type": "string"}),
            "store": nullable({"type": "boolean", "description": "Not false with background."}),
            "background": nullable({"type": "boolean"}),
            "stream": nullable({"type": "boolean"}),
            "max_output_tokens": nullable({"type": "integer", "minimum": 1}),
            "temperature": nullable({"type": "number", "minimum": 0, "maximum": 100}),
            "top_p": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
            "metadata": nullable(METADATA),
            "tools": nullable({"type": "array", "maxItems": 128, "items": schema_ref("FunctionTool")}),
            "tool_choice": nullable({"enum": ["auto", "none", "required"]}),
            "parallel_tool_calls": nullable({"type": "boolean"}),
        },
    },
    "Response": {
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "response"},
            "created_at": COUNT,
            "status": {"enum": ["completed", "incomplete", "in_progress", "failed", "queued", "cancelled"]},
            "background": {"type": "boolean"},
            "model": {"type": "string"},
            "output": {"type": "array", "items": schema_ref("Item")},
            "usage": nullable({"type": "object"}),
            "session_id": {"type": "string"},
            "cache": schema_ref("CacheReport"),
        },
    },
    "Item": {"type": "object", "required": ["id", "type"], "properties": {"id": {"type": "string"}}},
    "ItemList": {
        "type": "object",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": schema_ref("Item")},
            "first_id": nullable({"type": "string"}),
            "last_id": nullable({"type": "string"}),
            "has_more": {"type": "boolean"},
        },
    },
    "ResponseEvent": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"type": "string"}, "sequence_number": COUNT},
    },
    "Deleted": {
        "type": "object",
        "required": ["id", "object", "deleted"],
        "properties": {"id": {"type": "string"}, "object": {"type": "string"}, "deleted": {"const": True}},
    },
    "InputTokens": {
        "type": "object",
        "required": ["object", "input_tokens"],
        "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": COUNT},
    },
    "Conversation": {
        "type": "object",
        "required": ["id", "object", "created_at", "metadata"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "conversation"},
            "created_at": COUNT,
            "metadata": METADATA,
        },
    },
    "ConversationRequest": {
        "type": "object",
        "properties": {
            "metadata": nullable(METADATA),
            "items": nullable({"type": "array", "maxItems": 20, "items": schema_ref("InputItem")}),
        },
    },
    "ConversationUpdate": {"type": "object", "properties": {"metadata": nullable(METADATA)}},
    "ItemsRequest": {
        "type": "object",
        "required": ["items"],
        "properties": {"items": {"type": "array", "minItems": 1, "maxItems": 20, "items": schema_ref("InputItem")}},
    },
}
RESPONSE_ID = path_parameter("response_id", "The response.", {"type": "string"})
CONVERSATION_ID = path_parameter("conversation_id", "The conversation.", {"type": "string"})
ITEM_ID = path_parameter("item_id", "The item.", {"type": "string"})
PAGE = [
    query_parameter("limit", "Items of a page.", {"type": "integer", "minimum": 1, "maximum": 100}),
    query_parameter("order", "By time; the default is desc.", {"enum": ["asc", "desc"]}),
    query_parameter("after", "The id of the item before the page.", {"type": "string"}),
    query_parameter("before", "The id of the item behind the page.", {"type": "string"}),
]
EVENTS_OF_RESPONSE = [
    query_parameter("stream", "Tell the events of a response in the background.", {"type": "boolean"}),
    query_parameter("starting_after", "The number of the event behind which they begin.", COUNT),
]
STORED_ERRORS = (404, 409, 499, 504)


def links(parameter: str, *operation_ids: str) -> Json:
    """Links from a response to the operations on what it made, whose id they get as this parameter."""
    return {name: {"operationId": name, "parameters": {parameter: "$response.body#/id"}} for name in operation_ids}


def responses_description() -> ApiDescription:
    """The description of responses and conversations."""
    return ApiDescription(
        tag=TAG, description=DESCRIPTION, paths={**response_paths(), **conversation_paths()}, schemas=SCHEMAS
    )


def described(operation_id: str, summary: str, success: Json, parameters: list[Json], body: str = "") -> Json:
    """One operation on what is stored."""
    return operation(
        operation_id=operation_id,
        tag=TAG,
        summary=summary,
        success=success,
        parameters=parameters,
        body=schema_ref(body) if body else None,
        errors=STORED_ERRORS,
    )


def response_paths() -> dict[str, Json]:
    """The paths of responses."""
    whole = json_or_events_response(
        "The response, or with `stream` its events; it is stored by then. With `background` it as it has begun.",
        schema_ref("Response"),
        schema_ref("ResponseEvent"),
    )
    whole["links"] = links("response_id", "get_response", "list_input_items", "cancel_response", "delete_response")
    counted = json_response("The number.", schema_ref("InputTokens"))
    stored = json_response("The response.", schema_ref("Response"))
    deleted = json_response("It is deleted.", schema_ref("Deleted"))
    items = json_response("A page of items.", schema_ref("ItemList"))
    one = "/v1/responses/{response_id}"
    told = json_or_events_response(
        "The response; of one in the background with `stream` its events.",
        schema_ref("Response"),
        schema_ref("ResponseEvent"),
    )
    cancel = described("cancel_response", "End a response in the background", stored, [RESPONSE_ID])
    for status in ERRORS_OF_A_BODY:  # a POST has one, be it empty
        cancel["responses"][str(status)] = error_response(status, "Error")
    return {
        "/v1/responses": {
            "post": described(
                "create_response", "A response that continues others", whole, SESSION_PARAMETERS, "ResponseRequest"
            )
        },
        "/v1/responses/input_tokens": {
            "post": described("count_input_tokens", "Tokens of an input", counted, [], "ResponseRequest")
        },
        one: {
            "get": described("get_response", "A stored response", told, [RESPONSE_ID, *EVENTS_OF_RESPONSE]),
            "delete": described("delete_response", "Delete a response", deleted, [RESPONSE_ID]),
        },
        f"{one}/input_items": {"get": described("list_input_items", "Items of the input", items, [RESPONSE_ID, *PAGE])},
        f"{one}/cancel": {"post": cancel},
    }


def conversation_paths() -> dict[str, Json]:
    """The paths of conversations."""
    conversation = json_response("The conversation.", schema_ref("Conversation"))
    deleted = json_response("It is deleted.", schema_ref("Deleted"))
    items = json_response("A page of items.", schema_ref("ItemList"))
    item = json_response("The item.", schema_ref("Item"))
    one, of_one = "/v1/conversations/{conversation_id}", [CONVERSATION_ID]
    made = conversation | {
        "links": links(
            "conversation_id",
            *("get_conversation", "update_conversation", "list_conversation_items", "create_conversation_items"),
            "delete_conversation",
        )
    }
    create = described("create_conversation", "A conversation", made, [], "ConversationRequest")
    return {
        "/v1/conversations": {"post": create},
        one: {
            "get": described("get_conversation", "A conversation", conversation, of_one),
            "post": described("update_conversation", "Change its notes", conversation, of_one, "ConversationUpdate"),
            "delete": described("delete_conversation", "Delete a conversation", deleted, of_one),
        },
        f"{one}/items": {
            "get": described("list_conversation_items", "Its items", items, [*of_one, *PAGE]),
            "post": described("create_conversation_items", "Add items", items, of_one, "ItemsRequest"),
        },
        f"{one}/items/{{item_id}}": {
            "get": described("get_conversation_item", "An item", item, [*of_one, ITEM_ID]),
            "delete": described("delete_conversation_item", "The same without it", conversation, [*of_one, ITEM_ID]),
        },
    }
