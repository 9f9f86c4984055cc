"""Requests of SnapshotService as a door hands them to the validator; see `requests`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    context_id: object = None
    name: object = None
    durable: object = None
    overwrite_version: object = None
    ttl: object = None  # Ttl
    labels: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    name: object = None
    version: object = None
    recompute: object = None
    context_id: object = None
    priority: object = None
    pinned: object = None
    pin_for: object = None  # Duration
    ttl: object = None  # Ttl


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRequest:
    name: object = None
    recompute: object = None
    context_id: object = None
    priority: object = None
    pinned: object = None
    pin_for: object = None  # Duration
    ttl: object = None  # Ttl


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSnapshotRequest:
    name: object = None
    version: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSnapshotsRequest:
    prefix: object = None
    limit: object = None
    page_token: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSnapshotVersionsRequest:
    name: object = None
    limit: object = None
    page_token: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSnapshotRequest:
    name: object = None
    ttl: object = None  # Ttl
    labels: object = None  # Labels


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteSnapshotRequest:
    name: object = None
    version: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    context_id: object = None
    ttl: object = None  # Ttl
    labels: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishRequest:
    publication_id: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPublicationsRequest:
    limit: object = None
    page_token: object = None
