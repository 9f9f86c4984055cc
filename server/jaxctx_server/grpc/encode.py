"""Answers of the Engine interface to messages."""

from __future__ import annotations

from dataclasses import asdict

from google.protobuf.timestamp_pb2 import Timestamp

from jaxctx.engine.interface import (
    ContextInfo,
    ContextPages,
    ContextState,
    EngineInfo,
    EngineStats,
    FinishReason,
    GeneratePiece,
    PlanResult,
    TokenLogprob,
)
from jaxctx.v1 import admin_service_pb2, context_pb2, context_service_pb2, generation_pb2, model_service_pb2

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
    )


def pages(layout: ContextPages) -> context_pb2.ContextPages:
    """A context's pages."""
    return context_pb2.ContextPages(page_ids=layout.page_ids, refcounts=layout.refcounts)


def plan(result: PlanResult) -> context_service_pb2.PlanResponse:
    """What a fill would find and need."""
    return context_service_pb2.PlanResponse(
        tokens=result.tokens,
        resident=result.resident,
        restored=result.restored,
        computed=result.computed,
        pages_needed=result.pages_needed,
        pages_available=result.pages_available,
    )


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
    top = [generation_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in value.top]
    return generation_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


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


def _timestamp(unix_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromMicroseconds(round(unix_s * 1e6))
    return timestamp
