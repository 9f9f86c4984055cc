"""The Engine interface: what the doors (and later the dispatcher) see of an engine, in process or remote.

Everything here is plain data. Requests arrive fully validated; an engine checks only what needs its state. All methods
are called on the door's asyncio loop; a local engine hands them to its step thread and answers from there.

Cancellation: cancelling the task that awaits a method, or closing the iterator of `generate`, ends the work within one
step; what was computed by then stays in the context. `deadline` is in seconds of the injected monotonic clock.

Answers are those of `jaxctx.answers`; requests are generated from the contract, as these are.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxctx import answers
from jaxctx.v1 import requests
from jaxctx.v1.requests import *  # noqa: F403


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose namespace a request runs in, and until when it may wait and run (None: for ever)."""

    tenant: str = ""
    deadline: float | None = None


class ProgramEngine(Protocol):
    """What programs need of an engine. Every method may raise the errors of `jaxctx.errors`; NotFound for a context not
    the caller's.
    """

    info: answers.EngineInfo

    async def create(self, caller: Caller, request: requests.CreateRequest) -> answers.ContextInfo: ...

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> answers.FillResult:
        """Append tokens, if any; compute what is buffered and in no committed page, or only buffer with `defer`."""

    def generate(self, caller: Caller, request: requests.GenerateRequest) -> AsyncIterator[answers.GeneratePiece]:
        """Stream outputs. Pieces of the n outputs interleave, and are fewer and larger for a reader that lags.

        Each output ends with one piece that has `finish`.
        """

    async def update(self, caller: Caller, context_id: str, request: requests.UpdateRequest) -> answers.ContextInfo: ...

    async def close(self, caller: Caller, context_id: str) -> None:
        """Give up the context; a running writer is cancelled first."""

    async def stats(self) -> answers.EngineStats: ...


class Engine(ProgramEngine, Protocol):
    """One engine: all that clients can ask of it."""

    async def fork(self, caller: Caller, context_id: str, ids: Sequence[str | None]) -> Sequence[answers.ContextInfo]:
        """One child per entry of `ids` (None: the engine chooses the id). All or none."""

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> answers.ContextInfo:
        """Drop trailing tokens from buffered and working tokens only; OutOfRange past the last committed page."""

    async def rewind(self, caller: Caller, context_id: str, to: int) -> answers.ContextInfo:
        """Keep the first `to` tokens, across committed pages, with no forward pass."""

    async def forward(self, caller: Caller, request: requests.ForwardRequest) -> answers.ForwardResult:
        """One pass over explicit tokens, positions and masks; on an error nothing, save for deadline and cancel."""

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> answers.ContextInfo: ...

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> answers.ContextInfo:
        """FailedPrecondition if one of them is partial, OutOfRange past the last."""

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> answers.ContextInfo:
        """From the tail, with the tokens in them."""

    async def get(self, caller: Caller, context_id: str) -> answers.ContextInfo: ...

    async def pages(self, caller: Caller, context_id: str) -> answers.ContextLayout: ...

    async def list(self, caller: Caller, after: str = "", limit: int = 100) -> list[answers.ContextInfo]:
        """Contexts of the tenant in id order, starting after the id `after`."""

    async def plan(
        self, caller: Caller, tokens: Sequence[int], *, context_id: str | None = None, salt: str = ""
    ) -> answers.PlanResult:
        """Of an existing context extended by `tokens`, or of a new one filled with them."""

    async def compare(self, caller: Caller, a: str, b: str) -> answers.Comparison: ...

    def watch(self, caller: Caller) -> AsyncIterator[answers.ContextEvent]:
        """The tenant's contexts as they are, each once as EXISTS, and then every change until the reader leaves."""

    # Snapshots. NotFound (SNAPSHOT_NOT_FOUND) for a name or version that the tenant does not have.

    async def save(self, caller: Caller, request: requests.SaveRequest) -> answers.Snapshot:
        """See `SaveRequest`. The context may go on at once; FailedPrecondition (NO_STORE) for durable without one."""

    async def open(self, caller: Caller, request: requests.OpenRequest, take: bool = False) -> answers.FillResult:
        """See `OpenRequest`. Raises FailedPrecondition (MODEL_MISMATCH), DataLoss.

        With `take` the name is deleted in the same moment; of two racing takes one wins, the other is NotFound.
        """

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> answers.Snapshot:
        """One version; None: the latest."""

    async def snapshots(self, caller: Caller, prefix: str, after: str, limit: int) -> Sequence[answers.Snapshot]:
        """The latest version of each name that begins with `prefix`, in name order, starting after `after`."""

    async def history(self, caller: Caller, name: str) -> Sequence[answers.Snapshot]:
        """All versions of a name that are kept, latest first."""

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, changes: requests.Changes
    ) -> answers.Snapshot:
        """Change a version; None: the latest."""

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """Delete one version, or with None the name; returns how many versions. Open children are not touched."""

    async def publish(self, caller: Caller, context_id: str, settings: requests.Changes) -> answers.Publication:
        """Let all tenants share the full pages of a context, which are copied once. Counts as pinned."""

    async def update_publication(
        self, caller: Caller, publication_id: str, changes: requests.Changes
    ) -> answers.Publication:
        """Change its settings. NotFound (PUBLICATION_NOT_FOUND)."""

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        """Nobody finds it any more; contexts that share its pages keep them."""

    async def publications(self, caller: Caller) -> Sequence[answers.Publication]:
        """In the order of their ids."""

    async def drain(self) -> None:
        """Refuse new work with Unavailable, let running work finish, then return."""

    async def failure(self) -> str:
        """Return when the engine can do no more work, with what happened; every other call is Unavailable by then."""

    async def clear_cache(self) -> int:
        """Drop every cached page that no context holds; returns how many."""
