"""The description of completions and chat."""

from jaxctx_server.chat_input import MAX_MESSAGES
from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    json_or_events_response,
    nullable,
    operation,
    schema_ref,
)
from jaxctx_server.http.contextcache.openapi import SESSION_PARAMETERS
from jaxctx_server.http.openai.chat_messages import MAX_TOOL_CALLS
from jaxctx_server.http.openai.fields import EFFORTS, VERBOSITIES
from jaxctx_server.http.openai.output_format import MAX_CHOICES
from jaxctx_server.http.openai.prompts import MAX_PROMPTS
from jaxctx_server.http.openai.request import MAX_PRIORITY, MAX_TOP_LOGPROBS
from jaxctx_server.http.tools import MAX_TOOLS

TAG = "completions"
DESCRIPTION = "Completions and chat of the OpenAI API, with the fields that other servers have added."
ERRORS = (404, 409, 499, 504)

TRUTH: Json = {"type": "boolean"}
TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
TOKEN_ID: Json = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TOKEN_IDS: Json = {"type": "array", "items": TOKEN_ID}
LOGPROB: Json = {"type": "number", "maximum": 0.001}


def number(minimum: float, maximum: float) -> Json:
    """A number within bounds."""
    return {"type": "number", "minimum": minimum, "maximum": maximum}


