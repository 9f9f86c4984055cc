"""What a client is told, as plain data: one dataclass per message of protos/jaxctx/v1, of the same names and units."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

C = TypeVar("C", covariant=True)


class ContextState(enum.Enum):
    """What a context is doing."""

    IDLE = "idle"
    BUSY = "busy"  # a writer (fill, generate, …) holds it
    SUSPENDED = "suspended"  # pages given up under memory pressure; comes back on its next use


class FinishReason(enum.Enum):
    """Why an output ended."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the longest sequence of the model


class Tier(enum.Enum):
    """Where a page of a context is, best first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    LINEAGE = "lineage"  # nowhere: only its tokens are known, and it is computed when needed


class Change(enum.Enum):
    """What happened to a context."""

    EXISTS = "exists"  # it was there when the watch began, or is told again after RESET
    CREATED = "created"
    FORKED = "forked"
    OPENED = "opened"  # from a snapshot
    CHANGED = "changed"  # tokens, pages or settings
    SUSPENDED = "suspended"
    CLOSED = "closed"
    EXPIRED = "expired"
    RESET = "reset"  # changes were lost, because the reader was slow: forget everything; EXISTS follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """When an object ends. It can be read until then and never after."""

    at: datetime
    seconds: float  # the time to live that was asked for
    sliding: bool  # whether a use starts it again


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """Counters of a context: `seq_len == committed_pages * page_size + working_tokens`, buffered tokens apart."""

    context_id: str
    parent_id: str | None
    model_id: str
    state: ContextState
    seq_len: int  # tokens whose KV is computed
    committed_pages: int  # full, immutable, shared
    working_pages: int  # its own, including reserved ones without tokens
    working_tokens: int
    buffered_tokens: int  # known but not computed: deferred fills and the last sampled token
    page_size: int  # tokens per page
    priority: int
    pinned: bool
    salt: str
    created_at: datetime
    used_at: datetime
    labels: Mapping[str, str]
    pinned_until: datetime | None = None  # None: not pinned, or for good
    expiry: Expiry | None = None  # None: never ends
    version: int = 0  # grows with every change of its tokens, pages or settings
    forked_at: int = 0  # tokens that its parent had then
    snapshot: str = ""  # "name@version" that it was opened from


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """Physical pages of a context, committed ones first, and how many contexts hold each; none if suspended."""

    page_ids: Sequence[int]
    refcounts: Sequence[int]
    tiers: Sequence[Tier] = ()  # of every page of its tokens, suspended or not


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """Where the KV of the tokens came from that this call made ready."""

    resident: int  # found in pages on the device
    restored: int  # brought back from another tier
    computed: int
    context: ContextInfo

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a fill would find and need."""

    tokens: int
    resident: int
    restored: int
    computed: int
    pages_needed: int
    pages_available: int
    host: int = 0  # of `restored`
    disk: int = 0  # of `restored`

    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Where two contexts part."""

    common_tokens: int  # equal ones at the front
    shared_pages: int  # physical pages that both hold
    length_a: int  # tokens of each, buffered ones included
    length_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEvent:
    """One change of a context. Several that wait to be read may come as one."""

    change: Change
    at: datetime
    context_id: str  # "" with RESET
    context: ContextInfo | None  # None once it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms of the model's own distribution: of the token, and of the likeliest ones, best first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one output cost, in tokens."""

    prompt_tokens: int  # in the context before generation
    cached_tokens: int  # of these, not computed by this call
    computed_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Generic[C]):
    """A part of one output; `str(piece)` is its text.

    `context` is the object that holds this output: the one generated from, or with n > 1 the output's own fork. The
    last piece of an output has `finish`, `seed` and `usage`, and only then are the context's counters new.
    """

    index: int
    context: C
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish: FinishReason | None = None
    stop_match: str | int | None = None  # the stop string or token id that ended it
    seed: int | None = None  # repeats this output
    usage: Usage | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Generic[C]):
    """A whole output; `str(completion)` is its text."""

    context: C
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: FinishReason
    stop_match: str | int | None
    seed: int | None
    usage: Usage

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as it is served."""

    model_id: str
    model_revision: str  # equal revisions compute equal KV
    architecture: str
    parameters: int
    vocab_size: int
    max_context_tokens: int
    page_size: int  # tokens
    dtype: str
    kv_dtype: str
    default_max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Messages as the model reads them."""

    text: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine lives."""

    model_id: str
    model_revision: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load and memory of an engine: `pages_free + pages_cached + pages_held == pages_total`."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_reserved: int
    contexts: int
    running: int
    waiting: int
    draining: bool
    steps: int
    tokens_computed: int
    tokens_cached: int
    tokens_generated: int
    preemptions: int
    suspensions: int
    compilations_after_ready: int
    tokens_restored: int
    host_pages_total: int
    host_pages_used: int
    disk_pages_total: int
    disk_pages_used: int
    snapshots: int
    publications: int
    expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine of a server."""

    info: EngineInfo
    stats: EngineStats
