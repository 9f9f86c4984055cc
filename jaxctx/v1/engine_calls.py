"""What engines do, in process or not.

Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from jaxctx.caller import Caller
from jaxctx.codec import decode
from jaxctx.v1.answers import (
    Comparison,
    ContextEvent,
    ContextInfo,
    FillResult,
    ForwardResult,
    GeneratePiece,
    GetContextResult,
    Publication,
    Snapshot,
)
from jaxctx.v1.requests import (
    Changes,
    CreateRequest,
    ForwardRequest,
    GenerateRequest,
    OpenRequest,
    SaveRequest,
    UpdateRequest,
)

__all__ = [
    "EngineCalls",
    "ProgramCalls",
    "RemoteCalls",
]


class ProgramCalls(Protocol):
    """What programs have an engine do by one call of the contract."""

    async def create(self, caller: Caller, request: CreateRequest) -> ContextInfo:
        """A new, empty context."""

    async def update(self, caller: Caller, context_id: str, request: UpdateRequest) -> ContextInfo:
        """Change priority, pin, time to live or labels. What is unset stays as it is, labels replace all labels."""

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """Go back to any length, across committed pages, without computing."""

    async def close(self, caller: Caller, context_id: str) -> None:
        """Give up the context. A running writer is cancelled first; forks of it live on."""

    def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        """Continue the context and stream what comes."""

    async def clear_cache(self, caller: Caller) -> int:
        """Drop every cached page that no context holds, and tell how many; in a core, of all engines."""


class RemoteCalls(ProgramCalls, Protocol):
    """What programs have an engine do by one call of the contract, in another process."""

    @abstractmethod
    async def ask(self, rpc: str, caller: Caller, request: object = None, /, **fields: Any) -> Any:
        """Call a method with these fields and those of `request`; its response."""

    @abstractmethod
    def begun(
        self, rpc: str, caller: Caller, request: object = None, /, **fields: Any
    ) -> AbstractAsyncContextManager[Any]:
        """The same as a call under way, which ends with the block; one that is streamed is iterated over."""

    async def create(self, caller: Caller, request: CreateRequest) -> ContextInfo:
        told = await self.ask("CreateContext", caller, request)
        return decode(told.context, ContextInfo)

    async def update(self, caller: Caller, context_id: str, request: UpdateRequest) -> ContextInfo:
        told = await self.ask("UpdateContext", caller, request, context_id=context_id)
        return decode(told.context, ContextInfo)

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        told = await self.ask("Rewind", caller, context_id=context_id, to=to)
        return decode(told.context, ContextInfo)

    async def close(self, caller: Caller, context_id: str) -> None:
        await self.ask("CloseContext", caller, context_id=context_id)

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        async with self.begun("Generate", caller, request) as call:
            async for each in call:
                yield decode(each, GeneratePiece)

    async def clear_cache(self, caller: Caller) -> int:
        told = await self.ask("ClearCache", caller)
        return told.pages_dropped


class EngineCalls(Protocol):
    """What clients have an engine do by one call of the contract."""

    async def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[ContextInfo]:
        """Children that begin as the context stands now, its pages shared.

        All or none. Costs the same at any length.
        """

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """Drop trailing tokens that are in no committed page."""

    async def forward(self, caller: Caller, request: ForwardRequest) -> ForwardResult:
        """One pass over explicit tokens, positions and attention masks.

        All of it or, on any error, nothing; only after a deadline or a cancelled call may tokens be left in the
        context: Rewind takes them back.
        """

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Allocate working pages ahead, so that what follows does not wait for them."""

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Make the first full working pages immutable and shareable."""

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Give back working pages from the tail, with the tokens in them."""

    async def inspect(
        self,
        caller: Caller,
        context_id: str,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> GetContextResult:
        """Read the counters; on request, also the pages and the tokens."""

    async def list(
        self, caller: Caller, page_token: str, limit: int, include_program_contexts: bool = False
    ) -> Sequence[ContextInfo]:
        """The caller's contexts in the order of their ids, but those that the server made for programs."""

    def watch(self, caller: Caller, include_program_contexts: bool = False) -> AsyncIterator[ContextEvent]:
        """The caller's contexts as they are, but those that the server made for programs, and then every change of
        them, until the caller leaves.

        It reads, and uses none of them.
        """

    async def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        """Where two contexts part."""

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        """Keep a context's present state under a name. The context goes on as it is."""

    async def open(self, caller: Caller, request: OpenRequest) -> FillResult:
        """A new context from a snapshot. Opening twice gives two that are independent."""

    async def take(self, caller: Caller, request: OpenRequest) -> FillResult:
        """As Open of the latest version, and delete the name in the same moment: of two racing calls one gets
        NotFound.

        If meanwhile another version became the latest, that is Aborted (VERSION_MISMATCH), and nothing is deleted.
        """

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> Snapshot:
        """One version of a snapshot."""

    async def snapshots(self, caller: Caller, prefix: str, page_token: str, limit: int) -> Sequence[Snapshot]:
        """The latest version of each name, in the order of the names."""

    async def history(self, caller: Caller, name: str) -> Sequence[Snapshot]:
        """All versions of a name that are kept, latest first."""

    async def update_snapshot(self, caller: Caller, name: str, version: int | None, changes: Changes) -> Snapshot:
        """Change time to live or labels of a version. What is unset stays as it is."""

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """Delete a name or one version of it, and tell how many versions that were.

        Contexts that were opened from it live on.
        """

    async def publish(self, caller: Caller, context_id: str, changes: Changes) -> Publication:
        """Let contexts of all tenants share the full pages of a context."""

    async def update_publication(self, caller: Caller, publication_id: str, changes: Changes) -> Publication:
        """Change time to live or labels of a publication. What is unset stays as it is."""

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        """End a publication. Contexts that share its pages keep them."""

    async def publications(self, caller: Caller) -> Sequence[Publication]:
        """The caller's publications in the order of their ids."""
