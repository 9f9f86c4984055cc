"""Page control: tokens and pages that go, and pages by hand. Each is atomic: one that raises has changed nothing.

What can be done to a context of a cache beside its life. Each raises NotFound for a context that is closed. Called by
the engine's operations.
"""

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.page_pool import OutOfPages
from jaxctx.errors import FailedPrecondition, OutOfRange


def truncate(cache: ContextCache, context: Context, tokens: int) -> None:
    """Drop trailing tokens, buffered ones and then working ones; pages stay reserved.

    Raises OutOfRange where that would reach into committed pages. (A suspended context has none.)
    """
    context.raise_if_closed()
    droppable = context.working_tokens + context.buffered_tokens
    if not 0 <= tokens <= droppable:
        raise OutOfRange(f"{tokens} tokens to drop, {droppable} outside committed pages")
    cache.block_manager.shorten(context, context.length - tokens)


def rewind(cache: ContextCache, context: Context, to: int) -> None:
    """Keep the first `to` tokens, without computing.

    Within buffered tokens and working pages this is a truncate. Across committed pages the layout becomes that of
    a context just filled with `to` tokens: pages behind are released and stay cached, tokens of a partial page are
    copied to a working page, other working pages are free. Raises OutOfRange; OutOfPages if a page is needed and
    other contexts hold all.
    """
    context.raise_if_closed()
    if not 0 <= to <= context.length:
        raise OutOfRange(f"rewind to {to} of a context of {context.length} tokens")
    if to >= context.committed_pages * cache.page_size:  # of a suspended context: always
        cache.block_manager.shorten(context, to)
        return
    pages, partial = divmod(to, cache.page_size)
    # Its own pages behind `to` serve as well, if no other context holds them.
    if partial and not context.working and not cache.block_manager.available and context.tail.holders > 1:
        raise OutOfPages("a rewind into a page needs a working page, and other contexts hold all")
    source = [*context.tail.lineage(pages)][-1].page
    cache.block_manager.free_working(context, keep=min(partial, 1))
    cache.block_manager.shorten(context, to)
    if not partial:
        return
    if not context.working:
        cache.block_manager.add_working(context, 1)
    context.working_tokens = partial
    if (target := context.working[0]) != source:
        cache.block_manager.tiers.copy([source], [target])


def reserve(cache: ContextCache, context: Context, pages: int) -> None:
    """Add empty working pages; a suspended context comes back first, as by `match`. Raises OutOfPages."""
    context.raise_if_closed()
    if context.suspended:
        cache.block_manager.must_have(pages + cache.peek(context).unheld)
        cache.match(context)
    cache.block_manager.add_working(context, pages)


def commit(cache: ContextCache, context: Context, pages: int) -> None:
    """Commit the first `pages` working pages.

    Raises OutOfRange if there are fewer, FailedPrecondition (PAGE_NOT_FULL) if one of them is not full.
    """
    context.raise_if_closed()
    if not 0 <= pages <= len(context.working):
        raise OutOfRange(f"{pages} pages to commit, {len(context.working)} working pages")
    if pages * cache.page_size > context.working_tokens:
        message = f"{pages} pages to commit, {context.working_tokens} tokens in working pages"
        raise FailedPrecondition(message, reason="PAGE_NOT_FULL")
    cache.block_manager.commit(context, pages)
    context.manual_pages = None


def release(cache: ContextCache, context: Context, pages: int) -> None:
    """Give back the last working pages. Tokens in them are dropped, and then the buffered ones behind them too.

    Raises OutOfRange if there are fewer.
    """
    context.raise_if_closed()
    keep = len(context.working) - pages
    if pages < 0 or keep < 0:
        raise OutOfRange(f"{pages} pages to release, {len(context.working)} working pages")
    if keep * cache.page_size < context.working_tokens:
        cache.block_manager.shorten(context, (context.committed_pages + keep) * cache.page_size)
    cache.block_manager.free_working(context, keep)
