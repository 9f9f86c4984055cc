"""Contexts: counters, pages, changes, and the requests that create and change them."""

from jaxctx.convert.times import (
    duration_from_proto,
    duration_to_proto,
    expiry_from_proto,
    expiry_to_proto,
    timestamp_from_proto,
    timestamp_to_proto,
    ttl_from_proto,
    ttl_to_proto,
)
from jaxctx.types import (
    AdapterSpan,
    Comparison,
    ContextChange,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    CreateContextRequest,
    FillResult,
    GetContextResult,
    PlanResult,
    Tier,
    TokenIds,
    UpdateContextRequest,
)
from jaxctx.v1 import content_pb2, context_pb2, context_service_pb2

_CONTEXT_STATE_TO_PROTO = {
    ContextState.IDLE: context_pb2.CONTEXT_STATE_IDLE,
    ContextState.BUSY: context_pb2.CONTEXT_STATE_BUSY,
    ContextState.SUSPENDED: context_pb2.CONTEXT_STATE_SUSPENDED,
}
_CONTEXT_STATE_FROM_PROTO: dict[int, ContextState] = {
    number: member for member, number in _CONTEXT_STATE_TO_PROTO.items()
}

_TIER_TO_PROTO = {
    Tier.DEVICE: context_pb2.TIER_DEVICE,
    Tier.HOST: context_pb2.TIER_HOST,
    Tier.DISK: context_pb2.TIER_DISK,
    Tier.LINEAGE: context_pb2.TIER_LINEAGE,
}
_TIER_FROM_PROTO: dict[int, Tier] = {number: member for member, number in _TIER_TO_PROTO.items()}

_CONTEXT_CHANGE_TO_PROTO = {
    ContextChange.EXISTS: context_service_pb2.CONTEXT_CHANGE_EXISTS,
    ContextChange.CREATED: context_service_pb2.CONTEXT_CHANGE_CREATED,
    ContextChange.FORKED: context_service_pb2.CONTEXT_CHANGE_FORKED,
    ContextChange.OPENED: context_service_pb2.CONTEXT_CHANGE_OPENED,
    ContextChange.CHANGED: context_service_pb2.CONTEXT_CHANGE_CHANGED,
    ContextChange.SUSPENDED: context_service_pb2.CONTEXT_CHANGE_SUSPENDED,
    ContextChange.CLOSED: context_service_pb2.CONTEXT_CHANGE_CLOSED,
    ContextChange.EXPIRED: context_service_pb2.CONTEXT_CHANGE_EXPIRED,
    ContextChange.RESET: context_service_pb2.CONTEXT_CHANGE_RESET,
}
_CONTEXT_CHANGE_FROM_PROTO: dict[int, ContextChange] = {
    number: member for member, number in _CONTEXT_CHANGE_TO_PROTO.items()
}


def context_state_from_proto(number: int) -> ContextState:
    """The state. A number that only a later version knows is IDLE."""
    return _CONTEXT_STATE_FROM_PROTO.get(number, ContextState.IDLE)


def context_state_to_proto(value: ContextState) -> context_pb2.ContextState.ValueType:
    """The state's number."""
    return _CONTEXT_STATE_TO_PROTO[value]


def tier_from_proto(number: int) -> Tier:
    """The tier. A number that only a later version knows is LINEAGE: it promises least."""
    return _TIER_FROM_PROTO.get(number, Tier.LINEAGE)


def tier_to_proto(value: Tier) -> context_pb2.Tier.ValueType:
    """The tier's number."""
    return _TIER_TO_PROTO[value]


def context_change_from_proto(number: int) -> ContextChange:
    """The change. A number that only a later version knows is CHANGED."""
    return _CONTEXT_CHANGE_FROM_PROTO.get(number, ContextChange.CHANGED)


def context_change_to_proto(value: ContextChange) -> context_service_pb2.ContextChange.ValueType:
    """The change's number."""
    return _CONTEXT_CHANGE_TO_PROTO[value]


def context_info_from_proto(message: context_pb2.Context) -> ContextInfo:
    """A context and its counters."""
    return ContextInfo(
        context_id=message.context_id,
        parent_id=message.parent_id if message.HasField("parent_id") else None,
        model_id=message.model_id,
        state=context_state_from_proto(message.state),
        seq_len=message.seq_len,
        committed_pages=message.committed_pages,
        working_pages=message.working_pages,
        working_tokens=message.working_tokens,
        buffered_tokens=message.buffered_tokens,
        page_size=message.page_size,
        priority=message.priority,
        pinned=message.pinned,
        salt=message.salt,
        created_at=timestamp_from_proto(message.created_at),
        used_at=timestamp_from_proto(message.used_at),
        labels=dict(message.labels),
        pinned_until=timestamp_from_proto(message.pinned_until) if message.HasField("pinned_until") else None,
        expiry=expiry_from_proto(message.expiry) if message.HasField("expiry") else None,
        version=message.version,
        forked_at=message.forked_at,
        snapshot=message.snapshot,
        engine_id=message.engine_id,
        adapter=message.adapter,
        adapter_revision=message.adapter_revision,
        adapter_spans=tuple(adapter_span_from_proto(span) for span in message.adapter_spans),
    )


