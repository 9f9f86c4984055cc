"""The description of the paths and headers of the context cache."""

from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    header_parameter,
    json_or_events_response,
    json_response,
    nullable,
    operation,
    path_parameter,
    query_parameter,
    schema_ref,
)
from jaxctx_server.http.contextcache.headers import CACHE_HEADER, MAX_TTL_S, MODES
from jaxctx_server.http.headers import ID_HEADER, MODE_HEADER, TTL_HEADER

TAG = "context cache"
DESCRIPTION = "Contexts that are kept under a session id between requests, until their time to live ends."
ERRORS = (404, 409, 499, 504)
COUNT: Json = {"type": "integer", "minimum": 0}
TEXT: Json = {"type": "string"}
SECONDS: Json = {"type": "integer", "minimum": 1, "maximum": MAX_TTL_S}
SESSION_ID: Json = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9._~-]+$"}
ID = header_parameter(ID_HEADER, "The context that is continued; when one is made, the id that it gets.", SESSION_ID)
TTL = header_parameter(TTL_HEADER, "How long to keep the context from now on, in seconds.", SECONDS)
MODE = header_parameter(
    MODE_HEADER,
    "full: the request has the whole prompt; append: only what follows what the context has. Needs x-session-id.",
    {"enum": list(MODES)},
)
SESSION_PARAMETERS = [ID, TTL, MODE]
"""The headers of the paths that generate."""

CONTEXT_FIELDS: Json = {
    "id": SESSION_ID,
    "object": {"const": "context"},
    "session_id": SESSION_ID,
    "model": TEXT,
    "created_at": {**COUNT, "description": "Seconds since 1970."},
    "used_at": {**COUNT, "description": "When its last version was saved."},
    "ttl_s": {**nullable(COUNT), "description": "null: it is kept for ever."},
    "sliding": {"const": True, "description": "Every use starts the time to live again."},
    "expires_at": nullable(COUNT),
    "remaining_s": nullable({"type": "number", "minimum": 0}),
    "tokens": COUNT,
    "bytes": COUNT,
    "pages": COUNT,
    "durable": {"type": "boolean", "description": "Whether it survives the server."},
    "tier": {"enum": ["store", "memory"]},
    "version": {"type": "integer", "minimum": 1, "description": "How often it was made or used."},
    "forked_from": nullable(TEXT),
}


def closed(properties: Json) -> Json:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


SCHEMAS: dict[str, Json] = {
    "CacheReport": closed(
        {
            "status": {"enum": ["created", "hit", "partial", "miss"]},
            "reason": nullable({"enum": ["prompt_changed", "salt_changed", "model_revision_changed", "evicted"]}),
            "stored_tokens": {**COUNT, "description": "That the context had."},
            "reused_tokens": {**COUNT, "description": "Of these, those that the prompt begins with."},
            "missed_tokens": {**COUNT, "description": "That could have been reused, had nothing changed."},
            "first_difference": {**nullable(COUNT), "description": "The first token of the prompt that differs."},
            "recomputed_tokens": {**COUNT, "description": "Whose keys and values were lost."},
        }
    ),
    "KeptContext": closed(CONTEXT_FIELDS),
    "KeptContextList": closed(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": schema_ref("KeptContext")},
            "has_more": {"type": "boolean"},
            "next_page_token": TEXT,
        }
    ),
    "KeptContextUpdate": {
        "anyOf": [
            closed({"ttl_s": {**SECONDS, "description": "From now on."}}),
            closed({"permanent": {"const": True}}),
        ]
    },
    "KeptContextDeleted": closed(
        {"id": TEXT, "object": {"const": "context.deleted"}, "session_id": TEXT, "deleted": {"const": True}}
    ),
}
CREATE_SCHEMA: Json = {"anyOf": [schema_ref("CompletionRequest"), schema_ref("ChatCompletionRequest")]}


def contextcache_description() -> ApiDescription:
    """The paths of the context cache."""
    one, of_path = "/v1/context/{session_id}", [path_parameter("session_id", "The context.", TEXT)]
    context = json_response("The context.", schema_ref("KeptContext"))
    paging = [
        query_parameter("limit", "Contexts of a page.", {"type": "integer", "minimum": 1, "maximum": 100}),
        query_parameter("page_token", "`next_page_token` of the page before.", {"type": "string", "maxLength": 256}),
    ]
    return ApiDescription(
        tag=TAG,
        description=DESCRIPTION,
        paths={
            "/v1/context": {
                "post": create_operation(),
                "get": described(
                    "list_contexts",
                    "The caller's contexts, in the order of their ids",
                    json_response("A page of them.", schema_ref("KeptContextList")),
                    paging,
                ),
            },
            one: {
                "get": described("get_context", "A context; to look at it is no use of it", context, of_path),
                "patch": described(
                    "update_context", "Change how long it is kept", context, of_path, schema_ref("KeptContextUpdate")
                ),
                "delete": described(
                    "delete_context",
                    "Delete a context",
                    json_response("It is deleted.", schema_ref("KeptContextDeleted")),
                    of_path,
                ),
            },
            f"{one}/fork": {
                "post": described(
                    "fork_context",
                    "Another context that begins as this one stands",
                    context,
                    [*of_path, ID, TTL],
                    {"type": "object"},
                )
            },
        },
        schemas=SCHEMAS,
    )


def create_operation() -> Json:
    """POST /v1/context."""
    whole = {"anyOf": [schema_ref("Completion"), schema_ref("ChatCompletion")]}
    chunk = {"anyOf": [schema_ref("Completion"), schema_ref("ChatCompletionChunk")]}
    success = json_or_events_response("The answer, of completions or of chat. The context is kept.", whole, chunk)
    success["headers"] = {
        ID_HEADER: {"description": "The context.", "schema": SESSION_ID},
        CACHE_HEADER: {"description": "How much was reused, and why not all.", "schema": TEXT},
    }
    return operation(
        operation_id="create_context",
        tag=TAG,
        summary="Make a context of a prompt and its output",
        success=success,
        body=CREATE_SCHEMA,
        example={"prompt": "def fib(n):", "max_tokens": 0},
        parameters=[ID, TTL],
        errors=ERRORS,
    )


def described(operation_id: str, summary: str, success: Json, parameters: list[Json], body: Json | None = None) -> Json:
    """One operation."""
    return operation(
        operation_id=operation_id,
        tag=TAG,
        summary=summary,
        success=success,
        parameters=parameters,
        body=body,
        errors=ERRORS,
    )