def whole(minimum: int, maximum: int) -> Json:
    """A whole number within bounds."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def object_of(properties: Json, *, optional: Json | None = None) -> Json:
    """An object of an answer: these properties, perhaps those, and no others."""
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": {**properties, **(optional or {})},
    }


FORMAT_FIELDS: Json = {
    "response_format": {
        "anyOf": [
            {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
            {
                "type": "object",
                "required": ["type", "json_schema"],
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "properties": {"name": {}, "schema": nullable({"type": ["object", "string", "boolean"]})},
                    },
                },
            },
            {
                "type": "object",
                "required": ["type", "grammar"],
                "properties": {"type": {"const": "grammar"}, "grammar": TEXT},
            },
            {"type": "object", "maxProperties": 0},
        ]
    },
    "structured_outputs": {
        "type": "object",
        "description": "vLLM's: one of these.",
        "properties": {
            "json": {},
            "json_object": {},
            "regex": {},
            "choice": {},
            "grammar": {},
        },
    },
    "guided_json": {"type": ["object", "string", "boolean"]},
    "guided_json_object": TRUTH,
    "guided_regex": TEXT,
    "guided_choice": {"type": "array", "items": TEXT, "maxItems": MAX_CHOICES},
    "guided_grammar": {**TEXT, "description": "A grammar of llguidance, in its dialect of Lark."},
    "regex": TEXT,
    "json_schema": {"type": ["object", "string", "boolean"]},
}
SHARED_FIELDS: Json = {
    "model": {"type": "string", "maxLength": 256},
    "max_tokens": {**whole(0, 2**31 - 1), "description": "0: only compute the prompt."},
    "max_completion_tokens": whole(0, 2**31 - 1),
    "min_tokens": whole(0, 2**31 - 1),
    "n": whole(1, 128),
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 16}]},
    "stop_token_ids": {**TOKEN_IDS, "maxItems": 64},
    "ignore_eos": TRUTH,
    "include_stop_str_in_output": TRUTH,
    "temperature": number(0, 100),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "logit_bias": {"type": "object", "additionalProperties": number(-100, 100), "maxProperties": 300},
    "allowed_token_ids": {**TOKEN_IDS, "maxItems": 1024, "description": "Only these tokens are drawn."},
    "bad_words": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 256},
        "maxItems": 64,
        "description": "Texts that are kept out of the output.",
    },
    "seed": {"type": "integer", "minimum": -1, "maximum": 2**63 - 1, "description": "-1: the server chooses."},
    "stream": TRUTH,
    "stream_options": {
        "type": "object",
        "properties": {
            "include_usage": nullable(TRUTH),
            "continuous_usage_stats": nullable(TRUTH),
        },
    },
    "priority": {**whole(-MAX_PRIORITY, MAX_PRIORITY), "description": "The lowest goes first."},
    "cache_salt": {"type": "string", "maxLength": 256},
    "skip_special_tokens": TRUTH,
    "prompt_logprobs": {
        **whole(0, MAX_TOP_LOGPROBS),
        "description": "Tell how likely each token of the prompt was, and so many likely ones beside it. In no stream.",
    },
    "prompt_cache_key": {
        **TEXT,
        "description": "A name of the caller's own for prompts that begin alike. The answer says in "
        "`prompt_cache_diagnostics` why the prompt did not reuse what the last one of this name had.",
    },
    "return_token_ids": TRUTH,
    "return_tokens_as_token_ids": TRUTH,
    **FORMAT_FIELDS,
}
TEXT_PARTS: Json = {
    "type": "array",
    "items": {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": TEXT}},
}
NAMED_FUNCTION: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
        },
    },
}
USAGE: Json = object_of(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "completion_tokens_details": object_of({"reasoning_tokens": COUNT}),
    }
)
FINISH_REASONS: Json = {"enum": ["stop", "length", "tool_calls", "function_call"]}
PROMPT_LOGPROBS: Json = {
    "type": "array",
    "description": "Of each token of the prompt but the first: itself and the most likely ones, by their ids.",
    "items": nullable(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": object_of(
                {"logprob": LOGPROB, "rank": nullable({"type": "integer", "minimum": 1}), "decoded_token": TEXT}
            ),
        }
    ),
}
INDEX: Json = {"type": "integer", "minimum": 0}


DIAGNOSTICS: Json = {
    "description": "With `prompt_cache_key`: the prompt compared with the last one of that key.",
    "anyOf": [
        object_of({"type": {"const": "unavailable"}}),
        object_of({"type": {"const": "cache_hit"}, "comparison_response_id": TEXT}),
        object_of(
            {
                "type": {"const": "cache_miss"},
                "reason": {"enum": ["model_changed", "salt_changed", "tools_changed", "input_changed", "not_in_cache"]},
                "cache_missed_tokens": {**COUNT, "description": "Of the prompt: those that were computed."},
                "comparison_reusable_tokens": {**COUNT, "description": "Of the pages that both begin with."},
                "comparison_response_id": {**TEXT, "description": "The answer to the earlier prompt."},
            }
        ),
    ],
}


def request_of(required: list[str], properties: Json) -> Json:
    """A body. Each field may be null, which is the same as leaving it out, but for those that are required."""
    fields = {name: schema if name in required else nullable(schema) for name, schema in properties.items()}
    return {"type": "object", "required": required, "properties": fields}


def answer_of(name: str, choice: Json, *, optional: Json | None = None) -> Json:
    """An answer, or a chunk, with these choices."""
    return object_of(
        {
            "id": TEXT,
            "object": {"const": name},
            "created": COUNT,
            "model": TEXT,
            "system_fingerprint": TEXT,
            "choices": {"type": "array", "items": choice},
        },
        optional={
            "usage": nullable(USAGE),
            "session_id": TEXT,
            "cache": schema_ref("CacheReport"),
            "prompt_cache_diagnostics": DIAGNOSTICS,
            **(optional or {}),
        },
    )


def completion_schemas() -> dict[str, Json]:
    """Requests and answers of completions."""
    choice = object_of(
        {
            "index": INDEX,
            "text": TEXT,
            "logprobs": nullable(schema_ref("CompletionLogprobs")),
            "finish_reason": nullable(FINISH_REASONS),
        },
        optional={"token_ids": TOKEN_IDS, "prompt_token_ids": TOKEN_IDS, "prompt_logprobs": PROMPT_LOGPROBS},
    )
    prompt = {
        "anyOf": [
            TEXT,
            TOKEN_IDS,
            {"type": "array", "items": {"anyOf": [TEXT, TOKEN_IDS]}, "minItems": 1, "maxItems": MAX_PROMPTS},
        ]
    }
    return {
        "CompletionRequest": request_of(
            ["prompt"],
            {
                "prompt": prompt,
                "echo": TRUTH,
                "best_of": whole(0, 128),
                "logprobs": {"anyOf": [whole(0, MAX_TOP_LOGPROBS), TRUTH]},
                "add_special_tokens": TRUTH,
                **SHARED_FIELDS,
            },
        ),
        "Completion": answer_of("text_completion", choice),
        "CompletionLogprobs": object_of(
            {
                "tokens": {"type": "array", "items": TEXT},
                "token_logprobs": {"type": "array", "items": nullable(LOGPROB)},
                "top_logprobs": {
                    "type": "array",
                    "items": nullable({"type": "object", "additionalProperties": LOGPROB}),
                },
                "text_offset": {"type": "array", "items": COUNT},
            }
        ),
    }


def message_schema() -> Json:
    """A message of a chat request."""
    content = {"anyOf": [TEXT, TEXT_PARTS]}
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 256},
            "arguments": nullable({"type": ["string", "object"]}),
        },
    }
    call = {
        "type": "object",
        "required": ["function"],
        "properties": {
            "id": nullable({"type": "string", "maxLength": 256}),
            "type": {"const": "function"},
            "function": function,
        },
    }
    fields: Json = {
        "role": {"type": "string", "minLength": 1, "maxLength": 64},
        "content": content,
        "name": nullable({"type": "string", "maxLength": 256}),
        "tool_call_id": nullable({"type": "string", "maxLength": 256}),
        "reasoning_content": nullable(TEXT),
    }
    with_calls = {**fields, "role": {"const": "assistant"}, "content": nullable(content)}
    with_calls["tool_calls"] = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_TOOL_CALLS}
    with_function = {**fields, "role": {"const": "assistant"}, "content": nullable(content), "function_call": function}
    return {
        "anyOf": [
            {"type": "object", "required": ["role", "content"], "properties": fields},
            {"type": "object", "required": ["role", "tool_calls"], "properties": with_calls},
            {"type": "object", "required": ["role", "function_call"], "properties": with_function},
        ]
    }


def tool_choice_schema() -> Json:
    """Whether and which tools are to be called."""
    allowed = {
        "type": "object",
        "required": ["tools"],
        "properties": {
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": NAMED_FUNCTION, "minItems": 1, "maxItems": MAX_TOOLS},
        },
    }
    by_list = {
        "type": "object",
        "required": ["type", "allowed_tools"],
        "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": allowed},
    }
    return {"anyOf": [{"enum": ["auto", "none", "required"]}, NAMED_FUNCTION, by_list]}


def chat_schemas() -> dict[str, Json]:
    """Requests and answers of chat."""
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "description": nullable(TEXT),
            "parameters": nullable({"type": "object"}),
        },
    }
    tool = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }
    named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}}
    call = object_of({"name": TEXT, "arguments": TEXT})
    message = object_of(
        {"role": {"const": "assistant"}, "content": nullable(TEXT), "refusal": {"type": "null"}},
        optional={
            "reasoning_content": TEXT,
            "reasoning": TEXT,
            "tool_calls": {
                "type": "array",
                "items": object_of({"id": TEXT, "type": {"const": "function"}, "function": call}),
            },
            "function_call": {**call, "description": "Instead of `tool_calls`, if the request has `functions`."},
        },
    )
    call_part = object_of(
        {"index": INDEX},
        optional={
            "id": TEXT,
            "type": {"const": "function"},
            "function": object_of({"arguments": TEXT}, optional={"name": TEXT}),
        },
    )
    delta = object_of(
        {},
        optional={
            "role": {"const": "assistant"},
            "content": nullable(TEXT),
            "reasoning_content": TEXT,
            "reasoning": TEXT,
            "tool_calls": {"type": "array", "items": call_part},
            "function_call": object_of({"arguments": TEXT}, optional={"name": TEXT}),
        },
    )
    common = {"index": INDEX, "logprobs": nullable(schema_ref("ChatLogprobs"))}
    common["finish_reason"] = nullable(FINISH_REASONS)
    ids = {"token_ids": TOKEN_IDS}
    prompt_ids = {"prompt_token_ids": TOKEN_IDS}
    of_prompt = {**prompt_ids, "prompt_logprobs": PROMPT_LOGPROBS}
    token: Json = {"token": TEXT, "bytes": {"type": "array", "items": whole(0, 255)}, "logprob": LOGPROB}
    logprobs = object_of({**token, "top_logprobs": {"type": "array", "items": object_of(token)}})
    return {
        "ChatCompletionRequest": request_of(
            ["messages"],
            {
                "messages": {
                    "type": "array",
                    "items": schema_ref("ChatCompletionMessage"),
                    "minItems": 1,
                    "maxItems": MAX_MESSAGES,
                },
                "logprobs": TRUTH,
                "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
                "tools": {"type": "array", "items": tool, "maxItems": MAX_TOOLS},
                "tool_choice": tool_choice_schema(),
                "parallel_tool_calls": TRUTH,
                "functions": {
                    "type": "array",
                    "items": function,
                    "maxItems": MAX_TOOLS,
                    "description": "The older form of `tools`, without which it stands.",
                },
                "function_call": {"anyOf": [{"enum": ["auto", "none"]}, named]},
                "reasoning_effort": {"enum": list(EFFORTS)},
                "verbosity": {"enum": list(VERBOSITIES), "description": "Changes nothing."},
                "chat_template_kwargs": {"type": "object"},
                "add_generation_prompt": TRUTH,
                "include_reasoning": {**TRUTH, "description": "False leaves thoughts out of the answer."},
                "continue_final_message": TRUTH,
                "add_special_tokens": {"const": False},
                **SHARED_FIELDS,
            },
        ),
        "ChatCompletionMessage": message_schema(),
        "ChatCompletion": answer_of(
            "chat.completion", object_of({**common, "message": message}, optional=ids), optional=of_prompt
        ),
        "ChatCompletionChunk": answer_of(
            "chat.completion.chunk", object_of({**common, "delta": delta}, optional=ids), optional=prompt_ids
        ),
        "ChatLogprobs": object_of({"content": {"type": "array", "items": logprobs}, "refusal": {"type": "null"}}),
    }


def completions_description() -> ApiDescription:
    """The paths of completions and chat."""
    end = "Without a stream all at once, else in parts, of which the last one is [DONE]."
    completions = operation(
        operation_id="CreateCompletion",
        tag=TAG,
        summary="Outputs behind prompts.",
        body=schema_ref("CompletionRequest"),
        example={"prompt": "def fib(n):", "max_tokens": 8},
        success=json_or_events_response(end, schema_ref("Completion"), schema_ref("Completion")),
        parameters=SESSION_PARAMETERS,
        errors=ERRORS,
    )
    chat = operation(
        operation_id="CreateChatCompletion",
        tag=TAG,
        summary="Answers to messages.",
        body=schema_ref("ChatCompletionRequest"),
        example={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
        success=json_or_events_response(end, schema_ref("ChatCompletion"), schema_ref("ChatCompletionChunk")),
        parameters=SESSION_PARAMETERS,
        errors=ERRORS,
    )
    return ApiDescription(
        tag=TAG,
        description=DESCRIPTION,
        paths={"/v1/completions": {"post": completions}, "/v1/chat/completions": {"post": chat}},
        schemas={**completion_schemas(), **chat_schemas()},
    )
