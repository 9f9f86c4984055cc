"""The Engine interface: what frontends and the dispatcher use of an engine, in process or remote.

Everything here is plain data. Requests arrive fully validated; an engine checks only what needs its state. All methods
are called on the caller's asyncio loop; a local engine hands them to its step thread and answers from there.

Cancellation: cancelling the task that awaits a method, or closing the iterator of `generate`, ends the work within one
step; what was computed by then stays in the context. `deadline` is in seconds of the injected monotonic clock.

Results and requests are the classes of `jaxctx.types`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxctx.types import (
    AdapterInfo,
    Attention,
    Comparison,
    ContextEvent,
    ContextInfo,
    CreateContextRequest,
    EngineInfo,
    EngineStats,
    FillResult,
    ForwardRequest,
    ForwardResult,
    GeneratePiece,
    GenerateRequest,
    GetContextResult,
    GetSnapshotResult,
    OpenRequest,
    PlanResult,
    Publication,
    RetentionUpdate,
    SaveRequest,
    Snapshot,
    UpdateContextRequest,
)

LOCAL_ENGINE = "local"  # the id of the engine of this process
PROGRAM_LABELS: Mapping[str, str] = {"jaxctx": "program"}  # of contexts that are made for programs


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose contexts a request may use, and until when it may wait and run (None: without a limit).

    `traceparent` is the W3C trace context of what the request is a part of, for calls to other servers; empty: none.
    `draws_ids`: this server drew the ids and names of what the request makes at random, so nobody has them already.
    `of_cluster`: another server of the cluster calls, for that tenant.
    """

    tenant: str = ""
    deadline: float | None = None
    traceparent: str = ""
    draws_ids: bool = False
    of_cluster: bool = False


def is_of_program(labels: Mapping[str, str]) -> bool:
    """Whether a context with these labels belongs to a program. Lists show such contexts only on request."""
    return PROGRAM_LABELS.items() <= labels.items()


class ProgramEngine(Protocol):
    """What programs need of an engine.

    Every method may raise the errors of `jaxctx.errors`, among them NotFound for a context that is not the caller's.
    """

    info: EngineInfo
    attention_status: Attention | None
    """What computes attention, and why; None: not known."""

    @property
    def adapter_revisions(self) -> Mapping[str, str]:
        """The names of loaded adapters, and the digests of their content; of a remote engine as of its last `stats`."""

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> FillResult:
        """Append tokens, if any; compute what is buffered and in no committed page, or only buffer with `defer`."""

    async def stats(self) -> EngineStats:
        """Load and memory now."""

    async def create(self, caller: Caller, request: CreateContextRequest) -> ContextInfo:
        """A new, empty context."""

    async def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> ContextInfo:
        """Change priority, pin, time to live or labels. What is unset stays as it is, labels replace all labels."""

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """Go back to any length, across committed pages, without computing."""

    async def close(self, caller: Caller, context_id: str) -> None:
        """Give up the context. A running writer is cancelled first; forks of it live on."""

    def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        """Continue the context and stream its pieces."""

    async def clear_cache(self, caller: Caller) -> int:
        """Drop every cached page that no context holds; returns how many these were. In a router, of all engines."""

    async def load_adapter(self, caller: Caller, name: str, directory: str) -> AdapterInfo:
        """Load a LoRA adapter from a directory among those that the server has for them, to be called `name`.

        What was called so before loses the name; contexts that use it keep it. Cancelling it loads nothing.
        Raises CheckpointError, NotFound (ADAPTER_NOT_FOUND), FailedPrecondition (NO_ADAPTERS), ResourceExhausted
        (ADAPTER_SLOTS).
        """

    async def unload_adapter(self, caller: Caller, name: str) -> AdapterInfo:
        """Forget an adapter's name; contexts that use it keep it. Raises NotFound (ADAPTER_NOT_FOUND)."""

    async def adapters(self, caller: Caller) -> Sequence[AdapterInfo]:
        """The adapters in the order of their names; then those without a name that contexts still use."""


