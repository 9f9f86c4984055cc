"""Contexts: what they are and what is in them, their pages and changes; fill, plan, compare."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from jaxctx.types.lifetime import Expiry, Ttl


class ContextState(enum.Enum):
    """Whether a context can take an operation now."""

    IDLE = "idle"  # ready for the next operation
    BUSY = "busy"  # a writer (Fill, Generate, ...) holds it; a second one gets ABORTED
    SUSPENDED = "suspended"  # its pages were evicted under memory pressure; the next operation restores them


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpan:
    """The adapter of a context's tokens from `start` on, until the next span begins."""

    start: int  # index of its first token
    adapter: str  # what the adapter was called when it was chosen. Empty: none
    adapter_revision: str  # digest of the adapter's content. Empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A context and its counters.

    `seq_len == committed_pages * page_size + working_tokens`; buffered tokens are not part of `seq_len`.

    A context exists until it is closed, expires or the server ends, whatever happens to the connection that made it.
    Readers always succeed; writers are serialised, and a second concurrent writer gets ABORTED.

    A router moves the contexts of an engine that leaves to another engine, with their labels, time to live, priority
    and pin. It does so by a snapshot that is deleted afterwards. Hence a moved context has a new `created_at`, a
    `snapshot`, no `parent_id`, a `version` that starts again, and no reserved pages.
    """

    context_id: str  # unique within the tenant
    parent_id: str | None = None  # the context that it was forked from, perhaps closed by now. None: not forked
    model_id: str  # the model that computed it
    state: ContextState  # whether it can take an operation now
    seq_len: int  # tokens whose KV is computed
    committed_pages: int  # full, immutable pages, shared with every context that has the same prefix
    working_pages: int  # pages that are not committed, including reserved ones without tokens
    working_tokens: int  # tokens in working pages
    buffered_tokens: int  # tokens known but not computed yet: deferred fills and the last sampled token
    page_size: int  # tokens per page
    priority: int  # higher runs first. -100 to 100
    pinned: bool  # never evicted under memory pressure
    salt: str  # contexts of different salts never share pages
    created_at: datetime  # when it was created or forked
    used_at: datetime  # when an operation last used it
    # The caller's notes. A context that the server made for a program has the label `jaxctx` = `program`.
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned_until: datetime | None = None  # when the pin ends. None: never, or it is not pinned
    expiry: Expiry | None = None  # when it expires. None: never
    version: int  # increases with every change of its tokens, pages or settings
    forked_at: int  # tokens of the parent, buffered ones included, at the time of the fork
    snapshot: str = ""  # the snapshot that it was opened from: "NAME@VERSION". Empty: none
    # The engine that holds it, as in GraphTask.engine_id: behind a router the engine's address, else "local". It
    # changes when the router moves the context. Empty: unknown.
    engine_id: str = ""
    adapter: str = ""  # what the adapter of its next tokens was called when it was chosen. Empty: it has none
    adapter_revision: str = ""  # digest of that adapter's content: equal ones compute equal KV. Empty: it has none
    # Which adapter computes which of its tokens, if it has switched adapters: ascending, the first from 0, the last one
    # is `adapter`. Empty: `adapter` computes all.
    adapter_spans: Sequence[AdapterSpan] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """Where the KV of a call's tokens came from.

    `resident + restored + computed` tokens were made ready. With `defer` there are none.
    """

    resident: int  # tokens found in pages on the device
    restored: int  # tokens restored from another tier
    computed: int  # tokens computed
    context: ContextInfo  # the context afterwards

    @property
    def cached(self) -> int:
        """Tokens whose KV need not be computed."""
        return self.resident + self.restored


class Tier(enum.Enum):
    """Where a page of a context is stored."""

    DEVICE = "device"  # in the engine's pool, ready for computation
    HOST = "host"  # in the host's memory
    DISK = "disk"  # on the host's disk
    LINEAGE = "lineage"  # nowhere: only its tokens are known, from which it is computed again when needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """The physical pages of a context, committed ones first, then working ones."""

    # The pages, by numbers of the caller's own: equal numbers are one physical page. They count from 1 in the order in
    # which the engine first reported them to this caller, so that they reveal nothing about other callers. Empty for a
    # suspended context.
    page_ids: Sequence[int] = ()
    # How many contexts and snapshots of the caller hold each of these pages, this context included.
    refcounts: Sequence[int] = ()
    tiers: Sequence[Tier] = ()  # where each page is, also of a suspended context; a partial page counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Token ids, used as they are, without a tokenizer."""

    ids: Sequence[int] = ()  # 0 to vocab_size - 1 each. In a request, 1 to max_context_tokens of them


