"""POST /v1/responses: an answer to input, as a fork of what came before it.

    previous response ──open──▶ context ──fill the input, generate──▶ save as the new response

A response is a stored state (`record.py`): its tokens and pages are kept under its id. To continue one is to open a
copy of it, whatever was continued from it before, so no token that it holds is computed again. Only if the request has
other instructions or other tools than the tokens begin with, the conversation is written anew from its items; the
response says so in `prompt_cache_diagnostics`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext, suppress
from typing import Any

from jaxctx.errors import Aborted, InvalidArgument, JaxctxError, NotFound
from jaxctx.v1.content_pb2 import ChatMessage, ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx.v1.model_service_pb2 import GetModelRequest
from jaxctx.v1.snapshot_pb2 import Snapshot
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.chat_output import MAX_INLINE_TOOLS, ToolUse, formats_of
from jaxctx_server.http.contextcache.use import ContextUse, saved_before_end
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.generation import Generation, OpenedFrom, close_contexts, run
from jaxctx_server.http.openai.responses.diagnosis import diagnose
from jaxctx_server.http.openai.responses.items import chat_messages
from jaxctx_server.http.openai.responses.output import OutputBuilder
from jaxctx_server.http.openai.responses.progress import is_begun, response_resource
from jaxctx_server.http.openai.responses.record import (
    CONVERSATION_PREFIX,
    RESPONSE_PREFIX,
    Conversation,
    StoredConversation,
    conversation_ttl,
    load_conversation,
    new_response_id,
    not_found,
    output_item_ids,
    state_document,
)
from jaxctx_server.http.openai.responses.references import resolved
from jaxctx_server.http.openai.responses.replay import BEGUN
from jaxctx_server.http.openai.responses.request import ResponsesRequest
from jaxctx_server.http.openai.responses.response_run import ResponseRun
from jaxctx_server.http.stored import MAX_VERSIONS, check_document, delete_state, save_state, ttl_of
from jaxctx_server.http.token_pieces import TokenPieces, tokens_of
from jaxctx_server.http.tools import stored_tools

Json = dict[str, Any]


async def response_events(
    call: HttpCall, request: ResponsesRequest, use: ContextUse | None = None
) -> AsyncGenerator[Json, None]:
    """The events of a response; the last one has it whole, and comes when it is stored. Raises JaxctxError.

    The first events come with the first part of the output, so that an error before it has a status of its own; those
    of a response that generates nothing come when it is stored. An error behind them is raised after the event
    `response.failed`.
    """
    try:
        made = await begin_response(call, request, use)
    except JaxctxError as error:
        raise renamed(error, request.field_names) from None
    has_begun = False
    stores = request.store or request.conversation_id is not None
    try:
        with call.frontend.will_save() if stores else nullcontext():
            async with aclosing(output_events(call, made)) as parts:
                async for events in parts:
                    if not has_begun:
                        has_begun = True
                        for event in first_events(made):
                            yield event
                    for event in events:
                        yield event
            await store_response(call, made)
        if not has_begun:
            for event in first_events(made):
                yield event
        yield {"type": f"response.{made.status}", "response": made.object()}
    except JaxctxError as error:
        made.error = lost_base(error, request) or renamed(error, request.field_names)
        if has_begun:
            yield {"type": "response.failed", "response": made.object()}
        raise made.error from None
    finally:
        if made.generation.context_ids:
            call.frontend.run_in_background(close_contexts(call, made.generation.context_ids))


def first_events(made: ResponseRun) -> list[Json]:
    """The events with which every response begins."""
    begun = made.object() | BEGUN
    return [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]


async def output_events(call: HttpCall, made: ResponseRun) -> AsyncGenerator[list[Json], None]:
    """The events of the output: those of each part together, then the last ones. Behind them the response is complete,
    and not stored. A response that generates nothing has none.
    """
    async with aclosing(parts_of(call, made)) as parts:
        async for part in parts:
            if made.request.tells_logprobs:
                await made.pieces.load(tokens_of(part.logprobs))
            yield made.read_part(part)
    last = end_output(call, made)
    if last:
        yield last
    await explain_cache(call, made)


def end_output(call: HttpCall, made: ResponseRun) -> list[Json]:
    """The last events of the output."""
    made.completed_at = int(call.frontend.wall_time())
    if made.generation.generate is None:
        made.finish = FinishReason.FINISH_REASON_STOP
        return []
    return made.output.finish("incomplete" if made.status == "incomplete" else "completed")


def lost_base(error: JaxctxError, request: ResponsesRequest) -> JaxctxError | None:
    """The error for a response or a conversation that ended between being read and being opened. None: another one, as
    of an item that an input refers to.
    """
    if error.reason != "SNAPSHOT_NOT_FOUND" or any(each.field.startswith("input[") for each in error.violations):
        return None
    if request.previous_response_id is not None:
        return not_found(request.previous_response_id, "previous_response_id", error.reason)
    return conversation_changed() if request.conversation_id is not None else None


def conversation_changed() -> Aborted:
    """The error for a conversation that another request changed meanwhile."""
    return Aborted("conversation: it was changed by another request meanwhile", reason="VERSION_MISMATCH")


def parts_of(call: HttpCall, made: ResponseRun) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of the output. That of a kept context ends when it is saved."""
    parts = run(call, made.generation)
    use = made.kept_context
    return parts if use is None else saved_before_end(call, use, made.generation, parts)


