"""The Engine interface: what the doors (and later the dispatcher) see of an engine, in process or remote.

Everything here is plain data. Requests arrive fully validated; an engine checks only what needs its state. All methods
are called on the door's asyncio loop; a local engine hands them to its step thread and answers from there.

Cancellation: cancelling the task that awaits a method, or closing the iterator of `generate`, ends the work within one
step; what was computed by then stays in the context. `deadline` is in seconds of the injected monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose namespace a request runs in, and until when it may wait and run (None: for ever)."""

    tenant: str = ""
    deadline: float | None = None


# --- requests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest:
    """A new, empty context. `context_id` chosen by the client makes a retry safe (same id: ALREADY_EXISTS)."""

    context_id: str | None = None
    salt: str = ""  # contexts with different salts never share pages
    priority: int = 0  # higher runs first; -100..100
    manual_commit: bool = False  # full pages commit only by `commit_pages`
    pinned: bool = False  # never a victim under memory pressure
    labels: Mapping[str, str] = field(default_factory=dict)


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


# --- answers -------------------------------------------------------------------------------------------------------


class ContextState(enum.Enum):
    IDLE = "idle"
    BUSY = "busy"  # a writer (fill, generate, …) holds it
    SUSPENDED = "suspended"  # pages given up under pressure; comes back on its next use


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """Counters of a context: `seq_len == committed_pages * page_size + working_tokens`, buffered tokens apart."""

    context_id: str
    parent_id: str | None
    state: ContextState
    seq_len: int
    committed_pages: int
    working_pages: int  # allocated, including reserved ones without tokens
    working_tokens: int
    buffered_tokens: int  # known but not computed: deferred fills and the last sampled token
    page_size: int
    priority: int
    pinned: bool
    salt: str
    created_at: float  # unix seconds
    used_at: float  # unix seconds
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """The physical layout, for GetContext with `include_pages` and for tests."""

    page_ids: Sequence[int]  # committed, then working
    refcounts: Sequence[int]  # contexts that hold each page
    tokens: Sequence[int]  # the whole lineage, buffered tokens included


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """Where the filled tokens' KV came from; `resident + restored + computed` tokens became ready by this call."""

    resident: int
    restored: int
    computed: int
    context: ContextInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What filling `tokens` would find and need, without doing it."""

    tokens: int
    resident: int
    restored: int
    computed: int
    pages_needed: int
    pages_available: int  # free + evictable + held by idle contexts that may be suspended


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()  # best first


class FinishReason(enum.Enum):
    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the model's or context's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int  # tokens in the context before generation
    cached_tokens: int  # of these, not computed by this call
    computed_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePiece:
    """A part of one output.

    Concatenated `text` is the output's text; concatenated `token_ids` are what joined the context. Text never ends
    inside a UTF-8 character. The last piece of an output has `finish`, `usage` and `context`.
    """

    index: int  # which of the n outputs
    context_id: str
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish: FinishReason | None = None
    stop_match: str | int | None = None  # the stop string or token id that ended it
    seed: int | None = None  # with `finish`: the seed that repeats this output
    usage: Usage | None = None
    context: ContextInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of load and memory; counters only grow."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_reserved: int
    contexts: int
    running: int
    waiting: int
    steps: int
    tokens_computed: int
    tokens_cached: int
    tokens_generated: int
    preemptions: int
    suspensions: int
    compilations_after_ready: int
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What does not change while the engine lives."""

    model_id: str
    model_revision: str  # digest of configuration and weights: equal revisions compute equal KV
    architecture: str
    parameters: int
    vocab_size: int
    max_context_tokens: int
    page_size: int
    pages_total: int
    dtype: str
    kv_dtype: str
    max_batch: int
    platform: str
    mesh: Mapping[str, int]
    default_max_tokens: int


class Engine(Protocol):
    """One engine. Every method may raise the errors of `jaxctx.errors`; NotFound for a context not the caller's."""

    @property
    def info(self) -> EngineInfo: ...

    async def create(self, caller: Caller, request: CreateRequest) -> ContextInfo: ...

    async def fill(self, caller: Caller, context_id: str, tokens: Sequence[int], *, defer: bool = False) -> FillResult:
        """Append tokens; compute what no committed page holds, or only buffer them with `defer`."""
        ...

    async def flush(self, caller: Caller, context_id: str) -> FillResult:
        """Compute whatever is buffered."""
        ...

    def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        """Stream outputs. Pieces of the n outputs interleave; each output ends with one piece that has `finish`."""
        ...

    async def fork(self, caller: Caller, context_id: str, ids: Sequence[str | None]) -> list[ContextInfo]:
        """One child per entry of `ids` (None: the engine chooses the id). All or none."""
        ...

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """Drop trailing tokens from buffered and working tokens only; OutOfRange past the last committed page."""
        ...

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """Keep the first `to` tokens, across committed pages, with no forward pass."""
        ...

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
        labels: Mapping[str, str] | None = None,
    ) -> ContextInfo: ...

    async def close(self, caller: Caller, context_id: str) -> None:
        """Give up the context; a running writer is cancelled first."""
        ...

    async def get(self, caller: Caller, context_id: str) -> ContextInfo: ...

    async def pages(self, caller: Caller, context_id: str) -> ContextPages: ...

    async def list(self, caller: Caller, *, after: str = "", limit: int = 100) -> list[ContextInfo]:
        """Contexts of the tenant in id order, starting after the id `after`."""
        ...

    async def plan(
        self, caller: Caller, tokens: Sequence[int], *, context_id: str | None = None, salt: str = ""
    ) -> PlanResult:
        """Of an existing context extended by `tokens`, or of a new one filled with them."""
        ...

    async def stats(self) -> EngineStats: ...

    async def drain(self) -> None:
        """Refuse new work with Unavailable, let running work finish, then return."""
        ...

    async def failure(self) -> str:
        """Return when the engine can do no more work, with what happened; every other call is Unavailable by then."""
        ...

    async def clear_cache(self) -> int:
        """Drop every cached page that no context holds; returns how many."""
        ...
