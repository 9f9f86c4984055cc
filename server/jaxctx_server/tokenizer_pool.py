"""Content to tokens: tokenizer and chat template of the served model, with long texts off the event loop.

Special tokens: a text that goes into an empty context gets those that the tokenizer's post-processor adds (a
beginning-of-sequence token, if any), unless `add_special_tokens` says otherwise. The chat template writes its own. In a
context that has tokens, messages are written as the next turns of a conversation: without what the template writes only
once, at its start (a beginning-of-sequence token, a system prompt of its own), and after whatever is missing of the end
of the answer before them (`jaxctx.model.text.turns`).
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from jaxctx.errors import FailedPrecondition, InvalidArgument
from jaxctx.model.text import ChatTemplate, ModelText
from jaxctx.model.text.sandbox import CPU_S, TooMuchWork, rendering
from jaxctx.model.text.turns import Continuation, continuation, encode_behind
from jaxctx.types import RenderedChat
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest, PlanRequest
from jaxctx.v1.model_service_pb2 import TokenPiece
from jaxctx_server.chat_input import chat_size, template_messages, template_options
from jaxctx_server.validate import Limits, prompt_length_error, utf8_size

MAX_INLINE_SIZE = 2048  # characters or tokens: converting so few costs less than a trip to another thread
MAX_SHARED_THREAD_SIZE = 1 << 16  # larger texts cost so much that they wait for each other, on a thread of their own
THREADS = 2  # for sizes in between
EVENT_LOOP_CPU_S = 0.02  # processor time for a template on the event loop; most take less than a millisecond
ROLES_TO_ANSWER = ("user", "tool")  # after a message of these roles, the assistant answers
T = TypeVar("T")


class ContentPosition(Protocol):
    """The place where content is appended. Each question is asked only if the answer makes a difference."""

    async def is_empty(self) -> bool:
        """Whether there is no token before the content."""

    async def tokens(self) -> Sequence[int]:
        """All tokens before the content."""


class EmptyContext:
    """The start of a new context."""

    async def is_empty(self) -> bool:
        return True

    async def tokens(self) -> Sequence[int]:
        return ()


class MiddleOfSequence:
    """Somewhere within a sequence, for a text that is tokenised by itself: the tokens before it are not looked at."""

    async def is_empty(self) -> bool:
        return False

    async def tokens(self) -> Sequence[int]:
        return ()


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How a model writes calls of tools and its thoughts, by the names of `jaxctx.model.text.tool_calls`."""

    tool_calls: str  # empty: not known
    reasoning: str  # empty: not at all
    special_markers: Mapping[str, int]  # marks of these formats that are special tokens, with their ids


