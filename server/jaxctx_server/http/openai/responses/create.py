"""POST /v1/responses: an answer to input, as a fork of what came before it.

    previous response ──open──▶ context ──fill the input, generate──▶ save as the new response

A response is a stored state (`record.py`): its tokens and pages are kept under its id. To continue one is to open a
copy of it, whatever was continued from it before, so no token that it holds is computed again. Only if the request has
other instructions or other tools than the tokens begin with, the conversation is written anew from its items; the
response says so in `prompt_cache_diagnostics`.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from jaxctx.errors import Aborted, InvalidArgument, JaxctxError
from jaxctx.model.text.tool_calls import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jaxctx.v1.content_pb2 import ChatMessage, ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.chat_output import ChatFormats, ToolUse, chat_formats
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import json_response
from jaxctx_server.http.events import typed_event
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.generation import Generation, OpenedFrom, close_contexts, run
from jaxctx_server.http.openai.responses.diagnosis import diagnose
from jaxctx_server.http.openai.responses.items import chat_messages, new_id
from jaxctx_server.http.openai.responses.output import OutputBuilder
from jaxctx_server.http.openai.responses.record import (
    CONVERSATION_PREFIX,
    RESPONSE_PREFIX,
    Conversation,
    StoredConversation,
    load_conversation,
    state_document,
)
from jaxctx_server.http.openai.responses.request import ResponsesRequest, parse_responses_request, response_tools
from jaxctx_server.http.stored import check_document, save_state, ttl_of

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ResponseRun:
    """A response that is being made."""

    request: ResponsesRequest
    base: StoredConversation | None  # what it continues
    conversation: Conversation  # up to the end of the input
    generation: Generation
    formats: ChatFormats
    parser: OutputParser
    response_id: str
    created_at: int  # seconds since 1970
    diagnostics: Json | None = None
    output: OutputBuilder = field(default_factory=OutputBuilder)
    finish: int = 0  # a FinishReason
    completed_at: int | None = None

    @property
    def status(self) -> str:
        """What has become of it."""
        if not self.finish:
            return "in_progress"
        return "incomplete" if self.finish == FinishReason.FINISH_REASON_LENGTH else "completed"


async def create_response(call: HttpCall) -> Response:
    """POST /v1/responses."""
    request = await call.parse_body(parse_responses_request)
    call.frontend.log_unknown_fields(request.unknown_fields)
    events = response_events(call, request)
    if request.stream:
        return EventStream(numbered(events))
    last: Json = {}
    async with aclosing(events):
        async for event in events:
            last = event
    return json_response(last["response"])


async def numbered(events: AsyncGenerator[Json, None]) -> AsyncGenerator[str, None]:
    """The events as server-sent events, with their numbers."""
    number = 0
    async with aclosing(events):
        async for event in events:
            yield typed_event(event["type"], {**event, "sequence_number": number})
            number += 1


async def response_events(call: HttpCall, request: ResponsesRequest) -> AsyncGenerator[Json, None]:
    """The events of a response; the last one has it whole, and comes when it is stored. Raises JaxctxError.

    The first event comes with the first part of the output, so that an error before it has a status of its own.
    """
    try:
        made = await begin_response(call, request)
    except JaxctxError as error:
        raise renamed(error, request.field_names) from None
    has_begun = False
    try:
        async with aclosing(run(call, made.generation)) as parts:
            async for part in parts:
                if not has_begun:
                    has_begun = True
                    yield {"type": "response.created", "response": response_json(made, call)}
                    yield {"type": "response.in_progress", "response": response_json(made, call)}
                for event in read_part(made, part):
                    yield event
        made.completed_at = int(time.time())
        for event in made.output.finish("incomplete" if made.status == "incomplete" else "completed"):
            yield event
        await explain_cache(call, made)
        await store_response(call, made)
        yield {"type": f"response.{made.status}", "response": response_json(made, call)}
    except JaxctxError as error:
        raise renamed(error, request.field_names) from None
    finally:
        if made.generation.context_ids:
            call.frontend.run_in_background(close_contexts(call, made.generation.context_ids))


async def begin_conversation(
    call: HttpCall, request: ResponsesRequest
) -> tuple[StoredConversation | None, Conversation]:
    """What the response continues (None: nothing), and the conversation up to the end of its input. Raises NotFound."""
    base = await find_base(call, request)
    before = base.conversation if base is not None else Conversation(instructions=None, tools=(), items=())
    conversation = Conversation(
        instructions=before.instructions if request.instructions is None else request.instructions,
        tools=before.tools if request.tools is None else request.tools,
        items=[*before.items, *request.items],
    )
    return base, conversation


async def begin_response(call: HttpCall, request: ResponsesRequest) -> ResponseRun:
    """Find what the response continues, and what has to be filled. Raises NotFound, InvalidArgument."""
    base, conversation = await begin_conversation(call, request)
    if base is None or changes_the_beginning(base, conversation):
        source, new_messages = None, whole_conversation(conversation)
    else:
        source, new_messages = OpenedFrom(base.state.name, base.state.version), chat_messages(request.items)
    if not new_messages:
        raise InvalidArgument.field("input", "must have at least one item")
    if request.store or request.conversation_id is not None:
        check_document(conversation.document(), "input")  # before anything is computed for it
    formats = await chat_formats(call, request.create.model_id)
    use = ToolUse(tools=conversation.tools, **request.tool_choice)
    formats.prepare(request.generate, use)
    messages = ChatMessages(messages=new_messages, tools=conversation.tools, add_generation_prompt=True)
    generation = Generation(
        create=request.create, source=source, fill=FillRequest(messages=messages), generate=request.generate, keep=True
    )
    return ResponseRun(
        request=request,
        base=base,
        conversation=conversation,
        generation=generation,
        formats=formats,
        parser=formats.parser(use),
        response_id=new_id("resp"),
        created_at=int(time.time()),
    )


async def find_base(call: HttpCall, request: ResponsesRequest) -> StoredConversation | None:
    """The stored response or conversation that the request continues. Raises NotFound."""
    if request.previous_response_id is not None:
        name = request.previous_response_id
        return await load_conversation(call, name, "previous_response_id", RESPONSE_PREFIX)
    if request.conversation_id is not None:
        return await load_conversation(call, request.conversation_id, "conversation", CONVERSATION_PREFIX)
    return None


def changes_the_beginning(base: StoredConversation, wanted: Conversation) -> bool:
    """Whether the tokens of the base begin otherwise than the request wants."""
    held = base.conversation
    if not held.items and held.instructions is None:
        return True  # it holds no tokens
    return held.instructions != wanted.instructions or list(held.tools) != list(wanted.tools)


def whole_conversation(conversation: Conversation) -> list[ChatMessage]:
    """All messages of a conversation, its instructions first."""
    first = [] if conversation.instructions is None else [ChatMessage(role="system", content=conversation.instructions)]
    return [*first, *chat_messages(conversation.items)]


def read_part(made: ResponseRun, part: GenerateResponse) -> list[Json]:
    """The events that a part of the output brings."""
    events = output_events(made, made.parser.feed(part.text))
    if part.finish:
        made.finish = part.finish
        events += output_events(made, made.parser.finish())
    return events


def output_events(made: ResponseRun, found: Sequence[OutputEvent]) -> list[Json]:
    """The events of this API for what an output says."""
    events: list[Json] = []
    for each in found:
        match each:
            case TextDelta(text):
                events += made.output.text(text)
            case ReasoningDelta(text):
                events += made.output.reasoning(text)
            case ToolCallStart(_, name):
                events += made.output.start_call(made.formats.new_call_id(), name)
            case ToolCallArguments(_, fragment):
                events += made.output.call_arguments(fragment)
            case ToolCallEnd(_, is_complete):
                events += made.output.close("completed" if is_complete else "incomplete")
    return events


async def explain_cache(call: HttpCall, made: ResponseRun) -> None:
    """Find out why tokens of an earlier response were computed again, if they were or if the request asks."""
    request = made.request
    if request.comparison_response_id is not None:
        made.diagnostics = await diagnose(call, made.generation, made.conversation, request.comparison_response_id)
    elif made.base is not None and made.generation.source is None and made.base.conversation.items:
        made.diagnostics = await diagnose(call, made.generation, made.conversation, made.base.state.name)


async def store_response(call: HttpCall, made: ResponseRun) -> None:
    """Keep the response, and the conversation that it belongs to, before the client learns that it is complete."""
    request, base = made.request, made.base
    items = [*made.conversation.items, *made.output.items]
    conversation = Conversation(instructions=made.conversation.instructions, tools=made.conversation.tools, items=items)
    context_id, output_count = made.generation.context_id, len(made.output.items)
    response_document = state_document(response_json(made, call), conversation, output_count)
    if request.store:
        check_document(response_document, "input")  # before the conversation is changed
    if base is not None and request.conversation_id is not None:
        document = state_document(base.resource, conversation)
        try:
            await save_state(call, context_id, base.state.name, document, ttl_of(None), replaces=base.state.version)
        except Aborted as error:
            message = "conversation: another response was added to it meanwhile"
            raise Aborted(message, reason=error.reason) from None
    if request.store:
        ttl = ttl_of(call.frontend.response_ttl_s)
        await save_state(call, context_id, made.response_id, response_document, ttl)


def response_json(made: ResponseRun, call: HttpCall) -> Json:
    """The response as the API returns it."""
    fields, is_complete = made.request.fields, bool(made.finish)
    incomplete = {"reason": "max_output_tokens"} if made.status == "incomplete" else None
    return {
        "id": made.response_id,
        "object": "response",
        "created_at": made.created_at,
        "completed_at": made.completed_at if made.status == "completed" else None,
        "status": made.status,
        "error": None,
        "incomplete_details": incomplete,
        "background": False,
        "instructions": made.conversation.instructions,
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata", {}),
        "model": made.generation.model_id,
        "output": list(made.output.items) if is_complete else [],
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": made.request.previous_response_id,
        "conversation": None if made.request.conversation_id is None else {"id": made.request.conversation_id},
        "prompt_cache_diagnostics": made.diagnostics,
        "reasoning": {"effort": None, "summary": None},
        "store": made.request.store,
        "temperature": fields.get("temperature", 1.0),
        "text": fields.get("text", {"format": {"type": "text"}}),
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": response_tools(made.conversation.tools),
        "top_p": fields.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": usage_json(made) if is_complete else None,
    }


def usage_json(made: ResponseRun) -> Json:
    """What the response cost, in tokens."""
    usage = made.generation.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
