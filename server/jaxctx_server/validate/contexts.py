"""Requests of ContextService, Generate and Forward apart; and settings that snapshots and publications share."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxctx.engine.interface import CreateRequest, Ttl, UpdateRequest
from jaxctx_server.validate.content import Content, content, model_id
from jaxctx_server.validate.field import D, Field, refuse_repeated
from jaxctx_server.validate.limits import INT32_MAX

FOREVER = Ttl(None)


def context(request: Field) -> str:
    """Of a request that only names a context: its id."""
    return request["context_id"].id()


def count(name: str) -> Callable[[Field], tuple[str, int]]:
    """A context, and a number from 0 of its tokens or pages; whether there are as many depends on the context."""
    return lambda request: (context(request), request[name].integer(0, INT32_MAX, 0))


def create(request: Field) -> tuple[str, CreateRequest]:
    """The model that was asked for, and the context to create."""
    return model_id(request), CreateRequest(
        salt=request["salt"].text(0, request.limits.max_salt_bytes),
        manual_commit=request["manual_commit"].flag(False),
        labels=labels(request["labels"]),
        **new_context(request),
    )


def new_context(request: Field) -> dict[str, Any]:
    """What any new context begins with."""
    pinned = request["pinned"].flag(False)
    return {
        "context_id": request["context_id"].optional_id(),
        "priority": priority(request["priority"], 0),
        "pinned": pinned,
        "pin_s": pin_s(request["pin_for"], pinned),
        "ttl": ttl(request["ttl"]) or FOREVER,
    }


def fill(request: Field) -> tuple[str, Content, bool]:
    """The context, what to append, and whether only to buffer it."""
    return context(request), content(request), request["defer"].flag(False)


def plan(request: Field) -> tuple[str | None, str, str, Content]:
    """The context, or else None and model and salt of a new one; and what would be appended."""
    context_id = request["context_id"].optional_id()
    model, salt = model_id(request), request["salt"].text(0, request.limits.max_salt_bytes)
    for name, value in (("model_id", model), ("salt", salt)):
        if value and context_id is not None:
            request[name].refuse("must not be set with context_id: the context has its own")
    return context_id, model, salt, content(request)


def fork(request: Field) -> tuple[str, Sequence[str | None]]:
    """The context, and the ids of its children; None where the engine chooses."""
    children = request["child_ids"].items(request.limits.max_children)
    ids = [child.id() for child in children]
    refuse_repeated(children, ids)
    n = request["n"].integer(1, request.limits.max_children, len(ids) or 1)
    if ids and n != len(ids):
        request["n"].refuse(f"must be the number of child_ids, {len(ids)}, not {n}")
    return context(request), ids or [None] * n


def get(request: Field) -> tuple[str, bool, bool, bool]:
    """The context, whether to tell its pages, whether its tokens, whether its ancestors."""
    pages, tokens, ancestors = (request[f"include_{what}"].flag(False) for what in ("pages", "tokens", "ancestors"))
    return context(request), pages, tokens, ancestors


def compare(request: Field) -> tuple[str, str]:
    """The ids of the two."""
    return request["a"].id(), request["b"].id()


def update(request: Field) -> tuple[str, UpdateRequest]:
    """The context, and its new settings."""
    pinned = request["pinned"].flag(None)
    return context(request), UpdateRequest(
        priority=priority(request["priority"], None),
        pinned=pinned,
        pin_s=pin_s(request["pin_for"], pinned),
        ttl=ttl(request["ttl"]),
        labels=new_labels(request["labels"]),
    )


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
