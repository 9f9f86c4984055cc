"""One fork of the input for each question: its choices are scored there, or a text is generated.

Few forks are there at once, and each is closed before the next one is made. If the server or the caller's quota has no
place for so many, the questions wait for each other.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from jaxctx.errors import JaxctxError, ResourceExhausted
from jaxctx.v1.context_service_pb2 import CreateContextRequest, FillRequest, ForwardRequest, GenerateRequest
from jaxctx.v1.forward_pb2 import AttentionMask, ForwardOutputParams
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.decisions.choice_tree import Tokens, TreeNode, choice_logprobs
from jaxctx_server.http.decisions.prompt import DecisionPrompt, QuestionPrompt
from jaxctx_server.http.decisions.request import Question, in_question
from jaxctx_server.http.decisions.usage import DecisionUsage
from jaxctx_server.http.generation import (
    SCORED_AT_ONCE,
    ForkOf,
    Generation,
    PromptUsage,
    begin,
    close_contexts,
    fill,
    generate,
)
from jaxctx_server.http.interleave import Interleaved, interleave

MAX_RUNNING_QUESTIONS = 16  # of one request at once
# There may be a place once another question of the same request has ended.
PLACE_REASONS = ("OUT_OF_PAGES", "QUEUE_FULL", "TOO_MANY_CONTEXTS", "QUOTA")


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a question."""

    question: Question
    usage: DecisionUsage
    logprobs: Sequence[float] = ()  # of each option; empty for a text
    text: str = ""
    finish: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED  # of a text


class Answering:
    """Answers the questions of one request in forks of the context that has its input."""

    def __init__(self, call: HttpCall, prompt: DecisionPrompt, shared: Generation) -> None:
        """`shared`: has filled the input."""
        self._call = call
        self._prompt = prompt
        self._shared = shared
        self._running = 0  # questions
        self._one_ended = asyncio.Event()  # a new one each time that a question is answered

    async def answers(self) -> AsyncGenerator[Interleaved[Answered], None]:
        """The answers as they come. The first error ends all. To be closed as soon as it is no longer read."""
        places = range(len(self._prompt.questions))
        sources = [partial(self._one, place) for place in places]
        async with aclosing(interleave(sources, MAX_RUNNING_QUESTIONS)) as found:
            async for each in found:
                yield each

    async def _one(self, place: int) -> AsyncGenerator[Answered, None]:
        """The answer to one question."""
        question = self._prompt.questions[place].question
        try:
            yield await self._in_turn(self._prompt.questions[place])
        except JaxctxError as error:
            raise in_question(error, place, question.field_names) from None

    async def _in_turn(self, question: QuestionPrompt) -> Answered:
        """The answer, as soon as there is a place for the question. Raises ResourceExhausted if it is alone."""
        while True:
            self._running += 1
            try:
                answered = await self._answer(question)
            except ResourceExhausted as error:
                if self._running == 1 or error.reason not in PLACE_REASONS:
                    raise
            else:
                self._one_ended.set()
                self._one_ended = asyncio.Event()
                return answered
            finally:
                self._running -= 1
            await self._one_ended.wait()  # there is one: the last one that runs ends, or raises

    async def _answer(self, question: QuestionPrompt) -> Answered:
        async with self._fork() as fork:
            if question.question.generate is None:
                return await self._scored(fork, question)
            return await self._continued(fork, question, question.question.generate)

    @asynccontextmanager
    async def _fork(self) -> AsyncIterator[Generation]:
        """A fork of the input while entered."""
        fork = Generation(create=CreateContextRequest(), source=ForkOf(self._shared.context_id))
        fork.context_id = secrets.token_hex(16)
        try:
            await begin(self._call, fork)
            yield fork
        finally:
            closing = close_contexts(self._call, [fork.context_id])
            await asyncio.shield(self._call.frontend.run_in_background(closing))

    async def _scored(self, fork: Generation, question: QuestionPrompt) -> Answered:
        """The log probability of each option."""
        passes = scoring_passes(fork.context_id, len(self._prompt.input), question)
        found: dict[Tokens, dict[int, float]] = {}
        for each in passes:
            response = await self._call.unary(self._call.services.contexts.forward, each.request)
            for beginning, asked, told in zip(each.beginnings, each.request.outputs, response.outputs, strict=True):
                found[beginning] = dict(zip(asked.logprob_ids, told.logprobs, strict=True))
        prompt_tokens = len(self._prompt.input) + len(question.tokens)
        spent = PromptUsage(prompt_tokens, len(question.tokens), page_size=fork.usage.page_size)
        usage = DecisionUsage(
            input_tokens=len(self._prompt.input) + question.computed_tokens,
            cached_tokens=spent.cached_tokens,
            written_tokens=spent.written_tokens,
        )
        return Answered(question.question, usage, logprobs=choice_logprobs(question.choices, found))

    async def _continued(self, fork: Generation, question: QuestionPrompt, options: GenerateRequest) -> Answered:
        """The text that the model writes behind the question."""
        filling, asked = FillRequest(), GenerateRequest()
        filling.tokens.ids.extend(question.tokens)
        asked.CopyFrom(options)
        fork.generate = asked  # before `fill`, which leaves the computing to it
        await fill(self._call, fork, filling)
        texts: list[str] = []
        finish = FinishReason.FINISH_REASON_UNSPECIFIED
        async with aclosing(generate(self._call, fork, asked)) as parts:
            async for part in parts:
                texts.append(part.text)
                finish = part.finish or finish
        spent = fork.usage
        usage = DecisionUsage(spent.prompt_tokens, spent.cached_tokens, spent.written_tokens, spent.completion_tokens)
        return Answered(question.question, usage, text="".join(texts), finish=finish)


