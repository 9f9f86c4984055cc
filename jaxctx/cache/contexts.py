"""Contexts: the front of this room. Every operation on contexts, with what it promises and what it refuses.

A `ContextCache` decides; it never moves data. What must happen on the device is returned as `PageCopy`s, which the
engine carries out in the given order before its next step. Nothing here waits: what does not fit raises OutOfPages, and
the engine suspends `victims`, queues or refuses. Every operation is atomic: one that raises has changed nothing. One
thread owns a cache and its contexts.

    append ──▶ buffered ──the engine computes; settle──▶ working ──full──▶ committed
                  └──────────match: a committed page holds them already────────▲

Tiers, snapshots and quotas are not here yet; they begin where `suspend` and `match` do.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_128_digest

from jaxctx.cache import audit
from jaxctx.cache.context import Context
from jaxctx.cache.memory import Memory
from jaxctx.cache.pages import OutOfPages, PoolStats
from jaxctx.cache.prefix import Identity, PageNode, TokenIds, encode_tokens
from jaxctx.cache.registry import Registry
from jaxctx.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfRange

__all__ = ["Context", "ContextCache", "Identity", "OutOfPages", "PageCopy", "PoolStats"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The engine must copy page `source` onto page `target` on the device before the next step."""

    source: int
    target: int


