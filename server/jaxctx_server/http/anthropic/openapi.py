"""The description of the paths of the Anthropic API."""

from jaxctx_server.http.anthropic.errors import KNOWN_TYPES
from jaxctx_server.http.anthropic.request import THINKING_OF_KIND
from jaxctx_server.http.anthropic.tools import MAX_OFFERED_TOOLS
from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    json_or_events_response,
    json_response,
    nullable,
    operation,
    schema_ref,
)
from jaxctx_server.http.tools import MAX_TOOLS

TAG = "anthropic"
DESCRIPTION = "The Anthropic API: messages."
TEXT: Json = {"type": "string", "maxLength": 2 << 20}
COUNT: Json = {"type": "integer", "minimum": 0}
BLOCKS: Json = {"anyOf": [TEXT, {"type": "array", "items": schema_ref("AnthropicBlock"), "maxItems": 1024}]}
PROMPT: dict[str, Json] = {
    "model": nullable({"type": "string", "maxLength": 256}),
    "messages": {"type": "array", "minItems": 1, "maxItems": 256, "items": schema_ref("AnthropicMessage")},
    "system": nullable({"anyOf": [TEXT, {"type": "array", "items": schema_ref("AnthropicTextBlock")}]}),
    "tools": nullable(
        {
            "type": "array",
            "maxItems": MAX_OFFERED_TOOLS,
            "items": schema_ref("AnthropicTool"),
            "description": f"Up to {MAX_TOOLS} of them without `defer_loading`.",
        }
    ),
    "tool_choice": nullable(schema_ref("AnthropicToolChoice")),
    "thinking": nullable(
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(THINKING_OF_KIND)}}}
    ),
    "cache_salt": nullable({"type": "string", "maxLength": 256}),
}
SCHEMAS: dict[str, Json] = {
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "additionalProperties": False,
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message", "code", "param"],
                "additionalProperties": False,
                "properties": {
                    "type": {"type": "string", "enum": sorted(KNOWN_TYPES)},
                    "message": {"type": "string"},
                    "code": {"type": "string"},
                    "param": nullable({"type": "string"}),
                },
            },
        },
    },
    "AnthropicTextBlock": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": TEXT},
    },
    "AnthropicBlock": {
        "anyOf": [
            schema_ref("AnthropicTextBlock"),
            {
                "type": "object",
                "required": ["type", "id", "name", "input"],
                "properties": {
                    "type": {"const": "tool_use"},
                    "id": {"type": "string", "maxLength": 256},
                    "name": {"type": "string", "minLength": 1, "maxLength": 256},
                    "input": {"type": "object"},
                },
            },
            {
                "type": "object",
                "required": ["type", "tool_use_id"],
                "properties": {
                    "type": {"const": "tool_result"},
                    "tool_use_id": {"type": "string", "maxLength": 256},
                    "content": nullable(
                        {"anyOf": [TEXT, {"type": "array", "items": schema_ref("AnthropicTextBlock")}]}
                    ),
                },
            },
            {
                "type": "object",
                "required": ["type", "thinking"],
                "properties": {"type": {"const": "thinking"}, "thinking": TEXT},
            },
        ]
    },
    "AnthropicMessage": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": BLOCKS},
    },
    "AnthropicTool": {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {
            "type": {"enum": ["custom"]},
            "name": {"type": "string", "minLength": 1, "maxLength": 256},
            "description": {"type": "string"},
            "input_schema": {"type": "object"},
            "defer_loading": nullable({"type": "boolean"}),
        },
    },
    "AnthropicToolChoice": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": {"type": "string"},
            "disable_parallel_tool_use": {"type": "boolean"},
        },
    },
    "AnthropicCountRequest": {"type": "object", "required": ["messages"], "properties": PROMPT},
    "AnthropicRequest": {
        "type": "object",
        "required": ["messages", "max_tokens"],
        "properties": {
            **PROMPT,
            "max_tokens": {**COUNT, "description": "0: only compute the prompt, so that later requests find it."},
            "stop_sequences": nullable(
                {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 256}}
            ),
            "stream": nullable({"type": "boolean"}),
            "temperature": nullable({"type": "number", "minimum": 0, "maximum": 100}),
            "top_p": nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
            "top_k": nullable(COUNT),
            "diagnostics": nullable(
                {
                    "type": "object",
                    "properties": {"previous_message_id": nullable({"type": "string"})},
                    "description": "Say why tokens of that message's prompt were not reused.",
                }
            ),
        },
    },
    "AnthropicUsage": {
        "type": "object",
        "required": [
            "input_tokens",
            "cache_read_input_tokens",
            "cache_creation_input_tokens",
            "output_tokens",
        ],
        "additionalProperties": False,
        "properties": {
            "input_tokens": COUNT,
            "cache_read_input_tokens": {**COUNT, "description": "Tokens of the prompt that were not computed."},
            "cache_creation_input_tokens": {**COUNT, "description": "Tokens of the prompt that later requests find."},
            "output_tokens": COUNT,
        },
    },
    "AnthropicAnswer": {
        "type": "object",
        "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
        "properties": {
            "id": {"type": "string"},
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": {"type": "string"},
            "content": {"type": "array", "items": {"type": "object", "required": ["type"]}},
            "stop_reason": nullable({"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}),
            "stop_sequence": nullable({"type": "string"}),
            "usage": schema_ref("AnthropicUsage"),
            "diagnostics": nullable({"type": "object"}),
        },
    },
    "AnthropicEvent": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
    "AnthropicCount": {
        "type": "object",
        "required": ["input_tokens"],
        "additionalProperties": False,
        "properties": {"input_tokens": COUNT},
    },
}
EXAMPLE: Json = {"max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}


def anthropic_description() -> ApiDescription:
    """The description of the Anthropic API."""
    answer = json_or_events_response(
        "The answer, or with `stream` its events from message_start to message_stop.",
        schema_ref("AnthropicAnswer"),
        schema_ref("AnthropicEvent"),
    )
    create = operation(
        operation_id="create_message",
        tag=TAG,
        summary="An answer to messages",
        success=answer,
        body=schema_ref("AnthropicRequest"),
        example=EXAMPLE,
        errors=(404, 409, 499, 504),
        error_schema="AnthropicError",
    )
    count = operation(
        operation_id="count_tokens",
        tag=TAG,
        summary="How many tokens a prompt has",
        success=json_response("The number.", schema_ref("AnthropicCount")),
        body=schema_ref("AnthropicCountRequest"),
        example={"messages": EXAMPLE["messages"]},
        errors=(404,),
        error_schema="AnthropicError",
    )
    return ApiDescription(
        tag=TAG,
        description=DESCRIPTION,
        paths={"/v1/messages": {"post": create}, "/v1/messages/count_tokens": {"post": count}},
        schemas=SCHEMAS,
    )
