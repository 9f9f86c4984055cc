"""Answers of the Engine interface to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx.engine.interface import (
    Change,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    EngineInfo,
    EngineStats,
    Expiry,
    FillResult,
    FinishReason,
    GeneratePiece,
    PassResult,
    PlanResult,
    Publication,
    SnapshotInfo,
    Tier,
    TokenLogprob,
)
from jaxctx.v1 import (
    admin_service_pb2,
    context_pb2,
    context_service_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
)

# A response with the fields of a FillResult.
R = TypeVar(
    "R",
    context_service_pb2.FillResponse,
    context_service_pb2.FlushResponse,
    snapshot_service_pb2.OpenResponse,
    snapshot_service_pb2.TakeResponse,
)

STATES = {
    ContextState.IDLE: context_pb2.CONTEXT_STATE_IDLE,
    ContextState.BUSY: context_pb2.CONTEXT_STATE_BUSY,
    ContextState.SUSPENDED: context_pb2.CONTEXT_STATE_SUSPENDED,
}
FINISHES = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


TIERS = {
    Tier.DEVICE: context_pb2.TIER_DEVICE,
    Tier.HOST: context_pb2.TIER_HOST,
    Tier.DISK: context_pb2.TIER_DISK,
    Tier.LINEAGE: context_pb2.TIER_LINEAGE,
}
CHANGES = {
    Change.EXISTS: context_service_pb2.CONTEXT_CHANGE_EXISTS,
    Change.CREATED: context_service_pb2.CONTEXT_CHANGE_CREATED,
    Change.FORKED: context_service_pb2.CONTEXT_CHANGE_FORKED,
    Change.OPENED: context_service_pb2.CONTEXT_CHANGE_OPENED,
    Change.CHANGED: context_service_pb2.CONTEXT_CHANGE_CHANGED,
    Change.SUSPENDED: context_service_pb2.CONTEXT_CHANGE_SUSPENDED,
    Change.CLOSED: context_service_pb2.CONTEXT_CHANGE_CLOSED,
    Change.EXPIRED: context_service_pb2.CONTEXT_CHANGE_EXPIRED,
    Change.RESET: context_service_pb2.CONTEXT_CHANGE_RESET,
}


def context(info: ContextInfo, model_id: str) -> context_pb2.Context:
    """A context's counters."""
    return context_pb2.Context(
        context_id=info.context_id,
        parent_id=info.parent_id,
        model_id=model_id,
        state=STATES[info.state],
        seq_len=info.seq_len,
        committed_pages=info.committed_pages,
        working_pages=info.working_pages,
        working_tokens=info.working_tokens,
        buffered_tokens=info.buffered_tokens,
        page_size=info.page_size,
        priority=info.priority,
        pinned=info.pinned,
        salt=info.salt,
        created_at=_timestamp(info.created_at),
        used_at=_timestamp(info.used_at),
        labels=info.labels,
        pinned_until=None if info.pinned_until is None else _timestamp(info.pinned_until),
        expiry=_expiry(info.expiry),
        version=info.version,
        forked_at=info.forked_at,
        snapshot=info.snapshot,
    )


def filled(response: type[R], result: FillResult, model_id: str) -> R:
    """Where KV came from, as a response of that class."""
    return response(
        resident=result.resident,
        restored=result.restored,
        computed=result.computed,
        context=context(result.context, model_id),
    )


def pages(layout: ContextPages) -> context_pb2.ContextPages:
    """A context's pages."""
    return context_pb2.ContextPages(
        page_ids=layout.page_ids, refcounts=layout.refcounts, tiers=[TIERS[tier] for tier in layout.tiers]
    )


def plan(result: PlanResult) -> context_service_pb2.PlanResponse:
    """What a fill would find and need."""
    return context_service_pb2.PlanResponse(**asdict(result))


def piece(part: GeneratePiece, model_id: str) -> context_service_pb2.GenerateResponse:
    """A part of one output."""
    response = context_service_pb2.GenerateResponse(
        index=part.index,
        context_id=part.context_id,
        text=part.text,
        token_ids=part.token_ids,
        logprobs=[_logprob(each) for each in part.logprobs],
    )
    if part.finish is not None:
        _finish(response, part, model_id)
    return response


def _finish(response: context_service_pb2.GenerateResponse, part: GeneratePiece, model_id: str) -> None:
    response.finish = FINISHES[part.finish]
    if isinstance(part.stop_match, str):
        response.stop_text = part.stop_match
    elif part.stop_match is not None:
        response.stop_token_id = part.stop_match
    if part.seed is not None:
        response.seed = part.seed
    if part.usage is not None:
        usage = part.usage
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.cached_tokens = usage.cached_tokens
        response.usage.computed_tokens = usage.computed_tokens
        response.usage.completion_tokens = usage.completion_tokens
    if part.context is not None:
        response.context.CopyFrom(context(part.context, model_id))


def _logprob(value: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=_top(value.top))


def _top(pairs: Sequence[tuple[int, float]]) -> list[generation_pb2.TopLogprob]:
    return [generation_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in pairs]


def pass_result(result: PassResult) -> forward_pb2.PassResult:
    """What was asked of one token of a pass."""
    return forward_pb2.PassResult(
        index=result.index,
        token_id=result.token_id,
        seed=result.seed,
        logprobs=result.logprobs,
        top=_top(result.top),
        logits=result.logits,
        entropy=result.entropy,
    )


def event(change: ContextEvent, model_id: str) -> context_service_pb2.WatchContextsResponse:
    """One change of a context."""
    return context_service_pb2.WatchContextsResponse(
        change=CHANGES[change.change],
        at=_timestamp(change.at),
        context_id=change.context_id,
        context=None if change.context is None else context(change.context, model_id),
    )


def snapshot(info: SnapshotInfo) -> snapshot_pb2.Snapshot:
    """One version of a snapshot."""
    return snapshot_pb2.Snapshot(**_kept(info))


def publication(info: Publication) -> snapshot_pb2.Publication:
    """A published prefix."""
    return snapshot_pb2.Publication(**_kept(info))


def _kept(info: SnapshotInfo | Publication) -> dict[str, Any]:
    """The messages have the fields of the two classes, by the same names."""
    fields = {field.name: getattr(info, field.name) for field in dataclass_fields(info)}
    return fields | {"created_at": _timestamp(info.created_at), "expiry": _expiry(info.expiry)}


def model(info: EngineInfo) -> model_service_pb2.Model:
    """A model as it is served."""
    return model_service_pb2.Model(
        model_id=info.model_id,
        model_revision=info.model_revision,
        architecture=info.architecture,
        parameters=info.parameters,
        vocab_size=info.vocab_size,
        max_context_tokens=info.max_context_tokens,
        page_size=info.page_size,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        default_max_tokens=info.default_max_tokens,
    )


def engine(info: EngineInfo, stats: EngineStats) -> admin_service_pb2.Engine:
    """An engine and its load. The messages have the fields of the two classes, by the same names."""
    return admin_service_pb2.Engine(
        info=admin_service_pb2.EngineInfo(**asdict(info)),
        stats=admin_service_pb2.EngineStats(**asdict(stats)),
    )


def _expiry(expiry: Expiry | None) -> lifetime_pb2.Expiry | None:
    if expiry is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(expiry.seconds * 1e9))
    return lifetime_pb2.Expiry(at=_timestamp(expiry.at), duration=duration, sliding=expiry.sliding)


def _timestamp(unix_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromMicroseconds(round(unix_s * 1e6))
    return timestamp