class Engine(ProgramEngine, Protocol):
    """One engine: everything that clients can ask of it."""

    async def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[ContextInfo]:
        """Children that begin as the context stands now, its pages shared.

        All or none. Costs the same at any length.
        """

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """Drop trailing tokens that are in no committed page."""

    async def switch_adapter(self, caller: Caller, context_id: str, adapter: str) -> ContextInfo:
        """Go on with another adapter, or ("") none, from the present length on. What is before keeps its KV.

        Raises NotFound (ADAPTER_NOT_FOUND), Aborted (CONTEXT_BUSY), FailedPrecondition after too many switches.
        """

    async def forward(self, caller: Caller, request: ForwardRequest) -> ForwardResult:
        """One pass over explicit tokens, positions and attention masks.

        All of it or, on any error, nothing; only after a deadline or a cancelled call may tokens be left in the
        context: Rewind takes them back.
        """

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Allocate working pages ahead, so that later operations do not wait for them."""

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

    async def tenants(self, after: str, limit: int) -> Sequence[str]:
        """The names of up to `limit` tenants that have contexts, in order, after the name `after`."""

    def watch(self, caller: Caller, include_program_contexts: bool = False) -> AsyncIterator[ContextEvent]:
        """The caller's contexts as they are, but those that the server made for programs, and then every change of
        them, until the caller leaves.

        It reads, and uses none of them.
        """

    async def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        """How many first tokens two contexts have in common, and how many pages they share."""

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        """Keep a context's present state under a name. The context goes on as it is."""

    async def check_snapshot_quota(self, caller: Caller, versions: int) -> None:
        """Raise ResourceExhausted (QUOTA) if the caller's quotas have no place for so many more versions of snapshots.

        For who is about to compute what it will save. Another save may take the place meanwhile.
        """

    async def open(self, caller: Caller, request: OpenRequest) -> FillResult:
        """A new context from a snapshot. Opening twice gives two that are independent."""

    async def take(self, caller: Caller, request: OpenRequest) -> FillResult:
        """Open the latest version and delete the name, atomically: of two racing calls one gets
        NotFound.

        If meanwhile another version became the latest, that is Aborted (VERSION_MISMATCH), and nothing is deleted.
        """

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> Snapshot:
        """One version of a snapshot."""

    async def inspect_snapshot(
        self,
        caller: Caller,
        name: str,
        version: int | None = None,
        include_attachment: bool = False,
        include_tokens: bool = False,
    ) -> GetSnapshotResult:
        """One version of a snapshot, with its attachment and its tokens if they are requested.

        That is no use: a sliding time to live does not start again. DataLoss if the attachment is damaged.
        """

    async def snapshots(self, caller: Caller, prefix: str, page_token: str, limit: int) -> Sequence[Snapshot]:
        """The latest version of each name, in the order of the names."""

    async def history(self, caller: Caller, name: str) -> Sequence[Snapshot]:
        """All versions of a name that are kept, latest first."""

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, request: RetentionUpdate
    ) -> Snapshot:
        """Change time to live or labels of a version. What is unset stays as it is."""

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """Delete a name or one version of it, and return how many versions that were.

        Contexts that were opened from it live on.
        """

    async def publish(self, caller: Caller, context_id: str, request: RetentionUpdate) -> Publication:
        """Let contexts of all tenants share the full pages of a context."""

    async def update_publication(self, caller: Caller, publication_id: str, request: RetentionUpdate) -> Publication:
        """Change time to live or labels of a publication. What is unset stays as it is."""

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        """End a publication. Contexts that share its pages keep them."""

    async def publications(self, caller: Caller) -> Sequence[Publication]:
        """The caller's publications in the order of their ids."""

    async def plan(
        self,
        caller: Caller,
        tokens: Sequence[int],
        *,
        context_id: str | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> PlanResult:
        """What filling `tokens` into a context, or a new one, would cost: tokens found in each tier, pages needed."""

    async def drain(self) -> None:
        """Refuse new work with Unavailable, let running work finish, then return."""

    async def failure(self) -> str:
        """Return when the engine can do no more work, with what happened; every other call is Unavailable by then."""
