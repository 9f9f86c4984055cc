"""The description of the paths of operations."""

from jaxctx_server.chat_input import MAX_MESSAGES
from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    json_response,
    nullable,
    operation,
    query_parameter,
    schema_ref,
)
from jaxctx_server.lifecycle import State

TAG = "operations"
DESCRIPTION = "Health, version, tokenizer, and this document."


def object_of(properties: Json) -> Json:
    """The schema of an object with these properties and no others."""
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


METRICS: Json = {
    "description": "All metrics, as OpenMetrics if `accept` asks for it.",
    "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")},
}
MODEL: Json = {"type": "string", "maxLength": 256}
TRUTH: Json = nullable({"type": "boolean"})
TEXT: Json = {"type": "string", "maxLength": 2 << 20}
TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "maxLength": 64},
        "content": {"anyOf": [TEXT, {"type": "array", "items": schema_ref("TokenizeTextPart")}]},
    },
}
TOKEN_SCHEMAS: dict[str, Json] = {
    "TokenizeText": {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            "model": nullable(MODEL),
            "prompt": TEXT,
            "messages": {"type": "null"},
            "add_special_tokens": TRUTH,
            "return_token_strs": TRUTH,
        },
    },
    "TokenizeTextPart": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": TEXT},
    },
    "TokenizeMessages": {
        "type": "object",
        "required": ["messages"],
        "properties": {
            "model": nullable(MODEL),
            "prompt": {"type": "null"},
            "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
            "add_special_tokens": {"enum": [False, None]},
            "add_generation_prompt": TRUTH,
            "continue_final_message": TRUTH,
            "return_token_strs": TRUTH,
            "tools": nullable({"type": "array", "items": {"type": "object"}, "maxItems": 128}),
            "chat_template_kwargs": nullable({"type": "object"}),
        },
    },
    "Tokenized": object_of(
        {
            "count": {"type": "integer", "minimum": 0},
            "max_model_len": {"type": "integer", "minimum": 1},
            "tokens": {"type": "array", "items": TOKEN_ID},
            "token_strs": nullable({"type": "array", "items": {"type": "string"}}),
        }
    ),
    "DetokenizeTokens": {
        "type": "object",
        "required": ["tokens"],
        "properties": {"model": nullable(MODEL), "tokens": {"type": "array", "items": TOKEN_ID, "maxItems": 131072}},
    },
    "TokenizerInfo": {
        "type": "object",
        "required": ["tokenizer_class", "chat_template"],
        "properties": {"tokenizer_class": {"type": "string"}, "chat_template": nullable({"type": "string"})},
    },
}


def ops_description() -> ApiDescription:
    """All paths of operations."""
    ready = object_of({"status": {"const": "ready"}})
    states = [state.value for state in State]
    alive = object_of({"status": {"const": "alive"}, "state": {"enum": states}})
    version = object_of({"version": {"type": "string"}})
    document = {"type": "object", "required": ["openapi", "paths"]}
    paths: dict[str, Json] = {
        "/health": {"get": open_to_all("GetHealth", "200 when the server takes work.", ready)},
        "/readyz": {"get": open_to_all("GetReadiness", "200 when the server takes work.", ready)},
        "/livez": {"get": open_to_all("GetLiveness", "200 as long as the process answers.", alive)},
        "/version": {"get": open_to_all("GetVersion", "The version of the server.", version)},
        "/openapi.json": {"get": open_to_all("GetOpenapi", "This document.", document)},
        "/metrics": {
            "get": operation(
                operation_id="GetMetrics",
                tag=TAG,
                summary="Metrics for Prometheus.",
                success=METRICS,
            )
        },
        "/tokenize": {
            "post": operation(
                operation_id="Tokenize",
                tag=TAG,
                summary="The tokens of a text, or of messages as the chat template writes them.",
                body={"anyOf": [schema_ref("TokenizeText"), schema_ref("TokenizeMessages")]},
                success=json_response("The tokens.", schema_ref("Tokenized")),
                errors=(404, 504),
            )
        },
        "/detokenize": {
            "post": operation(
                operation_id="Detokenize",
                tag=TAG,
                summary="The text of tokens.",
                body=schema_ref("DetokenizeTokens"),
                success=json_response("The text.", object_of({"prompt": {"type": "string"}})),
                errors=(404, 504),
            )
        },
        "/tokenizer_info": {
            "get": operation(
                operation_id="GetTokenizerInfo",
                tag=TAG,
                summary="What the model's directory says about its tokenizer, and the chat template that is used.",
                parameters=[query_parameter("model", "Whose. Empty: the server's default.", MODEL)],
                success=json_response("tokenizer_config.json.", schema_ref("TokenizerInfo")),
                errors=(404, 504),
            )
        },
    }
    return ApiDescription(tag=TAG, description=DESCRIPTION, paths=paths, schemas=TOKEN_SCHEMAS)


def open_to_all(operation_id: str, summary: str, schema: Json) -> Json:
    """An operation that needs no key."""
    success = json_response(summary, schema)
    return operation(operation_id=operation_id, tag=TAG, summary=summary, success=success, needs_key=False)
