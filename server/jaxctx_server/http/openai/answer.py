"""The answer to a request of the OpenAI API, whole or as server-sent events."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.v1.context_service_pb2 import GenerateRequest
from jaxctx.v1.model_service_pb2 import GetModelRequest, Model
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.contextcache.use import ContextUse, UsingResponse, find_use, saved_before_end
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.errors import JSON_MEDIA_TYPE, json_text
from jaxctx_server.http.events import DONE
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.generation import Generation, close_contexts
from jaxctx_server.http.openai.diagnosis import diagnose
from jaxctx_server.http.openai.outputs import (
    Output,
    Prompt,
    PromptPart,
    TextRequest,
    make_generation,
    run_prompt,
    run_prompts,
)
from jaxctx_server.http.openai.usage import usage_json
from jaxctx_server.http.token_pieces import TokenPieces, tokens_of

Json = dict[str, Any]
MAX_OUTPUTS = 2048  # of all prompts of a request
MAX_INLINE_OUTPUTS = 16  # of an answer that is written on the event loop
MAX_INLINE_TOKENS = 64  # with their log probabilities, of a part that is written on the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that is being made."""

    request: TextRequest
    answer_id: str
    created: int  # seconds since 1970
    model: Model
    pieces: TokenPieces
    prompts: Sequence[Prompt]
    generations: Sequence[Generation]  # of each prompt
    outputs: Sequence[Output]  # all of the first prompt, then those of the next one
    use: ContextUse | None = None  # of a kept context, by the one prompt and its one output
    diagnostics: Json = field(default_factory=dict)  # a field of the answer, from the first part on
    loaded_prompts: set[int] = field(default_factory=set)  # whose tokens were asked for

    @property
    def outputs_per_prompt(self) -> int:
        """How many outputs each prompt gets."""
        return self.request.shared.outputs

    def header(self, object_name: str) -> Json:
        """The first fields of the answer and of all of its chunks."""
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model.model_id,
            "system_fingerprint": fingerprint(self.model),
        }

    def usage(self) -> Json:
        """What it has cost so far."""
        thoughts = sum(output.reasoning_tokens for output in self.outputs)
        return usage_json((generation.usage for generation in self.generations), thoughts)

    def place_of(self, each: PromptPart) -> int:
        """The place in `outputs` of the output that a part belongs to."""
        return each.prompt * self.outputs_per_prompt + each.part.index

    async def load_pieces(self, each: PromptPart) -> None:
        """Ask for the tokens that a part names, and those of its prompt with them."""
        await self.pieces.load(tokens_of(each.part.logprobs))
        scoring = self.prompts[each.prompt].scoring
        if scoring is not None and each.prompt not in self.loaded_prompts:
            self.loaded_prompts.add(each.prompt)
            await self.pieces.load(await asyncio.to_thread(tokens_of, scoring.logprobs))

    def is_large(self, each: PromptPart) -> bool:
        """Whether writing a part takes so long that a thread does it: it may have the tokens of its prompt."""
        scoring = self.prompts[each.prompt].scoring
        return scoring is not None and len(scoring.logprobs) > MAX_INLINE_TOKENS

    async def parts(self, call: HttpCall) -> AsyncGenerator[PromptPart, None]:
        """The parts of all outputs. To be closed as soon as it is no longer read."""
        if self.use is not None:
            parts = run_use(call, self.use, self.generations[0])
        else:
            parts = run_prompts(call, self.generations, self.outputs_per_prompt)
        has_begun = False
        async with aclosing(parts):
            async for each in parts:
                if not has_begun:
                    has_begun = True
                    await self.diagnose(call)
                yield each

    async def diagnose(self, call: HttpCall) -> None:
        """Compare the prompt with the last one of its key, if it has one. Several prompts are not compared."""
        key, generation = self.request.shared.prompt_cache_key, self.generations[0]
        if key is None or len(self.generations) > 1 or not generation.reads_prompt:
            return
        found = await diagnose(
            call, generation, key=key, answer_id=self.answer_id, model=self.model, tools=self.request.prompt_tools
        )
        self.diagnostics["prompt_cache_diagnostics"] = found

    def further_fields(self) -> Json:
        """Fields behind the others, of a whole answer or of the first chunk."""
        fields = {**self.request.answer_fields(self.prompts, self.pieces), **self.diagnostics}
        return fields if self.use is None else {**fields, **self.use.fields(self.generations[0])}


