"""The calls that a completion needs, and its answer, whole or as server-sent events.

CreateContext ──▶ Fill ──▶ Generate (stream) ──▶ CloseContext, also when the client leaves or a call fails
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxctx.rpc import from_rpc_error
from jaxctx.v1.context_service_pb2 import CloseContextRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.backend import Backend, backend_of, call_stream, call_unary, forwarded_headers, read_stream
from jaxctx_server.http.errors import error_json
from jaxctx_server.http.openai.errors import with_openai_names
from jaxctx_server.http.openai.request import ApiForm, CompletionRequest, parse_request
from jaxctx_server.http.request_body import read_body

FINISH_REASONS: Mapping[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}
MAX_LOGGED_FIELDS = 1000
log = logging.getLogger("jaxctx.http")


@dataclass(slots=True)
class UsageTotal:
    """The cost of all outputs of a request together. They have one prompt."""

    prompt_tokens: int = 0
    computed_tokens: int = 0  # of the prompt; the others were cached
    completion_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """The `usage` of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": max(self.prompt_tokens - self.computed_tokens, 0)},
        }


@dataclass(slots=True)
class Output:
    """One of the outputs of a request, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """The first fields of an answer and of all of its chunks."""

    answer_id: str
    created: int  # seconds since 1970
    model_id: str

    def as_json(self) -> dict[str, Any]:
        """The first fields of an answer."""
        return {"id": self.answer_id, "created": self.created, "model": self.model_id}


async def answer(form: ApiForm, request: Request) -> Response:
    """All outputs of a request, or a stream of their parts that begins when the first part is there.

    Raises JaxctxError, so that an error before the first part has a status of its own.
    """
    data = await read_body(request)
    backend = backend_of(request)
    completion = await backend.body_parser.parse(data, partial(parse_request, form))
    log_unknown_fields(backend, completion.unknown_fields)
    answer_id, created = form.id_prefix + secrets.token_hex(12), int(time.time())
    usage = UsageTotal()
    parts = generate_parts(request, completion, usage)
    try:
        first = await anext(parts)
        header = AnswerHeader(answer_id, created, completion.create.model_id)
        if completion.stream:
            events = stream_events(form, header, completion, usage, first, parts)
            return StreamingResponse(events, 200, {"cache-control": "no-store"}, "text/event-stream")
        outputs = await collect_outputs(max(completion.generate.n, 1), first, parts)
    except grpc.RpcError as error:
        raise with_openai_names(from_rpc_error(error), completion.field_names) from error
    return whole_answer(form, header, outputs, usage)


def whole_answer(form: ApiForm, header: AnswerHeader, outputs: Sequence[Output], usage: UsageTotal) -> Response:
    """The response with all outputs."""
    choices = [form.choice(index, "".join(each.texts), each.finish_reason) for index, each in enumerate(outputs)]
    body = {**header.as_json(), "object": form.object_name, "choices": choices, "usage": usage.as_json()}
    return JSONResponse(body)


async def collect_outputs(
    count: int, first: GenerateResponse, parts: AsyncGenerator[GenerateResponse, None]
) -> list[Output]:
    """All outputs, once they are complete."""
    outputs = [Output() for _ in range(count)]
    async with aclosing(parts):
        part: GenerateResponse | None = first
        while part is not None:
            output = outputs[part.index]
            output.texts.append(part.text)
            if part.finish:
                output.finish_reason = FINISH_REASONS[part.finish]
            part = await next_part(parts)
    return outputs


async def stream_events(
    form: ApiForm,
    header: AnswerHeader,
    completion: CompletionRequest,
    usage: UsageTotal,
    first: GenerateResponse,
    parts: AsyncGenerator[GenerateResponse, None],
) -> AsyncIterator[str]:
    """The parts of all outputs as server-sent events. The last one is `[DONE]`, or an error."""
    begun: set[int] = set()  # indexes of outputs of which a part was sent
    common = {**header.as_json(), "object": form.chunk_object_name}
    no_usage_yet = {"usage": None} if completion.include_usage else {}
    async with aclosing(parts):
        try:
            part: GenerateResponse | None = first
            while part is not None:
                is_first, finish_reason = part.index not in begun, FINISH_REASONS.get(part.finish)
                if part.text or finish_reason or is_first:
                    choice = form.chunk_choice(part.index, part.text, finish_reason, is_first=is_first)
                    yield event({**common, "choices": [choice], **no_usage_yet})
                begun.add(part.index)
                part = await next_part(parts)
            if completion.include_usage:
                yield event({**common, "choices": [], "usage": usage.as_json()})
            yield "data: [DONE]\n\n"
        except grpc.RpcError as error:
            yield f"data: {error_json(from_rpc_error(error))}\n\n"
        except ClientDisconnect:
            pass


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def next_part(parts: AsyncGenerator[GenerateResponse, None]) -> GenerateResponse | None:
    """The next part, None at the end."""
    try:
        return await anext(parts)
    except StopAsyncIteration:
        return None


async def generate_parts(
    request: Request, completion: CompletionRequest, usage: UsageTotal
) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of all outputs, from a context that is closed when this ends, however it does.

    From the first part on `completion.create.model_id` is the model, behind the last one `usage` is complete. Of
    several outputs the forks are closed too, as far as they are known from what has been read; forks of an answer that
    was left unread end by their time to live.
    """
    contexts = backend_of(request).contexts
    context_id = secrets.token_hex(16)
    completion.create.context_id = context_id
    completion.fill.context_id = context_id
    completion.generate.context_id = context_id
    context_ids, call = {context_id}, None
    try:
        created = await call_unary(request, contexts.CreateContext, completion.create)
        completion.create.model_id = created.context.model_id
        filled = await call_unary(request, contexts.Fill, completion.fill)
        usage.computed_tokens = filled.computed
        call = call_stream(request, contexts.Generate, completion.generate)
        while (part := await read_stream(call)) is not None:
            context_ids.add(part.context_id)
            if part.finish:
                usage.prompt_tokens = part.usage.prompt_tokens
                usage.computed_tokens += part.usage.computed_tokens if completion.fill.defer else 0
                usage.completion_tokens += part.usage.completion_tokens
            yield part
    finally:
        if call is not None:
            call.cancel()
        close_in_background(request, context_ids)


def close_in_background(request: Request, context_ids: Collection[str]) -> None:
    """Close contexts without waiting for it, as the request may be cancelled."""
    backend = backend_of(request)
    task = asyncio.create_task(close_contexts(backend, forwarded_headers(request), context_ids))
    backend.background_tasks.add(task)
    task.add_done_callback(backend.background_tasks.discard)


async def close_contexts(backend: Backend, metadata: list[tuple[str, str]], context_ids: Collection[str]) -> None:
    """Close each context, and leave out those that cannot be closed.

    One may never have been created. If the server is gone, so is the context; if this process ends, the context soon
    ends by its time to live.
    """
    for context_id in context_ids:
        with suppress(grpc.RpcError, grpc.aio.UsageError):
            await backend.contexts.CloseContext(CloseContextRequest(context_id=context_id), metadata=metadata)


def log_unknown_fields(backend: Backend, names: Sequence[str]) -> None:
    """Log each name once."""
    for name in names:
        if name not in backend.logged_fields and len(backend.logged_fields) < MAX_LOGGED_FIELDS:
            backend.logged_fields.add(name)
            log.warning("a field that is not known is left unread: %.64r", name)