@dataclass(frozen=True, slots=True)
class ScoringPass:
    """One Forward, and the beginning of a choice that each of its outputs stands for; () is the question's end."""

    request: ForwardRequest
    beginnings: Sequence[Tokens]


def scoring_passes(context_id: str, input_tokens: int, question: QuestionPrompt) -> list[ScoringPass]:
    """The passes that score the choices of a question, in this order. The first one has the question itself."""
    if question.tree is None:
        raise ValueError("a text has no choices")
    tree, start = question.tree, input_tokens + len(question.tokens)
    first = ForwardRequest(context_id=context_id, tokens=question.tokens)
    first.outputs.append(ForwardOutputParams(index=len(question.tokens) - 1, logprob_ids=tree.first_tokens))
    now = tree.nodes[: SCORED_AT_ONCE - 1]
    if now:  # else nothing in the pass is out of the ordinary
        first.positions.extend(range(input_tokens, start))
        first.masks.extend(AttentionMask() for _ in question.tokens)
    passes = [ScoringPass(first, [(), *(node.tokens for node in now)])]
    add_nodes(first, now, 0, start)
    for index in range(len(now), len(tree.nodes), SCORED_AT_ONCE):
        now = tree.nodes[index : index + SCORED_AT_ONCE]
        request = ForwardRequest(context_id=context_id)
        add_nodes(request, now, index, start)
        passes.append(ScoringPass(request, [node.tokens for node in now]))
    return passes


def add_nodes(request: ForwardRequest, nodes: Sequence[TreeNode], first: int, start: int) -> None:
    """Let a pass compute nodes too, of which the first one has the index `first` in the tree.

    `start`: tokens of the context before the tree, behind which its nodes stand one after the other.
    """
    for index, node in enumerate(nodes, first):
        seen = [start + each for each in (*node.ancestors, index)]
        request.outputs.append(ForwardOutputParams(index=len(request.tokens), logprob_ids=node.next_tokens))
        request.tokens.append(node.tokens[-1])
        request.positions.append(start + len(node.tokens) - 1)
        request.masks.append(AttentionMask(bounds=bounds_of(start, seen)))


def bounds_of(prefix: int, indexes: Sequence[int]) -> list[int]:
    """The first `prefix` tokens and those at these ascending indexes behind them, as ranges: start, stop, start, …"""
    bounds = [0, prefix]
    for index in indexes:
        if bounds[-1] == index:
            bounds[-1] = index + 1
        else:
            bounds += [index, index + 1]
    return bounds