class TokenizerPool:
    """Tokenizer and chat template of one model. Used on the event loop; threads do what takes long.

    Call `close` at the end.
    """

    def __init__(self, text: ModelText, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        self.formats = OutputFormats(
            tool_calls="" if text.tool_call_format is None else text.tool_call_format.name,
            reasoning="" if text.reasoning_format is None else text.reasoning_format.name,
            special_markers=text.special_markers(),
        )
        self._template_is_slow = False  # its last rendering took longer than the event loop may be held up
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxctx-text")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="jaxctx-long-text")
        self._adds_special_tokens = bool(text.tokenizer.encode("", add_special_tokens=True))
        longest = text.tokenizer.max_token_bytes
        self._max_bytes = None if longest is None else longest * limits.max_context_tokens

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def tokens(self, request: FillRequest | PlanRequest, position: ContentPosition) -> Sequence[int]:
        """The tokens that a request would append at `position`: at least one, at most the longest sequence.

        Raises InvalidArgument naming the content's field, FailedPrecondition for messages without a template.
        """
        match request.WhichOneof("content"):
            case "tokens":
                return request.tokens.ids[:]
            case "messages":
                field, ids = "messages", await self._encode_messages(request.messages, position)
            case _:
                field = "text"
                self._check_size(field, request.text)
                if request.HasField("add_special_tokens"):
                    special = request.add_special_tokens
                else:
                    special = self._adds_special_tokens and await position.is_empty()
                ids = await self.encode(request.text, add_special_tokens=special)
        limit = self._limits.max_context_tokens
        if not 1 <= len(ids) <= limit:
            raise InvalidArgument.field(field, prompt_length_error(len(ids), limit))
        return ids

    def _check_size(self, field: str, text: str) -> None:
        """Refuse a text that the longest entries of the vocabulary could not bring under the limit."""
        if self._max_bytes is not None and utf8_size(text) > self._max_bytes:
            raise InvalidArgument.field(field, prompt_length_error(None, self._limits.max_context_tokens))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text, of any number."""
        encode = partial(self._text.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(len(text), encode)

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens, which must be of the model's vocabulary."""
        decode = partial(self._text.tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        return await self._run(len(tokens), decode)

    async def pieces(self, tokens: Sequence[int]) -> list[TokenPiece]:
        """Each token by itself."""
        return await self._run(len(tokens), partial(self._pieces, tokens))

    def _pieces(self, tokens: Sequence[int]) -> list[TokenPiece]:
        tokenizer = self._text.tokenizer
        return [TokenPiece(bytes=tokenizer.piece(token), is_special=token in tokenizer.special_ids) for token in tokens]

    async def entries(self, tokens: Sequence[int]) -> list[str]:
        """The entries of the vocabulary that tokens are."""
        return await self._run(len(tokens), partial(self._text.tokenizer.entries, tokens))

    def config_json(self) -> str:
        """What the model's directory says about its tokenizer and chat template, a JSON object."""
        return self._text.config_json

    async def render(self, chat: ChatMessages) -> RenderedChat:
        """Messages as the chat template writes them into an empty context, and the tokens of that, of any number."""
        text = await self._render(chat)
        return RenderedChat(text=text, tokens=await self.encode(text, add_special_tokens=False))

    async def _encode_messages(self, chat: ChatMessages, position: ContentPosition) -> list[int]:
        """Tokens of messages at a position of a context."""
        template = self._template()
        if await position.is_empty():
            text = await self._render(chat)
            self._check_size("messages", text)
            return await self.encode(text, add_special_tokens=False)
        held = await position.tokens()
        write = partial(self._write_continuation, template, held, chat)
        found = await self._run_template(chat_size(chat) + len(held), write)
        self._check_size("messages", found.text)
        return await self._run(len(found.text), partial(self._encode_continuation, found, held))

    def _write_continuation(self, template: ChatTemplate, held: Sequence[int], chat: ChatMessages) -> Continuation:
        """Messages as the next turns of a conversation whose tokens are `held`."""
        return continuation(
            template,
            self._text.tokenizer,
            held,
            template_messages(chat, template, self._template_call_id),
            asks=asks_for_answer(chat),
            options=template_options(chat, template),
        )

    def _encode_continuation(self, found: Continuation, held: Sequence[int]) -> list[int]:
        """Tokens of the next turns of a conversation whose tokens are `held`."""
        tokenizer = self._text.tokenizer
        if not found.is_anew:
            return encode_behind(tokenizer, held, found.anchor, found.end + found.text)
        ids = tokenizer.encode(found.text, add_special_tokens=False)
        if ids[:1] == [self._text.bos_id]:
            ids = ids[1:]  # the context began with one
        return [*tokenizer.encode(found.end, add_special_tokens=False), *ids] if found.end else ids

    async def _render(self, chat: ChatMessages) -> str:
        """Messages as the template writes them by themselves, and the opening of an answer if one is asked for."""
        return await self._run_template(chat_size(chat), partial(self._write_alone, self._template(), chat))

    def _write_alone(self, template: ChatTemplate, chat: ChatMessages) -> str:
        """Messages as the template writes them into an empty context."""
        messages = template_messages(chat, template, self._template_call_id)
        options = template_options(chat, template)
        return template.render(messages, add_generation_prompt=asks_for_answer(chat), options=options)

    def _template_call_id(self, call_id: str) -> str:
        """An id of a call in the form that the template takes."""
        tool_calls = self._text.tool_call_format
        return call_id if tool_calls is None else tool_calls.template_call_id(call_id)

    def _template(self) -> ChatTemplate:
        if self._text.chat_template is None:
            message = "the model has no chat template; send text or tokens"
            raise FailedPrecondition(message, reason="NO_CHAT_TEMPLATE")
        return self._text.chat_template

    async def _run_template(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which renders a template over so many characters and tokens.

        A short one runs on the event loop. One that takes long there is run on the thread of long texts instead, and so
        are the next ones until one of them is quick again.
        """
        if size > MAX_INLINE_SIZE:
            return await self._run(size, partial(run_limited, work, CPU_S))
        if not self._template_is_slow:
            with suppress(TooMuchWork):
                return run_limited(work, EVENT_LOOP_CPU_S)
        return await self._run(MAX_SHARED_THREAD_SIZE + 1, partial(self._run_timed, work))

    def _run_timed(self, work: Callable[[], T]) -> T:
        """Run the rendering of a template on a thread, and note whether it is slow."""
        began = time.thread_time()
        try:
            return run_limited(work, CPU_S)
        finally:
            self._template_is_slow = time.thread_time() - began > EVENT_LOOP_CPU_S

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, run on the event loop or on the threads for texts of this size."""
        if size <= MAX_INLINE_SIZE:
            return work()
        threads = self._threads if size <= MAX_SHARED_THREAD_SIZE else self._long_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def run_limited(work: Callable[[], T], cpu_s: float) -> T:
    """The result of `work`, which renders a template. Raises TooMuchWork if it takes more processor time than this."""
    with rendering(cpu_s):
        return work()


def asks_for_answer(chat: ChatMessages) -> bool:
    """Whether the opening of an answer follows the messages."""
    if chat.continue_final_message:
        return False
    if chat.HasField("add_generation_prompt"):
        return chat.add_generation_prompt
    return chat.messages[-1].role in ROLES_TO_ANSWER
