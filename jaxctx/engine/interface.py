"""The Engine interface: what the doors (and later the dispatcher) see of an engine, in process or remote.

Everything here is plain data. Requests arrive fully validated; an engine checks only what needs its state. All methods
are called on the door's asyncio loop; a local engine hands them to its step thread and answers from there.

Cancellation: cancelling the task that awaits a method, or closing the iterator of `generate`, ends the work within one
step; what was computed by then stays in the context. `deadline` is in seconds of the injected monotonic clock.

Requests and answers live in modules of their own and can all be imported from here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from jaxctx.engine.answers import Change as Change
from jaxctx.engine.answers import Comparison as Comparison
from jaxctx.engine.answers import ContextEvent as ContextEvent
from jaxctx.engine.answers import ContextInfo as ContextInfo
from jaxctx.engine.answers import ContextPages as ContextPages
from jaxctx.engine.answers import ContextState as ContextState
from jaxctx.engine.answers import EngineInfo as EngineInfo
from jaxctx.engine.answers import EngineStats as EngineStats
from jaxctx.engine.answers import Expiry as Expiry
from jaxctx.engine.answers import FillResult as FillResult
from jaxctx.engine.answers import FinishReason as FinishReason
from jaxctx.engine.answers import ForwardResult as ForwardResult
from jaxctx.engine.answers import GeneratePiece as GeneratePiece
from jaxctx.engine.answers import PassResult as PassResult
from jaxctx.engine.answers import PlanResult as PlanResult
from jaxctx.engine.answers import Publication as Publication
from jaxctx.engine.answers import SnapshotInfo as SnapshotInfo
from jaxctx.engine.answers import Tier as Tier
from jaxctx.engine.answers import TokenLogprob as TokenLogprob
from jaxctx.engine.answers import Usage as Usage
from jaxctx.engine.requests import Caller as Caller
from jaxctx.engine.requests import CreateRequest as CreateRequest
from jaxctx.engine.requests import ForwardRequest as ForwardRequest
from jaxctx.engine.requests import GenerateRequest as GenerateRequest
from jaxctx.engine.requests import OpenRequest as OpenRequest
from jaxctx.engine.requests import PassOutput as PassOutput
from jaxctx.engine.requests import Sampling as Sampling
from jaxctx.engine.requests import SaveRequest as SaveRequest
from jaxctx.engine.requests import Ttl as Ttl


class Engine(Protocol):
    """One engine. Every method may raise the errors of `jaxctx.errors`; NotFound for a context not the caller's."""

    info: EngineInfo

    async def create(self, caller: Caller, request: CreateRequest) -> ContextInfo: ...

    async def fill(self, caller: Caller, context_id: str, tokens: Sequence[int], *, defer: bool = False) -> FillResult:
        """Append tokens; compute what no committed page holds, or only buffer them with `defer`."""

    async def flush(self, caller: Caller, context_id: str) -> FillResult:
        """Compute whatever is buffered."""

    def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        """Stream outputs. Pieces of the n outputs interleave; each output ends with one piece that has `finish`."""

    async def fork(self, caller: Caller, context_id: str, ids: Sequence[str | None]) -> Sequence[ContextInfo]:
        """One child per entry of `ids` (None: the engine chooses the id). All or none."""

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """Drop trailing tokens from buffered and working tokens only; OutOfRange past the last committed page."""

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """Keep the first `to` tokens, across committed pages, with no forward pass."""

    async def forward(self, caller: Caller, request: ForwardRequest) -> ForwardResult:
        """One pass over explicit tokens, positions and masks; all of it or, on an error, nothing."""

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo: ...

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo: ...

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo: ...

    async def update(
        self,
        caller: Caller,
        context_id: str,
        *,
        priority: int | None = None,
        pinned: bool | None = None,
        pin_s: float | None = None,
        ttl: Ttl | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> ContextInfo:
        """Change what is given. A pin beyond the tenant's budget is ResourceExhausted (PIN_BUDGET)."""

    async def close(self, caller: Caller, context_id: str) -> None:
        """Give up the context; a running writer is cancelled first."""

    async def get(self, caller: Caller, context_id: str) -> ContextInfo: ...

    async def pages(self, caller: Caller, context_id: str) -> ContextPages: ...

    async def list(self, caller: Caller, *, after: str = "", limit: int = 100) -> list[ContextInfo]:
        """Contexts of the tenant in id order, starting after the id `after`."""

    async def plan(
        self, caller: Caller, tokens: Sequence[int], *, context_id: str | None = None, salt: str = ""
    ) -> PlanResult:
        """Of an existing context extended by `tokens`, or of a new one filled with them."""

    async def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        """Where two contexts part."""

    def watch(self, caller: Caller) -> AsyncIterator[ContextEvent]:
        """The tenant's contexts as they are, each once as EXISTS, and then every change until the reader leaves."""

    # Snapshots. NotFound (SNAPSHOT_NOT_FOUND) for a name or version that the tenant does not have.

    async def save(self, caller: Caller, request: SaveRequest) -> SnapshotInfo:
        """See `SaveRequest`. The context may go on at once; FailedPrecondition (NO_STORE) for durable without one."""

    async def open(self, caller: Caller, request: OpenRequest) -> FillResult:
        """See `OpenRequest`. Raises FailedPrecondition (MODEL_MISMATCH), DataLoss."""

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> SnapshotInfo:
        """One version; None: the latest."""

    async def snapshots(
        self, caller: Caller, *, prefix: str = "", after: str = "", limit: int = 100
    ) -> Sequence[SnapshotInfo]:
        """The latest version of each name that begins with `prefix`, in name order, starting after `after`."""

    async def history(self, caller: Caller, name: str) -> Sequence[SnapshotInfo]:
        """All versions of a name that are kept, latest first."""

    async def update_snapshot(
        self, caller: Caller, name: str, *, ttl: Ttl | None = None, labels: Mapping[str, str] | None = None
    ) -> SnapshotInfo:
        """Change the latest version."""

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """Delete one version, or with None the name; returns how many versions. Open children are not touched."""

    async def publish(
        self, caller: Caller, context_id: str, *, ttl: Ttl | None = None, labels: Mapping[str, str] | None = None
    ) -> Publication:
        """Let all tenants share the full pages of a context, which are copied once. Counts as pinned."""

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        """Nobody finds it any more; contexts that share its pages keep them."""

    async def publications(self, caller: Caller) -> Sequence[Publication]:
        """Of the tenant."""

    async def stats(self) -> EngineStats: ...

    async def drain(self) -> None:
        """Refuse new work with Unavailable, let running work finish, then return."""

    async def failure(self) -> str:
        """Return when the engine can do no more work, with what happened; every other call is Unavailable by then."""

    async def clear_cache(self) -> int:
        """Drop every cached page that no context holds; returns how many."""
