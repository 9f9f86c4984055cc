"""Memory: pool and index as one, and the moves of pages between them and the contexts.

Every page is free (pool), a working page of one context, or a node's (index); the methods here are the only places
where one becomes the other. They trust their arguments: `contexts` has refused before what would be an error, so only
`take` raises, and it comes first wherever it is needed. Called by `contexts` only.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxctx.cache.context import Context
from jaxctx.cache.pages import OutOfPages, PagePool, PoolStats
from jaxctx.cache.prefix import TOKEN_BYTES, PageNode, PrefixIndex


class Memory:
    """The pages `first_page .. first_page + pages - 1` of one engine."""

    def __init__(self, pages: int, first_page: int, page_size: int, digest: Callable[[bytes], bytes]) -> None:
        self.page_size = page_size
        self.pool = PagePool(pages, first_page)
        self.index = PrefixIndex(page_size, digest)

    @property
    def available(self) -> int:
        """Pages that can be taken at once: free or evictable."""
        return self.pool.free + self.index.cached

    @property
    def stats(self) -> PoolStats:
        """Where the pages are."""
        return PoolStats(self.pool.total, self.pool.free, self.index.cached, self.pool.total - self.available)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def must_have(self, count: int) -> None:
        """Raises OutOfPages unless `count` pages can be taken."""
        if count > self.available:
            raise OutOfPages(f"{count} pages needed, {self.available} of {self.pool.total} free or evictable")

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Free pages, if possible next to page `after`; cached ones are evicted as needed, least recently used first.

        Raises OutOfPages and takes none.
        """
        self.must_have(count)
        if count > self.pool.free:
            self.evict(count - self.pool.free)
        return self.pool.allocate(count, after)

    def evict(self, count: int) -> None:
        """Make `count` cached pages free."""
        self.pool.release([self.index.evict() for _ in range(count)])

    def add_working(self, context: Context, count: int) -> None:
        """Append empty working pages, if possible next to the context's last page. Raises OutOfPages."""
        last = context.working[-1] if context.working else context.tail.page if context.tail.depth else None
        pages = self.take(count, last)
        context.working += pages
        if context.table is not None:
            context.table.append(pages)

    def free_working(self, context: Context, keep: int) -> None:
        """Free all working pages but the first `keep`; the others' tokens are the caller's business."""
        self.pool.release(context.working[keep:])
        del context.working[keep:]
        if context.table is not None:
            context.table.truncate(context.committed_pages + keep)

    def commit(self, context: Context, count: int) -> int:
        """Commit the first `count` working pages, all full; returns how many were merged with equal committed ones."""
        page_bytes = self.index.page_bytes
        duplicates: list[int] = []
        for position, page in enumerate(context.working[:count]):
            tokens = bytes(context.recent[position * page_bytes : (position + 1) * page_bytes])
            context.tail = self.index.commit(context.tail, tokens, page)
            if context.tail.page != page:
                duplicates.append(page)
                if context.table is not None:
                    context.table.replace(context.tail.depth - 1, context.tail.page)
        del context.working[:count]
        del context.recent[: count * page_bytes]
        context.working_tokens -= count * self.page_size
        self.pool.release(duplicates)
        return len(duplicates)

    def adopt(self, context: Context, path: list[PageNode]) -> None:
        """Let indexed nodes that hold the context's next tokens continue its chain."""
        self._move_hold(context, path[-1])
        del context.recent[: len(path) * self.index.page_bytes]

    def shorten(self, context: Context, length: int) -> None:
        """Drop all tokens but the first `length`, and the hold on nodes that are not full any more."""
        tail, pages = context.tail, length // self.page_size
        if pages < tail.depth:
            context.recent = bytearray(tail.ancestor(pages + 1).tokens)
            context.working_tokens = 0
            self._move_hold(context, tail.ancestor(pages))
        tokens = length - context.tail.depth * self.page_size
        del context.recent[tokens * TOKEN_BYTES :]
        context.working_tokens = min(context.working_tokens, tokens)

    def suspend(self, context: Context) -> int:
        """Give up all pages, keep the tokens; returns how many pages became free or cached."""
        freed = len(context.working)
        self.free_working(context, keep=0)
        context.working_tokens = 0
        context.suspended = True
        context.table = None
        return freed + self.index.release(context.tail)

    def restore(self, context: Context) -> None:
        """Undo a suspension: no pages, and all tokens buffered."""
        context.recent = bytearray(context.token_bytes())
        context.tail = context.root
        context.suspended = False
        context.table = None
        self.index.acquire(context.root)

    def _move_hold(self, context: Context, tail: PageNode) -> None:
        """Another last node for the context; a suspended one holds neither."""
        if not context.suspended:
            self.index.acquire(tail)
            self.index.release(context.tail)
        context.tail = tail
        context.table = None