def context_info_to_proto(value: ContextInfo) -> context_pb2.Context:
    """A context and its counters."""
    return context_pb2.Context(
        context_id=value.context_id,
        parent_id=value.parent_id,
        model_id=value.model_id,
        state=context_state_to_proto(value.state),
        seq_len=value.seq_len,
        committed_pages=value.committed_pages,
        working_pages=value.working_pages,
        working_tokens=value.working_tokens,
        buffered_tokens=value.buffered_tokens,
        page_size=value.page_size,
        priority=value.priority,
        pinned=value.pinned,
        salt=value.salt,
        created_at=timestamp_to_proto(value.created_at),
        used_at=timestamp_to_proto(value.used_at),
        labels=value.labels,
        pinned_until=None if value.pinned_until is None else timestamp_to_proto(value.pinned_until),
        expiry=None if value.expiry is None else expiry_to_proto(value.expiry),
        version=value.version,
        forked_at=value.forked_at,
        snapshot=value.snapshot,
        engine_id=value.engine_id,
        adapter=value.adapter,
        adapter_revision=value.adapter_revision,
        adapter_spans=[adapter_span_to_proto(span) for span in value.adapter_spans],
    )


def adapter_span_from_proto(message: context_pb2.AdapterSpan) -> AdapterSpan:
    """The adapter of some tokens of a context."""
    return AdapterSpan(start=message.start, adapter=message.adapter, adapter_revision=message.adapter_revision)


def adapter_span_to_proto(value: AdapterSpan) -> context_pb2.AdapterSpan:
    """The adapter of some tokens of a context."""
    return context_pb2.AdapterSpan(start=value.start, adapter=value.adapter, adapter_revision=value.adapter_revision)


def fill_result_from_proto(message: context_service_pb2.FillResponse) -> FillResult:
    """Where the KV of a filled context came from."""
    return FillResult(
        resident=message.resident,
        restored=message.restored,
        computed=message.computed,
        context=context_info_from_proto(message.context),
    )


def fill_result_to_proto(value: FillResult) -> context_service_pb2.FillResponse:
    """Where the KV of a filled context came from."""
    return context_service_pb2.FillResponse(
        resident=value.resident,
        restored=value.restored,
        computed=value.computed,
        context=context_info_to_proto(value.context),
    )


def flush_response_from_proto(message: context_service_pb2.FlushResponse) -> FillResult:
    """Where the KV of a flushed context came from."""
    return FillResult(
        resident=message.resident,
        restored=message.restored,
        computed=message.computed,
        context=context_info_from_proto(message.context),
    )


def flush_response_to_proto(value: FillResult) -> context_service_pb2.FlushResponse:
    """Where the KV of a flushed context came from."""
    return context_service_pb2.FlushResponse(
        resident=value.resident,
        restored=value.restored,
        computed=value.computed,
        context=context_info_to_proto(value.context),
    )


def token_ids_from_proto(message: content_pb2.TokenIds) -> TokenIds:
    """Token ids."""
    return TokenIds(ids=tuple(message.ids))


def token_ids_to_proto(value: TokenIds) -> content_pb2.TokenIds:
    """Token ids."""
    return content_pb2.TokenIds(ids=value.ids)


def context_pages_from_proto(message: context_pb2.ContextPages) -> ContextPages:
    """The physical pages of a context."""
    return ContextPages(
        page_ids=tuple(message.page_ids),
        refcounts=tuple(message.refcounts),
        tiers=tuple(tier_from_proto(number) for number in message.tiers),
    )


def context_pages_to_proto(value: ContextPages) -> context_pb2.ContextPages:
    """The physical pages of a context."""
    return context_pb2.ContextPages(
        page_ids=value.page_ids,
        refcounts=value.refcounts,
        tiers=[tier_to_proto(tier) for tier in value.tiers],
    )


def get_context_result_from_proto(message: context_service_pb2.GetContextResponse) -> GetContextResult:
    """One context, with its pages and tokens if they were asked for."""
    return GetContextResult(
        context=context_info_from_proto(message.context),
        pages=context_pages_from_proto(message.pages) if message.HasField("pages") else None,
        tokens=token_ids_from_proto(message.tokens) if message.HasField("tokens") else None,
        ancestors=tuple((ancestor.context_id, ancestor.forked_at) for ancestor in message.ancestors),
    )


