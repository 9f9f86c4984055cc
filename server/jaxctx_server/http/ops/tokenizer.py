"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, as vLLM's server has it.

POST /tokenize        {model, prompt, add_special_tokens, return_token_strs}, or
                      {model, messages, add_generation_prompt, continue_final_message, tools, chat_template_kwargs,
                       return_token_strs}
                      -> {count, max_model_len, tokens, token_strs}
POST /detokenize      {model, tokens} -> {prompt}
GET /tokenizer_info   the model's tokenizer_config.json and its chat template
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from starlette.responses import Response

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.v1 import model_service_pb2 as pb
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import JSON_MEDIA_TYPE, json_text
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.openai.chat_messages import parse_messages as parse_chat_messages
from jaxctx_server.http.openai.request import (
    Json,
    check_asks_for_nothing,
    check_entries,
    parse_object,
    parse_truth,
    set_field,
)
from jaxctx_server.http.request_body import PARSE_ERRORS

KNOWN_FIELDS = ("model", "prompt", "messages", "add_special_tokens", "return_token_strs", "tokens")
CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
UNSUPPORTED_FIELDS = {  # and the values with which each asks for nothing
    "chat_template": ("",),
    "mm_processor_kwargs": ({},),
}
NAMES = {
    "model_id": "model",
    "text": "prompt",
    "template_arguments": "chat_template_kwargs",
}  # of this API, by the names of the contract
MAX_INLINE_TOKENS = 4096  # of an answer that is written on the event loop
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # what stands for a tokenizer.json of which nothing more is known


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A request of /tokenize: one of the two calls that it can become."""

    text: pb.TokenizeRequest | None
    messages: pb.ApplyChatTemplateRequest | None
    field_names: tuple[str, ...]  # that the request has


async def tokenize(call: HttpCall) -> Response:
    """POST /tokenize."""
    asked = await call.parse_body(parse_tokenize)
    log_unknown_fields(call, asked.field_names)
    models = call.services.models
    try:
        response: pb.TokenizeResponse | pb.ApplyChatTemplateResponse
        if asked.text is not None:
            response, model_id = await call.unary(models.tokenize, asked.text), asked.text.model_id
        else:
            assert asked.messages is not None
            response = await call.unary(models.apply_chat_template, asked.messages)
            model_id = asked.messages.model_id
        model = (await call.unary(models.get_model, pb.GetModelRequest(model_id=model_id))).model
    except JaxctxError as error:
        raise renamed(error, NAMES) from None
    if len(response.tokens) <= MAX_INLINE_TOKENS:
        return tokenized_response(response, model.max_context_tokens)
    return await asyncio.to_thread(tokenized_response, response, model.max_context_tokens)


def tokenized_response(response: pb.TokenizeResponse | pb.ApplyChatTemplateResponse, max_model_len: int) -> Response:
    """The response with tokens. `token_strs` is null unless it was asked for."""
    body = {
        "count": len(response.tokens),
        "max_model_len": max_model_len,
        "tokens": response.tokens[:],
        "token_strs": response.entries[:] if response.entries else None,
    }
    return Response(json_text(body), media_type=JSON_MEDIA_TYPE)


def parse_tokenize(data: bytes) -> TokenizeCall:
    """The call that a body asks for. Raises InvalidArgument, naming the field that is wrong or not supported."""
    fields = parse_object(data)
    for name, values_for_nothing in UNSUPPORTED_FIELDS.items():
        if name in fields:
            check_asks_for_nothing(name, fields[name], values_for_nothing)
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidArgument.field("prompt", "exactly one of prompt and messages must be set")
    if "prompt" in fields:
        return TokenizeCall(parse_text(fields), None, tuple(fields))
    return TokenizeCall(None, parse_messages(fields), tuple(fields))


def parse_text(fields: Json) -> pb.TokenizeRequest:
    """A request with a prompt."""
    request = pb.TokenizeRequest(
        add_special_tokens=parse_truth("add_special_tokens", fields.get("add_special_tokens", True)),
        with_entries=parse_truth("return_token_strs", fields.get("return_token_strs", False)),
    )
    set_model(request, fields)
    set_field(request, "text", fields["prompt"], "prompt")
    return request


def parse_messages(fields: Json) -> pb.ApplyChatTemplateRequest:
    """A request with messages."""
    if "add_special_tokens" in fields:  # beside those that the chat template writes
        check_asks_for_nothing("add_special_tokens", fields["add_special_tokens"], (False,))
    request = pb.ApplyChatTemplateRequest(
        with_entries=parse_truth("return_token_strs", fields.get("return_token_strs", False))
    )
    set_model(request, fields)
    messages = fields["messages"]
    if not isinstance(messages, list):
        raise InvalidArgument.field("messages", "must be a list of messages")
    check_entries(ChatMessages(), "messages", messages, "messages")
    set_field(request, "messages", {"messages": parse_chat_messages(messages)}, "messages")
    continues = parse_truth("continue_final_message", fields.get("continue_final_message", False))
    chat = request.messages
    chat.continue_final_message = continues
    chat.add_generation_prompt = parse_truth(
        "add_generation_prompt", fields.get("add_generation_prompt", not continues)
    )
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise InvalidArgument.field("tools", "must be a list of tools")
    check_entries(chat, "tools", tools, "tools")
    chat.tools.extend(written("tools", tool) for tool in tools)
    if "chat_template_kwargs" in fields:
        chat.template_arguments = written("chat_template_kwargs", fields["chat_template_kwargs"])
    return request


def written(name: str, value: object) -> str:
    """A value as JSON again, as the contract has it. Raises InvalidArgument for one that is too deep to be written."""
    try:
        return json_text(value)
    except RecursionError as error:
        raise InvalidArgument.field(name, "has too many objects and lists inside each other") from error


async def detokenize(call: HttpCall) -> Response:
    """POST /detokenize."""
    request, field_names = await call.parse_body(parse_detokenize)
    log_unknown_fields(call, field_names)
    try:
        response = await call.unary(call.services.models.detokenize, request)
    except JaxctxError as error:
        raise renamed(error, NAMES) from None
    return Response(json_text({"prompt": response.text}), media_type=JSON_MEDIA_TYPE)


def parse_detokenize(data: bytes) -> tuple[pb.DetokenizeRequest, tuple[str, ...]]:
    """The request of a body, and the names of its fields. Raises InvalidArgument."""
    fields = parse_object(data)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InvalidArgument.field("tokens", "must be a list of token ids")
    request = pb.DetokenizeRequest()
    set_model(request, fields)
    try:
        request.tokens.extend(tokens)
    except PARSE_ERRORS as error:
        raise InvalidArgument.field("tokens", "must be token ids") from error
    return request, tuple(fields)


async def tokenizer_info(call: HttpCall) -> Response:
    """GET /tokenizer_info. With several models, the query `model` says whose."""
    request = pb.GetModelRequest(with_tokenizer=True)
    set_field(request, "model_id", call.request.query_params.get("model", ""), "model")
    try:
        response = await call.unary(call.services.models.get_model, request)
    except JaxctxError as error:
        raise renamed(error, NAMES) from None
    return await asyncio.to_thread(tokenizer_info_response, response.tokenizer_config)


def tokenizer_info_response(config_json: str) -> Response:
    """The response with what the model's directory says about its tokenizer."""
    config: dict[str, Any] = json.loads(config_json)
    body = {"tokenizer_class": TOKENIZER_CLASS, "chat_template": None, **config}
    return Response(json_text(body), media_type=JSON_MEDIA_TYPE)


def set_model(request: Message, fields: Json) -> None:
    """Set the model of a request."""
    if "model" in fields:
        set_field(request, "model_id", fields["model"], "model")


def log_unknown_fields(call: HttpCall, field_names: tuple[str, ...]) -> None:
    """Log the names of fields that are left unread."""
    known = {*KNOWN_FIELDS, *CHAT_FIELDS, *UNSUPPORTED_FIELDS}
    call.frontend.log_unknown_fields([name for name in field_names if name not in known])
