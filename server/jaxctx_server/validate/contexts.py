"""Requests of ContextService, Generate and Forward apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxctx.engine.interface import CreateRequest, Ttl
from jaxctx_server import requests
from jaxctx_server.validate import settings
from jaxctx_server.validate.checks import Checks
from jaxctx_server.validate.content import Content, content
from jaxctx_server.validate.limits import INT32_MAX, Limits
from jaxctx_server.validate.models import model_id


@dataclass(frozen=True, slots=True)
class Create:
    """A context to create, with the model that was asked for."""

    model_id: str
    request: CreateRequest


@dataclass(frozen=True, slots=True)
class Fill:
    """Content to append."""

    context_id: str
    content: Content
    defer: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Content to plan for: in a context, or in a new one of this model and salt."""

    context_id: str | None
    model_id: str
    salt: str
    content: Content


@dataclass(frozen=True, slots=True)
class Fork:
    """Ids of the children; None where the engine chooses."""

    context_id: str
    ids: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Update:
    """New settings; None leaves one as it is."""

    context_id: str
    priority: int | None
    pinned: bool | None
    pin_s: float | None
    ttl: Ttl | None
    labels: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Get:
    """What to tell of a context."""

    context_id: str
    include_pages: bool
    include_tokens: bool


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list: up to `limit` entries after the id `after`."""

    limit: int
    after: str


class Listing(Protocol):
    """A request for one page of a list."""

    @property
    def limit(self) -> object: ...

    @property
    def page_token(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Count:
    """A context and a number of its tokens or pages."""

    context_id: str
    count: int


def create(limits: Limits, request: requests.CreateContextRequest) -> Create:
    """See CreateContextRequest."""
    checks = Checks()
    model = model_id(checks, limits, request.model_id)
    pinned = checks.flag("pinned", request.pinned, False)
    created = CreateRequest(
        context_id=None if request.context_id is None else checks.context_id("context_id", request.context_id),
        salt=checks.string("salt", request.salt, 0, limits.max_salt_bytes),
        priority=checks.integer("priority", request.priority, -limits.max_priority, limits.max_priority, 0),
        manual_commit=checks.flag("manual_commit", request.manual_commit, False),
        pinned=pinned,
        pin_s=settings.pin_s(checks, limits, request.pin_for, pinned),
        ttl=settings.ttl(checks, limits, request.ttl) or settings.FOREVER,
        labels=settings.labels(checks, limits, request.labels),
    )
    checks.done()
    return Create(model, created)


def fill(limits: Limits, request: requests.FillRequest) -> Fill:
    """See FillRequest."""
    checks = Checks()
    checked = Fill(
        checks.context_id("context_id", request.context_id),
        content(checks, limits, request),
        checks.flag("defer", request.defer, False),
    )
    checks.done()
    return checked


def plan(limits: Limits, request: requests.PlanRequest) -> Plan:
    """See PlanRequest."""
    checks = Checks()
    model, salt = (
        model_id(checks, limits, request.model_id),
        checks.string("salt", request.salt, 0, limits.max_salt_bytes),
    )
    context_id = None
    if request.context_id is not None:
        context_id = checks.context_id("context_id", request.context_id)
        for path, value in (("model_id", model), ("salt", salt)):
            if value:
                checks.refuse(path, "must not be set with context_id: the context has its own")
    checked = Plan(context_id, model, salt, content(checks, limits, request))
    checks.done()
    return checked


def fork(limits: Limits, request: requests.ForkRequest) -> Fork:
    """See ForkRequest."""
    checks = Checks()
    context_id = checks.context_id("context_id", request.context_id)
    given = checks.items("child_ids", request.child_ids, limits.max_children)
    ids = [checks.context_id(f"child_ids[{place}]", child) for place, child in enumerate(given)]
    n = checks.integer("n", request.n, 1, limits.max_children, len(ids) or 1)
    if ids and n == request.n and n != len(ids):
        checks.refuse("n", f"must be the number of child_ids, {len(ids)}, not {n}")
    checks.done()
    if len(set(ids)) < len(ids):
        twice = next(place for place, child in enumerate(ids) if child in ids[:place])
        checks.refuse(f"child_ids[{twice}]", "must be different from those before it")
    checks.done()
    return Fork(context_id, ids or [None] * n)


def update(limits: Limits, request: requests.UpdateContextRequest) -> Update:
    """See UpdateContextRequest."""
    checks = Checks()
    pinned = checks.flag("pinned", request.pinned, None)
    checked = Update(
        checks.context_id("context_id", request.context_id),
        checks.integer("priority", request.priority, -limits.max_priority, limits.max_priority, None),
        pinned,
        settings.pin_s(checks, limits, request.pin_for, pinned),
        settings.ttl(checks, limits, request.ttl),
        settings.new_labels(checks, limits, request.labels),
    )
    checks.done()
    return checked


def get(limits: Limits, request: requests.GetContextRequest) -> Get:
    """See GetContextRequest."""
    checks = Checks()
    checked = Get(
        checks.context_id("context_id", request.context_id),
        checks.flag("include_pages", request.include_pages, False),
        checks.flag("include_tokens", request.include_tokens, False),
    )
    checks.done()
    return checked


def page(limits: Limits, request: requests.ListContextsRequest | requests.ListModelsRequest) -> Page:
    """See ListContextsRequest."""
    checks = Checks()
    checked = listing(checks, limits, request)
    checks.done()
    return checked


def listing(checks: Checks, limits: Limits, request: Listing) -> Page:
    """A page token is the last id of the page before."""
    limit = checks.integer("limit", request.limit, 0, limits.max_page_size, 0)
    return Page(
        limit or limits.default_page_size, checks.string("page_token", request.page_token, 0, limits.max_name_bytes)
    )


def compare(request: requests.CompareRequest) -> tuple[str, str]:
    """See CompareRequest: the ids of the two."""
    checks = Checks()
    pair = checks.context_id("a", request.a), checks.context_id("b", request.b)
    checks.done()
    return pair


def context(request: requests.FlushRequest | requests.CloseContextRequest) -> str:
    """A request that only names a context: its id."""
    checks = Checks()
    context_id = checks.context_id("context_id", request.context_id)
    checks.done()
    return context_id


def truncate(request: requests.TruncateRequest) -> Count:
    """See TruncateRequest."""
    return _count("tokens", request.context_id, request.tokens)


def rewind(request: requests.RewindRequest) -> Count:
    """See RewindRequest."""
    return _count("to", request.context_id, request.to)


def pages(
    request: requests.ReservePagesRequest | requests.CommitPagesRequest | requests.ReleasePagesRequest,
) -> Count:
    """A number of pages."""
    return _count("pages", request.context_id, request.pages)


def _count(path: str, context_id: object, value: object) -> Count:
    """From 0; whether there are as many depends on the context."""
    checks = Checks()
    checked = Count(checks.context_id("context_id", context_id), checks.integer(path, value, 0, INT32_MAX, 0))
    checks.done()
    return checked
