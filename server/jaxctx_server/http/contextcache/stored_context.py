"""A kept context: the snapshot that holds it, how it is found and saved, and what is told of it.

Its facts are labels of the snapshot, so that a list has them, and a change of its time to live saves no new version.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import Aborted, AlreadyExists, NotFound
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx.v1.snapshot_pb2 import Snapshot
from jaxctx.v1.snapshot_service_pb2 import GetSnapshotRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.contextcache.errors import busy, not_found, taken
from jaxctx_server.http.contextcache.registry import ContextKey
from jaxctx_server.http.stored import save_state, ttl_of

Json = dict[str, Any]
NAME_PREFIX = "ctx:"  # of the snapshots of kept contexts, which no other state of the caller has
DEFAULT_TTL_S = 3600.0
MODEL, CREATED_AT, FORKED_FROM = "model", "created_at", "forked_from"  # labels
KEPT_VERSIONS = 1


@dataclass(frozen=True, slots=True)
class StoredContext:
    """A version of a kept context."""

    session_id: str
    snapshot: Snapshot
    tokens: tuple[int, ...] = ()  # if they were asked for

    @property
    def model_id(self) -> str:
        """The model that computed it."""
        return self.snapshot.labels[MODEL]

    @property
    def ttl(self) -> Ttl:
        """The time to live that it was given."""
        if not self.snapshot.HasField("expiry"):
            return Ttl()
        return Ttl(duration=self.snapshot.expiry.duration, sliding=True)

    def json(self, now: float) -> Json:
        """What the API tells of it at a time, in seconds since 1970."""
        snapshot, ends_at = self.snapshot, end_of(self.snapshot)
        ttl_s = None if ends_at is None else snapshot.expiry.duration.seconds
        return {
            "id": self.session_id,
            "object": "context",
            "session_id": self.session_id,
            "model": self.model_id,
            "created_at": int(snapshot.labels.get(CREATED_AT, "0")),
            "used_at": snapshot.created_at.seconds,
            "ttl_s": ttl_s,
            "sliding": True,
            "expires_at": None if ends_at is None else math.ceil(ends_at),
            "remaining_s": None if ends_at is None else round(max(ends_at - now, 0.0), 3),
            "tokens": snapshot.tokens,
            "bytes": snapshot.size_bytes,
            "pages": snapshot.pages,
            "durable": snapshot.durable,
            "tier": "store" if snapshot.durable else "memory",
            "version": snapshot.version,
            "forked_from": snapshot.labels.get(FORKED_FROM),
        }


def new_session_id() -> str:
    """A session id that nobody can guess."""
    return secrets.token_hex(16)


def key_of(call: HttpCall, session_id: str) -> ContextKey:
    """The context of this id in the caller's namespace."""
    return ContextKey(call.caller.tenant, session_id)


def snapshot_name(session_id: str) -> str:
    """The snapshot that holds a context."""
    return NAME_PREFIX + session_id


def ttl_message(ttl_s: float | None) -> Ttl:
    """A time to live that every use starts again. None: for ever."""
    return ttl_of(ttl_s, sliding=True)


def end_of(snapshot: Snapshot) -> float | None:
    """When it ends if it is not used, in seconds since 1970. None: never."""
    if not snapshot.HasField("expiry"):
        return None
    at = snapshot.expiry.at
    return at.seconds + at.nanos / 1e9


async def find_context(call: HttpCall, session_id: str, *, include_tokens: bool = False) -> StoredContext:
    """A kept context of the caller's. Raises NotFound (context_not_found, context_expired)."""
    key = key_of(call, session_id)
    request = GetSnapshotRequest(name=snapshot_name(session_id), include_tokens=include_tokens)
    try:
        found = await call.unary(call.services.snapshots.get_snapshot, request)
    except NotFound:
        raise call.frontend.kept_contexts.missing(key) from None
    if MODEL not in found.snapshot.labels:  # of this name, but not saved by this API
        raise not_found(session_id)
    call.frontend.kept_contexts.remember(key, end_of(found.snapshot))
    return StoredContext(session_id, found.snapshot, tuple(found.tokens.ids))


async def save_context(
    call: HttpCall, context_id: str, session_id: str, ttl: Ttl, labels: dict[str, str], *, replaces: int | None
) -> StoredContext:
    """Keep the state of a live context. `replaces` is the version that it replaces; None: the session id is new.

    Raises AlreadyExists (context_exists), Aborted (context_busy), NotFound for one that was deleted meanwhile, and
    ResourceExhausted for a quota.
    """
    name, key = snapshot_name(session_id), key_of(call, session_id)
    try:
        snapshot = await save_state(
            call, context_id, name, None, ttl, replaces=replaces, labels=labels, max_versions=KEPT_VERSIONS
        )
    except AlreadyExists:
        raise taken(session_id) from None
    except Aborted as error:
        if error.reason != "VERSION_MISMATCH":
            raise
        raise busy(session_id) from None
    except NotFound as error:
        if error.reason != "SNAPSHOT_NOT_FOUND":
            raise
        raise call.frontend.kept_contexts.missing(key) from None
    call.frontend.kept_contexts.remember(key, end_of(snapshot))
    return StoredContext(session_id, snapshot)


def new_labels(model_id: str, now: float, *, forked_from: str | None = None) -> dict[str, str]:
    """The labels of a context that is made now, in seconds since 1970."""
    labels = {MODEL: model_id, CREATED_AT: str(int(now))}
    return labels if forked_from is None else {**labels, FORKED_FROM: forked_from}
