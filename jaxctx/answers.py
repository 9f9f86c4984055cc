"""What is told of contexts, snapshots and engines, as plain data: an engine answers it, and a client shows it.

One dataclass for each message of protos/jaxctx/v1 that answers, with its field names and units; `jaxctx.codec`
translates. Moments are in UTC, log probabilities natural and of the model's own distribution.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any


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


def moment(unix_s: float) -> datetime:
    """As answers tell it."""
    return datetime.fromtimestamp(unix_s, UTC)


def named(kind: type[Any], *sources: object) -> dict[str, Any]:
    """What the sources, the first that has it, call by the names of the fields of answers of this class."""
    names = [each.name for each in fields(kind)]
    return {name: getattr(source, name) for source in reversed(sources) for name in names if hasattr(source, name)}


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
    forked_at: int = 0  # tokens that its parent had then, buffered ones included
    snapshot: str = ""  # "name@version" that it was opened from


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """Physical pages of a context, committed ones first, and how many of its tenant's hold each; none if suspended."""

    page_ids: Sequence[int]
    refcounts: Sequence[int]
    tiers: Sequence[Tier] = ()  # of every page of its tokens, suspended or not


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLayout(ContextPages):
    """As an engine tells it: with the tokens, buffered ones included."""

    tokens: Sequence[int]
    ancestors: Sequence[tuple[str, int]]  # the parent first: ids, and tokens that each had when it was forked


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where the KV of tokens comes from."""

    resident: int  # found in pages on the device
    restored: int  # brought back from another tier
    computed: int

    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult(Found):
    """Of the tokens that a call made ready."""

    context: ContextInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(Found):
    """What a fill would find and need."""

    tokens: int
    pages_needed: int
    pages_available: int  # all but those that the caller's own pins and running calls keep
    host: int = 0  # of `restored`
    disk: int = 0  # of `restored`


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
    context_id: str = ""  # "" with RESET
    context: ContextInfo | None = None  # None once it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log probabilities of the token, and of the likeliest ones, best first."""

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
    restored_tokens: int = 0  # of the cached ones, brought back from other tiers by this call


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """A part of one output. The last one has `finish`, `seed` and `usage`.

    The texts of all parts together are the output's text, and none ends inside a UTF-8 character; their `token_ids` are
    what joined the context.
    """

    index: int  # which of the n outputs
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
class GeneratePiece(OutputPart):
    """As an engine tells it: with the context that holds the output, and with the last part its counters."""

    context_id: str
    context: ContextInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What was asked of one token of a pass."""

    index: int
    token_id: int | None = None  # the sample; it does not join the context
    seed: int | None = None  # repeats the sample
    logprobs: Sequence[float] = ()  # of `logprob_ids`, in their order
    top: Sequence[tuple[int, float]] = ()  # best first
    logits: bytes = b""  # float32, little-endian, [vocab_size]: numpy.frombuffer(logits, "<f4")
    entropy: float | None = None  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The answers to the outputs that were asked for, in their order."""

    outputs: Sequence[PassResult]
    context: ContextInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One version of a snapshot, as its store knows it too."""

    name: str
    version: int = 0  # 1, 2, …; a name that was deleted begins again at 1
    parent_version: int = 0  # that it replaced; 0: none
    durable: bool = False
    tokens: int  # buffered ones included
    seq_len: int  # of these, with KV
    pages: int
    size_bytes: int  # of its pages; those that snapshots share count in each
    model_revision: str
    salt: str
    manual_commit: bool
    context_id: str  # that was saved
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Saved):
    """One version of a snapshot."""

    latest: bool
    created_at: datetime
    expiry: Expiry | None  # None: never ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A prefix that contexts of all tenants may share, of the same model and salt."""

    publication_id: str
    tokens: int  # whole pages only
    pages: int
    salt: str
    created_at: datetime
    expiry: Expiry | None  # None: never ends
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as it is served."""

    model_id: str
    model_revision: str  # digest of configuration and weights: equal revisions compute equal KV
    architecture: str
    parameters: int
    vocab_size: int
    max_context_tokens: int
    page_size: int  # tokens
    dtype: str
    kv_dtype: str
    default_max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo(Model):
    """What does not change while an engine lives."""

    pages_total: int
    max_batch: int
    platform: str
    mesh: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load and memory of an engine: `pages_free + pages_cached + pages_held == pages_total`. Counters only grow."""

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
    tokens_restored: int = 0
    host_pages_total: int = 0
    host_pages_used: int = 0
    disk_pages_total: int = 0
    disk_pages_used: int = 0
    snapshots: int = 0
    publications: int = 0
    expired: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine of a server."""

    info: EngineInfo
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Messages as the model reads them."""

    text: str
    tokens: Sequence[int]
