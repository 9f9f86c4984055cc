"""Page control: tokens and pages that go, and pages by hand. Each is atomic: one that raises has changed nothing.

What `ContextCache.control` offers beside the life of a context. Called by the engine's operations.
"""

from typing import TYPE_CHECKING

from jaxctx.cache.context import Context
from jaxctx.cache.memory import Memory
from jaxctx.cache.pages import OutOfPages
from jaxctx.errors import FailedPrecondition, InvalidArgument, OutOfRange

if TYPE_CHECKING:
    from jaxctx.cache.contexts import ContextCache


class PageControl:
    """Of one cache. Every method raises NotFound for a context that is closed."""

    def __init__(self, cache: "ContextCache", memory: Memory) -> None:
        self._cache = cache
        self._memory = memory

    def truncate(self, context: Context, tokens: int) -> None:
        """Drop trailing tokens, buffered ones and then working ones; pages stay reserved.

        Raises OutOfRange where that would reach into committed pages. (A suspended context has none.)
        """
        self._cache.must_live(context)
        droppable = context.working_tokens + context.buffered_tokens
        if not 0 <= tokens <= droppable:
            raise OutOfRange(f"{tokens} tokens to drop, {droppable} outside committed pages")
        self._memory.shorten(context, context.length - tokens)

    def rewind(self, context: Context, to: int) -> None:
        """Keep the first `to` tokens, without computing.

        Within buffered tokens and working pages this is a truncate. Across committed pages the layout becomes that of
        a context just filled with `to` tokens: pages behind are released and stay cached, tokens of a partial page are
        copied to a working page, other working pages are free. Raises OutOfRange; OutOfPages if a page is needed and
        other contexts hold all.
        """
        self._cache.must_live(context)
        if not 0 <= to <= context.length:
            raise OutOfRange(f"rewind to {to} of a context of {context.length} tokens")
        if to >= context.committed_pages * self._cache.page_size:  # of a suspended context: always
            self._memory.shorten(context, to)
            return
        pages, partial = divmod(to, self._cache.page_size)
        # Its own pages behind `to` serve as well, if no other context holds them.
        if partial and not context.working and not self._memory.available and context.tail.holders > 1:
            raise OutOfPages("a rewind into a page needs a working page, and other contexts hold all")
        source = context.tail.ancestor(pages + 1).page
        self._memory.free_working(context, keep=min(partial, 1))
        self._memory.shorten(context, to)
        context.held_back = False
        if not partial:
            return
        if not context.working:
            self._memory.add_working(context, 1)
        context.working_tokens = partial
        if (target := context.working[0]) != source:
            self._memory.tiers.copy([source], [target])

    def reserve(self, context: Context, pages: int) -> None:
        """Add empty working pages; a suspended context comes back first, as by `match`.

        Raises InvalidArgument for more than the pool has at all, OutOfPages for more than can be had now.
        """
        self._cache.must_live(context)
        if not 0 <= pages <= self._memory.pool.total:
            raise InvalidArgument.field("pages", f"0 to {self._memory.pool.total}, the size of the pool")
        if context.suspended:
            self._memory.must_have(pages + self._cache.peek(context).unheld)
            self._cache.match(context)
        self._memory.add_working(context, pages)

    def commit(self, context: Context, pages: int) -> None:
        """Commit the first `pages` working pages.

        Raises OutOfRange if there are fewer, FailedPrecondition (PAGE_NOT_FULL) if one of them is not full.
        """
        self._cache.must_live(context)
        if not 0 <= pages <= len(context.working):
            raise OutOfRange(f"{pages} pages to commit, {len(context.working)} working pages")
        if pages * self._cache.page_size > context.working_tokens:
            message = f"{pages} pages to commit, {context.working_tokens} tokens in working pages"
            raise FailedPrecondition(message, reason="PAGE_NOT_FULL")
        self._memory.commit(context, pages)
        context.by_hand = None

    def release(self, context: Context, pages: int) -> None:
        """Give back the last working pages. Tokens in them are dropped, and then the buffered ones behind them too.

        Raises OutOfRange if there are fewer.
        """
        self._cache.must_live(context)
        keep = len(context.working) - pages
        if pages < 0 or keep < 0:
            raise OutOfRange(f"{pages} pages to release, {len(context.working)} working pages")
        if keep * self._cache.page_size < context.working_tokens:
            self._memory.shorten(context, (context.committed_pages + keep) * self._cache.page_size)
        self._memory.free_working(context, keep)
