"""Snapshots and publications: what is kept, and the requests that save, open and change it."""

from jaxctx.convert.contexts import (
    adapter_span_from_proto,
    adapter_span_to_proto,
    context_info_from_proto,
    context_info_to_proto,
    token_ids_from_proto,
    token_ids_to_proto,
)
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
    FillResult,
    GetSnapshotResult,
    OpenRequest,
    Publication,
    RetentionUpdate,
    SaveRequest,
    Snapshot,
)
from jaxctx.v1 import snapshot_pb2, snapshot_service_pb2


def snapshot_from_proto(message: snapshot_pb2.Snapshot) -> Snapshot:
    """One version of a snapshot."""
    return Snapshot(
        name=message.name,
        version=message.version,
        latest=message.latest,
        durable=message.durable,
        tokens=message.tokens,
        seq_len=message.seq_len,
        pages=message.pages,
        size_bytes=message.size_bytes,
        model_revision=message.model_revision,
        salt=message.salt,
        manual_commit=message.manual_commit,
        created_at=timestamp_from_proto(message.created_at),
        expiry=expiry_from_proto(message.expiry) if message.HasField("expiry") else None,
        context_id=message.context_id,
        parent_version=message.parent_version,
        labels=dict(message.labels),
        attachment_bytes=message.attachment_bytes,
        adapter=message.adapter,
        adapter_revision=message.adapter_revision,
        adapter_spans=tuple(adapter_span_from_proto(span) for span in message.adapter_spans),
    )


def snapshot_to_proto(value: Snapshot) -> snapshot_pb2.Snapshot:
    """One version of a snapshot."""
    return snapshot_pb2.Snapshot(
        name=value.name,
        version=value.version,
        latest=value.latest,
        durable=value.durable,
        tokens=value.tokens,
        seq_len=value.seq_len,
        pages=value.pages,
        size_bytes=value.size_bytes,
        model_revision=value.model_revision,
        salt=value.salt,
        manual_commit=value.manual_commit,
        created_at=timestamp_to_proto(value.created_at),
        expiry=None if value.expiry is None else expiry_to_proto(value.expiry),
        context_id=value.context_id,
        parent_version=value.parent_version,
        labels=value.labels,
        attachment_bytes=value.attachment_bytes,
        adapter=value.adapter,
        adapter_revision=value.adapter_revision,
        adapter_spans=[adapter_span_to_proto(span) for span in value.adapter_spans],
    )


def get_snapshot_result_from_proto(message: snapshot_service_pb2.GetSnapshotResponse) -> GetSnapshotResult:
    """One version of a snapshot, with what was requested of it."""
    return GetSnapshotResult(
        snapshot=snapshot_from_proto(message.snapshot),
        attachment=message.attachment,
        tokens=token_ids_from_proto(message.tokens) if message.HasField("tokens") else None,
    )


def get_snapshot_result_to_proto(value: GetSnapshotResult) -> snapshot_service_pb2.GetSnapshotResponse:
    """One version of a snapshot, with what was requested of it."""
    return snapshot_service_pb2.GetSnapshotResponse(
        snapshot=snapshot_to_proto(value.snapshot),
        attachment=value.attachment,
        tokens=None if value.tokens is None else token_ids_to_proto(value.tokens),
    )


def publication_from_proto(message: snapshot_pb2.Publication) -> Publication:
    """A prefix that all tenants may share."""
    return Publication(
        publication_id=message.publication_id,
        tokens=message.tokens,
        pages=message.pages,
        salt=message.salt,
        created_at=timestamp_from_proto(message.created_at),
        expiry=expiry_from_proto(message.expiry) if message.HasField("expiry") else None,
        labels=dict(message.labels),
    )


def publication_to_proto(value: Publication) -> snapshot_pb2.Publication:
    """A prefix that all tenants may share."""
    return snapshot_pb2.Publication(
        publication_id=value.publication_id,
        tokens=value.tokens,
        pages=value.pages,
        salt=value.salt,
        created_at=timestamp_to_proto(value.created_at),
        expiry=None if value.expiry is None else expiry_to_proto(value.expiry),
        labels=value.labels,
    )


def save_request_from_proto(message: snapshot_service_pb2.SaveRequest) -> SaveRequest:
    """A request to keep a context's state."""
    return SaveRequest(
        context_id=message.context_id,
        name=message.name,
        durable=message.durable,
        overwrite_version=message.overwrite_version if message.HasField("overwrite_version") else None,
        ttl=ttl_from_proto(message.ttl),
        labels=dict(message.labels),
        attachment=message.attachment,
        max_versions=message.max_versions,
        for_move=message.for_move,
    )


def save_request_to_proto(value: SaveRequest) -> snapshot_service_pb2.SaveRequest:
    """A request to keep a context's state."""
    return snapshot_service_pb2.SaveRequest(
        context_id=value.context_id,
        name=value.name,
        durable=value.durable,
        overwrite_version=value.overwrite_version,
        ttl=ttl_to_proto(value.ttl),
        labels=value.labels,
        attachment=value.attachment,
        max_versions=value.max_versions,
        for_move=value.for_move,
    )


def open_request_from_proto(message: snapshot_service_pb2.OpenRequest) -> OpenRequest:
    """A request for a context from a snapshot."""
    return OpenRequest(
        name=message.name,
        version=message.version if message.HasField("version") else None,
        recompute=message.recompute,
        context_id=message.context_id if message.HasField("context_id") else None,
        priority=message.priority,
        pinned=message.pinned,
        pin_s=duration_from_proto(message.pin_for) if message.HasField("pin_for") else None,
        ttl=ttl_from_proto(message.ttl),
    )


