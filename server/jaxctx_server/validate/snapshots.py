"""Requests of SnapshotService."""

from __future__ import annotations

import unicodedata

from jaxctx.engine.interface import OpenRequest, SaveRequest, Ttl
from jaxctx_server.validate import settings
from jaxctx_server.validate.contexts import context
from jaxctx_server.validate.field import Field
from jaxctx_server.validate.limits import INT32_MAX


def save(request: Field) -> SaveRequest:
    """What to keep."""
    return SaveRequest(
        context_id=context(request),
        name=name(request),
        durable=request["durable"].flag(False),
        overwrite_version=request["overwrite_version"].integer(1, INT32_MAX, None),
        ttl=settings.ttl(request["ttl"]) or settings.FOREVER,
        labels=settings.labels(request["labels"]),
    )


def open_(request: Field) -> OpenRequest:
    """A context from a version of a snapshot."""
    return _opened(request, request["version"].integer(1, INT32_MAX, None), take=False)


def take(request: Field) -> OpenRequest:
    """A context from the latest version of a snapshot, which is then no more."""
    return _opened(request, None, take=True)


def _opened(request: Field, version: int | None, *, take: bool) -> OpenRequest:
    pinned = request["pinned"].flag(False)
    return OpenRequest(
        name=name(request),
        version=version,
        take=take,
        recompute=request["recompute"].flag(False),
        context_id=request["context_id"].optional_id(),
        priority=settings.priority(request["priority"], 0),
        pinned=pinned,
        pin_s=settings.pin_s(request["pin_for"], pinned),
        ttl=settings.ttl(request["ttl"]) or settings.FOREVER,
    )


def version(request: Field) -> tuple[str, int | None]:
    """A name and a version of it; None: the latest, or where it is deleted, all."""
    return name(request), request["version"].integer(1, INT32_MAX, None)


def snapshots(request: Field) -> tuple[str, str, int]:
    """The prefix, and the page. A page token is the last name of the page before."""
    return request["prefix"].text(0, request.limits.max_snapshot_name_bytes), *settings.page(request)


def versions(request: Field) -> tuple[str, int, int]:
    """The name, the version below which the page begins, the most versions that are wanted."""
    after, limit = settings.page(request)
    is_version = after.isascii() and after.isdecimal() and len(after) <= 10
    if after and not is_version:
        request["page_token"].refuse("must be of the answer before")
    return name(request), int(after) if is_version else INT32_MAX, limit


def update(request: Field) -> tuple[str, Ttl | None, dict[str, str] | None]:
    """The name, its time to live and its labels; None leaves them as they are."""
    return name(request), settings.ttl(request["ttl"]), settings.new_labels(request["labels"])


def publish(request: Field) -> tuple[str, Ttl, dict[str, str]]:
    """The context whose prefix is to be published, for how long, and with which labels."""
    ttl = settings.ttl(request["ttl"]) or settings.FOREVER
    return context(request), ttl, settings.labels(request["labels"])


def unpublish(request: Field) -> str:
    """The publication's id."""
    return request["publication_id"].id()


def name(request: Field) -> str:
    """Of a snapshot. It is never part of a path, and never shown in a way that control characters could bend."""
    text = request["name"].text(1, request.limits.max_snapshot_name_bytes)
    if any(unicodedata.category(character) == "Cc" for character in text):
        request["name"].refuse("must have no control characters")
    return text
