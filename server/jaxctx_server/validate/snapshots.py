"""Requests of SnapshotService."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from jaxctx.engine.interface import OpenRequest, SaveRequest, Ttl
from jaxctx_server import snapshot_requests as requests
from jaxctx_server.validate import settings
from jaxctx_server.validate.checks import Checks
from jaxctx_server.validate.contexts import Page, listing
from jaxctx_server.validate.limits import INT32_MAX, Limits


@dataclass(frozen=True, slots=True)
class Version:
    """A snapshot; `version` None: the latest, or where it is deleted, all."""

    name: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Update:
    """New settings of a snapshot; None leaves one as it is."""

    name: str
    ttl: Ttl | None
    labels: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Publish:
    """A context whose prefix is to be published."""

    context_id: str
    ttl: Ttl
    labels: dict[str, str]


def save(limits: Limits, request: requests.SaveRequest) -> SaveRequest:
    """See SaveRequest."""
    checks = Checks()
    checked = SaveRequest(
        context_id=checks.context_id("context_id", request.context_id),
        name=_name(checks, limits, request.name),
        durable=checks.flag("durable", request.durable, False),
        overwrite_version=checks.integer("overwrite_version", request.overwrite_version, 1, INT32_MAX, None),
        ttl=settings.ttl(checks, limits, request.ttl) or settings.FOREVER,
        labels=settings.labels(checks, limits, request.labels),
    )
    checks.done()
    return checked


def open_(limits: Limits, request: requests.OpenRequest | requests.TakeRequest) -> OpenRequest:
    """See OpenRequest and TakeRequest."""
    checks = Checks()
    pinned = checks.flag("pinned", request.pinned, False)
    version = request.version if isinstance(request, requests.OpenRequest) else None
    checked = OpenRequest(
        name=_name(checks, limits, request.name),
        version=checks.integer("version", version, 1, INT32_MAX, None),
        take=isinstance(request, requests.TakeRequest),
        recompute=checks.flag("recompute", request.recompute, False),
        context_id=None if request.context_id is None else checks.context_id("context_id", request.context_id),
        priority=checks.integer("priority", request.priority, -limits.max_priority, limits.max_priority, 0),
        pinned=pinned,
        pin_s=settings.pin_s(checks, limits, request.pin_for, pinned),
        ttl=settings.ttl(checks, limits, request.ttl) or settings.FOREVER,
    )
    checks.done()
    return checked


def version(limits: Limits, request: requests.GetSnapshotRequest | requests.DeleteSnapshotRequest) -> Version:
    """A name, and a version of it or not."""
    checks = Checks()
    checked = Version(
        _name(checks, limits, request.name), checks.integer("version", request.version, 1, INT32_MAX, None)
    )
    checks.done()
    return checked


def snapshots(limits: Limits, request: requests.ListSnapshotsRequest) -> tuple[str, Page]:
    """See ListSnapshotsRequest: the prefix and the page. A page token is the last name of the page before."""
    checks = Checks()
    checked = (
        checks.string("prefix", request.prefix, 0, limits.max_snapshot_name_bytes),
        listing(checks, limits, request),
    )
    checks.done()
    return checked


def versions(limits: Limits, request: requests.ListSnapshotVersionsRequest) -> tuple[str, int, Page]:
    """See ListSnapshotVersionsRequest: name, the version below which the page begins, the page."""
    checks = Checks()
    name, page = _name(checks, limits, request.name), listing(checks, limits, request)
    checks.done()
    if page.after and not (page.after.isascii() and page.after.isdecimal() and len(page.after) <= 10):
        checks.refuse("page_token", "must be of the answer before")
    checks.done()
    return name, int(page.after or INT32_MAX), page


def update(limits: Limits, request: requests.UpdateSnapshotRequest) -> Update:
    """See UpdateSnapshotRequest."""
    checks = Checks()
    checked = Update(
        _name(checks, limits, request.name),
        settings.ttl(checks, limits, request.ttl),
        settings.new_labels(checks, limits, request.labels),
    )
    checks.done()
    return checked


def publish(limits: Limits, request: requests.PublishRequest) -> Publish:
    """See PublishRequest."""
    checks = Checks()
    checked = Publish(
        checks.context_id("context_id", request.context_id),
        settings.ttl(checks, limits, request.ttl) or settings.FOREVER,
        settings.labels(checks, limits, request.labels),
    )
    checks.done()
    return checked


def unpublish(request: requests.UnpublishRequest) -> str:
    """See UnpublishRequest: the id."""
    checks = Checks()
    publication_id = checks.context_id("publication_id", request.publication_id)
    checks.done()
    return publication_id


def publications(limits: Limits, request: requests.ListPublicationsRequest) -> Page:
    """See ListPublicationsRequest. A page token is the last id of the page before."""
    checks = Checks()
    page = listing(checks, limits, request)
    checks.done()
    return page


def _name(checks: Checks, limits: Limits, value: object) -> str:
    """Of a snapshot. It is never part of a path, and never shown in a way that control characters could bend."""
    name = checks.string("name", value, 1, limits.max_snapshot_name_bytes)
    if any(unicodedata.category(character) == "Cc" for character in name):
        checks.refuse("name", "must have no control characters")
    return name
