"""One prompt and its outputs, as every API of text needs them: the calls of services that they become.

    new context ─┐
    fork         ├─▶ Forward … ─▶ Fill ─▶ Generate (stream) ─▶ CloseContext, unless the contexts are kept
    snapshot    ─┘    (Rewind)

Rewind is there only if what the context has is not all wanted, Forward only if the log probabilities of the prompt's
own tokens are wanted.

The contexts are closed however it ends: also when the client leaves or a call fails. Should that be prevented, they end
by their time to live.
"""

import secrets
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.v1.context_service_pb2 import (
    CloseContextRequest,
    CreateContextRequest,
    FillRequest,
    ForkRequest,
    ForwardRequest,
    GenerateRequest,
    GenerateResponse,
    GetContextRequest,
    RewindRequest,
    UpdateContextRequest,
)
from jaxctx.v1.forward_pb2 import ForwardOutputParams
from jaxctx.v1.generation_pb2 import OutputFormat, TokenLogprob
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx.v1.snapshot_service_pb2 import OpenRequest, OpenResponse
from jaxctx_server.http.call import HttpCall

GRAMMAR = "output_format.grammar"  # the field that an error names whose format cannot be followed
SCORED_AT_ONCE = 256  # tokens of a prompt: as many as Forward tells about
ABANDONED_TTL = Ttl(duration=Duration(seconds=60), sliding=True)  # of a context that nobody could close


@dataclass(frozen=True, slots=True)
class ForkOf:
    """Begin as a context stands now."""

    context_id: str


@dataclass(frozen=True, slots=True)
class OpenedFrom:
    """Begin as a snapshot was saved."""

    name: str
    version: int | None = None  # None: the latest
    recompute: bool = False  # also one of another model revision, whose tokens are then computed anew


@dataclass(slots=True)
class PromptUsage:
    """What the outputs of one prompt cost together, in tokens. They have the prompt in common."""

    prompt_tokens: int = 0
    computed_tokens: int = 0  # of the prompt: newly written to the cache; the others were cached
    restored_tokens: int = 0  # of the cached ones: brought back from other tiers
    completion_tokens: int = 0  # so far
    reopened_tokens: int = 0  # of a snapshot: computed again, as their pages were lost
    page_size: int = 1
    _outputs_begun: set[int] = field(default_factory=set)  # their indexes

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return max(self.prompt_tokens - self.computed_tokens, 0)

    @property
    def written_tokens(self) -> int:
        """Tokens of the prompt that this request computed and that later requests find: those of whole pages."""
        whole_pages = self.prompt_tokens // self.page_size * self.page_size
        return max(whole_pages - self.cached_tokens, 0)

    def count(self, part: GenerateResponse, *, is_only_output: bool) -> None:
        """Count a part of an output. Of several outputs each computes the prompt's last token again: not counted."""
        if part.HasField("usage") and part.index not in self._outputs_begun:
            self._outputs_begun.add(part.index)
            self.prompt_tokens = part.usage.prompt_tokens
            if is_only_output:
                self.computed_tokens += part.usage.computed_tokens
                self.restored_tokens += part.usage.restored_tokens
        self.completion_tokens += len(part.token_ids)

    def add(self, other: "PromptUsage") -> None:
        """Count another prompt of the same request too."""
        self.prompt_tokens += other.prompt_tokens
        self.computed_tokens += other.computed_tokens
        self.restored_tokens += other.restored_tokens
        self.completion_tokens += other.completion_tokens
        self.page_size = other.page_size


