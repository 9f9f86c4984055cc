"""What a client is told, as plain data: one dataclass per message of protos/jaxctx/v1, of the same names and units."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypedDict, TypeVar

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """Physical pages of a context, committed ones first, and how many contexts hold each."""

    page_ids: Sequence[int]
    refcounts: Sequence[int]


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

    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
        return self.resident + self.restored


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


class GenerateOptions(TypedDict, total=False):
    """How to continue a context. Defaults, ranges and meaning: GenerateRequest and Sampling in protos/jaxctx/v1."""

    max_tokens: int
    min_tokens: int
    temperature: float  # 0: greedy; default 1
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    logprobs: bool
    top_logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine of a server."""

    info: EngineInfo
    stats: EngineStats
