#!/usr/bin/env python3
"""The OpenAI API for a server: completions and chat, whole or as they come, for programs that speak nothing else.

    scripts/openai_gateway.py [SERVER] [--port PORT]

    POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /v1/models/ID

A request becomes a context that is filled, continued and closed; what prompts have in common is computed once all the
same, as pages are shared by the server. Contexts by themselves (kept, forked, saved) are not in this API: they are
reached by gRPC. As with the gateway of programs, `rest_gateway.py`, the server decides who may do what and what is
valid, by the key of the request; it listens on loopback only, and a request ends with who made it.

Fields: `model`, `prompt` (text or token ids) or `messages` (their text), `max_tokens` or `max_completion_tokens`, `n`,
`stop`, `seed`, `stream`, `stream_options`, `temperature`, `top_p`, `presence_penalty`, `frequency_penalty` and
`logit_bias`; and as other servers have them `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`stop_token_ids`, `include_stop_str_in_output` and `cache_salt`. What would change an answer, or what becomes of it,
and is not here (`REFUSED`, of messages `REFUSED_OF_MESSAGES`, headers as with the other gateway) gives 400 with its
name if it asks for something. What only tells who asks or helps a cache (`HARMLESS`) is left unread, and so is what
nobody knows, as clients of this API expect; that is logged once. Without `max_tokens` an output has up to the model's
own default of tokens, not 16.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from gateway_limits import loaded
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rest_gateway import REFUSALS, as_error, beside, body, calling, gateway, headers, own_end, serve, typed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxctx.errors import FieldViolation, InvalidArgument, JaxctxError
from jaxctx.rpc import from_rpc_error, method_of
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import (
    CloseContextRequest,
    CreateContextRequest,
    FillRequest,
    GenerateRequest,
    GenerateResponse,
)
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx.v1.model_service_pb2 import GetModelRequest, ListModelsRequest, Model
from jaxctx.v1.rules_pb2 import rule as rule_of

ABANDONED = {"duration": "60s", "sliding": True}  # a context whose gateway has died
CREATE = {"model": "model_id", "cache_salt": "salt"}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", *PENALTIES)
GENERATE = {name: name for name in ("max_tokens", "min_tokens", "n", "stop_token_ids", "ignore_eos")} | {
    "max_completion_tokens": "max_tokens",  # counts if both are there
    "include_stop_str_in_output": "include_stop",
}
NOTHING = (False, "", [], {})
REFUSED: dict[str, Collection[Any]] = {  # what the API has and this has not, and which values ask for nothing
    **dict.fromkeys(("echo", "suffix", "logprobs", "prompt_logprobs", "functions", "tools"), NOTHING),
    **dict.fromkeys(("function_call", "tool_choice"), (*NOTHING, "none", "auto")),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "structured_outputs"), NOTHING),
    **dict.fromkeys(("store", "background", "include", "input", "instructions", "conversation"), NOTHING),
    **dict.fromkeys(("previous_response_id", "reasoning", "text", "max_output_tokens", "max_tool_calls"), NOTHING),
    **dict.fromkeys(("prompt_template", "context_management", "moderation", "session_id", "context_id"), NOTHING),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"), NOTHING),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "use_beam_search", "truncate_prompt_tokens"), NOTHING),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "documents"), NOTHING),
    **dict.fromkeys(("prompt_embeds", "logits_processors", "return_token_ids", "return_tokens_as_token_ids"), NOTHING),
    **dict.fromkeys(("kv_transfer_params", "lora_path", "session_params", "return_hidden_states"), NOTHING),
    **dict.fromkeys(("stop_regex", "json_schema", "no_stop_trim", "min_new_tokens", "max_new_tokens"), NOTHING),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
    **dict.fromkeys(("length_penalty", "typical_p"), (1, 1.0)),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "top_logprobs": (*NOTHING, 0),
    "priority": (*NOTHING, 0),  # other servers have the first ones lowest, this one highest
    "response_format": (*NOTHING, {"type": "text"}),
    "modalities": (*NOTHING, ["text"]),
}
REFUSED_OF_MESSAGES = ("name", "tool_calls", "tool_call_id", "function_call", "audio", "reasoning_content", "prefix")
REFUSED_OF_STREAMS = ("include_obfuscation", "continuous_usage_stats")
HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "request_id")
READ = ("prompt", "messages", "stop", "stream", "stream_options", "best_of", "add_special_tokens")
KNOWN = {*CREATE, *GENERATE, *SAMPLING, *REFUSED, *HARMLESS, *READ}
MAX_VALUES = 1 << 20  # of a body: the ids of a prompt
MAX_PARTS = 1 << 16  # texts, names, lists and objects among them
MAX_TOLD = 1000  # names of fields that were logged
TOLD: set[str] = set()
log = logging.getLogger("jaxctx.gateway")
REASONS = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}
CLOSING: set[asyncio.Task[None]] = set()  # contexts that nobody waits for any more


@dataclass(frozen=True, slots=True)
class Api:
    """One of the two forms that answers have."""

    kind: str  # of an answer
    part: str  # of a part of one
    prefix: str  # of ids
    is_chat: bool

    def choice(self, index: int, text: str, finish: str | None, *, role: str | None = None) -> dict[str, Any]:
        """An output, or with `role` ("" in all but its first one) a part of it."""
        told: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
        if not self.is_chat:
            return told | {"text": text}
        speaker = {"role": "assistant"} if role is None else {"role": role} if role else {}
        return told | {"message" if role is None else "delta": speaker | {"content": text}}


COMPLETIONS = Api("text_completion", "text_completion", "cmpl-", is_chat=False)
CHAT = Api("chat.completion", "chat.completion.chunk", "chatcmpl-", is_chat=True)


@dataclass(slots=True)
class Usage:
    """What all outputs of a request cost together. Their prompt is one."""

    prompt: int = 0
    computed: int = 0
    completion: int = 0

    @property
    def told(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": max(self.prompt - self.computed, 0)},
        }


@dataclass(slots=True)
class Asked:
    """A request, as calls of the contract."""

    create: CreateContextRequest
    fill: FillRequest
    generate: GenerateRequest
    streams: bool
    tells_usage: bool  # at the end of a stream
    names: Mapping[str, str]  # of its fields, where the contract has others
    usage: Usage = field(default_factory=Usage)  # of what has come


@dataclass(slots=True)
class Output:
    """One of the outputs of a request, as far as it has come."""

    text: list[str] = field(default_factory=list)
    finish: str | None = None


def application(server: str) -> Starlette:
    """The gateway to a server, "host:port" or "unix:/path"."""
    return gateway(
        server,
        [
            Route("/v1/completions", typed(partial(answered, COMPLETIONS)), methods=["POST"]),
            Route("/v1/chat/completions", typed(partial(answered, CHAT)), methods=["POST"]),
            *(Route(path, typed(models)) for path in ("/v1/models", "/v1/models/")),
            Route("/v1/models/{model_id:path}", typed(model)),
        ],
    )


async def answered(api: Api, request: Request) -> Response:
    """With all outputs, or with a stream of their parts from when the first is there."""
    data = await body(request)
    asked = await beside(request, len(data), partial(read, api, data))
    told = {"id": api.prefix + secrets.token_hex(12), "created": int(time.time())}
    parts = outputs(request, asked)
    try:
        first = await anext(parts)
        told["model"] = asked.create.model_id
        if asked.streams:
            told["object"] = api.part
            parts_told = events(api, told, asked, first, parts)
            return StreamingResponse(parts_told, 200, {"cache-control": "no-store"}, "text/event-stream")
        found = [Output() for _ in range(max(asked.generate.n, 1))]
        async with aclosing(parts):
            part: GenerateResponse | None = first
            while part is not None:
                found[part.index].text.append(part.text)
                if part.finish:
                    found[part.index].finish = REASONS[part.finish]
                part = await anext(parts, None)
    except grpc.RpcError as error:
        raise in_its_words(from_rpc_error(error), asked.names) from error
    choices = [api.choice(index, "".join(each.text), each.finish) for index, each in enumerate(found)]
    return JSONResponse({**told, "object": api.kind, "choices": choices, "usage": asked.usage.told})


async def events(
    api: Api,
    told: Mapping[str, Any],
    asked: Asked,
    first: GenerateResponse,
    parts: AsyncGenerator[GenerateResponse, None],
) -> AsyncIterator[str]:
    """The parts of all outputs, as server-sent events."""
    begun, part = set[int](), first
    nothing_yet = {"usage": None} if asked.tells_usage else {}
    async with aclosing(parts):
        try:
            while part is not None:
                role, finish = "" if part.index in begun else "assistant", REASONS.get(part.finish)
                if part.text or finish or role:
                    choice = api.choice(part.index, part.text, finish, role=role)
                    yield event({**told, "choices": [choice], **nothing_yet})
                begun.add(part.index)
                part = await anext(parts, None)
            if asked.tells_usage:
                yield event({**told, "choices": [], "usage": asked.usage.told})
            yield "data: [DONE]\n\n"
        except grpc.RpcError as error:
            yield f"data: {as_error(from_rpc_error(error))}\n\n"
        except asyncio.CancelledError:
            if own_end():
                raise


def event(told: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(told, ensure_ascii=False)}\n\n"


async def outputs(request: Request, asked: Asked) -> AsyncGenerator[GenerateResponse, None]:
    """What comes of a request, in a context that is closed when this ends, however it does. From the first on `asked`
    says which model it is, and behind the last what it cost.

    Of several outputs the forks are closed too, as far as they are known from what has been read; those of an answer
    that was left unread are abandoned. Their prompt is computed before, else nobody would say what it cost.
    """
    made = asked.create.context_id = asked.fill.context_id = asked.generate.context_id = secrets.token_hex(16)
    contexts, call = {made}, None
    try:
        asked.create.model_id = (await calling("CreateContext", request, asked.create)).context.model_id
        asked.usage.computed = (await calling("Fill", request, asked.fill)).computed
        call = calling("Generate", request, asked.generate)
        while (part := await call.read()) is not grpc.aio.EOF:
            contexts.add(part.context_id)
            if part.finish:
                asked.usage.prompt = part.usage.prompt_tokens
                asked.usage.computed += part.usage.computed_tokens if asked.fill.defer else 0
                asked.usage.completion += part.usage.completion_tokens
            yield part
    finally:
        if call is not None:
            call.cancel()
        close = method_of(request.app.state.channel, "CloseContext")
        closing = asyncio.create_task(closed(close, headers(request), contexts))
        CLOSING.add(closing)
        closing.add_done_callback(CLOSING.discard)


async def closed(close: Any, headers: list[tuple[str, str]], contexts: Collection[str]) -> None:
    for context_id in contexts:
        # It may never have been made. If the server is gone, so is the context, and if this one ends, it will be soon.
        with suppress(grpc.RpcError, grpc.aio.UsageError):
            await close(CloseContextRequest(context_id=context_id), metadata=headers)


def read(api: Api, data: bytes) -> Asked:
    """What a body asks for. Raises InvalidArgument for what the contract cannot say, by the names of the API."""
    try:
        told = loaded(data, most_values=MAX_VALUES, most_parts=MAX_PARTS)
    except REFUSALS as error:
        raise InvalidArgument("the body is no JSON") from error
    if not isinstance(told, dict):
        raise InvalidArgument("the body must be a JSON object")
    told = {name: value for name, value in told.items() if value is not None}
    for name, asks_nothing in REFUSED.items():
        if name in told:
            check_asks_nothing(name, told[name], asks_nothing)
    if "add_special_tokens" in told:  # a text gets them, a chat has what its template writes
        check_asks_nothing("add_special_tokens", told["add_special_tokens"], (not api.is_chat,))
    tell_unknown(told)
    if "best_of" in told and told["best_of"] != told.get("n", 1):
        raise InvalidArgument.field("best_of", "must be n: all outputs are told")
    asked = Asked(
        json_format.ParseDict({"ttl": ABANDONED}, CreateContextRequest()),
        FillRequest(),
        GenerateRequest(),
        truth("stream", told.get("stream", False)),
        truth("stream_options.include_usage", options(told).get("include_usage", False)),
        {theirs: name for name, theirs in (CREATE | GENERATE).items() if name in told},
    )
    for names, message in ((CREATE, asked.create), (GENERATE, asked.generate)):
        for name in names:
            if name in told:
                put(message, names[name], told[name], name)
    asked.fill.defer = asked.generate.n <= 1  # computed with the first step of the output
    if told.get("top_k") == -1:  # off, to other servers
        told["top_k"] = 0
    for name in SAMPLING:
        if name in told:
            put(asked.generate.sampling, name, told[name], name)
    if (stop := told.get("stop")) is not None:
        put(asked.generate, "stop", [stop] if isinstance(stop, str) else stop, "stop")
    if api.is_chat:
        messages = told.get("messages")
        if not isinstance(messages, list):
            raise InvalidArgument.field("messages", "must be a list of messages")
        check_entries(ChatMessages.DESCRIPTOR.fields_by_name["messages"], messages, "messages")
        put(asked.fill, "messages", {"messages": [said(*each) for each in enumerate(messages)]}, "messages")
    else:
        prompt = told.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            put(asked.fill, "text", prompt, "prompt")
        elif isinstance(prompt, list) and all(type(each) is int for each in prompt):
            asked.fill.tokens.SetInParent()  # there may be none, or very many, which `put` takes seconds for
            try:
                asked.fill.tokens.ids.extend(prompt)
            except REFUSALS as error:
                raise InvalidArgument.field("prompt", "must be token ids") from error
        else:
            raise InvalidArgument.field("prompt", "must be one text, or one list of token ids")
    return asked


def check_asks_nothing(name: str, value: object, asks_nothing: Collection[Any]) -> None:
    """Raise InvalidArgument for a field that asks for something."""
    if not any(type(each) is type(value) and each == value for each in asks_nothing):
        raise InvalidArgument.field(name, "is not supported here")


def tell_unknown(told: Mapping[str, Any]) -> None:
    """Log each name that nobody knows, once."""
    for name in told:
        if name not in KNOWN and name not in TOLD and len(TOLD) < MAX_TOLD:
            TOLD.add(name)
            log.warning("a field that is not known is left unread: %.64r", name)


def options(told: Mapping[str, Any]) -> dict[str, Any]:
    """How a stream is to be."""
    found = told.get("stream_options", {})
    if not isinstance(found, dict):
        raise InvalidArgument.field("stream_options", "must be an object")
    for name in REFUSED_OF_STREAMS:
        if found.get(name) is not None:
            check_asks_nothing(f"stream_options.{name}", found[name], NOTHING)
    return found


def truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument.field(name, "must be true or false")
    return value


def said(place: int, message: object) -> dict[str, str]:
    """One message, of which the text is read: as it stands, or in parts."""
    fields: Mapping[str, Any] = message if isinstance(message, dict) else {}
    for name in REFUSED_OF_MESSAGES:
        if fields.get(name) is not None:
            check_asks_nothing(f"messages[{place}].{name}", fields[name], NOTHING)
    role, content = fields.get("role"), fields.get("content")
    if isinstance(content, list):
        texts = [
            each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None for each in content
        ]
        content = "".join(texts) if all(isinstance(each, str) for each in texts) else None
    for name, value in (("role", role), ("content", content)):
        if not isinstance(value, str):
            raise InvalidArgument.field(f"messages[{place}].{name}", "must be text")
    return {"role": role, "content": content}


def put(message: Message, name: str, value: object, known_as: str) -> None:
    """Set a field. Whether its value is within bounds is for the server to say."""
    if isinstance(value, list | dict):
        check_entries(message.DESCRIPTOR.fields_by_name[name], value, known_as)
    try:
        json_format.ParseDict({name: value}, message)
    except REFUSALS as error:
        raise InvalidArgument.field(known_as, "has a value of another type") from error


def check_entries(field: FieldDescriptor, entries: Collection[Any], known_as: str) -> None:
    """Raise InvalidArgument for more entries of a list or map than the contract has, before time is spent on them."""
    most = field.GetOptions().Extensions[rule_of].max_items
    if field.is_repeated and len(entries) > most > 0:
        raise InvalidArgument.field(known_as, f"must have up to {most} entries, not {len(entries)}")


def in_its_words(error: JaxctxError, names: Mapping[str, str]) -> JaxctxError:
    """An error whose fields are named as the API does, or as the request did."""
    if error.violations:
        error.violations = [FieldViolation(known_as(each.field, names), each.description) for each in error.violations]
        error.message = "; ".join(f"{each.field}: {each.description}" for each in error.violations)
    return error


def known_as(path: str, names: Mapping[str, str]) -> str:
    """What the API calls a field of the contract."""
    if re.match(r"(text|tokens)\b", path):
        return "prompt"
    path = path.removeprefix("sampling.").removeprefix("messages.")
    return names.get(path, path)


async def models(request: Request) -> Response:
    """All that the server has."""
    found = (await calling("ListModels", request, ListModelsRequest(limit=1000))).models
    return JSONResponse({"object": "list", "data": [described(each) for each in found]})


async def model(request: Request) -> Response:
    """One of them."""
    asked = GetModelRequest(model_id=request.path_params["model_id"])
    try:
        return JSONResponse(described((await calling("GetModel", request, asked)).model))
    except grpc.RpcError as error:
        raise in_its_words(from_rpc_error(error), {"model_id": "model"}) from error


def described(model: Model) -> dict[str, Any]:
    owner = {"created": 0, "owned_by": "jaxctx"}
    return {"id": model.model_id, "object": "model", **owner, "max_model_len": model.max_context_tokens}


if __name__ == "__main__":
    serve(application, __doc__)