class ContextCache:
    """All contexts of one engine, their pages `first_page .. first_page + pages - 1`, and the prefixes they share.

    `clock` and `new_id` are the world: what time it is, and an id nobody has. `digest` is the prefix index's hash.
    Every method with a context raises NotFound if it is closed.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        first_page: int = 1,
        digest: Callable[[bytes], bytes] = xxh3_128_digest,
    ) -> None:
        self.page_size = page_size
        self.memory = Memory(pages, first_page, page_size, digest)
        self._registry = Registry()
        self._clock = clock
        self._new_id = new_id

    # --- which contexts there are --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Contexts that are not closed."""
        return len(self._registry)

    def __iter__(self) -> Iterator[Context]:
        """All of them, of all tenants; do not create or close one meanwhile."""
        return iter(self._registry)

    def create(
        self,
        identity: Identity,
        *,
        tenant: str = "",
        context_id: str | None = None,
        priority: int = 0,
        pinned: bool = False,
        manual_commit: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> Context:
        """A new, empty context. Raises AlreadyExists if the tenant has one of this id."""
        now = self._clock()
        root = self.memory.index.root(identity)
        context = Context(
            id=self._unused_id(tenant, context_id),
            tenant=tenant,
            identity=identity,
            page_size=self.page_size,
            priority=priority,
            pinned=pinned,
            manual_commit=manual_commit,
            labels=dict(labels or {}),
            created_at=now,
            used_at=now,
            root=root,
            tail=root,
        )
        self.memory.index.acquire(root)
        self._registry.enter(context)
        return context

    def fork(self, context: Context, *, context_id: str | None = None) -> tuple[Context, builtins.list[PageCopy]]:
        """A child that begins as `context` stands now, at a cost that does not depend on its length.

        Committed pages are shared; working pages with tokens are copied, reserved empty ones are not inherited;
        buffered tokens are copied. The child is not pinned. The child of a suspended context is suspended. Also works
        while a writer holds the context: what is not settled yet is buffered, or unknown, in the child.

        Raises AlreadyExists, OutOfPages.
        """
        self._must_live(context)
        now = self._clock()
        sources = context.working[: self.memory.pages_for(context.working_tokens)]
        child = replace(
            context,
            id=self._unused_id(context.tenant, context_id),
            parent_id=context.id,
            pinned=False,
            busy=False,
            created_at=now,
            used_at=now,
            working=self.memory.take(len(sources)),
            recent=context.recent[:],
            table=None,
        )
        if not child.suspended:
            self.memory.index.acquire(child.tail)
        self._registry.enter(child)
        return child, [PageCopy(*pages) for pages in zip(sources, child.working, strict=True)]

    def get(self, tenant: str, context_id: str) -> Context:
        """Raises NotFound, for another tenant's context just the same."""
        return self._registry.get(tenant, context_id)

    def list(self, tenant: str, after: str, limit: int) -> builtins.list[Context]:
        """Up to `limit` of the tenant's contexts in id order, beginning after the id `after`."""
        return self._registry.list(tenant, after, limit)

    def close(self, context: Context) -> None:
        """Give up a context; of the pages that only it held, committed ones stay cached and working ones are free."""
        self.suspend(context)
        context.closed = True
        self._registry.leave(context)

    # --- tokens come ---------------------------------------------------------------------------------------------

    def append(self, context: Context, tokens: TokenIds) -> None:
        """Add tokens, `[tokens]` int32, to the buffered ones; takes no pages. Raises InvalidArgument."""
        self._must_live(context)
        context.recent += encode_tokens(tokens)

    def match(self, context: Context) -> int:
        """Move the buffered tokens that committed pages hold already into the context's chain; returns how many.

        Restores a suspended context first: all its tokens are buffered, and matched from the beginning; what is not
        found stays buffered, to be computed. Finds nothing where working tokens stand before the buffered ones.
        """
        self._must_live(context)
        if context.suspended:
            self.memory.restore(context)
            self.touch(context)
        if context.working_tokens:
            return 0
        path = self.memory.index.walk(context.tail, bytes(context.recent))
        if path:
            self.memory.adopt(context, path)
        return len(path) * self.page_size

    def resident(self, identity: Identity, tokens: TokenIds) -> int:
        """How many of `tokens` a match would find for a new context. Changes nothing."""
        return self.find(identity, tokens)[0] * self.page_size

    def resident_extension(self, context: Context, tokens: TokenIds) -> int:
        """How many tokens, buffered ones included, a match would find once `tokens` are appended. Changes nothing."""
        return self.peek(context, tokens)[0] * self.page_size

    def find(self, identity: Identity, tokens: TokenIds) -> tuple[int, int]:
        """Pages that a new context filled with `tokens` would find, and how many of them nobody holds."""
        index = self.memory.index
        return _count(index.walk(index.root(identity), encode_tokens(tokens)))

    def peek(self, context: Context, more: TokenIds = ()) -> tuple[int, int]:
        """Pages that a match would find once `more` is appended, and how many of them nobody holds. Changes nothing."""
        self._must_live(context)
        if context.working_tokens:
            return 0, 0
        start, known = context.tail, bytes(context.recent)
        if context.suspended:
            start, known = context.root, context.token_bytes()
        return _count(self.memory.index.walk(start, known + encode_tokens(more)))

    def grow(self, context: Context, tokens: int) -> None:
        """Have working pages for `tokens` tokens beyond `seq_len`, evicting cached pages as needed.

        Raises OutOfPages and takes none; FailedPrecondition for a suspended context (`match` restores it).
        """
        self._must_be_resident(context)
        missing = self.memory.pages_for(context.working_tokens + tokens) - len(context.working)
        if missing > 0:
            self.memory.add_working(context, missing)

    def settle(self, context: Context, tokens: int) -> int:
        """The KV of the first `tokens` buffered tokens is on the device now: they become working tokens.

        Full working pages commit, unless the context commits by hand. Returns how many of them others had committed
        meanwhile: those were merged, the duplicates are free. Raises OutOfRange if fewer tokens are buffered,
        FailedPrecondition if there are no pages for them.
        """
        self._must_be_resident(context)
        if not 0 <= tokens <= context.buffered_tokens:
            raise OutOfRange(f"{tokens} tokens to settle, {context.buffered_tokens} buffered")
        if context.working_tokens + tokens > len(context.working) * self.page_size:
            raise FailedPrecondition(f"no working pages for {tokens} more tokens")
        context.working_tokens += tokens
        full = context.working_tokens // self.page_size
        return self.memory.commit(context, full) if full and not context.manual_commit else 0

    # --- tokens go -----------------------------------------------------------------------------------------------

    def truncate(self, context: Context, tokens: int) -> None:
        """Drop trailing tokens, buffered ones and then working ones; pages stay reserved.

        Raises OutOfRange where that would reach into committed pages. (A suspended context has none.)
        """
        self._must_live(context)
        droppable = context.working_tokens + context.buffered_tokens
        if not 0 <= tokens <= droppable:
            raise OutOfRange(f"{tokens} tokens to drop, {droppable} outside committed pages")
        self.memory.shorten(context, context.length - tokens)

    def rewind(self, context: Context, to: int) -> builtins.list[PageCopy]:
        """Keep the first `to` tokens, without computing.

        Within buffered tokens and working pages this is a truncate. Across committed pages the layout becomes that of
        a context just filled with `to` tokens: pages behind are released and stay cached, tokens of a partial page are
        copied to a working page, other working pages are free. Raises OutOfRange; OutOfPages if a page is needed and
        other contexts hold all.
        """
        self._must_live(context)
        if not 0 <= to <= context.length:
            raise OutOfRange(f"rewind to {to} of a context of {context.length} tokens")
        if to >= context.committed_pages * self.page_size:  # of a suspended context: always
            self.memory.shorten(context, to)
            return []
        pages, partial = divmod(to, self.page_size)
        # Its own pages behind `to` serve as well, if no other context holds them.
        if partial and not context.working and not self.available() and context.tail.holders > 1:
            raise OutOfPages("a rewind into a page needs a working page, and other contexts hold all")
        source = context.tail.ancestor(pages + 1).page
        self.memory.free_working(context, keep=min(partial, 1))
        self.memory.shorten(context, to)
        if not partial:
            return []
        if not context.working:
            self.memory.add_working(context, 1)
        context.working_tokens = partial
        target = context.working[0]
        return [PageCopy(source, target)] if target != source else []

    # --- manual page operations ----------------------------------------------------------------------------------

    def reserve(self, context: Context, pages: int) -> None:
        """Add empty working pages; a suspended context comes back first, as by `match`.

        Raises InvalidArgument for more than the pool has at all, OutOfPages for more than can be had now.
        """
        self._must_live(context)
        if not 0 <= pages <= self.memory.pool.total:
            raise InvalidArgument.field("pages", f"0 to {self.memory.pool.total}, the size of the pool")
        if context.suspended:
            path = self.memory.index.walk(context.root, context.token_bytes())
            self.memory.must_have(pages + sum(node.holders == 0 for node in path))
            self.match(context)
        self.memory.add_working(context, pages)

    def commit(self, context: Context, pages: int) -> None:
        """Commit the first `pages` working pages.

        Raises OutOfRange if there are fewer, FailedPrecondition (PAGE_NOT_FULL) if one of them is not full.
        """
        self._must_live(context)
        if not 0 <= pages <= len(context.working):
            raise OutOfRange(f"{pages} pages to commit, {len(context.working)} working pages")
        if pages * self.page_size > context.working_tokens:
            raise FailedPrecondition(
                f"{pages} pages to commit, {context.working_tokens} tokens in working pages", reason="PAGE_NOT_FULL"
            )
        self.memory.commit(context, pages)

    def release(self, context: Context, pages: int) -> None:
        """Give back the last working pages. Tokens in them are dropped, and then the buffered ones behind them too.

        Raises OutOfRange if there are fewer.
        """
        self._must_live(context)
        keep = len(context.working) - pages
        if pages < 0 or keep < 0:
            raise OutOfRange(f"{pages} pages to release, {len(context.working)} working pages")
        if keep * self.page_size < context.working_tokens:
            self.memory.shorten(context, (context.committed_pages + keep) * self.page_size)
        self.memory.free_working(context, keep)

    # --- memory --------------------------------------------------------------------------------------------------

    def suspend(self, context: Context) -> int:
        """Give up all pages and keep the tokens; returns how many pages became free or evictable."""
        self._must_live(context)
        if context.suspended:
            return 0
        self._registry.rest(context)
        return self.memory.suspend(context)

    def victims(self) -> Iterator[Context]:
        """Contexts that may be suspended: idle, not pinned, holding pages; least recently used first."""
        for context in self._registry.by_use():
            idle = not (context.busy or context.pinned or context.suspended)
            if idle and (context.committed_pages or context.working):
                yield context

    def touch(self, context: Context) -> None:
        """The context is used now."""
        self._must_live(context)
        context.used_at = self._clock()
        self._registry.use(context)

    def available(self) -> int:
        """Pages that can be had at once: free or evictable."""
        return self.memory.available

    def suspendable(self) -> int:
        """Pages that would become available if all victims were suspended. Walks all contexts."""
        return audit.suspendable([*self.victims()], self._registry.by_use())

    def stats(self) -> PoolStats:
        """Where the pages are."""
        return self.memory.stats

    def refcounts(self, context: Context) -> builtins.list[int]:
        """How many contexts hold each page of the page table. Walks all contexts."""
        return audit.refcounts(context, self._registry.by_use())

    def clear_cached(self) -> int:
        """Evict every cached page; returns how many."""
        count = self.memory.index.cached
        self.memory.evict(count)
        return count

    def check(self) -> None:
        """Recount everything from scratch; raises AssertionError where something does not add up."""
        audit.check(self.memory, self._registry)

    # --- the parts of the above ----------------------------------------------------------------------------------

    def _must_live(self, context: Context) -> None:
        if context.closed:
            raise NotFound(f"no context {context.id!r}")

    def _must_be_resident(self, context: Context) -> None:
        self._must_live(context)
        if context.suspended:
            raise FailedPrecondition(f"context {context.id!r} is suspended")

    def _unused_id(self, tenant: str, context_id: str | None) -> str:
        return self._registry.unused(tenant, self._new_id() if context_id is None else context_id)


def _count(path: Sequence[PageNode]) -> tuple[int, int]:
    return len(path), sum(node.holders == 0 for node in path)
