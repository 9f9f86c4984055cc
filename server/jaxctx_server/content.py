"""Content to tokens: tokenizer and chat template of the served model, with long texts off the event loop.

Special tokens: text gets those that the tokenizer's post-processor adds (a beginning-of-sequence token, if any) when it
goes into an empty context, unless `add_special_tokens` says otherwise. The chat template writes its own; in a context
that has tokens, a beginning-of-sequence token at its front is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from jaxctx.errors import FailedPrecondition, InvalidArgument
from jaxctx.model.text import ChatTemplate, ModelText
from jaxctx_server.validate import Content, Limits, MessageContent, TextContent, TokenContent

SHORT = 2048  # characters, or tokens, that cost less than a trip to another thread
THREADS = 2
T = TypeVar("T")


class Texts:
    """Text of one model. Called on the event loop; threads do what takes long. `close` at the end."""

    def __init__(self, text: ModelText, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxctx-text")
        self._adds_special_tokens = bool(text.tokenizer.encode("", add_special_tokens=True))

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def depends_on_context(self, content: Content) -> bool:
        """Whether the tokens of `content` differ between an empty context and one that has tokens."""
        match content:
            case TextContent():
                return content.add_special_tokens is None and self._adds_special_tokens
            case MessageContent():
                return self._text.bos_id is not None
            case TokenContent():
                return False

    async def tokens(self, content: Content, *, empty: bool) -> Sequence[int]:
        """The tokens of `content` for a context that is empty or not: at least one, at most the longest sequence.

        Raises InvalidArgument naming the content's field, FailedPrecondition for messages without a template.
        """
        match content:
            case TokenContent():
                return content.ids
            case TextContent():
                field, ids = "text", await self.encode(content, empty=empty)
            case MessageContent():
                field, ids = "messages", (await self.render(content))[1]
                if not empty and ids and ids[0] == self._text.bos_id:
                    ids = ids[1:]
        if not 1 <= len(ids) <= self._limits.max_context_tokens:
            limit = self._limits.max_context_tokens
            raise InvalidArgument.field(field, f"must be 1 to {limit} tokens, is {len(ids)}")
        return ids

    async def encode(self, content: TextContent, *, empty: bool = True) -> list[int]:
        """Tokens of a text, of any number."""
        special = empty if content.add_special_tokens is None else content.add_special_tokens
        encode = partial(self._text.tokenizer.encode, content.text, add_special_tokens=special)
        return await self._run(len(content.text), encode)

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens, which must be of the tokenizer's vocabulary."""
        decode = partial(self._text.tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        return await self._run(len(tokens), decode)

    async def render(self, content: MessageContent) -> tuple[str, list[int]]:
        """Messages as the chat template writes them, and the tokens of that."""
        template = self._text.chat_template
        if template is None:
            message = "the model has no chat template; send text or tokens"
            raise FailedPrecondition(message, reason="NO_CHAT_TEMPLATE")
        size = sum(len(message["content"]) for message in content.messages)
        return await self._run(size, partial(self._render, template, content))

    def _render(self, template: ChatTemplate, content: MessageContent) -> tuple[str, list[int]]:
        text = template.render(content.messages, add_generation_prompt=content.add_generation_prompt)
        return text, self._text.tokenizer.encode(text, add_special_tokens=False)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