def fingerprint(model: Model) -> str:
    """What a client can tell by that with the same seed the same answer comes."""
    revisions = f"{model.model_revision}{model.adapter_revision}"
    return "fp_" + hashlib.sha256(revisions.encode()).hexdigest()[:10]


async def answer(call: HttpCall, request: TextRequest, *, makes_context: bool = False) -> Response:
    """All outputs of a request, or a stream of their parts. Raises JaxctxError.

    A kept context is used if the headers ask for that; with `makes_context` one is made in any case.
    """
    call.frontend.log_unknown_fields(request.shared.unknown_fields)
    use = await find_use(call, request.shared.create.model_id, creates=makes_context)
    if use is None:
        return await answer_with(call, request, None)
    try:
        return UsingResponse(call, use, await answer_with(call, request, use))
    except BaseException:
        use.release(call)
        raise


async def answer_with(call: HttpCall, request: TextRequest, use: ContextUse | None) -> Response:
    """The answer that uses a kept context, or none."""
    try:
        made = await begin_answer(call, request, use)
        if request.shared.streaming.stream:
            return EventStream(stream_events(call, made))
        await collect_outputs(call, made)
    except JaxctxError as error:
        raise renamed(error, request.shared.field_names) from None
    if len(made.outputs) <= MAX_INLINE_OUTPUTS and not request.names_tokens:
        return whole_answer(made)
    return await asyncio.to_thread(whole_answer, made)


async def begin_answer(call: HttpCall, request: TextRequest, use: ContextUse | None = None) -> Answer:
    """Find out all that is needed before anything is computed. Raises JaxctxError."""
    shared = request.shared
    if use is not None and use.base is not None:
        shared.create.model_id = use.base.model_id
    asked = GetModelRequest(model_id=shared.create.model_id)
    model = (await call.unary(call.services.models.get_model, asked)).model
    prompts = await request.prompts(call, model)
    await check_options(call, shared.generate, len(prompts))
    generations = [make_generation(request.shared, prompt) for prompt in prompts]  # with what the model makes of it
    if use is not None:
        check_one_output(request, prompts)
        generations[0].reads_prompt = False  # the report on the kept context says what was reused of it
        await use.prepare(call, model, generations[0])
    pieces = TokenPieces(call, model.model_id, model.model_revision)
    for prompt in prompts:
        if prompt.scoring is not None:
            await pieces.load(prompt.token_ids or ())
    return Answer(
        request=request,
        answer_id=request.form.id_prefix + secrets.token_hex(12),
        created=int(time.time()),
        model=model,
        pieces=pieces,
        prompts=prompts,
        generations=generations,
        outputs=[request.new_output(prompt, pieces) for prompt in prompts for _ in range(shared.outputs)],
        use=use,
    )


def check_one_output(request: TextRequest, prompts: Sequence[Prompt]) -> None:
    """Raise InvalidArgument for a request of a kept context that has more than one prompt or output."""
    if len(prompts) > 1:
        raise InvalidArgument.field("prompt", "must be one prompt: a kept context goes on in one way")
    if request.shared.generate.n > 1:
        name = "n" if request.chosen is None else "best_of"
        raise InvalidArgument.field(name, "must be 1: a kept context goes on in one way")
    if prompts[0].scoring is not None:
        name = "echo" if request.shared.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidArgument.field(name, "must not ask for log probabilities: tokens that are kept have none")


