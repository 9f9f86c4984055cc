"""Snapshots and publications."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from jaxctx.types.contexts import AdapterSpan, TokenIds
from jaxctx.types.lifetime import Expiry, Ttl


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of a snapshot: an immutable copy of a context's state in the caller's namespace."""

    name: str  # 1..100 bytes without control characters
    version: int  # 1, 2, ...; a name that was deleted starts again at 1
    latest: bool  # whether no later version of the name exists
    durable: bool  # whether it survives the server's end and a loss of power
    tokens: int  # tokens, buffered ones included
    seq_len: int  # of these, tokens with KV
    pages: int  # pages of KV
    size_bytes: int  # bytes of its pages. Pages that several snapshots share are stored once but counted in each
    model_revision: str  # the model revision that computed it
    salt: str  # the salt of the context, which contexts opened from it inherit
    manual_commit: bool  # whether full pages of contexts opened from it commit only by CommitPages
    created_at: datetime  # when it was saved
    expiry: Expiry | None = None  # when it expires. None: never
    context_id: str  # the context that was saved, perhaps closed by now
    parent_version: int = 0  # the version that it replaced as the latest. 0: none
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes
    attachment_bytes: int = 0  # bytes of its attachment. 0: it has none
    adapter: str = ""  # what the adapter of the context's next tokens was called. Empty: it had none
    adapter_revision: str = ""  # digest of that adapter's content
    adapter_spans: Sequence[AdapterSpan] = ()  # which adapter computed which tokens. Empty: `adapter` computed all


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSnapshotResult:
    """One version of a snapshot, with what was requested of it."""

    snapshot: Snapshot  # the version
    attachment: bytes = b""  # its attachment, if that was requested; empty if it has none
    tokens: TokenIds | None = None  # its tokens, buffered ones included. None: they were not requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A prefix that contexts of all tenants share, if they have the same model and salt.

    Only its owner can list and end it.
    """

    publication_id: str  # 128 random bits
    tokens: int  # tokens of it; whole pages only
    pages: int  # pages of it
    salt: str  # contexts of this salt share it
    created_at: datetime  # when it was published
    expiry: Expiry | None = None  # when it expires. None: never
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes; no other tenant sees them


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A request to save a context's present state as a snapshot."""

    context_id: str  # the context
    name: str  # the snapshot's name. One that exists gives ALREADY_EXISTS, unless `overwrite_version` is set
    # Respond only when the snapshot would survive a loss of power; a server without a store gives FAILED_PRECONDITION
    # (NO_STORE). Otherwise it is kept in memory until the server ends.
    durable: bool = False
    # The latest version, which the new one replaces as the latest. It is kept as history; a server may have a limit,
    # and then drops the oldest version. Any other number gives ABORTED (VERSION_MISMATCH).
    overwrite_version: int | None = None
    ttl: Ttl = Ttl()  # the time to live; without seconds: for ever
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes: limits as in CreateContextRequest
    # Bytes of the caller's that belong to the version, up to 4 MiB. They are as durable as the version, expire and are
    # deleted with it, and count for the tenant's quota of bytes. Empty: none.
    attachment: bytes = b""
    # At most this many versions of the name are kept, the new one included, if the server's limit is not lower. 0: as
    # many as the server's limit allows.
    max_versions: int = 0
    # It is a step of moving the context to another engine, so no quota of snapshots counts it. For the engine's router.
    for_move: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """A request for a context from a snapshot. It has salt and manual_commit of the context that was saved."""

    name: str  # the snapshot
    version: int | None = None  # its version, from 1. None: the latest
    # Accept a snapshot of another model revision and compute its tokens anew. Otherwise that gives FAILED_PRECONDITION
    # (MODEL_MISMATCH).
    recompute: bool = False
    context_id: str | None = None  # as in CreateContextRequest
    priority: int = 0  # higher runs first. -100 to 100
    pinned: bool = False  # as in CreateContextRequest
    pin_s: float | None = None  # as in CreateContextRequest. None: until it is unpinned
    ttl: Ttl = Ttl()  # as in CreateContextRequest


@dataclass(frozen=True, slots=True)
class RetentionUpdate:
    """A request to change how long a snapshot's version or a publication is kept. What is None stays as it is."""

    ttl: Ttl | None = None  # the time to live from now on; without seconds: for ever
    labels: Mapping[str, str] | None = None  # all labels from now on
