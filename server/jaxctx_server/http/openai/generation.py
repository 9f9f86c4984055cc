"""The calls that a completion needs, and its answer, whole or as server-sent events.

CreateContext ──▶ Fill ──▶ Generate (stream) ──▶ CloseContext, also when the client leaves or a call fails
"""

import secrets
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxctx.errors import JaxctxError
from jaxctx.v1.context_service_pb2 import CloseContextRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.openai.errors import with_openai_names
from jaxctx_server.http.openai.request import ApiForm, CompletionRequest, parse_request

FINISH_REASONS: Mapping[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


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
    completion: CompletionRequest  # which has the name of the model, once its context was created

    def as_json(self) -> dict[str, Any]:
        """The first fields of an answer."""
        return {"id": self.answer_id, "created": self.created, "model": self.completion.create.model_id}


async def answer(form: ApiForm, call: HttpCall) -> Response:
    """All outputs of a request, or a stream of their parts. Raises JaxctxError."""
    completion = await call.parse_body(partial(parse_request, form))
    call.frontend.log_unknown_fields(completion.unknown_fields)
    answer_id, created = form.id_prefix + secrets.token_hex(12), int(time.time())
    usage = UsageTotal()
    parts = generate_parts(call, completion, usage)
    header = AnswerHeader(answer_id, created, completion)
    if completion.stream:
        return EventStream(stream_events(form, header, completion, usage, parts))
    outputs = await collect_outputs(max(completion.generate.n, 1), parts)
    return whole_answer(form, header, outputs, usage)


def whole_answer(form: ApiForm, header: AnswerHeader, outputs: Sequence[Output], usage: UsageTotal) -> Response:
    """The response with all outputs."""
    choices = [form.choice(index, "".join(each.texts), each.finish_reason) for index, each in enumerate(outputs)]
    body = {**header.as_json(), "object": form.object_name, "choices": choices, "usage": usage.as_json()}
    return JSONResponse(body)


async def collect_outputs(count: int, parts: AsyncGenerator[GenerateResponse, None]) -> list[Output]:
    """All outputs, once they are complete."""
    outputs = [Output() for _ in range(count)]
    async with aclosing(parts):
        async for part in parts:
            output = outputs[part.index]
            output.texts.append(part.text)
            if part.finish:
                output.finish_reason = FINISH_REASONS[part.finish]
    return outputs


async def stream_events(
    form: ApiForm,
    header: AnswerHeader,
    completion: CompletionRequest,
    usage: UsageTotal,
    parts: AsyncGenerator[GenerateResponse, None],
) -> AsyncGenerator[str, None]:
    """The parts of all outputs as server-sent events. The last one is `[DONE]`."""
    begun: set[int] = set()  # indexes of outputs of which a part was sent
    no_usage_yet = {"usage": None} if completion.include_usage else {}
    async with aclosing(parts):
        async for part in parts:
            is_first, finish_reason = part.index not in begun, FINISH_REASONS.get(part.finish)
            if part.text or finish_reason or is_first:
                choice = form.chunk_choice(part.index, part.text, finish_reason, is_first=is_first)
                yield event({**chunk_header(form, header), "choices": [choice], **no_usage_yet})
            begun.add(part.index)
    if completion.include_usage:
        yield event({**chunk_header(form, header), "choices": [], "usage": usage.as_json()})
    yield "data: [DONE]\n\n"


def chunk_header(form: ApiForm, header: AnswerHeader) -> dict[str, Any]:
    """The first fields of a chunk."""
    return {**header.as_json(), "object": form.chunk_object_name}


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json_text(body)}\n\n"


async def generate_parts(
    call: HttpCall, completion: CompletionRequest, usage: UsageTotal
) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of all outputs, from a context that is closed when this ends, however it does.

    From the first part on `completion.create.model_id` is the model, behind the last one `usage` is complete. Of
    several outputs the forks are closed too, as far as they are known from what has been read; forks of an answer that
    was left unread end by their time to live. Raises JaxctxError, with the field names of this API.
    """
    contexts = call.services.contexts
    context_id = secrets.token_hex(16)
    completion.create.context_id = context_id
    completion.fill.context_id = context_id
    completion.generate.context_id = context_id
    context_ids = {context_id}
    try:
        created = await call.unary(contexts.create_context, completion.create)
        completion.create.model_id = created.context.model_id
        filled = await call.unary(contexts.fill, completion.fill)
        usage.computed_tokens = filled.computed
        async with aclosing(call.stream(contexts.generate, completion.generate)) as parts:
            async for part in parts:
                context_ids.add(part.context_id)
                if part.finish:
                    usage.prompt_tokens = part.usage.prompt_tokens
                    usage.computed_tokens += part.usage.computed_tokens if completion.fill.defer else 0
                    usage.completion_tokens += part.usage.completion_tokens
                yield part
    except JaxctxError as error:
        raise with_openai_names(error, completion.field_names) from None
    finally:
        call.frontend.run_in_background(close_contexts(call, context_ids))


async def close_contexts(call: HttpCall, context_ids: Collection[str]) -> None:
    """Close each context, and leave out those that cannot be closed: one may never have been created."""
    for context_id in context_ids:
        with suppress(JaxctxError):
            await call.services.contexts.close_context(call.caller, CloseContextRequest(context_id=context_id))
