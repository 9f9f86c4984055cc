"""Response messages to the dataclasses of `types`. Pure."""

from __future__ import annotations

import dataclasses
from datetime import UTC

from jaxctx.client.types import (
    Change,
    Comparison,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    Engine,
    EngineInfo,
    EngineStats,
    Expiry,
    FillResult,
    FinishReason,
    Model,
    PlanResult,
    Tier,
    TokenLogprob,
    Usage,
)
from jaxctx.v1 import (
    admin_service_pb2,
    context_pb2,
    context_service_pb2,
    generation_pb2,
    model_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
)

Filled = (
    context_service_pb2.FillResponse
    | context_service_pb2.FlushResponse
    | snapshot_service_pb2.OpenResponse
    | snapshot_service_pb2.TakeResponse
)

_STATES = {
    context_pb2.CONTEXT_STATE_IDLE: ContextState.IDLE,
    context_pb2.CONTEXT_STATE_BUSY: ContextState.BUSY,
    context_pb2.CONTEXT_STATE_SUSPENDED: ContextState.SUSPENDED,
}
_FINISHES = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_TIERS = {
    context_pb2.TIER_DEVICE: Tier.DEVICE,
    context_pb2.TIER_HOST: Tier.HOST,
    context_pb2.TIER_DISK: Tier.DISK,
}
_CHANGES = {context_service_pb2.ContextChange.Value(f"CONTEXT_CHANGE_{change.name}"): change for change in Change}


def context_info(context: context_pb2.Context) -> ContextInfo:
    """A state that this client does not know yet reads as IDLE: all operations may be tried."""
    return ContextInfo(
        context_id=context.context_id,
        parent_id=context.parent_id if context.HasField("parent_id") else None,
        model_id=context.model_id,
        state=_STATES.get(context.state, ContextState.IDLE),
        seq_len=context.seq_len,
        committed_pages=context.committed_pages,
        working_pages=context.working_pages,
        working_tokens=context.working_tokens,
        buffered_tokens=context.buffered_tokens,
        page_size=context.page_size,
        priority=context.priority,
        pinned=context.pinned,
        salt=context.salt,
        created_at=context.created_at.ToDatetime(UTC),
        used_at=context.used_at.ToDatetime(UTC),
        labels=dict(context.labels),
        pinned_until=context.pinned_until.ToDatetime(UTC) if context.HasField("pinned_until") else None,
        expiry=expiry(context),
        version=context.version,
        forked_at=context.forked_at,
        snapshot=context.snapshot,
    )


def expiry(owner: context_pb2.Context | snapshot_pb2.Snapshot | snapshot_pb2.Publication) -> Expiry | None:
    """When it ends; None: never."""
    if not owner.HasField("expiry"):
        return None
    seconds = owner.expiry.duration.ToNanoseconds() / 1e9
    return Expiry(at=owner.expiry.at.ToDatetime(UTC), seconds=seconds, sliding=owner.expiry.sliding)


def context_pages(pages: context_pb2.ContextPages) -> ContextPages:
    """Of GetContext. A tier that this client does not know yet reads as LINEAGE: none of its guesses is better."""
    tiers = tuple(_TIERS.get(tier, Tier.LINEAGE) for tier in pages.tiers)
    return ContextPages(page_ids=tuple(pages.page_ids), refcounts=tuple(pages.refcounts), tiers=tiers)


def fill_result(response: Filled) -> FillResult:
    """Of Fill, Flush, Open and Take."""
    return FillResult(
        resident=response.resident,
        restored=response.restored,
        computed=response.computed,
        context=context_info(response.context),
    )


def plan_result(response: context_service_pb2.PlanResponse) -> PlanResult:
    """Of Plan."""
    return PlanResult(**{each.name: getattr(response, each.name) for each in dataclasses.fields(PlanResult)})


def comparison(response: context_service_pb2.CompareResponse) -> Comparison:
    """Of Compare."""
    return Comparison(**{each.name: getattr(response, each.name) for each in dataclasses.fields(Comparison)})


def event(response: context_service_pb2.WatchContextsResponse) -> ContextEvent:
    """Of WatchContexts. A change that this client does not know yet reads as CHANGED."""
    return ContextEvent(
        change=_CHANGES.get(response.change, Change.CHANGED),
        at=response.at.ToDatetime(UTC),
        context_id=response.context_id,
        context=context_info(response.context) if response.HasField("context") else None,
    )


def logprobs(response: context_service_pb2.GenerateResponse) -> tuple[TokenLogprob, ...]:
    """Of one response of Generate."""
    return tuple(
        TokenLogprob(token_id=each.token_id, logprob=each.logprob, top=tuple((t.token_id, t.logprob) for t in each.top))
        for each in response.logprobs
    )


def finish(response: context_service_pb2.GenerateResponse) -> FinishReason | None:
    """None before the last response of an output. A reason that this client does not know yet reads as STOP."""
    if response.finish == generation_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISHES.get(response.finish, FinishReason.STOP)


def stop_match(response: context_service_pb2.GenerateResponse) -> str | int | None:
    """The stop string or token that ended the output, if one did."""
    match response.WhichOneof("stop_match"):
        case "stop_text":
            return response.stop_text
        case "stop_token_id":
            return response.stop_token_id
        case _:
            return None


def usage(message: generation_pb2.Usage) -> Usage:
    """Of the last response of an output."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        computed_tokens=message.computed_tokens,
        completion_tokens=message.completion_tokens,
    )


def model(message: model_service_pb2.Model) -> Model:
    """Of ListModels and GetModel."""
    return Model(**{each.name: getattr(message, each.name) for each in dataclasses.fields(Model)})


def engine(message: admin_service_pb2.Engine) -> Engine:
    """Of GetStats."""
    info = {each.name: getattr(message.info, each.name) for each in dataclasses.fields(EngineInfo)}
    stats = {each.name: getattr(message.stats, each.name) for each in dataclasses.fields(EngineStats)}
    return Engine(info=EngineInfo(**{**info, "mesh": dict(message.info.mesh)}), stats=EngineStats(**stats))


def total(engines: list[Engine]) -> EngineStats:
    """The sums over all engines; draining if all are."""
    sums = {
        each.name: sum(getattr(engine.stats, each.name) for engine in engines)
        for each in dataclasses.fields(EngineStats)
        if each.name != "draining"
    }
    return EngineStats(**sums, draining=all(engine.stats.draining for engine in engines))