def get_context_result_to_proto(value: GetContextResult) -> context_service_pb2.GetContextResponse:
    """One context, with its pages and tokens if they were asked for."""
    return context_service_pb2.GetContextResponse(
        context=context_info_to_proto(value.context),
        pages=None if value.pages is None else context_pages_to_proto(value.pages),
        tokens=None if value.tokens is None else token_ids_to_proto(value.tokens),
        ancestors=[
            context_pb2.Ancestor(context_id=context_id, forked_at=forked_at)
            for context_id, forked_at in value.ancestors
        ],
    )


def context_event_from_proto(message: context_service_pb2.WatchContextsResponse) -> ContextEvent:
    """One change of a context."""
    return ContextEvent(
        change=context_change_from_proto(message.change),
        at=timestamp_from_proto(message.at),
        context_id=message.context_id,
        context=context_info_from_proto(message.context) if message.HasField("context") else None,
    )


def context_event_to_proto(value: ContextEvent) -> context_service_pb2.WatchContextsResponse:
    """One change of a context."""
    return context_service_pb2.WatchContextsResponse(
        change=context_change_to_proto(value.change),
        at=timestamp_to_proto(value.at),
        context_id=value.context_id,
        context=None if value.context is None else context_info_to_proto(value.context),
    )


def comparison_from_proto(message: context_service_pb2.CompareResponse) -> Comparison:
    """Where two contexts part."""
    return Comparison(
        common_tokens=message.common_tokens,
        shared_pages=message.shared_pages,
        length_a=message.length_a,
        length_b=message.length_b,
    )


def comparison_to_proto(value: Comparison) -> context_service_pb2.CompareResponse:
    """Where two contexts part."""
    return context_service_pb2.CompareResponse(
        common_tokens=value.common_tokens,
        shared_pages=value.shared_pages,
        length_a=value.length_a,
        length_b=value.length_b,
    )


def plan_result_from_proto(message: context_service_pb2.PlanResponse) -> PlanResult:
    """What filling would find and need."""
    return PlanResult(
        tokens=message.tokens,
        resident=message.resident,
        restored=message.restored,
        computed=message.computed,
        pages_needed=message.pages_needed,
        pages_available=message.pages_available,
        host=message.host,
        disk=message.disk,
    )


def plan_result_to_proto(value: PlanResult) -> context_service_pb2.PlanResponse:
    """What filling would find and need."""
    return context_service_pb2.PlanResponse(
        tokens=value.tokens,
        resident=value.resident,
        restored=value.restored,
        computed=value.computed,
        pages_needed=value.pages_needed,
        pages_available=value.pages_available,
        host=value.host,
        disk=value.disk,
    )


def create_context_request_from_proto(message: context_service_pb2.CreateContextRequest) -> CreateContextRequest:
    """A request for a new context. Its `model_id` is left to the server, which finds the engine by it."""
    return CreateContextRequest(
        context_id=message.context_id if message.HasField("context_id") else None,
        salt=message.salt,
        adapter=message.adapter,
        priority=message.priority,
        manual_commit=message.manual_commit,
        pinned=message.pinned,
        labels=dict(message.labels),
        ttl=ttl_from_proto(message.ttl),
        pin_s=duration_from_proto(message.pin_for) if message.HasField("pin_for") else None,
    )


def create_context_request_to_proto(value: CreateContextRequest) -> context_service_pb2.CreateContextRequest:
    """A request for a new context of the server's default model."""
    return context_service_pb2.CreateContextRequest(
        context_id=value.context_id,
        salt=value.salt,
        adapter=value.adapter,
        priority=value.priority,
        manual_commit=value.manual_commit,
        pinned=value.pinned,
        labels=value.labels,
        ttl=ttl_to_proto(value.ttl),
        pin_for=None if value.pin_s is None else duration_to_proto(value.pin_s),
    )


def update_context_request_from_proto(message: context_service_pb2.UpdateContextRequest) -> UpdateContextRequest:
    """A change of a context's settings. The `context_id` stands beside it in calls of an engine."""
    return UpdateContextRequest(
        priority=message.priority if message.HasField("priority") else None,
        pinned=message.pinned if message.HasField("pinned") else None,
        labels=dict(message.labels.labels) if message.HasField("labels") else None,
        ttl=ttl_from_proto(message.ttl) if message.HasField("ttl") else None,
        pin_s=duration_from_proto(message.pin_for) if message.HasField("pin_for") else None,
    )


def update_context_request_to_proto(
    value: UpdateContextRequest, *, context_id: str = ""
) -> context_service_pb2.UpdateContextRequest:
    """A change of the settings of the context of this id."""
    labels = None
    if value.labels is not None:
        labels = context_service_pb2.UpdateContextRequest.Labels(labels=value.labels)
    return context_service_pb2.UpdateContextRequest(
        context_id=context_id,
        priority=value.priority,
        pinned=value.pinned,
        labels=labels,
        ttl=None if value.ttl is None else ttl_to_proto(value.ttl),
        pin_for=None if value.pin_s is None else duration_to_proto(value.pin_s),
    )
