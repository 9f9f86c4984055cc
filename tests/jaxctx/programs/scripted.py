"""A scripted engine: contexts of characters, a log of every call, and outputs that come when a test says so."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from jaxctx.engine.interface import Caller
from jaxctx.errors import NotFound
from jaxctx.types import CreateContextRequest, FinishReason, GeneratePiece, GenerateRequest, UpdateContextRequest
from tests.server.fake_engine import INFO, STATS

BOS = 1


async def encode(caller: Caller, text: str, start: bool) -> list[int]:
    """A token for each character, and one at the start of a sequence."""
    return [BOS] * start + [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token != BOS)


class ScriptedEngine:
    """As the real one it computes what no context of the tenant has in common. An output, which `answer` makes of the
    text of its context, comes in three parts, once `gate` is open.
    """

    def __init__(
        self, name: str = "e", *, max_batch: int = 32, answer: Callable[[str], str] | None = None, **info: Any
    ) -> None:
        self.name = name
        self.info = replace(INFO, max_batch=max_batch, page_size=64, pages_total=100_000, **info)
        self.adapter_revisions: dict[str, str] = {}  # name → content
        self.answer = answer or (lambda text: f"<{text[-12:]}>")
        self.gate = asyncio.Event()
        self.gate.set()
        self.log: list[tuple[str, str]] = []  # operation, text
        self.contexts: dict[tuple[str, str], list[int]] = {}
        self.created: list[CreateContextRequest] = []  # every one
        self.requests: list[GenerateRequest] = []  # every one
        self.running: dict[str, str] = {}  # text of the prompt, by context
        self.most_running = 0
        self.failure: Exception | None = None  # of every call from now on
        self.failing = ""  # or of calls of this operation only
        self.parts_before_failure: int | None = None  # of every output
        self.ticks_to_close = 0  # of a stream that its reader leaves
        self.silent = False  # no call is answered
        self._ids = itertools.count()

    def did(self, operation: str) -> list[str]:
        return [text for each, text in self.log if each == operation]

    async def _called(self, operation: str, text: str = "") -> None:
        self.log.append((operation, text))
        await asyncio.sleep(0)
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None and self.failing in ("", operation):
            raise self.failure

    def _tokens(self, caller: Caller, context_id: str) -> list[int]:
        try:
            return self.contexts[caller.tenant, context_id]
        except KeyError:
            raise NotFound("no such context") from None

    async def create(self, caller: Caller, request: CreateContextRequest) -> Any:
        await self._called("create")
        self.created.append(request)
        context_id = request.context_id or f"{self.name}{next(self._ids)}"
        self.contexts[caller.tenant, context_id] = []
        revision = self.adapter_revisions[request.adapter] if request.adapter else ""
        return SimpleNamespace(context_id=context_id, adapter_revision=revision)

    async def fork(self, caller: Caller, context_id: str, ids: Sequence[str | None]) -> list[Any]:
        tokens = self._tokens(caller, context_id)
        await self._called("fork", decode(tokens))
        child = f"{self.name}{next(self._ids)}"
        self.contexts[caller.tenant, child] = list(tokens)
        return [SimpleNamespace(context_id=child)]

    async def fill(self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False) -> None:
        await self._called("fill", decode(tokens))
        context = self._tokens(caller, context_id)
        whole = [*context, *tokens]
        others = [
            each for (tenant, _), each in self.contexts.items() if tenant == caller.tenant and each is not context
        ]
        found = max((len(os.path.commonprefix([whole, each])) for each in others), default=0)
        self.log.append(("compute", decode(whole[max(found, len(context)) :])))
        context.extend(tokens)

    async def rewind(self, caller: Caller, context_id: str, to: int) -> None:
        tokens = self._tokens(caller, context_id)
        await self._called("rewind", decode(tokens[:to]))
        del tokens[to:]

    async def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> None:
        self._tokens(caller, context_id)
        await self._called("update", str(request.priority))

    async def close(self, caller: Caller, context_id: str) -> None:
        self._tokens(caller, context_id)
        await self._called("close")
        del self.contexts[caller.tenant, context_id]

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        tokens = self._tokens(caller, request.context_id)
        text = decode(tokens)
        self.requests.append(request)
        self.running[request.context_id] = text
        self.most_running = max(self.most_running, len(self.running))
        try:
            await self._called("generate", text)
            await self.gate.wait()
            left = None if request.max_tokens is None else request.max_tokens - request.resume_tokens
            whole = self.answer(text)[:left]
            parts = [whole[:1], whole[1:2], whole[2:]]
            for count, part in enumerate(parts):
                if count == self.parts_before_failure and self.failure is not None:
                    raise self.failure
                tokens += map(ord, part)
                yield GeneratePiece(
                    index=0,
                    context_id=request.context_id,
                    text=part,
                    token_ids=list(map(ord, part)),
                    finish=FinishReason.STOP if count == 2 else None,
                )
                await asyncio.sleep(0)
        finally:
            del self.running[request.context_id]
            for _ in range(self.ticks_to_close):
                await asyncio.sleep(0)

    async def stats(self) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        return replace(STATS, running=len(self.running), waiting=0, pages_held=0)
