"""Page control: dropping tokens, and manual page operations. Each is atomic: one that raises has changed nothing.

`truncate`, `rewind` and `take_back` drop tokens; `reserve`, `commit` and `release` are the page operations that clients
may call themselves. All take the cache and one of its contexts, and raise NotFound for a context that is closed. Called
by the engine's context operations, and by its core for requests that are refused.
"""

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.page_pool import OutOfPages
from jaxctx.errors import FailedPrecondition, OutOfRange


def truncate(cache: ContextCache, context: Context, tokens: int) -> None:
    """Drop the last `tokens` tokens, buffered ones first, then working ones. Their pages stay reserved.

    Raises OutOfRange where that would reach into committed pages. (A suspended context has none.)
    """
    context.raise_if_closed()
    droppable = context.working_tokens + context.buffered_tokens
    if not 0 <= tokens <= droppable:
        raise OutOfRange(f"{tokens} tokens to drop, {droppable} outside committed pages")
    cache.block_manager.shorten(context, context.length - tokens)


def rewind(cache: ContextCache, context: Context, to: int) -> None:
    """Keep the first `to` tokens, without computing anything.

    Within buffered tokens and working pages this is a truncate. Across committed pages, the layout becomes that of a
    context that was just filled with `to` tokens: committed pages after them are released and stay cached, the tokens
    of a partial page are copied to a working page, and other working pages become free.

    Raises OutOfRange; OutOfPages if a working page is needed and other contexts hold all pages.
    """
    context.raise_if_closed()
    if not 0 <= to <= context.length:
        raise OutOfRange(f"rewind to {to} of a context of {context.length} tokens")
    if to >= context.committed_pages * cache.page_size:  # always so if the context is suspended
        cache.block_manager.shorten(context, to)
        return
    pages, partial = divmod(to, cache.page_size)
    needs_page = partial and not context.working
    # The context's own pages after `to` become available by the rewind, unless another context holds them too.
    if needs_page and not cache.block_manager.available and context.tail.holders > 1:
        raise OutOfPages("a rewind into a page needs a working page, and other contexts hold all")
    *_, first_dropped = context.tail.lineage(pages)
    source = first_dropped.page
    cache.block_manager.free_working(context, keep=min(partial, 1))
    cache.block_manager.shorten(context, to)
    if not partial:
        return
    if not context.working:
        cache.block_manager.add_working(context, 1)
    context.working_tokens = partial
    target = context.working[0]
    if target != source:  # they are equal if the page that was released is the one that was allocated
        cache.block_manager.tiers.copy([source], [target])


def take_back(cache: ContextCache, context: Context, to: int) -> None:
    """Keep the first `to` tokens, and never take a page: tokens of a committed page that is kept in part are buffered.

    For what was appended by a request that is refused: that is no time to need a page, as all may be promised. Across
    committed pages, those after `to` are released and stay cached, and all working pages become free.

    Raises OutOfRange.
    """
    context.raise_if_closed()
    if not 0 <= to <= context.length:
        raise OutOfRange(f"{to} tokens to keep of a context of {context.length} tokens")
    if to < context.committed_pages * cache.page_size:
        cache.block_manager.free_working(context, keep=0)
    cache.block_manager.shorten(context, to)


def reserve(cache: ContextCache, context: Context, pages: int) -> None:
    """Add empty working pages. A suspended context is resumed first, as by `match`. Raises OutOfPages."""
    context.raise_if_closed()
    if context.suspended:
        matched = cache.peek(context).unheld  # cached pages that the match will hold
        cache.block_manager.raise_if_unavailable(pages + matched)
        cache.match(context)
    cache.context_table.note_pages(context)
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
    """Free the last `pages` working pages. Tokens in them are dropped, and so are the buffered tokens after those.

    Raises OutOfRange if there are fewer.
    """
    context.raise_if_closed()
    keep = len(context.working) - pages
    if pages < 0 or keep < 0:
        raise OutOfRange(f"{pages} pages to release, {len(context.working)} working pages")
    if keep * cache.page_size < context.working_tokens:
        cache.block_manager.shorten(context, (context.committed_pages + keep) * cache.page_size)
    cache.block_manager.free_working(context, keep)
