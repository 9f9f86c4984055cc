"""The answer to a request of the OpenAI API, whole or as server-sent events."""

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxctx.errors import JaxctxError
from jaxctx.v1.context_service_pb2 import GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.events import DONE, data_event
from jaxctx_server.http.generation import Generation, PromptUsage, run
from jaxctx_server.http.openai.errors import with_openai_names
from jaxctx_server.http.openai.request import ApiForm, CompletionRequest, parse_request

FINISH_REASONS: Mapping[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


def usage_json(usage: PromptUsage) -> dict[str, Any]:
    """The `usage` of an answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
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
    generation: Generation  # which has the name of the model, once its context was created

    def as_json(self) -> dict[str, Any]:
        """The first fields of an answer."""
        return {"id": self.answer_id, "created": self.created, "model": self.generation.model_id}


async def answer(form: ApiForm, call: HttpCall) -> Response:
    """All outputs of a request, or a stream of their parts. Raises JaxctxError."""
    completion = await call.parse_body(partial(parse_request, form))
    call.frontend.log_unknown_fields(completion.unknown_fields)
    answer_id, created = form.id_prefix + secrets.token_hex(12), int(time.time())
    generation = Generation(create=completion.create, fill=completion.fill, generate=completion.generate)
    parts = named(run(call, generation), completion.field_names)
    header = AnswerHeader(answer_id, created, generation)
    if completion.stream:
        return EventStream(stream_events(form, header, completion, parts))
    outputs = await collect_outputs(parts)
    return whole_answer(form, header, outputs)


def whole_answer(form: ApiForm, header: AnswerHeader, outputs: Sequence[Output]) -> Response:
    """The response with all outputs."""
    choices = [form.choice(index, "".join(each.texts), each.finish_reason) for index, each in enumerate(outputs)]
    usage = usage_json(header.generation.usage)
    body = {**header.as_json(), "object": form.object_name, "choices": choices, "usage": usage}
    return JSONResponse(body)


async def collect_outputs(parts: AsyncGenerator[GenerateResponse, None]) -> list[Output]:
    """All outputs, once they are complete. Nothing is made for them before the first part: the request has not been
    checked until then.
    """
    outputs: dict[int, Output] = {}
    async with aclosing(parts):
        async for part in parts:
            output = outputs.setdefault(part.index, Output())
            output.texts.append(part.text)
            if part.finish:
                output.finish_reason = FINISH_REASONS[part.finish]
    return [output for _, output in sorted(outputs.items())]


async def stream_events(
    form: ApiForm,
    header: AnswerHeader,
    completion: CompletionRequest,
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
                yield data_event({**chunk_header(form, header), "choices": [choice], **no_usage_yet})
            begun.add(part.index)
    if completion.include_usage:
        yield data_event({**chunk_header(form, header), "choices": [], "usage": usage_json(header.generation.usage)})
    yield DONE


def chunk_header(form: ApiForm, header: AnswerHeader) -> dict[str, Any]:
    """The first fields of a chunk."""
    return {**header.as_json(), "object": form.chunk_object_name}


async def named(
    parts: AsyncGenerator[GenerateResponse, None], field_names: Mapping[str, str]
) -> AsyncGenerator[GenerateResponse, None]:
    """The same parts; errors name fields as the request did."""
    try:
        async with aclosing(parts):
            async for part in parts:
                yield part
    except JaxctxError as error:
        raise with_openai_names(error, field_names) from None