async def begin_conversation(
    call: HttpCall, request: ResponsesRequest
) -> tuple[StoredConversation | None, Conversation]:
    """What the response continues (None: nothing), and the conversation up to the end of its input.

    Raises NotFound, and InvalidArgument for an input that refers to too much.
    """
    base = await find_base(call, request)
    before = base.conversation if base is not None else Conversation(instructions=None, tools=(), items=())
    conversation = Conversation(
        instructions=before.instructions if request.instructions is None else request.instructions,
        tools=before.tools if request.tools is None else request.tools,
        items=[*before.items, *await resolved(call, request.items, before.items)],
    )
    return base, conversation


async def begin_response(call: HttpCall, request: ResponsesRequest, use: ContextUse | None = None) -> ResponseRun:
    """Find what the response continues, and what has to be filled.

    Raises NotFound, InvalidArgument, and ResourceExhausted (QUOTA) if it could not be stored.
    """
    base, conversation = await begin_conversation(call, request)
    if base is not None and not request.create.model_id:
        request.create.model_id = base.model_id
    if base is None or changes_the_beginning(base, conversation, request.create.model_id):
        source, new_messages = None, whole_conversation(conversation)
    else:
        new_items = conversation.items[len(base.conversation.items) :]
        source, new_messages = OpenedFrom(base.state.name, base.state.version), chat_messages(new_items)
    if not new_messages:
        raise InvalidArgument.field("input", "must have at least one item")
    if request.store or request.conversation_id is not None:  # before anything is computed for it
        await check_document(call, conversation.document(), "input")
        await call.services.snapshot_quota.check(call.caller, new_versions(request, base))
    if use is not None and use.base is not None:
        request.create.model_id = use.base.model_id
    model = await call.unary(call.services.models.get_model, GetModelRequest(model_id=request.create.model_id))
    tools = await tool_use(request, conversation)
    formats = await formats_of(model.model).prepare(request.generate, tools)
    generation = Generation(
        create=request.create,
        source=source,
        fill=FillRequest(messages=prompt_messages(request, conversation, new_messages)),
        generate=request.generate if request.generates else None,
        looser_format=formats.looser_format,
        keep=True,
    )
    created_at = int(call.frontend.wall_time())
    response_id = new_response_id(created_at)
    if use is not None:
        await use.prepare(call, model.model, generation)
    return ResponseRun(
        request=request,
        base=base,
        conversation=conversation,
        generation=generation,
        formats=formats,
        use=tools,
        kept_context=use,
        parser=formats.parser(tools),
        pieces=TokenPieces(call, model.model.model_id, model.model.model_revision),
        response_id=response_id,
        created_at=created_at,
        output=OutputBuilder(output_item_ids(response_id)),
    )


def new_versions(request: ResponsesRequest, base: StoredConversation | None) -> int:
    """How many versions of snapshots more there are when the response is stored (`store_response`)."""
    is_in_conversation = request.conversation_id is not None
    of_response = 1 if request.store else 0
    if request.background and is_in_conversation:
        of_response = 2  # as it has begun, too
    replaces_another = base is not None and base.state.version >= MAX_VERSIONS
    return of_response + (1 if is_in_conversation and not replaces_another else 0)


def prompt_messages(request: ResponsesRequest, conversation: Conversation, new: list[ChatMessage]) -> ChatMessages:
    """Messages that are to be filled, and how the template writes them."""
    messages = ChatMessages(messages=new, tools=conversation.tools, add_generation_prompt=request.generates)
    if request.effort is not None:
        arguments = {"reasoning_effort": request.effort, "enable_thinking": request.effort != "none"}
        messages.template_arguments = json_text(arguments)
    return messages


