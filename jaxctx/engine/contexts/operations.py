"""Operations on contexts that compute nothing: create, fork, rewind, switch_adapter, commit, inspect, plan, ….

An operation changes the cache's state. The page copies that it needs are moves of the cache, which are carried out
after every step dispatched before it and before every later step. Each operation is atomic: an error changes nothing.
Pages come from those that the scheduler has not promised to running requests (`claim`). `engine.interface` says what
callers see of each operation. Called on the step thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxctx.cache import audit, page_control
from jaxctx.cache.context_cache import Context, ContextCache, Identity, PrefixMatch
from jaxctx.cache.prefix_index import NOWHERE
from jaxctx.cache.tiers import TierEntry
from jaxctx.engine.adapters.table import AdapterTable
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.contexts.info import context_info
from jaxctx.engine.contexts.lifecycle import ContextLifecycle
from jaxctx.engine.contexts.quotas import Quotas, hidden_tenant, is_hidden, owner_of
from jaxctx.engine.interface import PROGRAM_LABELS, Caller, is_of_program
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.errors import Aborted, ResourceExhausted
from jaxctx.types import (
    Comparison,
    ContextChange,
    ContextInfo,
    ContextPages,
    CreateContextRequest,
    GetContextResult,
    OpenRequest,
    PlanResult,
    Tier,
    TokenIds,
    UpdateContextRequest,
)

NOTHING_FOUND = PrefixMatch(device=0, unheld=0, host=0, disk=0)


@dataclass(frozen=True, slots=True)
class ContextOperations:
    """Operations on the contexts of one engine.

    `model` identifies its pages, except for namespace, adapter and salt; `model_id` is the model's name on this server.
    """

    config: EngineConfig
    cache: ContextCache
    scheduler: Scheduler
    lifecycle: ContextLifecycle
    quotas: Quotas
    adapters: AdapterTable
    model: Identity
    model_id: str

    # New contexts.

    def create(self, caller: Caller, request: CreateContextRequest) -> Context:
        """A new, empty context.

        Raises NotFound (ADAPTER_NOT_FOUND), AlreadyExists, ResourceExhausted (QUOTA, TOO_MANY_CONTEXTS, PIN_BUDGET).
        """
        adapter = self.adapters.find(request.adapter) if request.adapter else None
        identity = self.identity(caller, request.salt, "" if adapter is None else adapter.content_hash)
        context = self.make_empty(caller, request.context_id, identity, request.adapter, request.manual_commit)
        context.of_program = is_of_program(request.labels)
        settings = UpdateContextRequest(
            priority=request.priority,
            pinned=request.pinned,
            labels=request.labels,
            ttl=request.ttl,
            pin_s=request.pin_s,
        )
        self.lifecycle.begin(context, settings, ContextChange.CREATED)
        return context

    def make_empty(
        self, caller: Caller, context_id: str | None, identity: Identity, adapter: str, manual_commit: bool
    ) -> Context:
        """An empty context that is not announced yet: `create` and `begin_opened` give it its settings.

        `adapter`: what that of its identity is called. `context_id` None: a new id.
        Raises AlreadyExists, ResourceExhausted (QUOTA, TOO_MANY_CONTEXTS).
        """
        self._raise_if_too_many(1, caller.tenant)
        context = self.cache.create(identity, tenant=caller.tenant, context_id=context_id, manual_commit=manual_commit)
        context.adapter = adapter
        return context

    def begin_opened(self, context: Context, request: OpenRequest, snapshot: str) -> Context:
        """Give a context that was made from `snapshot` ("NAME@VERSION") the requested settings, and announce it.

        Raises ResourceExhausted (PIN_BUDGET); then the context is closed.
        """
        context.ancestors = ()
        context.snapshot = snapshot
        settings = UpdateContextRequest(
            priority=request.priority, pinned=request.pinned, labels={}, ttl=request.ttl, pin_s=request.pin_s
        )
        self.lifecycle.begin(context, settings, ContextChange.OPENED)
        return context

    def identity(self, caller: Caller, salt: str, adapter: str = "") -> Identity:
        """The identity of a context with this salt, and an adapter of this content hash; empty: none.

        Contexts share pages only within one identity.
        """
        return replace(self.model, namespace=caller.tenant, adapter=adapter, salt=salt)

    def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[Context]:
        """Children with these ids, or `n` with new ids. Beside a writer, they have the tokens that it has computed."""
        parent = self.cache.get(caller.tenant, context_id)
        ids: list[str | None] = [*child_ids] if child_ids else [None] * (n or 1)
        children = self.fork_context(parent, ids)
        self.cache.touch(parent)
        for child in children:
            if parent.of_program:  # the child is its caller's, not the program's
                child.labels = {key: value for key, value in parent.labels.items() if key not in PROGRAM_LABELS}
            self.lifecycle.notify_changed(child, ContextChange.FORKED)
        return children

    def fork_context(self, parent: Context, ids: Sequence[str | None], tenant: str | None = None) -> Sequence[Context]:
        """One child per id (None: a new id), all or none. They are not announced to watches.

        They belong to `tenant` (None: their parent's). Raises AlreadyExists, ResourceExhausted.
        """
        self._raise_if_too_many(len(ids), parent.tenant if tenant is None else tenant)
        self.claim(parent, self._pages_for(parent.working_tokens) * len(ids))
        children: list[Context] = []
        try:
            for context_id in ids:
                children.append(self.cache.fork(parent, context_id=context_id, tenant=tenant))
        except BaseException:
            for child in children:
                self.cache.close(child)
            raise
        return children

    def _raise_if_too_many(self, more: int, tenant: str) -> None:
        """Raises ResourceExhausted (QUOTA, TOO_MANY_CONTEXTS) if `tenant` may not have `more` contexts."""
        if not is_hidden(tenant):  # contexts that snapshots hold have quotas of their own
            self.quotas.check_contexts(self.cache.count(tenant) + more)
        if len(self.cache.context_table) + more > self.config.max_contexts:
            message = f"the engine holds at most {self.config.max_contexts} contexts"
            raise ResourceExhausted(message, reason="TOO_MANY_CONTEXTS", retry_after_s=1.0)

    # Changes. Each returns the context as it is afterwards.

    def writable(self, caller: Caller, context_id: str) -> Context:
        """The context, if nobody writes to it or holds it: NotFound, or Aborted (CONTEXT_BUSY). Counts as a use."""
        context = self.cache.get(caller.tenant, context_id)
        if self.lifecycle.has_writer(context):
            raise _context_busy()
        self.cache.touch(context)
        return context

    def hold(self, caller: Caller, context_id: str) -> Context:
        """The context, for a call that is going to flush and then fork it. Until the call ends its hold with
        `ContextLifecycle.release`, nobody else may write to the context.

        Calls that have nothing to flush may hold one context together. Raises NotFound, Aborted (CONTEXT_BUSY).
        """
        context = self.cache.get(caller.tenant, context_id)
        is_held = self.lifecycle.has_writer(context)
        if self.scheduler.writer_of(context) is not None or (is_held and context.buffered_tokens):
            raise _context_busy()
        self.cache.touch(context)
        self.lifecycle.hold(context)
        return context

    def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """Drop trailing tokens. Raises OutOfRange if some of them are in committed pages."""
        context = self.writable(caller, context_id)
        page_control.truncate(self.cache, context, tokens)
        return self._changed(context)

    def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """Keep the first `to` tokens; a page that is kept in part is copied. Raises OutOfRange."""
        context = self.writable(caller, context_id)
        # Of a tail that is its own the rewind itself frees a page.
        needs_page = to % self.config.page_size and to < context.seq_len and not context.working_pages
        if needs_page and context.tail.holders > 1:
            self.claim(context, 1)
        page_control.rewind(self.cache, context, to)
        return self._changed(context)

    def switch_adapter(self, caller: Caller, context_id: str, adapter: str) -> ContextInfo:
        """Go on with the adapter of this name, or ("") none. Raises NotFound (ADAPTER_NOT_FOUND).

        FailedPrecondition after too many switches, see `ContextCache.switch_adapter`.
        """
        context = self.writable(caller, context_id)
        revision = self.adapters.find(adapter).content_hash if adapter else ""
        self.cache.switch_adapter(context, adapter, revision)
        return self._changed(context)

    def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo | None:
        """Add empty working pages. None: not now, but perhaps when other work is done.

        Raises NEVER_FITS if the pool is too small, PIN_BUDGET.
        """
        context = self.writable(caller, context_id)
        if pages > self.config.pages:
            raise ResourceExhausted(f"{pages} pages of {self.config.pages} asked for", reason="NEVER_FITS")
        # A suspended context takes its cached pages back first: they count too.
        found = self.cache.peek(context) if context.suspended else NOTHING_FOUND
        own = context.committed_pages + context.working_pages + found.device
        self.lifecycle.check_growth(context, own + pages)
        if not self._try_claim(context, pages + found.unheld):
            return None
        page_control.reserve(self.cache, context, pages)
        return self._changed(context)

    def commit_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Commit the first working pages. Raises OutOfRange, FailedPrecondition (PAGE_NOT_FULL)."""
        context = self.writable(caller, context_id)
        page_control.commit(self.cache, context, pages)
        return self._changed(context)

    def release_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """Give back the last working pages, with the tokens in them. Raises OutOfRange."""
        context = self.writable(caller, context_id)
        page_control.release(self.cache, context, pages)
        return self._changed(context)

    def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> ContextInfo:
        """Change settings, also beside a writer. It does not count as a use. Raises PIN_BUDGET."""
        context = self.cache.get(caller.tenant, context_id)
        self.lifecycle.update(context, request)
        return self._changed(context)

    def close(self, caller: Caller, context_id: str) -> None:
        """Close the context; its writer is ended first."""
        self.lifecycle.close(self.cache.get(caller.tenant, context_id))

    def discard(self, contexts: Iterable[Context]) -> None:
        """Close contexts of an operation that failed, unless they are closed."""
        for context in contexts:
            if not context.closed:
                self.lifecycle.close(context)

    def _changed(self, context: Context) -> ContextInfo:
        self.lifecycle.notify_changed(context)
        return self.describe(context)

    # Pages for operations.

    def claim(self, context: Context, pages: int) -> None:
        """Make `pages` pages claimable for an operation on a context. Raises ResourceExhausted (OUT_OF_PAGES)."""
        if not self._try_claim(context, pages):
            raise ResourceExhausted(f"{pages} pages are not available now", reason="OUT_OF_PAGES", retry_after_s=1.0)

    def _try_claim(self, context: Context, pages: int) -> bool:
        """Claim pages for a context; whether they were granted. The context itself is not suspended for them."""
        was_busy, context.busy = context.busy, True
        try:
            claim = self.scheduler.claim_pages(pages)
        finally:
            context.busy = was_busy
        for suspended in claim.suspended:
            self.lifecycle.notify_suspended(suspended)
        return claim.granted

    def pages_to_move_now(self) -> int:
        """Pages that may move to or from the device at once without delaying steps."""
        return self.scheduler.moving_pages

    def _pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.config.page_size)

    # Reads.

    def describe(self, context: Context) -> ContextInfo:
        """A context's counters and settings as plain data."""
        return context_info(context, model_id=self.model_id, has_writer=self.lifecycle.has_writer(context))

    def inspect(
        self,
        caller: Caller,
        context_id: str,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> GetContextResult:
        """One context, with the details that are requested."""
        context = self.cache.get(caller.tenant, context_id)
        return GetContextResult(
            context=self.describe(context),
            pages=self._pages(context) if include_pages else None,
            tokens=TokenIds(ids=context.tokens().tolist()) if include_tokens else None,
            ancestors=context.ancestors if include_ancestors else (),
        )

    def _pages(self, context: Context) -> ContextPages:
        """The pages of a context. Walks over all contexts of its namespace, for the reference counts."""
        return ContextPages(
            page_ids=self.cache.page_numbers.of(context.tenant, context.page_table().tolist()),
            refcounts=audit.refcounts(context, self.cache.context_table.in_namespace(context.identity.namespace)),
            tiers=self._tiers(context),
        )

    def _tiers(self, context: Context) -> Sequence[Tier]:
        """Where each page of the context's tokens is."""
        if not context.suspended:
            return [Tier.DEVICE] * len(context.page_table())
        found = [_tier(entry) for entry in self.cache.block_manager.lookup_tiers(context, context.length)]
        nowhere = self._pages_for(context.computed) - len(found)
        return found + [Tier.LINEAGE] * nowhere

    def list(
        self, caller: Caller, page_token: str = "", limit: int = 100, include_program_contexts: bool = False
    ) -> Sequence[ContextInfo]:
        """Contexts of the caller in the order of their ids, up to `limit`, after the id `page_token`."""
        found = self.cache.list(caller.tenant, page_token, limit, with_programs=include_program_contexts)
        return [self.describe(context) for context in found]

    def tenants(self, after: str, limit: int) -> Sequence[str]:
        """The names of up to `limit` tenants that have contexts, in order, after the name `after`."""
        names = (tenant for tenant in self.cache.context_table.tenants() if not is_hidden(tenant))
        return sorted(name for name in names if name > after)[:limit]

    def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        """Where two contexts diverge."""
        first = self.cache.get(caller.tenant, a)
        second = self.cache.get(caller.tenant, b)
        common_tokens, shared_pages = audit.compare(first, second)
        return Comparison(
            common_tokens=common_tokens, shared_pages=shared_pages, length_a=first.length, length_b=second.length
        )

    # Plan.

    def plan(
        self, caller: Caller, tokens: np.ndarray, context_id: str | None, salt: str, adapter: str = ""
    ) -> PlanResult:
        """What a fill of int32 `tokens` would find and need, in a context or (None) in a new one of this salt and
        adapter. Raises NotFound (ADAPTER_NOT_FOUND).
        """
        if context_id is None:
            content_hash = self.adapters.find(adapter).content_hash if adapter else ""
            found = self.cache.find(self.identity(caller, salt, content_hash), tokens)
            available = self.config.pages - self._kept_pages(caller.tenant) - found.unheld
            return self._plan(len(tokens), found, computed_tokens=0, own_pages=0, pages_available=available)
        context = self.cache.get(caller.tenant, context_id)
        found = self.cache.peek(context, tokens)
        return self._plan(
            len(tokens) + context.buffered_tokens,
            found,
            computed_tokens=context.seq_len,
            own_pages=context.committed_pages + context.working_pages,
            pages_available=self.config.pages - self._kept_pages(caller.tenant, context) - found.unheld,
        )

    def _plan(
        self, tokens: int, found: PrefixMatch, *, computed_tokens: int, own_pages: int, pages_available: int
    ) -> PlanResult:
        """The plan for `tokens` tokens after `computed_tokens`; the context has `own_pages` pages for them already."""
        resident = self._reusable_tokens(found, found.device, tokens)
        resident_or_host = self._reusable_tokens(found, found.device + found.host, tokens)
        reusable = self._reusable_tokens(found, found.device + found.host + found.disk, tokens)
        return PlanResult(
            tokens=tokens,
            resident=resident,
            restored=reusable - resident,
            host=resident_or_host - resident,
            disk=reusable - resident_or_host,
            computed=tokens - reusable,
            pages_needed=max(self._pages_for(computed_tokens + tokens) - own_pages - found.device, 0),
            pages_available=pages_available,
        )

    def _reusable_tokens(self, found: PrefixMatch, pages: int, tokens: int) -> int:
        """Of the next `tokens` tokens, those that the first `pages` found pages hold and that need not be computed."""
        held = pages * self.config.page_size
        if found.offloaded and pages == found.device + found.host + found.disk:
            held -= self.config.page_size - found.offloaded  # the last found page is partial
        return min(held, max(tokens - 1, 0))  # the last token is always computed

    def _kept_pages(self, tenant: str, asking: Context | None = None) -> int:
        """Pages that are not available to the tenant: those of its running work, of its pins, and of `asking`.

        Pages of other tenants do not count: their number must not be revealed.
        """
        table = self.cache.context_table
        kept: dict[Context, None] = {} if asking is None else {asking: None}
        kept.update(dict.fromkeys(table.pinned(tenant)))
        kept.update(dict.fromkeys(table.pinned(hidden_tenant(tenant))))
        for context in self.scheduler.writers:
            if context.busy and owner_of(context.tenant) == tenant:
                kept[context] = None
        held = audit.count_held_pages(context for context in kept if not context.suspended)
        return held + self.scheduler.pages_reserved_for(tenant)


def _context_busy() -> Aborted:
    return Aborted("another operation is writing to this context", reason="CONTEXT_BUSY", retry_after_s=0.1)


def _tier(entry: TierEntry) -> Tier:
    """The fastest tier that has the page."""
    if entry.page != NOWHERE:
        return Tier.DEVICE
    return Tier.HOST if entry.host != NOWHERE else Tier.DISK
