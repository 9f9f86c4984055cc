"""Operations: what a client does to contexts without computing anything.

Bookkeeping in the cache; the page copies that this takes are among the cache's moves, which come after every step
dispatched before and ahead of every later one. Called on the step thread; each is atomic: an error changes nothing.
Pages come from what the scheduler has not promised to running work (`claim`). For callers see `interface`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from jaxctx import types
from jaxctx.cache import page_control
from jaxctx.cache.audit import compare, held, refcounts
from jaxctx.cache.context_cache import Context, ContextCache, Identity, PrefixMatch
from jaxctx.cache.prefix_index import NOWHERE
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.contexts.lifecycle import ContextLifecycle, told
from jaxctx.engine.interface import LOCAL_ENGINE, PROGRAM_LABELS, Caller, is_of_program
from jaxctx.engine.scheduler.page_budget import HIDDEN
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.errors import Aborted, ResourceExhausted
from jaxctx.store import SnapshotVersion
from jaxctx.types import (
    Comparison,
    ContextChange,
    ContextInfo,
    ContextState,
    CreateContextRequest,
    OpenRequest,
    PlanResult,
    Tier,
    UpdateContextRequest,
    utc_datetime,
)


@dataclass(frozen=True, slots=True)
class ContextOperations:
    """Of one engine; `model` is the identity of its pages, tenant and salt apart."""

    config: EngineConfig
    cache: ContextCache
    scheduler: Scheduler
    lifecycle: ContextLifecycle
    model: Identity
    model_id: str

    def create(self, caller: Caller, request: CreateContextRequest) -> Context:
        context = self.make(caller, request)
        context.of_program = is_of_program(request.labels)
        self.lifecycle.begin(context, request, ContextChange.CREATED)
        return context

    def make(self, caller: Caller, request: CreateContextRequest) -> Context:
        """A new, empty context, whose settings are for `ContextLifecycle.begin`. AlreadyExists if the chosen id is taken."""
        self._raise_if_too_many(1, caller.tenant)
        identity, chosen = self.identity(caller, request.salt), request.context_id
        return self.cache.create(identity, tenant=caller.tenant, context_id=chosen, manual_commit=request.manual_commit)

    def opened(self, context: Context, request: OpenRequest, version: SnapshotVersion) -> Context:
        """A context made from a snapshot gets the settings that its opener asks for."""
        context.ancestors = ()
        context.snapshot = f"{version.name}@{version.version}"
        self.lifecycle.begin(context, request, ContextChange.OPENED)
        return context

    def identity(self, caller: Caller, salt: str) -> Identity:
        """What pages of a context with this salt may be shared with: the same tenant, salt, model and KV type."""
        return replace(self.model, namespace=caller.tenant, salt=salt)

    def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[Context]:
        """Works beside a writer: the children have what was settled."""
        parent = self.cache.get(caller.tenant, context_id)
        children = self.branch(parent, list(child_ids) or [None] * (n or 1))
        self.cache.touch(parent)
        for child in children:
            if parent.of_program:  # the child is its caller's
                child.labels = {key: value for key, value in parent.labels.items() if key not in PROGRAM_LABELS}
            self.lifecycle.notify_changed(child, ContextChange.FORKED)
        return children

    def branch(self, parent: Context, ids: Sequence[str | None], tenant: str | None = None) -> Sequence[Context]:
        """One child per id (None: a new id), all or none; filed under its parent's tenant or this one."""
        self._raise_if_too_many(len(ids), parent.tenant if tenant is None else tenant)
        children: list[Context] = []
        self.claim(parent, -(-parent.working_tokens // self.config.page_size) * len(ids))
        try:
            for chosen in ids:
                children.append(self.cache.fork(parent, context_id=chosen, tenant=tenant))
        except BaseException:
            for child in children:
                self.cache.close(child)
            raise
        return children

    def claim(self, context: Context, pages: int) -> None:
        """Make sure of free pages for what is done to a context. Raises ResourceExhausted."""
        if not self._try_claim(context, pages):
            raise ResourceExhausted(f"{pages} pages are not to be had now", reason="OUT_OF_PAGES", retry_after_s=1.0)

    def _raise_if_too_many(self, more: int, tenant: str) -> None:
        if not tenant.startswith(HIDDEN):  # what snapshots hold has quotas of its own
            self.lifecycle.quotas.check(max_contexts_per_tenant=self.cache.count(tenant) + more)
        if len(self.cache.context_table) + more > self.config.max_contexts:
            message = f"the engine holds at most {self.config.max_contexts} contexts"
            raise ResourceExhausted(message, reason="TOO_MANY_CONTEXTS", retry_after_s=1.0)

    def _try_claim(self, context: Context, pages: int) -> bool:
        """Claim pages for a context, which is not suspended itself for them. False, with nothing changed."""
        was_busy, context.busy = context.busy, True
        try:
            return self.scheduler.budget.claim(pages)
        finally:
            context.busy = was_busy

    def writable(self, caller: Caller, context_id: str) -> Context:
        """The context, if nobody writes to it: NotFound, or Aborted (CONTEXT_BUSY)."""
        context = self.cache.get(caller.tenant, context_id)
        if context in self.scheduler.writers:
            raise Aborted("another operation is writing to this context", reason="CONTEXT_BUSY", retry_after_s=0.1)
        self.cache.touch(context)
        return context

    def control(
        self, change: Callable[[ContextCache, Context, int], None], caller: Caller, context_id: str, n: int
    ) -> ContextInfo:
        """Truncate, commit or release: what `change` of the cache's page control does to so many tokens or pages."""
        context = self.writable(caller, context_id)
        change(self.cache, context, n)
        return self._changed(context)

    def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """A page that is cut in the middle is copied."""
        context = self.writable(caller, context_id)
        if to % self.config.page_size and to < context.seq_len and not context.working_pages:
            self.claim(context, 1)
        page_control.rewind(self.cache, context, to)
        return self._changed(context)

    def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo | None:
        """None: not now, but perhaps when other work is done. Raises NEVER_FITS if the pool is too small."""
        context = self.writable(caller, context_id)
        if pages > self.config.pages:
            raise ResourceExhausted(f"{pages} pages of {self.config.pages} asked for", reason="NEVER_FITS")
        # A suspended context takes its cached pages back first: they count too.
        found = self.cache.peek(context) if context.suspended else PrefixMatch(0, 0, 0, 0)
        own = context.committed_pages + context.working_pages + found.device
        self.lifecycle.check_growth(context, own + pages)
        if not self._try_claim(context, pages + found.unheld):
            return None
        page_control.reserve(self.cache, context, pages)
        return self._changed(context)

    def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> ContextInfo:
        context = self.cache.get(caller.tenant, context_id)
        self.lifecycle.update(context, request)
        return self._changed(context)

    def close(self, caller: Caller, context_id: str) -> None:
        self.lifecycle.close(self.cache.get(caller.tenant, context_id))

    def inspect(
        self,
        caller: Caller,
        context_id: str,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> types.GetContextResult:
        context = self.cache.get(caller.tenant, context_id)
        return types.GetContextResult(
            context=self.describe(context),
            pages=self._pages(context) if include_pages else None,
            tokens=types.TokenIds(ids=context.tokens().tolist()) if include_tokens else None,
            ancestors=context.ancestors if include_ancestors else (),
        )

    def _pages(self, context: Context) -> types.ContextPages:
        refs = refcounts(context, self.cache.context_table)
        ids = self.cache.page_numbers.of(context.tenant, context.page_table().tolist())
        return types.ContextPages(page_ids=ids, refcounts=refs, tiers=self._tiers(context))

    def _tiers(self, context: Context) -> Sequence[Tier]:
        if not context.suspended:
            return [Tier.DEVICE] * len(context.page_table())
        found = [
            Tier.DEVICE if item.page != NOWHERE else Tier.HOST if item.host != NOWHERE else Tier.DISK
            for item in self.cache.block_manager.lookup_tiers(context, context.length)
        ]
        return [*found, *[Tier.LINEAGE] * (-(-context.computed // self.config.page_size) - len(found))]

    def list(
        self, caller: Caller, page_token: str = "", limit: int = 100, include_program_contexts: bool = False
    ) -> Sequence[ContextInfo]:
        found = self.cache.list(caller.tenant, page_token, limit, with_programs=include_program_contexts)
        return [self.describe(context) for context in found]

    def plan(self, caller: Caller, tokens: np.ndarray, context_id: str | None, salt: str) -> PlanResult:
        context = None
        new, before, own_pages = len(tokens), 0, 0  # tokens behind those that have KV already, in pages of its own
        if context_id is None:
            found = self.cache.find(self.identity(caller, salt), tokens)
        else:
            context = self.cache.get(caller.tenant, context_id)
            new, before = new + context.buffered_tokens, context.seq_len
            own_pages = context.committed_pages + context.working_pages
            found = self.cache.peek(context, tokens)
        size = self.config.page_size
        last = max(new - 1, 0)  # the last token is always computed
        pages = [*accumulate((found.device, found.host, found.disk))]
        short = size - found.offloaded if found.offloaded else 0
        ends = [min(each * size - (short if each == pages[-1] else 0), last) for each in pages]
        return PlanResult(
            tokens=new,
            resident=ends[0],
            restored=ends[2] - ends[0],
            host=ends[1] - ends[0],
            disk=ends[2] - ends[1],
            computed=new - ends[2],
            pages_needed=max(-(-(before + new) // size) - own_pages - found.device, 0),
            pages_available=self.config.pages - self._kept(caller.tenant, context) - found.unheld,
        )

    def _kept(self, tenant: str, asking: Context | None = None) -> int:
        """Pages that the tenant's work, pins and the context asking keep from it; others' are not for it to know."""
        mine = [
            each
            for each in self.cache.context_table
            if each.tenant.removeprefix(HIDDEN) == tenant and not each.suspended
        ]
        promised = sum(work.reserved for work in self.scheduler.writers.values() if work.context.tenant == tenant)
        return held(each for each in mine if each.busy or each.pinned or each is asking) + promised

    def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        first, second = (self.cache.get(caller.tenant, context_id) for context_id in (a, b))
        common, shared = compare(first, second)
        return Comparison(common_tokens=common, shared_pages=shared, length_a=first.length, length_b=second.length)

    def _changed(self, context: Context) -> ContextInfo:
        self.lifecycle.notify_changed(context)
        return self.describe(context)

    def describe(self, context: Context) -> ContextInfo:
        """A context's counters as plain data."""
        state = ContextState.SUSPENDED if context.suspended else ContextState.IDLE
        until = context.pinned_until
        parent_id, forked_at = context.ancestors[0] if context.ancestors else (None, 0)
        return told(
            ContextInfo,
            context,
            context_id=context.id,
            parent_id=parent_id,
            forked_at=forked_at,
            model_id=self.model_id,
            state=ContextState.BUSY if context in self.scheduler.writers else state,
            salt=context.identity.salt,
            used_at=utc_datetime(context.used_at),
            pinned_until=None if until is None else utc_datetime(until),
            engine_id=LOCAL_ENGINE,
        )
