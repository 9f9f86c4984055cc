"""`ContextInfo`: the description of a context that callers get, made from its state in the cache."""

from jaxctx.cache.context_cache import Context
from jaxctx.engine.interface import LOCAL_ENGINE
from jaxctx.lifetime import Lifetime
from jaxctx.types import ContextInfo, ContextState, Expiry, utc_datetime


def expiry(lifetime: Lifetime) -> Expiry | None:
    """When something of this lifetime ends; None: never."""
    if lifetime.at is None or lifetime.seconds is None:
        return None
    return Expiry(at=utc_datetime(lifetime.at), seconds=lifetime.seconds, sliding=lifetime.sliding)


def context_info(context: Context, *, model_id: str, has_writer: bool) -> ContextInfo:
    """A context's counters and settings as plain data."""
    parent_id, forked_at = context.ancestors[0] if context.ancestors else (None, 0)
    spans = context.adapter_spans
    return ContextInfo(
        context_id=context.id,
        parent_id=parent_id,
        model_id=model_id,
        state=_state(context, has_writer),
        seq_len=context.seq_len,
        committed_pages=context.committed_pages,
        working_pages=context.working_pages,
        working_tokens=context.working_tokens,
        buffered_tokens=context.buffered_tokens,
        page_size=context.page_size,
        priority=context.priority,
        pinned=context.pinned,
        salt=context.identity.salt,
        created_at=utc_datetime(context.created_at),
        used_at=utc_datetime(context.used_at),
        labels=context.labels,
        pinned_until=None if context.pinned_until is None else utc_datetime(context.pinned_until),
        expiry=expiry(context.lifetime),
        version=context.version,
        forked_at=forked_at,
        snapshot=context.snapshot,
        engine_id=LOCAL_ENGINE,
        adapter=spans[-1].adapter,
        adapter_revision=spans[-1].adapter_revision,
        adapter_spans=spans if context.adapter_switches else (),
    )


def _state(context: Context, has_writer: bool) -> ContextState:
    if has_writer:
        return ContextState.BUSY
    return ContextState.SUSPENDED if context.suspended else ContextState.IDLE