@dataclass(slots=True)
class PromptScoring:
    """Log probabilities of the tokens of a prompt, each after those before it."""

    top: int  # how many of the most likely tokens to tell beside each
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each token but the first, which nothing stands before. Complete before the first part of an output."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """A prompt, how it is continued, and what has become of it so far. The ids of contexts are chosen by `run`."""

    create: CreateContextRequest  # of a new context; with a `source` its time to live and its priority are used
    source: ForkOf | OpenedFrom | None = None  # None: a new context
    rewind_to: int | None = None  # how many tokens of the `source` to keep; None: all
    fill: FillRequest | None = None  # what is appended first; None: nothing
    generate: GenerateRequest | None = None  # None: only fill, which computes the prompt
    scoring: PromptScoring | None = None  # also score the prompt: a new context, and `fill` with tokens
    looser_format: OutputFormat | None = None  # of outputs, if the engine cannot follow that of `generate`
    reads_prompt: bool = False  # find out the token ids of the prompt
    keep: bool = False  # leave the contexts to the caller, unless it ends with an error

    # What `run` has found out. Complete behind the last part.
    model_id: str = ""  # that, or its adapter's name, from the first part on
    context_id: str = ""  # the context of the prompt; empty: it has not been made yet
    prompt_ids: Sequence[int] = ()  # with `reads_prompt`, from the first part on
    usage: PromptUsage = field(default_factory=PromptUsage)
    context_ids: set[str] = field(default_factory=set)  # that, and those of the outputs if they are others


async def run(call: HttpCall, generation: Generation) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of all outputs. Raises the errors of the services, with the field names of the contract.

    Of several outputs the forks are closed too, as far as they are known from what has been read; forks of an answer
    that was left unread end by their time to live. To be closed as soon as it is no longer read.
    """
    if not generation.context_id:
        await prepare(call, generation)
    is_complete = False
    try:
        if generation.generate is not None:
            async with aclosing(generate(call, generation, generation.generate)) as parts:
                async for part in parts:
                    yield part
        is_complete = True
    finally:
        if not (generation.keep and is_complete):
            call.frontend.run_in_background(close_contexts(call, generation.context_ids))


async def prepare(call: HttpCall, generation: Generation) -> None:
    """Make the context, with the prompt. `run` does that itself, unless something has to be done with it before the
    outputs.

    Raises the errors of the services, with the field names of the contract; then there is no context.
    """
    generation.context_id = secrets.token_hex(16)
    generation.context_ids = {generation.context_id}
    is_prepared = False
    try:
        await begin(call, generation)
        if generation.rewind_to is not None:
            request = RewindRequest(context_id=generation.context_id, to=generation.rewind_to)
            await call.unary(call.services.contexts.rewind, request)
        if generation.scoring is not None and generation.fill is not None:
            await score(call, generation, generation.scoring, generation.fill)
        if generation.fill is not None:
            await fill(call, generation, generation.fill)
        if generation.reads_prompt:
            asked = GetContextRequest(context_id=generation.context_id, include_tokens=True)
            generation.prompt_ids = (await call.unary(call.services.contexts.get_context, asked)).tokens.ids[:]
        is_prepared = True
    finally:
        if not is_prepared:
            call.frontend.run_in_background(close_contexts(call, generation.context_ids))


async def begin(call: HttpCall, generation: Generation) -> None:
    """Create, fork or open the context of the prompt."""
    contexts, context_id = call.services.contexts, generation.context_id
    ttl = generation.create.ttl if generation.create.HasField("ttl") else ABANDONED_TTL
    match generation.source:
        case None:
            generation.create.context_id = context_id
            generation.create.ttl.CopyFrom(ttl)
            context = (await call.unary(contexts.create_context, generation.create, draws_ids=True)).context
        case ForkOf(parent_id):
            await call.unary(contexts.fork, ForkRequest(context_id=parent_id, child_ids=[context_id]), draws_ids=True)
            # A child has the parent's time to live, which is not that of a single request.
            update = UpdateContextRequest(context_id=context_id, ttl=ttl)
            context = (await call.unary(contexts.update_context, update)).context
        case OpenedFrom(name, version, recompute):
            opening = OpenRequest(
                name=name,
                version=version,
                recompute=recompute,
                context_id=context_id,
                ttl=ttl,
                priority=generation.create.priority,
            )
            opened = await call.unary(call.services.snapshots.open, opening, draws_ids=True)
            generation.usage.computed_tokens += computed_of_prompt(opened, generation.rewind_to)
            generation.usage.reopened_tokens += opened.computed
            generation.usage.restored_tokens += opened.restored
            context = opened.context
    generation.model_id = context.adapter or context.model_id
    generation.usage.page_size = context.page_size