async def run_use(call: HttpCall, use: ContextUse, generation: Generation) -> AsyncGenerator[PromptPart, None]:
    """The parts of the one output of a kept context. The last one comes when the context is saved."""
    try:
        async with aclosing(saved_before_end(call, use, generation, run_prompt(call, generation, 1))) as parts:
            async for part in parts:
                yield PromptPart(0, part)
    finally:
        call.frontend.run_in_background(close_contexts(call, generation.context_ids))


async def check_options(call: HttpCall, generate: GenerateRequest, prompts: int) -> None:
    """Raise InvalidArgument for options that are not valid, before a context is created for them."""
    checked = GenerateRequest(context_id="unused")
    checked.MergeFrom(generate)
    await call.check(checked)
    if prompts * max(generate.n, 1) > MAX_OUTPUTS:
        raise InvalidArgument.field("n", f"must ask for up to {MAX_OUTPUTS} outputs, of all prompts together")


async def collect_outputs(call: HttpCall, made: Answer) -> None:
    """Read all outputs to their ends."""
    async with aclosing(made.parts(call)) as parts:
        async for each in parts:
            output = made.outputs[made.place_of(each)]
            if made.request.names_tokens:
                await made.load_pieces(each)
            if made.is_large(each):
                await asyncio.to_thread(output.add, each.part)
            else:
                output.add(each.part)


def whole_answer(made: Answer) -> Response:
    """The response with all outputs, or with the most likely ones of each prompt."""
    request, count = made.request, made.outputs_per_prompt
    told: list[Output] = []
    for start in range(0, len(made.outputs), count):
        outputs = made.outputs[start : start + count]
        told += outputs if request.chosen is None else most_likely(outputs, request.chosen)
    body = {
        **made.header(request.form.object_name),
        "choices": [output.choice(index) for index, output in enumerate(told)],
        "usage": made.usage(),
        **made.further_fields(),
    }
    return Response(json_text(body), media_type=JSON_MEDIA_TYPE)


def most_likely(outputs: Sequence[Output], count: int) -> list[Output]:
    """The outputs with the highest mean log probability of a token, the best one first."""
    return sorted(outputs, key=lambda output: output.mean_logprob(), reverse=True)[:count]


async def stream_events(call: HttpCall, made: Answer) -> AsyncGenerator[str, None]:
    """The parts of all outputs as server-sent events. The last one is `[DONE]`. Raises JaxctxError.

    What all chunks have in common is written once.
    """
    options = made.request.shared.streaming
    names_tokens = made.request.names_tokens
    prefix = "data: " + json_text(made.header(made.request.form.chunk_object_name))[:-1] + ',"choices":['
    no_usage_yet = ',"usage":null' if options.include_usage else ""
    extra: str | None = None  # not told yet
    try:
        async with aclosing(made.parts(call)) as parts:
            async for each in parts:
                place = made.place_of(each)
                output = made.outputs[place]
                if names_tokens:
                    await made.load_pieces(each)
                if made.is_large(each):
                    choices = await asyncio.to_thread(output.chunks, each.part, place)
                else:
                    choices = output.chunks(each.part, place)
                if not choices:
                    continue
                if extra is None:
                    extra = fields_of_first_chunk(made)
                usage = f',"usage":{json_text(made.usage())}' if options.continuous_usage else no_usage_yet
                yield "".join([f"{prefix}{choice}]{usage}{extra}}}\n\n" for choice in choices])
                extra = ""
    except JaxctxError as error:
        raise renamed(error, made.request.shared.field_names) from None
    if options.include_usage:
        yield f'{prefix}],"usage":{json_text(made.usage())}}}\n\n'
    yield DONE


def fields_of_first_chunk(made: Answer) -> str:
    """The JSON of further fields of the first chunk, behind its other fields."""
    fields = made.further_fields()
    return "," + json_text(fields)[1:-1] if fields else ""
