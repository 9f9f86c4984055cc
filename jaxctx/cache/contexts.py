"""Contexts: the front of this room. Every operation on contexts and their pages, and the memory they share.

A `ContextCache` decides; it never moves data. What must happen on the device is returned as `PageCopy`s, which the
engine carries out in the given order before its next step. Nothing here waits: what does not fit raises OutOfPages, and
the engine suspends `victims`, queues or refuses. Every operation is atomic: one that raises has changed nothing. One
thread owns a cache and its contexts.

    append ──▶ buffered ──(engine computes; settle)──▶ working ──full──▶ committed
                  └───────────────match: a committed page holds them already──▲
"""

from __future__ import annotations

import builtins
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy.typing as npt
from xxhash import xxh3_128_digest

from jaxctx.cache import audit
from jaxctx.cache.context import Context
from jaxctx.cache.pages import OutOfPages, PagePool, PoolStats
from jaxctx.cache.prefix import TOKEN_BYTES, Identity, PrefixIndex, encode_tokens
from jaxctx.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, OutOfRange

__all__ = ["Context", "ContextCache", "Identity", "OutOfPages", "PageCopy", "PoolStats"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The engine must copy page `source` onto page `target` on the device before the next step."""

    source: int
    target: int


class ContextCache:
    """All contexts of one engine, their pages `first_page .. first_page + pages - 1`, and the prefixes they share.

    `clock` and `new_id` are the world: what time it is, and an id nobody has. `digest` is the index's hash.
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
        self.pool = PagePool(pages, first_page)
        self.index = PrefixIndex(page_size, digest)
        self.contexts: dict[tuple[str, str], Context] = {}
        self.by_use: OrderedDict[Context, None] = OrderedDict()  # not suspended; least recently used first
        self._ids: dict[str, builtins.list[str]] = {}  # of each tenant, sorted
        self._clock = clock
        self._new_id = new_id

    # --- which contexts there are --------------------------------------------------------------------------------

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
        context_id = self._free_id(tenant, context_id)
        root = self.index.root(identity)
        now = self._clock()
        context = Context(
            id=context_id,
            tenant=tenant,
            identity=identity,
            page_size=self.page_size,
            parent_id=None,
            priority=priority,
            pinned=pinned,
            manual_commit=manual_commit,
            labels=dict(labels or {}),
            created_at=now,
            used_at=now,
            root=root,
            tail=root,
        )
        return self._enter(context)

    def fork(self, context: Context, *, context_id: str | None = None) -> tuple[Context, builtins.list[PageCopy]]:
        """A child that begins as `context` stands now, at a cost that does not depend on its length.

        Committed pages are shared, working pages with tokens are copied, reserved empty ones are not inherited, and
        buffered tokens are. The child is not pinned. A suspended context has suspended children. Also works while a
        writer holds the context: what that has not settled yet is buffered or unknown to the child.

        Raises AlreadyExists, NotFound (closed), OutOfPages.
        """
        self._must_live(context)
        context_id = self._free_id(context.tenant, context_id)
        sources = context.working[: self._pages_for(context.working_tokens)]
        targets = self._take(len(sources))
        now = self._clock()
        child = Context(
            id=context_id,
            tenant=context.tenant,
            identity=context.identity,
            page_size=self.page_size,
            parent_id=context.id,
            priority=context.priority,
            pinned=False,
            manual_commit=context.manual_commit,
            labels=context.labels,
            created_at=now,
            used_at=now,
            root=context.root,
            tail=context.tail,
            working=targets,
            recent=context.recent[:],
            working_tokens=context.working_tokens,
            suspended=context.suspended,
        )
        return self._enter(child), [PageCopy(*pages) for pages in zip(sources, targets, strict=True)]

    def get(self, tenant: str, context_id: str) -> Context:
        """Raises NotFound, for another tenant's context too."""
        context = self.contexts.get((tenant, context_id))
        if context is None:
            raise NotFound(f"no context {context_id!r}")
        return context

    def list(self, tenant: str, after: str, limit: int) -> builtins.list[Context]:
        """Up to `limit` of the tenant's contexts in id order, beginning after the id `after`."""
        ids = self._ids.get(tenant, [])
        start = bisect_right(ids, after)
        return [self.contexts[tenant, context_id] for context_id in ids[start : start + limit]]

    def close(self, context: Context) -> None:
        """Give up a context; of the pages that only it held, committed ones stay cached. Raises NotFound if closed."""
        self._must_live(context)
        self._drop_pages(context)
        context.closed = True
        self.by_use.pop(context, None)
        del self.contexts[context.tenant, context.id]
        ids = self._ids[context.tenant]
        del ids[bisect_left(ids, context.id)]
        if not ids:
            del self._ids[context.tenant]

    # --- tokens come ---------------------------------------------------------------------------------------------

    def append(self, context: Context, tokens: npt.ArrayLike) -> None:
        """Add tokens to the buffered ones; takes no pages. Raises InvalidArgument, NotFound (closed)."""
        self._must_live(context)
        context.recent += encode_tokens(tokens)

    def match(self, context: Context) -> int:
        """Move the buffered tokens that committed pages hold already into the context's chain; returns how many.

        Restores a suspended context first: all its tokens are buffered, and matched from the beginning; what is not
        found stays buffered, to be computed. Finds nothing where working tokens stand before the buffered ones.
        """
        self._must_live(context)
        if context.suspended:
            context.recent = bytearray(context.token_bytes())
            context.tail = context.root
            context.suspended = False
            context.table = None
            self.index.acquire(context.root)
            self.touch(context)
        if context.working_tokens:
            return 0
        path = self.index.walk(context.tail, bytes(context.recent))
        if not path:
            return 0
        self.index.acquire(path[-1])
        self.index.release(context.tail)
        context.tail = path[-1]
        context.table = None
        del context.recent[: len(path) * self.index.page_bytes]
        return len(path) * self.page_size

    def resident(self, identity: Identity, tokens: npt.ArrayLike) -> int:
        """How many of `tokens` a match would find for a new context. Changes nothing."""
        return len(self.index.walk(self.index.root(identity), encode_tokens(tokens))) * self.page_size

    def resident_extension(self, context: Context, tokens: npt.ArrayLike) -> int:
        """How many tokens a match would find once `tokens` were appended, buffered ones counted. Changes nothing."""
        if context.working_tokens:
            return 0
        start, known = context.tail, bytes(context.recent)
        if context.suspended:
            start, known = context.root, context.token_bytes()
        return len(self.index.walk(start, known + encode_tokens(tokens))) * self.page_size

    def grow(self, context: Context, tokens: int) -> None:
        """Have working pages for `tokens` tokens beyond `seq_len`, evicting cached pages as needed.

        Raises OutOfPages and takes none; FailedPrecondition for a suspended context (match restores it).
        """
        self._add_working(context, self._pages_for(context.working_tokens + tokens) - len(context.working))

    def settle(self, context: Context, tokens: int) -> int:
        """The KV of the first `tokens` buffered tokens is on the device now: they become working tokens.

        Full working pages commit, unless the context commits by hand. Returns how many of them another context had
        committed meanwhile: those were merged and the duplicates are free. Raises OutOfRange if fewer tokens are
        buffered, FailedPrecondition if there are no pages for them.
        """
        self._must_be_resident(context)
        if tokens > context.buffered_tokens:
            raise OutOfRange(f"{tokens} tokens to settle, {context.buffered_tokens} buffered")
        if context.working_tokens + tokens > len(context.working) * self.page_size:
            raise FailedPrecondition(f"no working pages for {tokens} more tokens")
        context.working_tokens += tokens
        return 0 if context.manual_commit else self._commit(context, context.working_tokens // self.page_size)

    # --- tokens go -----------------------------------------------------------------------------------------------

    def truncate(self, context: Context, tokens: int) -> None:
        """Drop trailing tokens, buffered ones and then working ones; pages stay reserved.

        Raises OutOfRange where that would reach into committed pages.
        """
        self._must_live(context)
        droppable = context.working_tokens + context.buffered_tokens
        if not 0 <= tokens <= droppable:
            raise OutOfRange(f"{tokens} tokens to drop, {droppable} outside committed pages")
        self._keep(context, context.length - tokens)

    def rewind(self, context: Context, to: int) -> builtins.list[PageCopy]:
        """Keep the first `to` tokens, without computing.

        Within buffered tokens and working pages this is a truncate. Across committed pages, those behind `to` are
        released and stay cached; tokens of a partial page are copied to a working page; other working pages become
        free. Raises OutOfRange; OutOfPages if a page is needed and all others are held by others.
        """
        self._must_live(context)
        if not 0 <= to <= context.length:
            raise OutOfRange(f"rewind to {to} of a context of {context.length} tokens")
        if context.suspended or to >= context.committed_pages * self.page_size:
            self._keep(context, to)
            return []
        pages, partial = divmod(to, self.page_size)
        # Releasing the tail makes a page available unless another context holds it as well.
        if partial and not context.working and not self.available() and context.tail.holders > 1:
            raise OutOfPages("a rewind into a page needs a working page, and all pages are held")
        source = context.tail.ancestor(pages + 1).page
        self._give_back(context, keep=min(partial, 1))
        self._keep(context, to)
        if not partial:
            return []
        if not context.working:
            self._add_working(context, 1)
        context.working_tokens = partial
        target = context.working[0]  # the very source, if nothing else was to be had
        return [PageCopy(source, target)] if source != target else []

    # --- manual page operations ----------------------------------------------------------------------------------

    def reserve(self, context: Context, pages: int) -> None:
        """Add empty working pages.

        Raises InvalidArgument for more than the pool has at all, OutOfPages for more than there are now, and
        FailedPrecondition for a suspended context (match restores it).
        """
        if not 0 <= pages <= self.pool.total:
            raise InvalidArgument.field("pages", f"0 to {self.pool.total}, the size of the pool")
        self._add_working(context, pages)

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
        self._commit(context, pages)

    def release(self, context: Context, pages: int) -> None:
        """Give back working pages from the tail, and drop all tokens from the first one in them on, buffered or not.

        Raises OutOfRange if there are fewer.
        """
        self._must_live(context)
        if not 0 <= pages <= len(context.working):
            raise OutOfRange(f"{pages} pages to release, {len(context.working)} working pages")
        keep = len(context.working) - pages
        if keep * self.page_size < context.working_tokens:
            self._keep(context, (context.committed_pages + keep) * self.page_size)
        self._give_back(context, keep)

    # --- memory --------------------------------------------------------------------------------------------------

    def suspend(self, context: Context) -> int:
        """Give up all pages and keep the tokens; returns how many pages became free or evictable."""
        self._must_live(context)
        gained = self._drop_pages(context)
        context.suspended = True
        context.working_tokens = 0
        self.by_use.pop(context, None)
        return gained

    def victims(self) -> Iterator[Context]:
        """Contexts that may be suspended: idle, not pinned, holding pages; least recently used first."""
        for context in [*self.by_use]:
            idle = not (context.busy or context.pinned or context.suspended or context.closed)
            if idle and (context.committed_pages or context.working):
                yield context

    def touch(self, context: Context) -> None:
        """The context is used now."""
        context.used_at = self._clock()
        if not context.suspended:
            self.by_use[context] = None
            self.by_use.move_to_end(context)

    def available(self) -> int:
        """Pages that can be had at once: free or evictable."""
        return self.pool.free + self.index.cached

    def stats(self) -> PoolStats:
        """Where the pages are."""
        return PoolStats(self.pool.total, self.pool.free, self.index.cached, self.pool.total - self.available())

    def refcounts(self, context: Context) -> builtins.list[int]:
        """How many contexts hold each page of the page table. Walks all contexts."""
        return audit.refcounts(context, self.contexts.values())

    def clear_cached(self) -> int:
        """Evict every cached page; returns how many."""
        count = self.index.cached
        self.pool.release([self.index.evict() for _ in range(count)])
        return count

    def check(self) -> None:
        """Recount everything from scratch; raises AssertionError where something does not add up."""
        audit.check(self.pool, self.index, self.contexts, self.by_use)

    # --- the parts of the above ----------------------------------------------------------------------------------

    def _must_live(self, context: Context) -> None:
        if context.closed:
            raise NotFound(f"no context {context.id!r}")

    def _must_be_resident(self, context: Context) -> None:
        self._must_live(context)
        if context.suspended:
            raise FailedPrecondition(f"context {context.id!r} is suspended")

    def _free_id(self, tenant: str, context_id: str | None) -> str:
        context_id = self._new_id() if context_id is None else context_id
        if (tenant, context_id) in self.contexts:
            raise AlreadyExists(f"there is a context {context_id!r} already")
        return context_id

    def _enter(self, context: Context) -> Context:
        if not context.suspended:
            self.index.acquire(context.tail)
            self.by_use[context] = None
        self.contexts[context.tenant, context.id] = context
        insort(self._ids.setdefault(context.tenant, []), context.id)
        return context

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self, count: int, after: int | None = None) -> builtins.list[int]:
        """Take free pages, evicting cached ones as needed, least recently used first."""
        if count > self.available():
            raise OutOfPages(f"{count} pages needed, {self.available()} of {self.pool.total} free or evictable")
        self.pool.release([self.index.evict() for _ in range(count - self.pool.free)])
        return self.pool.allocate(count, after)

    def _add_working(self, context: Context, count: int) -> None:
        """Append empty working pages, next to the context's last page if those are free."""
        self._must_be_resident(context)
        if count <= 0:
            return
        pages = self._take(count, context.working[-1] if context.working else context.tail.page)
        context.working += pages
        if context.table is not None:
            context.table.append(pages)

    def _give_back(self, context: Context, keep: int) -> None:
        """Free all working pages but the first `keep`."""
        self.pool.release(context.working[keep:])
        del context.working[keep:]
        context.table = None

    def _commit(self, context: Context, count: int) -> int:
        """Commit the first `count` working pages, all full; returns how many were merged."""
        duplicates: builtins.list[int] = []
        for page in context.working[:count]:
            tokens = bytes(context.recent[: self.index.page_bytes])
            node = self.index.commit(context.tail, tokens, page)
            if node.page != page:
                duplicates.append(page)
                if context.table is not None:
                    context.table.replace(context.tail.depth, node.page)
            context.tail = node
            del context.recent[: self.index.page_bytes]
        del context.working[:count]
        context.working_tokens -= count * self.page_size
        self.pool.release(duplicates)
        return len(duplicates)

    def _keep(self, context: Context, length: int) -> None:
        """Drop all tokens but the first `length`, and the hold on nodes behind them."""
        pages = length // self.page_size
        tail = context.tail
        if pages < tail.depth:
            context.recent = bytearray(tail.ancestor(pages + 1).tokens)
            context.tail = tail.ancestor(pages)
            context.working_tokens = 0
            context.table = None
            if not context.suspended:
                self.index.acquire(context.tail)
                self.index.release(tail)
        tokens = length - context.tail.depth * self.page_size
        del context.recent[tokens * TOKEN_BYTES :]
        context.working_tokens = min(context.working_tokens, tokens)

    def _drop_pages(self, context: Context) -> int:
        """Free the working pages and let go of the chain; returns how many pages became free or evictable."""
        if context.suspended:
            return 0
        freed = len(context.working)
        self._give_back(context, keep=0)
        return freed + self.index.release(context.tail)
