"""What an engine answers, as plain data; see `interface` for the methods."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ContextState(enum.Enum):
    IDLE = "idle"
    BUSY = "busy"  # a writer (fill, generate, …) holds it
    SUSPENDED = "suspended"  # pages given up under pressure; comes back on its next use


class Tier(enum.Enum):
    """Where a page of a context is, best first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    LINEAGE = "lineage"  # nowhere: only its tokens are known, and it is computed when needed


@dataclass(frozen=True, slots=True)
class Expiry:
    """When an object ends. It is not readable from then on, and not deleted before."""

    at: float  # unix seconds
    seconds: float  # the ttl that was asked for
    sliding: bool  # whether a use starts it again


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
    pinned_until: float | None = None  # unix seconds; None if not pinned, or for good
    salt: str
    created_at: float  # unix seconds
    used_at: float  # unix seconds
    expiry: Expiry | None = None
    version: int = 0  # grows with every change of its tokens, pages or settings
    forked_at: int = 0  # tokens that the parent had when it was forked, buffered ones included
    snapshot: str = ""  # name and version ("name@3") that it was opened from
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """The physical layout, for GetContext with `include_pages` and for tests."""

    page_ids: Sequence[int]  # committed, then working; none of a suspended context
    refcounts: Sequence[int]  # contexts that hold each page
    tokens: Sequence[int]  # the whole lineage, buffered tokens included
    tiers: Sequence[Tier] = ()  # of every page of the lineage, partial and working ones at the end


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
    restored: int  # in another tier: host + disk
    host: int = 0
    disk: int = 0
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
class PassResult:
    """What a `PassOutput` asked for; log probabilities are natural, of the model's own distribution."""

    index: int
    token_id: int | None = None  # the sample
    seed: int | None = None  # that repeats it
    logprobs: Sequence[float] = ()  # of `logprob_ids`, in their order
    top: Sequence[tuple[int, float]] = ()  # best first
    logits: bytes = b""  # float32, little-endian, [vocab_size]
    entropy: float | None = None  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The answers to the outputs that were asked for, in their order."""

    outputs: Sequence[PassResult]
    context: ContextInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Where two contexts part."""

    common_tokens: int  # equal tokens at the front, buffered ones included
    shared_pages: int  # physical pages that both hold
    length_a: int
    length_b: int


class Change(enum.Enum):
    """What happened to a context."""

    EXISTS = "exists"  # it was there when the watch began, or when a reader that lagged is told everything again
    CREATED = "created"
    FORKED = "forked"
    OPENED = "opened"
    CHANGED = "changed"  # tokens, pages or settings
    SUSPENDED = "suspended"
    CLOSED = "closed"
    EXPIRED = "expired"
    RESET = "reset"  # events were lost because the reader lagged: forget everything; EXISTS events follow


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEvent:
    """One change. Several changes of a context between two reads may come as one."""

    change: Change
    at: float  # unix seconds
    context_id: str = ""
    context: ContextInfo | None = None  # None once it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """One version of a snapshot."""

    name: str
    version: int  # 1, 2, …; a name that was deleted begins again at 1
    latest: bool
    durable: bool
    tokens: int  # with KV and buffered
    seq_len: int  # tokens with KV
    pages: int
    size_bytes: int  # of its pages; pages that snapshots share count in each
    model_revision: str
    salt: str
    manual_commit: bool
    created_at: float  # unix seconds
    expiry: Expiry | None
    context_id: str  # that was saved
    parent_version: int  # 0, or the version that this one replaced
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A prefix that contexts of all tenants may share (same model, same salt)."""

    publication_id: str
    tokens: int  # whole pages only
    pages: int
    salt: str
    created_at: float
    expiry: Expiry | None
    labels: Mapping[str, str]


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
    tokens_restored: int = 0
    host_pages_total: int = 0
    host_pages_used: int = 0
    disk_pages_total: int = 0
    disk_pages_used: int = 0
    snapshots: int = 0
    publications: int = 0
    expired: int = 0


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
