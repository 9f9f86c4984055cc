"""POST /v1/messages: an answer to messages, whole or as events.

message_start ──▶ content blocks (see `output.py`) ──▶ message_delta ──▶ message_stop
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from jaxctx.errors import JaxctxError
from jaxctx.model.text.tool_calls import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jaxctx.v1.context_service_pb2 import FillRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.anthropic.diagnosis import explain_miss, remember
from jaxctx_server.http.anthropic.output import ContentBuilder, new_call_id
from jaxctx_server.http.anthropic.request import NAMES_OF_FIELDS, MessagesRequest, parse_messages_request
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.chat_output import ToolUse, chat_formats
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import json_response
from jaxctx_server.http.events import typed_event
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.generation import Generation, PromptUsage, close_contexts, run

Json = dict[str, Any]
TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer that is being made."""

    message_id: str
    request: MessagesRequest
    generation: Generation
    use: ToolUse
    parser: OutputParser
    content: ContentBuilder = field(default_factory=ContentBuilder)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    has_calls: bool = False
    diagnostics: Json | None = None


async def create_message(call: HttpCall) -> Response:
    """POST /v1/messages."""
    request = await call.parse_body(parse_messages_request)
    call.frontend.log_unknown_fields(request.unknown_fields)
    try:
        answer = await begin_answer(call, request)
    except JaxctxError as error:
        raise renamed(error, NAMES_OF_FIELDS) from None
    events = answer_events(call, answer)
    if request.stream:
        return EventStream(encoded(events))
    async with aclosing(events):
        async for _ in events:
            pass
    return json_response(message_json(answer))


async def encoded(events: AsyncGenerator[Json, None]) -> AsyncGenerator[str, None]:
    """The events as server-sent events."""
    async with aclosing(events):
        async for event in events:
            yield typed_event(event["type"], event)


async def begin_answer(call: HttpCall, request: MessagesRequest) -> Answer:
    """What has to be done for an answer. Raises JaxctxError, with the field names of the contract."""
    formats = await chat_formats(call, request.create.model_id)
    choice = request.tool_choice
    kind: Any = TOOL_CHOICES[choice.kind]
    use = ToolUse(tools=request.tools, choice=kind, name=choice.name, parallel=choice.parallel)
    is_continuation = request.prompt.continue_final_message
    if request.generate is not None:
        formats = await formats.prepare(request.generate, use, is_continuation=is_continuation)
    generation = Generation(
        create=request.create,
        fill=FillRequest(messages=request.prompt),
        generate=request.generate,
        looser_format=formats.looser_format,
        keep=True,
    )
    parser = formats.parser(use, is_continuation=is_continuation)
    message_id = f"msg_{secrets.token_hex(12)}"
    return Answer(message_id=message_id, request=request, generation=generation, use=use, parser=parser)


async def answer_events(call: HttpCall, answer: Answer) -> AsyncGenerator[Json, None]:
    """The events of an answer, from the first part of its output on. Raises JaxctxError."""
    has_begun = False
    try:
        async with aclosing(run(call, answer.generation)) as parts:
            async for part in parts:
                if not has_begun:
                    has_begun = True
                    await diagnose(call, answer)
                    yield {"type": "message_start", "message": message_json(answer)}
                for event in read_part(answer, part):
                    yield event
        if answer.generation.generate is None:
            await diagnose(call, answer)
            answer.stop_reason = "max_tokens"
        if answer.request.wants_diagnosis:
            await remember(call, answer.generation, answer.message_id, answer.request)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence},
            "usage": usage_json(answer.generation.usage),
            **context_management_json(answer),
        }
        yield {"type": "message_stop"}
    except JaxctxError as error:
        raise renamed(error, NAMES_OF_FIELDS) from None
    finally:
        if answer.generation.context_ids:
            call.frontend.run_in_background(close_contexts(call, answer.generation.context_ids))


async def diagnose(call: HttpCall, answer: Answer) -> None:
    """Find out why tokens of an earlier request were not reused, if the request asks."""
    if answer.request.wants_diagnosis:
        reason = await explain_miss(call, answer.generation, answer.request)
        answer.diagnostics = None if reason is None else {"cache_miss_reason": reason}


def read_part(answer: Answer, part: GenerateResponse) -> list[Json]:
    """The events that a part of the output brings."""
    found = answer.parser.feed(part.text)
    if part.finish:
        found += answer.parser.finish()
    events = output_events(answer, answer.use.allowed(found))
    if part.finish:
        events += answer.content.close()
        set_stop_reason(answer, part)
    return events


def output_events(answer: Answer, found: Sequence[OutputEvent]) -> list[Json]:
    """The events of this API for what an output says."""
    events: list[Json] = []
    for each in found:
        match each:
            case TextDelta(text):
                events += answer.content.text(text)
            case ReasoningDelta(text):
                events += answer.content.thinking(text)
            case ToolCallStart(_, name):
                events += answer.content.start_call(new_call_id(), name)
            case ToolCallArguments(_, fragment):
                events += answer.content.call_arguments(fragment)
            case ToolCallEnd(_, is_complete):
                answer.has_calls |= (
                    is_complete  # a client runs what it is told to run: no call whose arguments are lost
                )
                events += answer.content.close()
    return events


def set_stop_reason(answer: Answer, part: GenerateResponse) -> None:
    """Note why the output ended."""
    if part.finish == FinishReason.FINISH_REASON_LENGTH:
        answer.stop_reason = "max_tokens"
    elif answer.has_calls:
        answer.stop_reason = "tool_use"
    elif part.HasField("stop_text"):
        answer.stop_reason, answer.stop_sequence = "stop_sequence", part.stop_text
    else:
        answer.stop_reason = "end_turn"


def message_json(answer: Answer) -> Json:
    """The message as far as it has come."""
    message: Json = {
        "id": answer.message_id,
        "type": "message",
        "role": "assistant",
        "model": answer.generation.model_id,
        "content": list(answer.content.blocks),
        "stop_reason": answer.stop_reason,
        "stop_sequence": answer.stop_sequence,
        "usage": usage_json(answer.generation.usage),
    }
    message |= context_management_json(answer)
    if answer.request.wants_diagnosis:
        message["diagnostics"] = answer.diagnostics
    return message


def context_management_json(answer: Answer) -> Json:
    """Which edits of the context were applied: none; nothing if the request asks for none."""
    return {"context_management": {"applied_edits": []}} if answer.request.has_context_management else {}


def usage_json(usage: PromptUsage) -> Json:
    """What the answer has cost so far, in tokens: those of the prompt are the sum of three numbers."""
    read, written = usage.cached_tokens, usage.written_tokens
    return {
        "input_tokens": max(usage.prompt_tokens - read - written, 0),
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "output_tokens": usage.completion_tokens,
    }
