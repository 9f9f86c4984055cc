"""POST /v1/decisions: the answers to all questions in their order, or each as it comes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from jaxctx.errors import JaxctxError
from jaxctx.v1.context_service_pb2 import CreateContextRequest, FillRequest, GenerateRequest
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.decisions.answering import Answered, Answering
from jaxctx_server.http.decisions.answers import answer_json
from jaxctx_server.http.decisions.prompt import DecisionPrompt, make_prompt
from jaxctx_server.http.decisions.request import (
    DecisionRequest,
    different_formats,
    in_question,
    parse_decision_request,
)
from jaxctx_server.http.decisions.usage import total_usage
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import json_response
from jaxctx_server.http.events import DONE, data_event
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.generation import Generation, close_contexts, run
from jaxctx_server.http.interleave import Interleaved

Json = dict[str, Any]
# Of the input: it is used only when a question begins, which waits as long as those before it take.
INPUT_TTL = Ttl(sliding=True)
INPUT_TTL.duration.FromSeconds(3600)


@dataclass(frozen=True, slots=True)
class Decision:
    """The answers to one request."""

    prompt: DecisionPrompt
    shared: Generation  # of the input
    answered: dict[int, Answered] = field(default_factory=dict)  # so far, by the place of the question

    def usage(self) -> Json:
        """What it has cost so far."""
        return total_usage(self.shared.usage, (each.usage for each in self.answered.values())).json()

    def answers(self) -> list[Json]:
        """All answers, in the order of the questions."""
        return [answer_json(self.answered[place]) for place in sorted(self.answered)]


async def create_decision(call: HttpCall) -> Response:
    """POST /v1/decisions. Raises JaxctxError."""
    request = await call.parse_body(parse_decision_request)
    call.frontend.log_unknown_fields(request.unknown_fields)
    decision = await prepare(call, request)
    if request.stream:
        return EventStream(answer_events(call, request, decision))
    async with aclosing(decide(call, request, decision)) as found:
        async for _ in found:
            pass
    model_id = decision.prompt.model.model_id
    return json_response({"model": model_id, "answers": decision.answers(), "usage": decision.usage()})


async def prepare(call: HttpCall, request: DecisionRequest) -> Decision:
    """Find out whether all of a request can be answered, before its input is computed. Raises JaxctxError.

    A format of a text is tried on a single token: only an engine can tell whether it can be followed.
    """
    prompt = await make_prompt(call, request)
    for place, question in enumerate(request.questions):
        if question.generate is not None:
            checked = GenerateRequest(context_id="unused")
            checked.MergeFrom(question.generate)
            try:
                await call.check(checked)
            except JaxctxError as error:
                raise in_question(error, place, question.field_names) from None
    for place in different_formats(request.questions).values():
        question = request.questions[place]
        try:
            await try_format(call, request, prompt, question.generate or GenerateRequest())
        except JaxctxError as error:
            raise in_question(error, place, question.field_names) from None
    filling = FillRequest()
    filling.tokens.ids.extend(prompt.input)
    create = new_context(request)
    create.ttl.CopyFrom(INPUT_TTL)
    return Decision(prompt, Generation(create=create, fill=filling, keep=True))


def new_context(request: DecisionRequest) -> CreateContextRequest:
    """Asks for a context of the request's."""
    create = CreateContextRequest()
    create.CopyFrom(request.create)
    return create


async def try_format(
    call: HttpCall, request: DecisionRequest, prompt: DecisionPrompt, options: GenerateRequest
) -> None:
    """Generate one token of a format behind one token. Raises InvalidArgument if the format is wrong."""
    filling = FillRequest()
    filling.tokens.ids.append(prompt.input[0])
    trial = GenerateRequest(max_tokens=1, output_format=options.output_format)
    async with aclosing(run(call, Generation(create=new_context(request), fill=filling, generate=trial))) as parts:
        async for _ in parts:
            pass


async def decide(
    call: HttpCall, request: DecisionRequest, decision: Decision
) -> AsyncGenerator[Interleaved[Answered], None]:
    """The answers as they come. To be closed as soon as it is no longer read. Raises JaxctxError."""
    shared = decision.shared
    try:
        try:
            async with aclosing(run(call, shared)) as nothing:
                async for _ in nothing:
                    pass
        except JaxctxError as error:
            raise renamed(error, request.field_names) from None
        async with aclosing(Answering(call, decision.prompt, shared).answers()) as found:
            async for each in found:
                decision.answered[each.source] = each.value
                yield each
    finally:
        call.frontend.run_in_background(close_contexts(call, shared.context_ids))


async def answer_events(call: HttpCall, request: DecisionRequest, decision: Decision) -> AsyncGenerator[str, None]:
    """The answers as server-sent events, each with the place of its question; then the usage, and `[DONE]`."""
    model_id = decision.prompt.model.model_id
    async with aclosing(decide(call, request, decision)) as found:
        async for each in found:
            yield data_event({"model": model_id, "index": each.source, "answer": answer_json(each.value)})
    yield data_event({"model": model_id, "usage": decision.usage()})
    yield DONE
