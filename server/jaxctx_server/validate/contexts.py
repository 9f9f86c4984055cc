"""Requests of ContextService, Generate and Forward apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxctx.engine.interface import CreateRequest
from jaxctx_server.validate import settings
from jaxctx_server.validate.content import Content, content, model_id
from jaxctx_server.validate.field import Field, refuse_repeated
from jaxctx_server.validate.limits import INT32_MAX


def context(request: Field) -> str:
    """Of a request that only names a context: its id."""
    return request["context_id"].id()


def count(name: str) -> Callable[[Field], tuple[str, int]]:
    """A context, and a number from 0 of its tokens or pages; whether there are as many depends on the context."""
    return lambda request: (context(request), request[name].integer(0, INT32_MAX, 0))


def create(request: Field) -> tuple[str, CreateRequest]:
    """The model that was asked for, and the context to create."""
    pinned = request["pinned"].flag(False)
    return model_id(request), CreateRequest(
        context_id=request["context_id"].optional_id(),
        salt=request["salt"].text(0, request.limits.max_salt_bytes),
        priority=settings.priority(request["priority"], 0),
        manual_commit=request["manual_commit"].flag(False),
        pinned=pinned,
        pin_s=settings.pin_s(request["pin_for"], pinned),
        ttl=settings.ttl(request["ttl"]) or settings.FOREVER,
        labels=settings.labels(request["labels"]),
    )


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


def get(request: Field) -> tuple[str, bool, bool]:
    """The context, whether to tell its pages, whether its tokens."""
    return context(request), request["include_pages"].flag(False), request["include_tokens"].flag(False)


def compare(request: Field) -> tuple[str, str]:
    """The ids of the two."""
    return request["a"].id(), request["b"].id()


def update(request: Field) -> tuple[str, dict[str, Any]]:
    """The context, and its new settings by the names of the engine; None leaves one as it is."""
    pinned = request["pinned"].flag(None)
    return context(request), {
        "priority": settings.priority(request["priority"], None),
        "pinned": pinned,
        "pin_s": settings.pin_s(request["pin_for"], pinned),
        "ttl": settings.ttl(request["ttl"]),
        "labels": settings.new_labels(request["labels"]),
    }
