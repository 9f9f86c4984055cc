"""Engines: what they are, and how loaded."""

from jaxctx.types import AdapterInfo, Attention, EngineInfo, EngineStats, EngineStatus
from jaxctx.v1 import admin_service_pb2


def engine_info_from_proto(message: admin_service_pb2.EngineInfo) -> EngineInfo:
    """What does not change while an engine runs."""
    return EngineInfo(
        model_id=message.model_id,
        model_revision=message.model_revision,
        architecture=message.architecture,
        parameters=message.parameters,
        vocab_size=message.vocab_size,
        max_context_tokens=message.max_context_tokens,
        page_size=message.page_size,
        pages_total=message.pages_total,
        dtype=message.dtype,
        weights_dtype=message.weights_dtype,
        kv_dtype=message.kv_dtype,
        max_batch=message.max_batch,
        platform=message.platform,
        mesh=dict(message.mesh),
        default_max_tokens=message.default_max_tokens,
        adapter_slots=message.adapter_slots,
        adapter_rank=message.adapter_rank,
    )


def engine_info_to_proto(value: EngineInfo) -> admin_service_pb2.EngineInfo:
    """What does not change while an engine runs."""
    return admin_service_pb2.EngineInfo(
        model_id=value.model_id,
        model_revision=value.model_revision,
        architecture=value.architecture,
        parameters=value.parameters,
        vocab_size=value.vocab_size,
        max_context_tokens=value.max_context_tokens,
        page_size=value.page_size,
        pages_total=value.pages_total,
        dtype=value.dtype,
        weights_dtype=value.weights_dtype,
        kv_dtype=value.kv_dtype,
        max_batch=value.max_batch,
        platform=value.platform,
        mesh=value.mesh,
        default_max_tokens=value.default_max_tokens,
        adapter_slots=value.adapter_slots,
        adapter_rank=value.adapter_rank,
    )


def engine_stats_from_proto(message: admin_service_pb2.EngineStats) -> EngineStats:
    """Load and memory of one engine."""
    return EngineStats(
        pages_total=message.pages_total,
        pages_free=message.pages_free,
        pages_cached=message.pages_cached,
        pages_held=message.pages_held,
        pages_reserved=message.pages_reserved,
        contexts=message.contexts,
        running=message.running,
        waiting=message.waiting,
        draining=message.draining,
        steps=message.steps,
        tokens_computed=message.tokens_computed,
        tokens_cached=message.tokens_cached,
        tokens_generated=message.tokens_generated,
        preemptions=message.preemptions,
        suspensions=message.suspensions,
        compilations_after_ready=message.compilations_after_ready,
        functions_compiling=message.functions_compiling,
        tokens_restored=message.tokens_restored,
        host_pages_total=message.host_pages_total,
        host_pages_used=message.host_pages_used,
        disk_pages_total=message.disk_pages_total,
        disk_pages_used=message.disk_pages_used,
        snapshots=message.snapshots,
        publications=message.publications,
        expired=message.expired,
        tokens_drafted=message.tokens_drafted,
        tokens_accepted=message.tokens_accepted,
        tokens_queried=message.tokens_queried,
        prompt_tokens=message.prompt_tokens,
        requests_admitted=message.requests_admitted,
        queue_seconds=message.queue_seconds,
        step_seconds=message.step_seconds,
        adapters=message.adapters,
        tokens_drafted_by_model=message.tokens_drafted_by_model,
        tokens_accepted_by_model=message.tokens_accepted_by_model,
    )


def engine_stats_to_proto(value: EngineStats) -> admin_service_pb2.EngineStats:
    """Load and memory of one engine."""
    return admin_service_pb2.EngineStats(
        pages_total=value.pages_total,
        pages_free=value.pages_free,
        pages_cached=value.pages_cached,
        pages_held=value.pages_held,
        pages_reserved=value.pages_reserved,
        contexts=value.contexts,
        running=value.running,
        waiting=value.waiting,
        draining=value.draining,
        steps=value.steps,
        tokens_computed=value.tokens_computed,
        tokens_cached=value.tokens_cached,
        tokens_generated=value.tokens_generated,
        preemptions=value.preemptions,
        suspensions=value.suspensions,
        compilations_after_ready=value.compilations_after_ready,
        functions_compiling=value.functions_compiling,
        tokens_restored=value.tokens_restored,
        host_pages_total=value.host_pages_total,
        host_pages_used=value.host_pages_used,
        disk_pages_total=value.disk_pages_total,
        disk_pages_used=value.disk_pages_used,
        snapshots=value.snapshots,
        publications=value.publications,
        expired=value.expired,
        tokens_drafted=value.tokens_drafted,
        tokens_accepted=value.tokens_accepted,
        tokens_queried=value.tokens_queried,
        prompt_tokens=value.prompt_tokens,
        requests_admitted=value.requests_admitted,
        queue_seconds=value.queue_seconds,
        step_seconds=value.step_seconds,
        adapters=value.adapters,
        tokens_drafted_by_model=value.tokens_drafted_by_model,
        tokens_accepted_by_model=value.tokens_accepted_by_model,
    )


def attention_from_proto(message: admin_service_pb2.Attention) -> Attention:
    """What computes attention."""
    return Attention(
        implementation=message.implementation,
        reason=message.reason,
        why_no_kernel=message.why_no_kernel,
        compared=message.compared,
    )


def attention_to_proto(value: Attention) -> admin_service_pb2.Attention:
    """What computes attention."""
    return admin_service_pb2.Attention(
        implementation=value.implementation,
        reason=value.reason,
        why_no_kernel=value.why_no_kernel,
        compared=value.compared,
    )


def engine_status_from_proto(message: admin_service_pb2.Engine) -> EngineStatus:
    """One engine: what it is, and how loaded."""
    return EngineStatus(
        info=engine_info_from_proto(message.info),
        stats=engine_stats_from_proto(message.stats),
        address=message.address,
        epoch=message.epoch,
        adapters=dict(message.adapters),
        attention=attention_from_proto(message.attention) if message.HasField("attention") else None,
    )


def engine_status_to_proto(value: EngineStatus) -> admin_service_pb2.Engine:
    """One engine: what it is, and how loaded."""
    return admin_service_pb2.Engine(
        info=engine_info_to_proto(value.info),
        stats=engine_stats_to_proto(value.stats),
        address=value.address,
        epoch=value.epoch,
        attention=None if value.attention is None else attention_to_proto(value.attention),
        adapters=value.adapters,
    )


def adapter_from_proto(message: admin_service_pb2.Adapter) -> AdapterInfo:
    """An adapter that an engine holds."""
    return AdapterInfo(
        name=message.name,
        revision=message.revision,
        rank=message.rank,
        parameters=message.parameters,
        contexts=message.contexts,
        unloaded=message.unloaded,
    )


def adapter_to_proto(value: AdapterInfo) -> admin_service_pb2.Adapter:
    """An adapter that an engine holds."""
    return admin_service_pb2.Adapter(
        name=value.name,
        revision=value.revision,
        rank=value.rank,
        parameters=value.parameters,
        contexts=value.contexts,
        unloaded=value.unloaded,
    )
