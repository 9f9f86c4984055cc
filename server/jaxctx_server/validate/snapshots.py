"""Requests of SnapshotService."""

import unicodedata

from jaxctx.engine.interface import Changes, OpenRequest, SaveRequest
from jaxctx_server.validate.contexts import FOREVER, context, labels, new_context, new_labels, page, ttl
from jaxctx_server.validate.field import Field
from jaxctx_server.validate.limits import INT32_MAX


def save(request: Field) -> SaveRequest:
    """What to keep."""
    return SaveRequest(
        context_id=context(request),
        name=name(request),
        durable=request["durable"].flag(False),
        overwrite_version=request["overwrite_version"].integer(1, INT32_MAX, None),
        ttl=ttl(request["ttl"]) or FOREVER,
        labels=labels(request["labels"]),
    )


def open_(request: Field, *, take: bool = False) -> OpenRequest:
    """A context from a version of a snapshot; with `take` from the latest one, and then the snapshot is no more."""
    return OpenRequest(
        name=name(request),
        version=None if take else request["version"].integer(1, INT32_MAX, None),
        take=take,
        recompute=request["recompute"].flag(False),
        **new_context(request),
    )


def version(request: Field) -> tuple[str, int | None]:
    """A name and a version of it; None: the latest, or where it is deleted, all."""
    return name(request), request["version"].integer(1, INT32_MAX, None)


def snapshots(request: Field) -> tuple[str, str, int]:
    """The prefix, and the page. A page token is the last name of the page before."""
    return request["prefix"].text(0, request.limits.max_snapshot_name_bytes), *page(request)


def versions(request: Field) -> tuple[str, int, int]:
    """The name, the version below which the page begins, the most versions that are wanted."""
    after, limit = page(request)
    is_version = after.isascii() and after.isdecimal() and len(after) <= 10
    if after and not is_version:
        request["page_token"].refuse("must be of the answer before")
    return name(request), int(after) if is_version else INT32_MAX, limit


def update(request: Field) -> tuple[str, int | None, Changes]:
    """A name, a version of it, and what is to change."""
    return *version(request), _changes(request)


def publish(request: Field) -> tuple[str, Changes]:
    """The context whose prefix is to be published, for how long, and with which labels."""
    return context(request), Changes(ttl=ttl(request["ttl"]), labels=labels(request["labels"]))


def update_publication(request: Field) -> tuple[str, Changes]:
    """The publication's id, and what is to change."""
    return unpublish(request), _changes(request)


def unpublish(request: Field) -> str:
    """The publication's id."""
    return request["publication_id"].id()


def _changes(request: Field) -> Changes:
    return Changes(ttl=ttl(request["ttl"]), labels=new_labels(request["labels"]))


def name(request: Field) -> str:
    """Of a snapshot. It is never part of a path, and never shown in a way that control characters could bend."""
    text = request["name"].text(1, request.limits.max_snapshot_name_bytes)
    if any(unicodedata.category(character) == "Cc" for character in text):
        request["name"].refuse("must have no control characters")
    return text
