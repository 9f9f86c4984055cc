"""What is kept of contexts: snapshots and publications. Plain data, and its translation; no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from jaxctx.client import answers, requests
from jaxctx.client.options import OpenOptions
from jaxctx.client.types import Expiry
from jaxctx.v1 import snapshot_pb2
from jaxctx.v1 import snapshot_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of a snapshot."""

    name: str
    version: int  # 1, 2, …; a name that was deleted begins again at 1
    latest: bool
    durable: bool
    tokens: int  # buffered ones included
    seq_len: int  # of these, with KV
    pages: int
    size_bytes: int  # of its pages; those that snapshots share count in each
    model_revision: str
    salt: str
    manual_commit: bool
    created_at: datetime
    expiry: Expiry | None  # None: never ends
    context_id: str  # that was saved
    parent_version: int  # that it replaced; 0: none
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A prefix that contexts of all tenants may share, of the same model and salt."""

    publication_id: str
    tokens: int  # whole pages only
    pages: int
    salt: str
    created_at: datetime
    expiry: Expiry | None  # None: never ends
    labels: Mapping[str, str]


def snapshot(message: snapshot_pb2.Snapshot) -> Snapshot:
    """As it is told."""
    fields = {each.name: getattr(message, each.name) for each in dataclasses.fields(Snapshot)}
    return Snapshot(**{**fields, **_translated(message)})


def publication(message: snapshot_pb2.Publication) -> Publication:
    """As it is told."""
    fields = {each.name: getattr(message, each.name) for each in dataclasses.fields(Publication)}
    return Publication(**{**fields, **_translated(message)})


def _translated(message: snapshot_pb2.Snapshot | snapshot_pb2.Publication) -> dict[str, object]:
    return {
        "created_at": message.created_at.ToDatetime(UTC),
        "expiry": answers.expiry(message),
        "labels": dict(message.labels),
    }


def save(
    context_id: str,
    name: str,
    durable: bool,
    overwrite_version: int | None,
    ttl_s: float | None,
    sliding: bool,
    labels: Mapping[str, str] | None,
) -> pb.SaveRequest:
    """Of SnapshotService.Save."""
    return requests.make(
        pb.SaveRequest,
        context_id=context_id,
        name=name,
        durable=durable,
        overwrite_version=overwrite_version,
        ttl=requests.ttl(ttl_s, sliding),
        labels=labels or {},
    )


def open_(name: str, version: int | None, context_id: str, options: OpenOptions) -> pb.OpenRequest:
    """Of SnapshotService.Open."""
    settings = requests.settings(options, OpenOptions)
    recompute = options.get("recompute", False)
    return requests.make(
        pb.OpenRequest, name=name, version=version, recompute=recompute, **{**settings, "context_id": context_id}
    )


def take(name: str, options: OpenOptions) -> pb.TakeRequest:
    """Of SnapshotService.Take."""
    settings = requests.settings(options, OpenOptions)
    return requests.make(pb.TakeRequest, name=name, recompute=options.get("recompute", False), **settings)


def update(name: str, ttl_s: float | None, sliding: bool, labels: Mapping[str, str] | None) -> pb.UpdateSnapshotRequest:
    """Of SnapshotService.UpdateSnapshot; None leaves a setting as it is."""
    request = pb.UpdateSnapshotRequest
    new = None if labels is None else requests.make(request.Labels, labels=labels)
    return requests.make(request, name=name, ttl=requests.ttl(ttl_s, sliding), labels=new)


def publish(context_id: str, ttl_s: float | None, sliding: bool, labels: Mapping[str, str] | None) -> pb.PublishRequest:
    """Of SnapshotService.Publish."""
    ttl = requests.ttl(ttl_s, sliding)
    return requests.make(pb.PublishRequest, context_id=context_id, ttl=ttl, labels=labels or {})
