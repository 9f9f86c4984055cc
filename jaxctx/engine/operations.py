"""Operations: what a client does to contexts without computing anything.

Bookkeeping in the cache; the page copies that this takes are among the cache's moves, which come after every step
dispatched before and ahead of every later one. Called on the step thread; each is atomic: an error
changes nothing. Pages come from what the scheduler has not promised to running work (`claim`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import numpy as np

from jaxctx.cache.compare import compare
from jaxctx.cache.contexts import Context, ContextCache, Found, Identity
from jaxctx.cache.prefix import NOWHERE
from jaxctx.engine.answers import Change, Comparison, ContextInfo, ContextPages, ContextState, PlanResult, Tier
from jaxctx.engine.budget import PageBudget
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.delivery import expiry
from jaxctx.engine.lives import Lives
from jaxctx.engine.requests import Caller, CreateRequest, OpenRequest, Ttl
from jaxctx.errors import Aborted, OutOfRange, ResourceExhausted
from jaxctx.store import Version


class ContextOperations:
    """Everything on contexts but fill, generate and close. `busy` holds the contexts that have a writer."""

    def __init__(
        self,
        config: EngineConfig,
        cache: ContextCache,
        budget: PageBudget,
        model: Identity,
        busy: Container[Context],
        lives: Lives,
    ) -> None:
        self._config = config
        self._cache = cache
        self._budget = budget
        self._model = model
        self._busy = busy
        self.lives = lives

    # --- birth ---------------------------------------------------------------------------------------------------

    def create(self, caller: Caller, request: CreateRequest) -> ContextInfo:
        """A new, empty context. AlreadyExists if the chosen id is taken."""
        context = self.make(caller, request)
        self.lives.begin(context, request, Change.CREATED)
        return self.describe(context)

    def make(self, caller: Caller, request: CreateRequest) -> Context:
        """See `create`; settings are for `Lives.begin`."""
        self._raise_if_too_many(1, caller.tenant)
        return self._cache.create(
            self.identity(caller, request.salt),
            tenant=caller.tenant,
            context_id=request.context_id,
            priority=request.priority,
            manual_commit=request.manual_commit,
            labels=request.labels,
        )

    def opened(self, context: Context, request: OpenRequest, version: Version) -> Context:
        """A context made from a snapshot gets the settings that its opener asks for."""
        context.parent_id, context.forked_at = None, 0
        context.priority = request.priority
        context.labels = {}
        context.snapshot = f"{version.name}@{version.version}"
        self.lives.begin(context, request, Change.OPENED)
        return context

    def identity(self, caller: Caller, salt: str) -> Identity:
        """What pages of a context with this salt may be shared with: the same tenant, salt, model and KV type."""
        return replace(self._model, namespace=caller.tenant, salt=salt)

    def fork(self, parent: Context, ids: Sequence[str | None], tenant: str | None = None) -> list[Context]:
        """One child per id (None: a new id), all or none. Works beside a writer: children have what was settled."""
        self._raise_if_too_many(len(ids), parent.tenant if tenant is None else tenant)
        children: list[Context] = []
        with self._not_a_victim(parent):
            partial = -(-parent.working_tokens // self._config.page_size)
            if not self._budget.claim(partial * len(ids)):
                raise ResourceExhausted("no page for the partial pages of the forks", retry_after_s=1.0)
            try:
                for chosen in ids:
                    children.append(self._cache.fork(parent, context_id=chosen, tenant=tenant))
            except BaseException:
                for child in children:
                    self._cache.close(child)
                raise
        return children

    def claim(self, pages: int) -> None:
        """Make sure of free pages. Raises ResourceExhausted."""
        if not self._budget.claim(pages):
            raise ResourceExhausted(f"{pages} pages are not to be had now", retry_after_s=1.0)

    def _raise_if_too_many(self, more: int, tenant: str) -> None:
        self.lives.quotas.check_contexts(self._cache.count(tenant) + more)
        if len(self._cache) + more > self._config.max_contexts:
            message = f"the engine holds at most {self._config.max_contexts} contexts"
            raise ResourceExhausted(message, reason="TOO_MANY_CONTEXTS", retry_after_s=1.0)

    @contextmanager
    def _not_a_victim(self, context: Context) -> Iterator[None]:
        """Keep a context from being suspended for the pages it asks for itself."""
        was_busy, context.busy = context.busy, True
        try:
            yield
        finally:
            context.busy = was_busy

    # --- change --------------------------------------------------------------------------------------------------

    def writable(self, caller: Caller, context_id: str) -> Context:
        """The context, if nobody writes to it: NotFound, or Aborted (CONTEXT_BUSY)."""
        context = self._cache.get(caller.tenant, context_id)
        if context in self._busy:
            raise Aborted("another operation is writing to this context", retry_after_s=0.1)
        self._cache.touch(context)
        return context

    def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """Drop trailing tokens of the buffered and working ones."""
        context = self.writable(caller, context_id)
        self._cache.control.truncate(context, tokens)
        return self._changed(context)

    def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """Keep the first `to` tokens; a page that is cut in the middle is copied, nothing is computed."""
        context = self.writable(caller, context_id)
        if to > context.length:
            raise OutOfRange(f"cannot rewind to {to}: the context has {context.length} tokens")
        with self._not_a_victim(context):
            cut = bool(to % self._config.page_size) and to < context.committed_pages * self._config.page_size
            if cut and not context.working_pages and not self._budget.claim(1):
                raise ResourceExhausted("no page for the partial page", retry_after_s=1.0)
            self._cache.control.rewind(context, to)
        return self._changed(context)

    def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo | None:
        """None: not now, but perhaps when other work is done. Raises NEVER_FITS if the pool is too small."""
        context = self.writable(caller, context_id)
        if pages > self._config.pages:
            raise ResourceExhausted(f"{pages} pages of {self._config.pages} asked for", reason="NEVER_FITS")
        with self._not_a_victim(context):
            # A suspended context takes its cached pages back first: they count too.
            found = self._cache.peek(context) if context.suspended else Found(0, 0, 0, 0)
            own = context.committed_pages + context.working_pages + found.device
            self.lives.check_growth(context, own + pages)
            if not self._budget.claim(pages + found.unheld):
                return None
            self._cache.control.reserve(context, pages)
        return self._changed(context)

    def commit_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Commit the first `pages` working pages: FailedPrecondition if one is partial, OutOfRange past the last."""
        context = self.writable(caller, context_id)
        self._cache.control.commit(context, pages)
        return self._changed(context)

    def release_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Give up `pages` working pages from the tail, with the tokens in them."""
        context = self.writable(caller, context_id)
        self._cache.control.release(context, pages)
        return self._changed(context)

    def update(
        self,
        caller: Caller,
        context_id: str,
        priority: int | None,
        pinned: bool | None,
        pin_s: float | None,
        ttl: Ttl | None,
        labels: Mapping[str, str] | None,
    ) -> ContextInfo:
        """Change what is given; takes effect for work not yet admitted. `pin_s` goes with `pinned`."""
        context = self._cache.get(caller.tenant, context_id)
        if pinned is not None:  # the only one that may be refused
            self.lives.pin(context, pinned, pin_s)
        if priority is not None:
            context.priority = priority
        if ttl is not None:
            self.lives.set_ttl(context, ttl)
        if labels is not None:
            context.labels = dict(labels)
        return self._changed(context)

    # --- look ----------------------------------------------------------------------------------------------------

    def get(self, caller: Caller, context_id: str) -> ContextInfo:
        """Counters of one context."""
        return self.describe(self._cache.get(caller.tenant, context_id))

    def pages(self, caller: Caller, context_id: str) -> ContextPages:
        """Physical layout and tokens of one context."""
        context = self._cache.get(caller.tenant, context_id)
        return ContextPages(
            page_ids=context.page_table().tolist(),
            refcounts=self._cache.refcounts(context),
            tokens=context.tokens().tolist(),
            tiers=self._tiers(context),
        )

    def _tiers(self, context: Context) -> Sequence[Tier]:
        if not context.suspended:
            return [Tier.DEVICE] * len(context.page_table())
        found = [
            Tier.DEVICE if item.page != NOWHERE else Tier.HOST if item.host != NOWHERE else Tier.DISK
            for item in self._cache.places(context)
        ]
        return [*found, *[Tier.LINEAGE] * (-(-context.computed // self._config.page_size) - len(found))]

    def list(self, caller: Caller, after: str, limit: int) -> list[ContextInfo]:
        """Contexts of the tenant in id order."""
        return [self.describe(context) for context in self._cache.list(caller.tenant, after, limit)]

    def plan(self, caller: Caller, tokens: np.ndarray, context_id: str | None, salt: str) -> PlanResult:
        """What filling `tokens` would find and need; changes nothing."""
        if context_id is None:
            return self._planned(len(tokens), 0, 0, self._cache.find(self.identity(caller, salt), tokens))
        context = self._cache.get(caller.tenant, context_id)
        new = context.buffered_tokens + len(tokens)
        pages = context.committed_pages + context.working_pages
        with self._not_a_victim(context):
            return self._planned(new, context.seq_len, pages, self._cache.peek(context, tokens))

    def _planned(self, new: int, before: int, pages_before: int, found: Found) -> PlanResult:
        """`new` tokens after `before` with KV in `pages_before` pages; `found` as `peek` says it."""
        size = self._config.page_size
        last = max(new - 1, 0)  # the last token is always computed
        ends = [min(pages * size, last) for pages in accumulate((found.device, found.host, found.disk))]
        return PlanResult(
            tokens=new,
            resident=ends[0],
            restored=ends[2] - ends[0],
            host=ends[1] - ends[0],
            disk=ends[2] - ends[1],
            computed=new - ends[2],
            pages_needed=max(-(-(before + new) // size) - pages_before - found.device, 0),
            pages_available=self._budget.claimable() + self._cache.suspendable() - found.unheld,
        )

    def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        """Where two contexts part."""
        first, second = (self._cache.get(caller.tenant, context_id) for context_id in (a, b))
        common, shared = compare(first, second)
        return Comparison(common_tokens=common, shared_pages=shared, length_a=first.length, length_b=second.length)

    def _changed(self, context: Context) -> ContextInfo:
        self.lives.changed(context)
        return self.describe(context)

    def describe(self, context: Context) -> ContextInfo:
        """A context's counters as plain data."""
        state = ContextState.SUSPENDED if context.suspended else ContextState.IDLE
        return ContextInfo(
            context_id=context.id,
            parent_id=context.parent_id,
            state=ContextState.BUSY if context in self._busy else state,
            seq_len=context.seq_len,
            committed_pages=context.committed_pages,
            working_pages=context.working_pages,
            working_tokens=context.working_tokens,
            buffered_tokens=context.buffered_tokens,
            page_size=self._config.page_size,
            priority=context.priority,
            pinned=context.pinned,
            pinned_until=context.pinned_until,
            salt=context.identity.salt,
            created_at=context.created_at,
            used_at=context.used_at,
            expiry=expiry(context.lifetime),
            version=context.version,
            forked_at=context.forked_at,
            snapshot=context.snapshot,
            labels=context.labels,
        )
