"""The Engine interface: what the doors (and later the dispatcher) see of an engine, in process or remote.

Everything here is plain data. Requests arrive fully validated; an engine checks only what needs its state. All methods
are called on the door's asyncio loop; a local engine hands them to its step thread and answers from there.

Cancellation: cancelling the task that awaits a method, or closing the iterator of `generate`, ends the work within one
step; what was computed by then stays in the context. `deadline` is in seconds of the injected monotonic clock.

Answers are those of `jaxctx.answers`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxctx import answers


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose namespace a request runs in, and until when it may wait and run (None: for ever)."""

    tenant: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long an object is to live from now on. A sliding one starts again with every use, a fixed one never does."""

    seconds: float | None  # None: for ever
    sliding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewContext:
    """How a context begins. `context_id` chosen by the client makes a retry safe (same id: ALREADY_EXISTS)."""

    context_id: str | None = None
    priority: int = 0  # higher runs first; -100..100
    pinned: bool = False  # never a victim under memory pressure; counts against the tenant's pin budget
    pin_s: float | None = None  # pinned for so long; None: until it is taken back
    ttl: Ttl = Ttl(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest(NewContext):
    """A new, empty context."""

    salt: str = ""  # contexts with different salts never share pages
    manual_commit: bool = False  # full pages commit only by `commit_pages`
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """New settings of a snapshot or a publication; None leaves one as it is."""

    ttl: Ttl | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest(Changes):
    """Those of a context. A pin beyond the tenant's budget is refused (PIN_BUDGET)."""

    priority: int | None = None
    pinned: bool | None = None
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Defaults sample from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: chosen by the engine and reported


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Continue a context. With n > 1 the context is flushed and forked n times; each fork is continued, it is not."""

    context_id: str
    max_tokens: int | None = None  # None: the server's default
    min_tokens: int = 0
    n: int = 1
    sampling: Sampling = Sampling()
    logprobs: bool = False  # of every returned token
    top_logprobs: int = 0  # alternatives beside each, 0..20
    stop: Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the matched stop string in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int  # which of the pass's tokens
    sample: Sampling | None = None  # draw from it; without penalties and logit_bias
    logprob_ids: Sequence[int] = ()  # log probabilities of these
    top: int = 0  # the most likely ones, up to 64
    logits: bool = False  # all of it
    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """One pass over explicit tokens, which join the context; what it had buffered is computed first.

    A token's position defaults to its index in the context. Its mask is the ranges `[start, stop)` of indices that it
    sees, ascending, apart and within `0 .. its index`; empty: all of these. Default positions and full masks are the
    same as none at all.
    """

    context_id: str
    tokens: Sequence[int]
    positions: Sequence[int] = ()  # of all tokens, or none
    masks: Sequence[Sequence[tuple[int, int]]] = ()  # of all tokens, or none
    keep_working: bool = False  # full pages stay working, so that `truncate` reaches them, until the next computation
    outputs: Sequence[PassOutput] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Keep a context's present state under a name.

    Raises AlreadyExists if the name is taken, unless `overwrite_version` is its latest version (else Aborted with
    VERSION_MISMATCH); earlier versions are kept as history.
    """

    context_id: str
    name: str
    durable: bool = False  # acknowledged when it would survive a loss of power; else in memory, until the server ends
    overwrite_version: int | None = None
    ttl: Ttl = Ttl(None)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest(NewContext):
    """A new context from a snapshot, of which it inherits salt and manual_commit."""

    name: str
    version: int | None = None  # None: the latest
    take: bool = False  # delete the name in the same moment; of two racing takes one wins, the other is NotFound
    recompute: bool = False  # accept a snapshot of other weights, and compute its tokens anew


class Engine(Protocol):
    """One engine. Every method may raise the errors of `jaxctx.errors`; NotFound for a context not the caller's."""

    info: answers.EngineInfo

    async def create(self, caller: Caller, request: CreateRequest) -> answers.ContextInfo: ...

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> answers.FillResult:
        """Append tokens, if any; compute what is buffered and in no committed page, or only buffer with `defer`."""

    def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[answers.GeneratePiece]:
        """Stream outputs. Pieces of the n outputs interleave, and are fewer and larger for a reader that lags.

        Each output ends with one piece that has `finish`.
        """

    async def fork(self, caller: Caller, context_id: str, ids: Sequence[str | None]) -> Sequence[answers.ContextInfo]:
        """One child per entry of `ids` (None: the engine chooses the id). All or none."""

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> answers.ContextInfo:
        """Drop trailing tokens from buffered and working tokens only; OutOfRange past the last committed page."""

    async def rewind(self, caller: Caller, context_id: str, to: int) -> answers.ContextInfo:
        """Keep the first `to` tokens, across committed pages, with no forward pass."""

    async def forward(self, caller: Caller, request: ForwardRequest) -> answers.ForwardResult:
        """One pass over explicit tokens, positions and masks; on an error nothing, save for deadline and cancel."""

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> answers.ContextInfo: ...

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> answers.ContextInfo:
        """FailedPrecondition if one of them is partial, OutOfRange past the last."""

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> answers.ContextInfo:
        """From the tail, with the tokens in them."""

    async def update(self, caller: Caller, context_id: str, request: UpdateRequest) -> answers.ContextInfo: ...

    async def close(self, caller: Caller, context_id: str) -> None:
        """Give up the context; a running writer is cancelled first."""

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

    async def save(self, caller: Caller, request: SaveRequest) -> answers.Snapshot:
        """See `SaveRequest`. The context may go on at once; FailedPrecondition (NO_STORE) for durable without one."""

    async def open(self, caller: Caller, request: OpenRequest) -> answers.FillResult:
        """See `OpenRequest`. Raises FailedPrecondition (MODEL_MISMATCH), DataLoss."""

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> answers.Snapshot:
        """One version; None: the latest."""

    async def snapshots(self, caller: Caller, prefix: str, after: str, limit: int) -> Sequence[answers.Snapshot]:
        """The latest version of each name that begins with `prefix`, in name order, starting after `after`."""

    async def history(self, caller: Caller, name: str) -> Sequence[answers.Snapshot]:
        """All versions of a name that are kept, latest first."""

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, changes: Changes
    ) -> answers.Snapshot:
        """Change a version; None: the latest."""

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """Delete one version, or with None the name; returns how many versions. Open children are not touched."""

    async def publish(self, caller: Caller, context_id: str, settings: Changes) -> answers.Publication:
        """Let all tenants share the full pages of a context, which are copied once. Counts as pinned."""

    async def update_publication(self, caller: Caller, publication_id: str, changes: Changes) -> answers.Publication:
        """Change its settings. NotFound (PUBLICATION_NOT_FOUND)."""

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        """Nobody finds it any more; contexts that share its pages keep them."""

    async def publications(self, caller: Caller) -> Sequence[answers.Publication]: ...

    async def stats(self) -> answers.EngineStats: ...

    async def drain(self) -> None:
        """Refuse new work with Unavailable, let running work finish, then return."""

    async def failure(self) -> str:
        """Return when the engine can do no more work, with what happened; every other call is Unavailable by then."""

    async def clear_cache(self) -> int:
        """Drop every cached page that no context holds; returns how many."""