def computed_of_prompt(opened: OpenResponse, rewind_to: int | None) -> int:
    """Tokens of a prompt that were computed when a snapshot was opened: of the snapshot the last ones were, and of that
    the prompt has `rewind_to` tokens (None: all).
    """
    if rewind_to is None:
        return opened.computed
    found = opened.context.seq_len - opened.computed
    return max(min(rewind_to, opened.context.seq_len) - found, 0)


async def score(call: HttpCall, generation: Generation, scoring: PromptScoring, request: FillRequest) -> None:
    """Compute all tokens of the prompt but the last one, and note how likely each was. `request` keeps the last one.

    All of them are computed, as a cached page tells nothing about its tokens.
    """
    tokens = request.tokens.ids[:]
    for start in range(0, len(tokens) - 1, SCORED_AT_ONCE):
        stop = min(start + SCORED_AT_ONCE, len(tokens) - 1)
        outputs = [
            ForwardOutputParams(index=place - start, logprob_ids=[tokens[place + 1]], top=scoring.top)
            for place in range(start, stop)
        ]
        forward = ForwardRequest(context_id=generation.context_id, tokens=tokens[start:stop], outputs=outputs)
        response = await call.unary(call.services.contexts.forward, forward)
        for place, result in enumerate(response.outputs, start):
            scoring.logprobs.append(
                TokenLogprob(token_id=tokens[place + 1], logprob=result.logprobs[0], top=result.top)
            )
    generation.usage.computed_tokens += len(tokens) - 1
    request.tokens.ids[:] = tokens[-1:]


async def fill(call: HttpCall, generation: Generation, request: FillRequest) -> None:
    """Append the prompt. With one output it is computed in the first step of that.

    With several outputs it is computed before, as no output says what their common prompt cost.
    """
    request.context_id = generation.context_id
    request.defer = generation.generate is not None and generation.generate.n <= 1
    filled = await call.unary(call.services.contexts.fill, request)
    generation.usage.computed_tokens += filled.computed
    generation.usage.restored_tokens += filled.restored
    generation.usage.prompt_tokens = filled.context.seq_len + filled.context.buffered_tokens


async def generate(
    call: HttpCall, generation: Generation, request: GenerateRequest
) -> AsyncGenerator[GenerateResponse, None]:
    """Continue the prompt."""
    usage = generation.usage
    request.context_id = generation.context_id
    async with aclosing(formatted(call, request, generation.looser_format)) as parts:
        async for part in parts:
            generation.context_ids.add(part.context_id)
            usage.count(part, is_only_output=request.n <= 1)
            yield part


async def formatted(
    call: HttpCall, request: GenerateRequest, looser_format: OutputFormat | None
) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of the outputs, in the looser format (None: there is none) if the engine refuses the request's own."""
    has_begun = False
    try:
        async with aclosing(call.stream(call.services.contexts.generate, request)) as parts:
            async for part in parts:
                has_begun = True
                yield part
        return
    except InvalidArgument as error:
        if has_begun or looser_format is None or all(each.field != GRAMMAR for each in error.violations):
            raise
    request.output_format.CopyFrom(looser_format)
    async with aclosing(call.stream(call.services.contexts.generate, request)) as parts:
        async for part in parts:
            yield part


async def close_contexts(call: HttpCall, context_ids: Collection[str]) -> None:
    """Close each context, and leave out those that cannot be closed: one may never have been created."""
    for context_id in context_ids:
        with suppress(JaxctxError):
            await call.services.contexts.close_context(call.caller, CloseContextRequest(context_id=context_id))