async def tool_use(request: ResponsesRequest, conversation: Conversation) -> ToolUse:
    """The tools of a response, and which may be called. Raises InvalidArgument naming `tool_choice`."""
    choice = request.tool_choice
    if sum(map(len, conversation.tools)) <= MAX_INLINE_TOOLS:
        tools = stored_tools(conversation.tools)
    else:
        tools = await asyncio.to_thread(stored_tools, conversation.tools)
    if choice["allowed"] is not None:
        by_name = {tool.name: tool for tool in tools}
        for index, name in enumerate(choice["allowed"]):
            if name not in by_name:
                raise InvalidArgument.field(f"tool_choice.tools[{index}].name", "names no tool of the request")
        tools = [by_name[name] for name in dict.fromkeys(choice["allowed"])]
    if choice["choice"] in ("required", "named") and not tools:
        raise InvalidArgument.field("tool_choice", "demands a call, and there are no tools")
    return ToolUse(tools=tools, choice=choice["choice"], name=choice["name"], parallel=choice["parallel"])


async def find_base(call: HttpCall, request: ResponsesRequest) -> StoredConversation | None:
    """The stored response or conversation that the request continues. Raises NotFound."""
    if request.previous_response_id is not None:
        name = request.previous_response_id
        base = await load_conversation(call, name, "previous_response_id", RESPONSE_PREFIX)
        if is_begun(base.resource):
            status = response_resource(call, base)["status"]
            description = f"must be a response that is complete: this one is {status}"
            raise InvalidArgument.field("previous_response_id", description)
        return base
    if request.conversation_id is not None:
        return await load_conversation(call, request.conversation_id, "conversation", CONVERSATION_PREFIX)
    return None


def changes_the_beginning(base: StoredConversation, wanted: Conversation, model_id: str) -> bool:
    """Whether the tokens of the base begin otherwise than the request wants, or another model computed them."""
    held = base.conversation
    if not held.items and held.instructions is None:
        return True  # it holds no tokens
    if base.model_id and base.model_id != model_id:
        return True
    return held.instructions != wanted.instructions or list(held.tools) != list(wanted.tools)


def whole_conversation(conversation: Conversation) -> list[ChatMessage]:
    """All messages of a conversation, its instructions first."""
    first = [] if conversation.instructions is None else [ChatMessage(role="system", content=conversation.instructions)]
    return [*first, *chat_messages(conversation.items)]


async def explain_cache(call: HttpCall, made: ResponseRun) -> None:
    """Find out why tokens of an earlier response were computed again, if they were or if the request asks."""
    request = made.request
    if request.comparison_response_id is not None:
        made.diagnostics = await diagnose(call, made.generation, made.conversation, request.comparison_response_id)
    elif made.base is not None and made.generation.source is None and made.base.conversation.items:
        made.diagnostics = await diagnose(call, made.generation, made.conversation, made.base.state.name)


async def store_response(call: HttpCall, made: ResponseRun) -> None:
    """Keep the response, and the conversation that it belongs to, before the client learns that it is complete.

    Either both are kept or none: should the conversation not take it, the response is deleted again. What was stored
    when it began in the background stays.
    """
    request, base = made.request, made.base
    items = [*made.conversation.items, *made.output.items]
    conversation = Conversation(instructions=made.conversation.instructions, tools=made.conversation.tools, items=items)
    context_id, output_count = made.generation.context_id, len(made.output.items)
    saved: Snapshot | None = None
    if request.store:
        document = state_document(made.object(), conversation, made.generation.model_id, output_count, made.deltas)
        saved = await save_state(
            call,
            context_id,
            made.response_id,
            document,
            ttl_of(call.frontend.response_ttl_s),
            replaces=made.begun_version,
            max_versions=MAX_VERSIONS if request.conversation_id is not None else 1,
            field="input",
            name_is_drawn=True,
        )
    if base is None or request.conversation_id is None:
        return
    document = state_document(base.resource, conversation, made.generation.model_id)
    ttl, replaces = conversation_ttl(call), base.state.version
    try:
        await save_state(call, context_id, base.state.name, document, ttl, replaces=replaces, field="input")
    except JaxctxError as error:
        if saved is not None:
            with suppress(NotFound):
                await delete_state(call, made.response_id, saved.version)
        raise (conversation_changed() if isinstance(error, Aborted) else error) from None
