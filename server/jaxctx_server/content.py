"""Content to tokens: tokenizer and chat template of the served model, with long texts off the event loop.

Special tokens: text gets those that the tokenizer's post-processor adds (a beginning-of-sequence token, if any) when it
goes into an empty context, unless `add_special_tokens` says otherwise. The chat template writes its own. In a context
that has tokens, messages are written as the next turns of a conversation: without what the template writes once, at the
start of one (a beginning-of-sequence token, a system prompt of its own).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from jaxctx.answers import RenderedChat
from jaxctx.errors import FailedPrecondition, InvalidArgument
from jaxctx.model.text import ModelText
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest, PlanRequest
from jaxctx_server.validate import Limits, utf8_size
from jaxctx_server.validate.requests import made

SHORT = 2048  # characters, or tokens, that cost less than a trip to another thread
LONG = 1 << 16  # from here on they cost so much that they wait for each other, on a thread of their own
THREADS = 2  # for what is in between
MESSAGE = 32  # characters that a message costs beside its own
ANSWERED = ("user", "tool")  # roles after which the assistant speaks
T = TypeVar("T")


class Texts:
    """Text of one model. Called on the event loop; threads do what takes long. `close` at the end."""

    def __init__(self, text: ModelText, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxctx-text")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="jaxctx-long-text")
        self._adds_special_tokens = bool(text.tokenizer.encode("", add_special_tokens=True))
        longest = text.tokenizer.max_token_bytes
        self._max_bytes = None if longest is None else longest * limits.max_context_tokens

    def close(self) -> None:
        """Let go of the threads."""
        for threads in (self._threads, self._long_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def tokens(
        self, request: FillRequest | PlanRequest, is_empty: Callable[[], Awaitable[bool]]
    ) -> Sequence[int]:
        """The tokens of what a request would append to a context: at least one, at most the longest sequence.

        `is_empty` says whether the context has no tokens yet, and is asked only where that makes a difference. Raises
        InvalidArgument naming the content's field, FailedPrecondition for messages without a template.
        """
        field, special, again = "text", made(request, "add_special_tokens"), False
        match request.WhichOneof("content"):
            case "tokens":
                return request.tokens.ids[:]
            case "messages":
                field, special = "messages", False
                text, again = await self._written(request.messages, await is_empty())
            case _:
                text = request.text
        limit = self._limits.max_context_tokens
        # The longest entries of the vocabulary could not bring such a text under the limit.
        if self._max_bytes is not None and utf8_size(text) > self._max_bytes:
            raise InvalidArgument.field(field, f"must be 1 to {limit} tokens, is more")
        if special is None:
            special = self._adds_special_tokens and await is_empty()
        ids = await self.encode(text, add_special_tokens=special)
        if again and ids[:1] == [self._text.bos_id]:
            ids = ids[1:]  # the context began with one
        if not 1 <= len(ids) <= limit:
            raise InvalidArgument.field(field, f"must be 1 to {limit} tokens, is {len(ids)}")
        return ids

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
        text, _ = await self._written(chat, True)
        return RenderedChat(text=text, tokens=await self.encode(text, add_special_tokens=False))

    async def _written(self, chat: ChatMessages, empty: bool) -> tuple[str, bool]:
        """Messages as the chat template writes them for a context, and whether they begin a conversation again: if it
        has tokens and the template cannot write a next turn. By themselves they end with what opens an answer if
        somebody waits for one.
        """
        if (template := self._text.chat_template) is None:
            message = "the model has no chat template; send text or tokens"
            raise FailedPrecondition(message, reason="NO_CHAT_TEMPLATE")
        turns = [{"role": turn.role, "content": turn.content} for turn in chat.messages]
        size = sum(len(turn.role) + len(turn.content) + MESSAGE for turn in chat.messages)
        opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else turns[-1]["role"] in ANSWERED

        def write() -> tuple[str, bool]:
            later = None if empty else template.render_next(turns, add_generation_prompt=opens)
            if later is not None:
                return later, False
            return template.render(turns, add_generation_prompt=opens), not empty

        return await self._run(size, write)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= SHORT:
            return work()
        threads = self._threads if size <= LONG else self._long_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)
