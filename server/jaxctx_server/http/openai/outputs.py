"""The prompts of a request and their outputs, while they come."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import FillRequest, GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx.v1.model_service_pb2 import Model
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.generation import Generation, PromptScoring, run
from jaxctx_server.http.interleave import interleave
from jaxctx_server.http.openai.request import SharedOptions
from jaxctx_server.http.token_pieces import TokenPieces
from jaxctx_server.validate import prompt_length_error

Json = dict[str, Any]
MAX_RUNNING_OUTPUTS = 16  # of one request at once, for several prompts
FINISH_REASONS: dict[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a request."""

    fill: FillRequest
    text: str = ""  # that outputs begin with, if the prompt is echoed
    token_ids: Sequence[int] | None = None  # if they are known
    scoring: PromptScoring | None = None  # if the log probabilities of its tokens are told


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What answers of one API are called."""

    object_name: str
    chunk_object_name: str
    id_prefix: str


class Output(Protocol):
    """One output of a request, in the form of one API. Its parts are either all added, or all told as chunks."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far."""

    def add(self, part: GenerateResponse) -> None:
        """Take the next part of an output that is told as a whole."""

    def choice(self, index: int) -> Json:
        """The whole output, as the choice of this index."""

    def chunks(self, part: GenerateResponse, index: int) -> list[str]:
        """The JSON of the choices of chunks, for the next part of an output that is told in parts."""

    def mean_logprob(self) -> float:
        """The mean log probability of its tokens."""


class TextRequest(Protocol):
    """A request of one of the two APIs."""

    @property
    def shared(self) -> SharedOptions:
        """What both APIs have."""

    @property
    def form(self) -> AnswerForm:
        """What the answer is called."""

    @property
    def chosen(self) -> int | None:
        """How many of the outputs of each prompt are told, the most likely ones. None: all, in their order."""

    @property
    def names_tokens(self) -> bool:
        """Whether the answer names tokens, for which their pieces are needed."""

    @property
    def prompt_tools(self) -> Sequence[str]:
        """The tools that stand in the prompt, as JSON texts."""

    async def prompts(self, call: HttpCall, model: Model) -> Sequence[Prompt]:
        """The prompts. Raises JaxctxError."""

    def new_output(self, prompt: Prompt, pieces: TokenPieces) -> Output:
        """An output of a prompt."""

    def answer_fields(self, prompts: Sequence[Prompt], pieces: TokenPieces) -> Json:
        """Further fields of a whole answer."""


def check_length(token_ids: Sequence[int], model: Model) -> None:
    """Raise InvalidArgument for a prompt that is empty, or longer than the model's longest context."""
    if not 1 <= len(token_ids) <= model.max_context_tokens:
        raise InvalidArgument.field("tokens", prompt_length_error(len(token_ids), model.max_context_tokens))


def make_generation(shared: SharedOptions, prompt: Prompt) -> Generation:
    """The calls for one prompt, with messages of their own."""
    create, generate = type(shared.create)(), type(shared.generate)()
    create.CopyFrom(shared.create)
    generate.CopyFrom(shared.generate)
    return Generation(
        create=create,
        fill=prompt.fill,
        generate=None if shared.is_prefill_only else generate,
        looser_format=shared.looser_format,
        scoring=prompt.scoring,
        # A prompt that is scored is computed as a whole, whatever the cache has.
        reads_prompt=shared.prompt_cache_key is not None and prompt.scoring is None,
    )


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of an output, and of which prompt."""

    prompt: int  # from 0
    part: GenerateResponse


async def run_prompt(call: HttpCall, generation: Generation, outputs: int) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of all outputs of one prompt. Without a generation, each output is one empty part."""
    async with aclosing(run(call, generation)) as parts:
        async for part in parts:
            yield part
    if generation.generate is None:
        for index in range(outputs):
            yield GenerateResponse(index=index, finish=FinishReason.FINISH_REASON_LENGTH)


async def run_prompts(
    call: HttpCall, generations: Sequence[Generation], outputs: int
) -> AsyncGenerator[PromptPart, None]:
    """The parts of all outputs of all prompts, several prompts at once. Each prompt has `outputs` outputs.

    The first error ends all. To be closed as soon as it is no longer read.
    """
    if len(generations) == 1:
        async with aclosing(run_prompt(call, generations[0], outputs)) as parts:
            async for part in parts:
                yield PromptPart(0, part)
        return
    sources = [partial(run_prompt, call, generation, outputs) for generation in generations]
    async with aclosing(interleave(sources, MAX_RUNNING_OUTPUTS // outputs)) as items:
        async for item in items:
            yield PromptPart(item.source, item.value)
