"""Contexts, pages, engines and sessions as the page's scripts read them.

Written by hand, field by field: the page needs few of the fields, and this takes a tenth of the time that the general
conversion of messages takes. Times are milliseconds since 1970, as scripts count them.
"""

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx.v1.admin_service_pb2 import Engine
from jaxctx.v1.context_pb2 import (
    CONTEXT_STATE_BUSY,
    CONTEXT_STATE_IDLE,
    CONTEXT_STATE_SUSPENDED,
    TIER_DEVICE,
    TIER_DISK,
    TIER_HOST,
    TIER_LINEAGE,
    Context,
    ContextPages,
)
from jaxctx.v1.session_service_pb2 import Session

MAX_DRAWN_PAGES = 512  # of one context
STATES: Mapping[int, str] = {
    CONTEXT_STATE_IDLE: "idle",
    CONTEXT_STATE_BUSY: "busy",
    CONTEXT_STATE_SUSPENDED: "suspended",
}
TIER_LETTERS: Mapping[int, str] = {TIER_DEVICE: "d", TIER_HOST: "h", TIER_DISK: "k", TIER_LINEAGE: "l"}

Json = dict[str, Any]


def milliseconds(time: Timestamp) -> int:
    """Milliseconds since 1970."""
    return int(time.seconds) * 1000 + int(time.nanos) // 1_000_000


def context_json(context: Context) -> Json:
    """A context's counters and settings."""
    return {
        "context_id": context.context_id,
        "parent_id": context.parent_id if context.HasField("parent_id") else None,
        "model_id": context.model_id,
        "state": STATES.get(context.state, ""),
        "seq_len": context.seq_len,
        "buffered_tokens": context.buffered_tokens,
        "pages": context.committed_pages + context.working_pages,
        "committed_pages": context.committed_pages,
        "working_tokens": context.working_tokens,
        "page_size": context.page_size,
        "priority": context.priority,
        "pinned": context.pinned,
        "created_at": milliseconds(context.created_at),
        "used_at": milliseconds(context.used_at),
        "expires_at": milliseconds(context.expiry.at) if context.HasField("expiry") else None,
        "labels": dict(context.labels),
        "forked_at": context.forked_at,
        "snapshot": context.snapshot,
        "adapter": context.adapter,
        "adapter_spans": [{"start": span.start, "adapter": span.adapter} for span in context.adapter_spans],
        "engine_id": context.engine_id,
    }


def pages_json(context_id: str, pages: ContextPages) -> Json:
    """The pages of a context. Of more than MAX_DRAWN_PAGES only every `stride`-th, a power of two, so that contexts of
    different lengths have the same ones. `tiers` has a letter a page: device, host, disk (k) or lineage.
    """
    count = max(len(pages.page_ids), len(pages.tiers))
    stride = 1 << max(0, math.ceil(math.log2(max(count, 1) / MAX_DRAWN_PAGES)))
    return {
        "context_id": context_id,
        "count": count,
        "stride": stride,
        "page_ids": list(pages.page_ids[::stride]),
        "refcounts": list(pages.refcounts[::stride]),
        "tiers": "".join(TIER_LETTERS.get(tier, "d") for tier in pages.tiers[::stride]),
    }


def engine_json(engine: Engine) -> Json:
    """An engine and its load."""
    info, stats = engine.info, engine.stats
    return {
        "engine_id": engine.address or "local",
        "model_id": info.model_id,
        "platform": info.platform,
        "dtype": info.dtype,
        "weights_dtype": info.weights_dtype,
        "kv_dtype": info.kv_dtype,
        "attention": engine.attention.implementation,
        "attention_reason": engine.attention.reason,
        "page_size": info.page_size,
        "max_batch": info.max_batch,
        "max_context_tokens": info.max_context_tokens,
        "pages_total": stats.pages_total,
        "pages_free": stats.pages_free,
        "pages_cached": stats.pages_cached,
        "pages_held": stats.pages_held,
        "host_pages_total": stats.host_pages_total,
        "host_pages_used": stats.host_pages_used,
        "disk_pages_total": stats.disk_pages_total,
        "disk_pages_used": stats.disk_pages_used,
        "contexts": stats.contexts,
        "snapshots": stats.snapshots,
        "running": stats.running,
        "waiting": stats.waiting,
        "draining": stats.draining,
        "tokens_computed": stats.tokens_computed,
        "tokens_cached": stats.tokens_cached,
        "tokens_restored": stats.tokens_restored,
        "tokens_generated": stats.tokens_generated,
        "preemptions": stats.preemptions,
        "suspensions": stats.suspensions,
    }


def session_json(session: Session) -> Json:
    """A session and how much it holds."""
    return {
        "session_id": session.session_id,
        "variables": session.variables,
        "calls": session.calls,
        "started": session.started,
    }