@dataclass(frozen=True, slots=True, kw_only=True)
class GetContextResult:
    """One context, with the details that were requested."""

    context: ContextInfo  # its counters
    pages: ContextPages | None = None  # its pages. None: not requested
    tokens: TokenIds | None = None  # all of its tokens, buffered ones at the end. None: not requested
    # The contexts that it descends from, its parent first, closed ones too, up to 100: id, and tokens at the fork.
    # Empty: not requested, or no parent.
    ancestors: Sequence[tuple[str, int]] = ()


class ContextChange(enum.Enum):
    """What happened to a context that is watched."""

    EXISTS = "exists"  # it existed when the watch began, or exists after a RESET
    CREATED = "created"  # it was created
    FORKED = "forked"  # it was forked from another one
    OPENED = "opened"  # it was opened from a snapshot
    CHANGED = "changed"  # its tokens, pages or settings changed
    SUSPENDED = "suspended"  # its pages were evicted under memory pressure
    CLOSED = "closed"  # it was closed
    EXPIRED = "expired"  # it expired
    # Changes were lost because the caller read slowly, or because a router gained or lost an engine. Forget all
    # contexts: an EXISTS follows for each one that there is.
    RESET = "reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEvent:
    """One change of a context. Several changes that wait to be read may be merged into one."""

    change: ContextChange  # what happened
    at: datetime  # when it happened
    context_id: str = ""  # the context. Empty for RESET
    context: ContextInfo | None = None  # the context afterwards. None if it is closed or expired, and for RESET


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How much two contexts, a and b, have in common."""

    common_tokens: int  # length of the common prefix in tokens, buffered ones included
    shared_pages: int  # physical pages that both hold
    length_a: int  # tokens of a, buffered ones included
    length_b: int  # tokens of b, buffered ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a Fill would find in the cache and need. An estimate: other requests fill and evict meanwhile."""

    tokens: int  # tokens to make ready, including what is buffered in the context
    resident: int  # of these, found in pages on the device
    restored: int  # of these, in another tier: `host + disk`
    computed: int  # of these, tokens to compute
    pages_needed: int  # pages to allocate
    # Pages that the caller could use: all but those that its own pins and running calls hold. What other tenants hold
    # is not revealed.
    pages_available: int
    host: int  # of `restored`, tokens in the host's memory
    disk: int  # of `restored`, tokens on the host's disk

    @property
    def cached(self) -> int:
        """Tokens whose KV need not be computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContextRequest:
    """A request for a new, empty context."""

    # Chosen by the client so that a retry is safe (a second request of the same id gives ALREADY_EXISTS): 1..64
    # characters of A-Z a-z 0-9 . _ -, not beginning with a punctuation mark. None: 128 random bits from the server.
    context_id: str | None = None
    salt: str = ""  # contexts of different salts never share pages. Up to 256 bytes
    adapter: str = ""  # the LoRA adapter to compute with. Empty: none, unless the model that is asked for is one
    priority: int = 0  # higher runs first. -100 to 100
    manual_commit: bool = False  # full pages commit only by CommitPages
    # Never evicted under memory pressure. More than the caller may pin gives RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool = False
    # The caller's notes: up to 32; keys of 1..64 bytes, values of up to 256.
    labels: Mapping[str, str] = field(default_factory=dict)
    ttl: Ttl = Ttl()  # the time to live; without seconds: for ever
    # Seconds to stay pinned; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContextRequest:
    """A request to change a context's settings. What is None stays as it is."""

    priority: int | None = None  # higher runs first. -100 to 100
    # Never evicted under memory pressure. More than the caller may pin gives RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool | None = None
    labels: Mapping[str, str] | None = None  # all labels from now on
    ttl: Ttl | None = None  # the time to live from now on; without seconds: for ever
    # Seconds to stay pinned from now on; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None
