"""Content to tokens: tokenizer and chat template of the served model, with long texts off the event loop.

Special tokens: text gets those that the tokenizer's post-processor adds (a beginning-of-sequence token, if any) when it
goes into an empty context, unless `add_special_tokens` says otherwise. The chat template writes its own. In a context
that has tokens, messages are written as the next turns of a conversation: without what the template writes once, at the
start of one (a beginning-of-sequence token, a system prompt of its own), and behind what is missing of the end of an
answer (`jaxctx.model.text.turns`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from jaxctx.errors import FailedPrecondition, InvalidArgument
from jaxctx.model.text import ChatTemplate, ModelText
from jaxctx.model.text.sandbox import CPU_S, TooMuchWork, rendering
from jaxctx.model.text.turns import Continuation, continuation, encode_behind
from jaxctx.types import RenderedChat
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest, PlanRequest
from jaxctx_server.validate import Limits, utf8_size
from jaxctx_server.validate.cross_field import made

SHORT = 2048  # characters, or tokens, that cost less than a trip to another thread
LONG = 1 << 16  # from here on they cost so much that they wait for each other, on a thread of their own
THREADS = 2  # for what is in between
LOOP_S = 0.02  # of the processor, for a template on the event loop; most take less than a millisecond
MESSAGE = 32  # characters that a message costs beside its own
ANSWERED = ("user", "tool")  # roles after which the assistant speaks
T = TypeVar("T")


class Before(Protocol):
    """What a context holds before something is appended. Each is asked only where it makes a difference."""

    async def is_empty(self) -> bool: ...

    async def tokens(self) -> Sequence[int]: ...


class Nothing:
    """Before what goes into a new context."""

    async def is_empty(self) -> bool:
        return True

    async def tokens(self) -> Sequence[int]:
        return ()


class Something(Nothing):
    """Before a text that stands in the middle of a sequence, whatever is there."""

    async def is_empty(self) -> bool:
        return False


class TokenizerPool:
    """Text of one model. Called on the event loop; threads do what takes long. `close` at the end."""

    def __init__(self, text: ModelText, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        self._is_slow = False  # the template took longer than the event loop has, the last time
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxctx-text")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="jaxctx-long-text")
        self._adds_special_tokens = bool(text.tokenizer.encode("", add_special_tokens=True))
        longest = text.tokenizer.max_token_bytes
        self._max_bytes = None if longest is None else longest * limits.max_context_tokens

    def close(self) -> None:
        """Let go of the threads."""
        for threads in (self._threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def tokens(self, request: FillRequest | PlanRequest, before: Before) -> Sequence[int]:
        """The tokens of what a request would append to a context: at least one, at most the longest sequence.

        Raises InvalidArgument naming the content's field, FailedPrecondition for messages without a template.
        """
        match request.WhichOneof("content"):
            case "tokens":
                return request.tokens.ids[:]
            case "messages":
                field, ids = "messages", await self._encode_messages(request.messages, before)
            case _:
                field, special = "text", made(request, "add_special_tokens")
                self._check_size(field, request.text)
                if special is None:
                    special = self._adds_special_tokens and await before.is_empty()
                ids = await self.encode(request.text, add_special_tokens=special)
        limit = self._limits.max_context_tokens
        if not 1 <= len(ids) <= limit:
            raise InvalidArgument.field(field, f"must be 1 to {limit} tokens, is {len(ids)}")
        return ids

    def _check_size(self, field: str, text: str) -> None:
        """Refuse a text that the longest entries of the vocabulary could not bring under the limit."""
        if self._max_bytes is not None and utf8_size(text) > self._max_bytes:
            raise InvalidArgument.field(field, f"must be 1 to {self._limits.max_context_tokens} tokens, is more")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text, of any number."""
        encode = partial(self._text.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(len(text), encode)

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens, which must be of the model's vocabulary."""
        decode = partial(self._text.tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        return await self._run(len(tokens), decode)

    async def render(self, chat: ChatMessages) -> RenderedChat:
        """Messages as the chat template writes them into an empty context, and the tokens of that, of any number."""
        text = await self._render(chat)
        return RenderedChat(text=text, tokens=await self.encode(text, add_special_tokens=False))

    async def _encode_messages(self, chat: ChatMessages, before: Before) -> list[int]:
        """Tokens of messages in a context."""
        template = self._template()
        if await before.is_empty():
            text = await self._render(chat)
            self._check_size("messages", text)
            return await self.encode(text, add_special_tokens=False)
        held, tokenizer = await before.tokens(), self._text.tokenizer

        def write() -> Continuation:
            return continuation(template, tokenizer, held, _turns(chat), asks=_asks(chat))

        found = await self._rendered(_size(chat) + len(held), write)
        self._check_size("messages", found.text)

        def encode() -> list[int]:
            if not found.is_anew:
                return encode_behind(tokenizer, held, found.anchor, found.end + found.text)
            ids = tokenizer.encode(found.text, add_special_tokens=False)
            if ids[:1] == [self._text.bos_id]:
                ids = ids[1:]  # the context began with one
            return [*tokenizer.encode(found.end, add_special_tokens=False), *ids] if found.end else ids

        return await self._run(len(found.text), encode)

    async def _render(self, chat: ChatMessages) -> str:
        """Messages as they stand. By themselves they end with what opens an answer if somebody waits for one."""
        render = partial(self._template().render, _turns(chat), add_generation_prompt=_asks(chat))
        return await self._rendered(_size(chat), render)

    def _template(self) -> ChatTemplate:
        if self._text.chat_template is None:
            message = "the model has no chat template; send text or tokens"
            raise FailedPrecondition(message, reason="NO_CHAT_TEMPLATE")
        return self._text.chat_template

    async def _rendered(self, size: int, work: Callable[[], T]) -> T:
        """What a template writes. One that takes long does so on the thread of long texts, for as long as it needs more
        time there than the event loop has.
        """

        def limited(cpu_s: float = CPU_S) -> T:
            with rendering(cpu_s):
                return work()

        def patiently() -> T:
            begun = time.thread_time()
            try:
                return limited()
            finally:
                self._is_slow = time.thread_time() - begun > LOOP_S

        if size > SHORT:
            return await self._run(size, limited)
        if not self._is_slow:
            with suppress(TooMuchWork):
                return limited(LOOP_S)
        return await self._run(LONG + 1, patiently)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= SHORT:
            return work()
        threads = self._threads if size <= LONG else self._long_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _turns(chat: ChatMessages) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in chat.messages]


def _asks(chat: ChatMessages) -> bool:
    """Whether an answer is opened behind the messages."""
    return chat.add_generation_prompt if chat.HasField("add_generation_prompt") else chat.messages[-1].role in ANSWERED


def _size(chat: ChatMessages) -> int:
    """What messages cost, in characters."""
    return sum(len(turn.role) + len(turn.content) + MESSAGE for turn in chat.messages)