def open_request_to_proto(value: OpenRequest) -> snapshot_service_pb2.OpenRequest:
    """A request for a context from a snapshot."""
    return snapshot_service_pb2.OpenRequest(
        name=value.name,
        version=value.version,
        recompute=value.recompute,
        context_id=value.context_id,
        priority=value.priority,
        pinned=value.pinned,
        pin_for=None if value.pin_s is None else duration_to_proto(value.pin_s),
        ttl=ttl_to_proto(value.ttl),
    )


def take_request_from_proto(message: snapshot_service_pb2.TakeRequest) -> OpenRequest:
    """A request for a context from the latest version of a snapshot, which is then deleted."""
    return OpenRequest(
        name=message.name,
        recompute=message.recompute,
        context_id=message.context_id if message.HasField("context_id") else None,
        priority=message.priority,
        pinned=message.pinned,
        pin_s=duration_from_proto(message.pin_for) if message.HasField("pin_for") else None,
        ttl=ttl_from_proto(message.ttl),
    )


def take_request_to_proto(value: OpenRequest) -> snapshot_service_pb2.TakeRequest:
    """A request to open the latest version of a snapshot and delete it. `version` has no place in it."""
    return snapshot_service_pb2.TakeRequest(
        name=value.name,
        recompute=value.recompute,
        context_id=value.context_id,
        priority=value.priority,
        pinned=value.pinned,
        pin_for=None if value.pin_s is None else duration_to_proto(value.pin_s),
        ttl=ttl_to_proto(value.ttl),
    )


def open_response_from_proto(message: snapshot_service_pb2.OpenResponse) -> FillResult:
    """Where the KV of an opened context came from."""
    return FillResult(
        resident=message.resident,
        restored=message.restored,
        computed=message.computed,
        context=context_info_from_proto(message.context),
    )


def open_response_to_proto(value: FillResult) -> snapshot_service_pb2.OpenResponse:
    """Where the KV of an opened context came from."""
    return snapshot_service_pb2.OpenResponse(
        resident=value.resident,
        restored=value.restored,
        computed=value.computed,
        context=context_info_to_proto(value.context),
    )


def take_response_from_proto(message: snapshot_service_pb2.TakeResponse) -> FillResult:
    """Where the KV of a taken context came from."""
    return FillResult(
        resident=message.resident,
        restored=message.restored,
        computed=message.computed,
        context=context_info_from_proto(message.context),
    )


def take_response_to_proto(value: FillResult) -> snapshot_service_pb2.TakeResponse:
    """Where the KV of a taken context came from."""
    return snapshot_service_pb2.TakeResponse(
        resident=value.resident,
        restored=value.restored,
        computed=value.computed,
        context=context_info_to_proto(value.context),
    )


def update_snapshot_request_from_proto(message: snapshot_service_pb2.UpdateSnapshotRequest) -> RetentionUpdate:
    """A change of a version's time to live or labels. Name and version stand beside it in calls of an engine."""
    return RetentionUpdate(
        ttl=ttl_from_proto(message.ttl) if message.HasField("ttl") else None,
        labels=dict(message.labels.labels) if message.HasField("labels") else None,
    )


def update_snapshot_request_to_proto(
    value: RetentionUpdate, *, name: str = "", version: int | None = None
) -> snapshot_service_pb2.UpdateSnapshotRequest:
    """A change of time to live or labels of this version; None: of the latest one."""
    labels = None
    if value.labels is not None:
        labels = snapshot_service_pb2.UpdateSnapshotRequest.Labels(labels=value.labels)
    return snapshot_service_pb2.UpdateSnapshotRequest(
        name=name,
        version=version,
        ttl=None if value.ttl is None else ttl_to_proto(value.ttl),
        labels=labels,
    )


def update_publication_request_from_proto(message: snapshot_service_pb2.UpdatePublicationRequest) -> RetentionUpdate:
    """A change of a publication's time to live or labels. Its id stands beside it in calls of an engine."""
    return RetentionUpdate(
        ttl=ttl_from_proto(message.ttl) if message.HasField("ttl") else None,
        labels=dict(message.labels.labels) if message.HasField("labels") else None,
    )


def update_publication_request_to_proto(
    value: RetentionUpdate, *, publication_id: str = ""
) -> snapshot_service_pb2.UpdatePublicationRequest:
    """A change of time to live or labels of this publication."""
    labels = None
    if value.labels is not None:
        labels = snapshot_service_pb2.UpdatePublicationRequest.Labels(labels=value.labels)
    return snapshot_service_pb2.UpdatePublicationRequest(
        publication_id=publication_id,
        ttl=None if value.ttl is None else ttl_to_proto(value.ttl),
        labels=labels,
    )


def publish_request_from_proto(message: snapshot_service_pb2.PublishRequest) -> RetentionUpdate:
    """Time to live and labels of a new publication. The context's id stands beside it in calls of an engine.

    Labels that are not sent are an empty mapping or None, which mean the same for what is new: None here.
    """
    return RetentionUpdate(
        ttl=ttl_from_proto(message.ttl) if message.HasField("ttl") else None,
        labels=dict(message.labels) if message.labels else None,
    )


def publish_request_to_proto(value: RetentionUpdate, *, context_id: str = "") -> snapshot_service_pb2.PublishRequest:
    """A request to publish the full pages of this context."""
    return snapshot_service_pb2.PublishRequest(
        context_id=context_id,
        ttl=None if value.ttl is None else ttl_to_proto(value.ttl),
        labels=value.labels,
    )
