"""Settings that contexts, snapshots and publications share: labels, time to live, pins; and pages of lists."""

from __future__ import annotations

from jaxctx.engine.interface import Ttl
from jaxctx_server.validate.field import D, Field

FOREVER = Ttl(None)


def labels(field: Field) -> dict[str, str]:
    """The caller's notes."""
    checked = {}
    for key, text in field.mapping(field.limits.max_labels).items():
        name = field.at(".key", key).text(1, field.limits.max_label_key_bytes)
        checked[name] = field.at(f"[{name}]", text).text(0, field.limits.max_label_value_bytes)
    return checked


def new_labels(field: Field) -> dict[str, str] | None:
    """Of an update; None: no change."""
    if field.value is None or not field.message("must be a map"):
        return None
    return labels(field["labels"])


def priority(field: Field, default: D) -> int | D:
    """Higher runs first."""
    return field.integer(-field.limits.max_priority, field.limits.max_priority, default)


def ttl(field: Field) -> Ttl | None:
    """None where it was not sent."""
    if field.value is None or not field.message("must be a time to live"):
        return None
    return Ttl(_seconds(field["duration"]), field["sliding"].flag(False))


def pin_s(field: Field, pinned: bool | None) -> float | None:
    """For how long; None: until it is taken back."""
    if field.value is not None and not pinned:
        field.refuse("needs pinned")
    return _seconds(field)


def page(request: Field) -> tuple[str, int]:
    """Of a list: the token of the page before, "" for the first one, and the most entries that are wanted."""
    limits = request.limits
    most = request["limit"].integer(0, limits.max_page_size, 0) or limits.default_page_size
    return request["page_token"].text(0, limits.max_name_bytes), most


def _seconds(field: Field) -> float | None:
    if field.value is None:
        return None
    seconds, nanos = field["seconds"].value or 0, field["nanos"].value or 0
    if type(seconds) is int and type(nanos) is int and 0 <= nanos < 10**9:
        if 0 < seconds * 10**9 + nanos <= field.limits.max_ttl_s * 10**9:
            return (seconds * 10**9 + nanos) / 1e9
    field.refuse(f"must be above 0 and up to {field.limits.max_ttl_s} seconds")
    return 1.0
