"""Block manager: page pool, prefix index and tiers together, and the movement of pages between them and contexts.

Every page is free (in the pool), a working page of one context, or the page of a node (in the index). The methods here
are the only places where it changes from one to the other:

    pool ──allocate──▶ working page of a context ──commit──▶ page of a node ──evict──▶ pool
      ▲─────────────────free_working─────┘

The methods trust their arguments: `context_cache` and `page_control` check them first. Only `allocate` and its callers
raise, and they raise before they change anything. Called by `context_cache`, `page_control` and the engine's scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jaxctx.cache.context import Context, OffloadedPage
from jaxctx.cache.page_pool import OutOfPages, PagePool
from jaxctx.cache.prefix_index import NOWHERE, TOKEN_BYTES, PageNode, PrefixIndex
from jaxctx.cache.tiers import TierEntry, Tiers
from jaxctx.errors import DataLoss

Ready: TypeAlias = Callable[[int], bool]  # whether the data of a host slot has arrived; DataLoss if it never will


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Pages in all tiers. On the device, `pages_free + pages_cached + pages_held == pages_total`."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    host_pages_total: int
    host_pages_used: int
    disk_pages_total: int
    disk_pages_used: int


class BlockManager:
    """The pages `first_page .. first_page + pages - 1` of one engine, and slots for copies on the host and on disk."""

    def __init__(self, pages: int, page_size: int, host: int = 0, disk: int = 0, *, first_page: int = 1) -> None:
        self.page_size = page_size
        self.pool = PagePool(pages, first_page)
        self.index = PrefixIndex(page_size)
        self.tiers = Tiers(host, disk)

    # --- pages of the pool ---------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that can be allocated at once: free or evictable."""
        return self.pool.free + self.index.cached

    def stats(self) -> MemoryStats:
        """Pages in all tiers now."""
        return MemoryStats(
            pages_total=self.pool.total,
            pages_free=self.pool.free,
            pages_cached=self.index.cached,
            pages_held=self.pool.total - self.available,
            host_pages_total=self.tiers.host.total,
            host_pages_used=self.tiers.host.used,
            disk_pages_total=self.tiers.disk.total,
            disk_pages_used=self.tiers.disk.used,
        )

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def raise_if_unavailable(self, count: int) -> None:
        """Raises OutOfPages unless `count` pages can be allocated."""
        if count > self.available:
            raise OutOfPages(f"{count} pages are not available")  # how many there are depends on other tenants

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take free pages, if possible adjacent to page `after`. Cached pages are evicted as needed, in LRU order.

        Raises OutOfPages and takes none.
        """
        self.raise_if_unavailable(count)
        if count > self.pool.free:
            self.evict(count - self.pool.free)
        return self.pool.allocate(count, after)

    def evict(self, count: int) -> None:
        """Make `count` cached pages free. The other tiers keep copies as far as they have slots."""
        pages = []
        for _ in range(count):
            node, page = self.index.evict()
            self.tiers.save(node, page)
            pages.append(page)
        self.pool.release(pages)

    # --- working pages and commits -------------------------------------------------------------------------------

    def add_working(self, context: Context, count: int) -> None:
        """Append empty working pages, if possible adjacent to the context's last page. Raises OutOfPages."""
        last = context.working[-1] if context.working else _tail_page(context)
        context.working += self.allocate(count, last)

    def free_working(self, context: Context, keep: int) -> None:
        """Free all working pages but the first `keep`. The caller adjusts the number of working tokens."""
        self.pool.release(context.working[keep:])
        del context.working[keep:]

    def commit(self, context: Context, count: int) -> int:
        """Commit the first `count` working pages, which are full; returns how many merged with equal committed ones."""
        page_bytes, all_overrides = self.index.page_bytes, context.overrides
        duplicates: list[int] = []
        for position, page in enumerate(context.working[:count]):
            tokens = context.recent[position * page_bytes : (position + 1) * page_bytes]
            overrides = all_overrides.of_page(context.tail.depth * self.page_size, self.page_size)
            context.tail = self.index.commit(context.tail, context.root, tokens, overrides, page)
            if context.tail.page != page:
                duplicates.append(page)
            if context.table is not None:
                context.table.append(context.tail.page)
        del context.working[:count]
        context.recent = context.recent[count * page_bytes :]
        context.working_tokens -= count * self.page_size
        self.pool.release(duplicates)
        return len(duplicates)

    def attach_prefix(self, context: Context, path: list[PageNode]) -> None:
        """Continue the context's chain with indexed nodes that hold its next tokens."""
        self._replace_tail(context, path[-1])
        context.recent = context.recent[len(path) * self.index.page_bytes :]
        self.drop_offloaded(context, before=context.tail.depth)

    def shorten(self, context: Context, length: int) -> None:
        """Drop all tokens but the first `length`, and the hold on nodes that are not full any more.

        A switch of adapters at `length` stays: whoever goes back to where a context switched goes on as it did.
        """
        tail = context.tail
        pages = length // self.page_size
        if pages < tail.depth:
            *_, first_dropped = tail.lineage(pages)
            context.recent = first_dropped.tokens
            context.working_tokens = 0
            new_tail = first_dropped.parent if pages else context.root
            assert new_tail is not None
            self._replace_tail(context, new_tail)
        recent_tokens = length - context.tail.depth * self.page_size
        context.recent = context.recent[: recent_tokens * TOKEN_BYTES]
        context.working_tokens = min(context.working_tokens, recent_tokens)
        context.attention_overrides = {
            index: override for index, override in context.attention_overrides.items() if index < length
        }
        context.adapter_switches = tuple(switch for switch in context.adapter_switches if switch.start <= length)
        context.computed = min(context.computed, length)
        for number, offloaded in list(context.offloaded_pages.items()):
            offloaded.tokens = min(offloaded.tokens, length - number * self.page_size)
            if offloaded.tokens <= 0:
                self.tiers.drop(context.offloaded_pages.pop(number))
        context.recommit_pages = min(context.recommit_pages, length // self.page_size)
        if context.manual_pages is not None and length < context.manual_pages * self.page_size:
            context.manual_pages = None

    # --- suspension ----------------------------------------------------------------------------------------------

    def suspend(self, context: Context) -> int:
        """Give up all pages and keep the tokens; returns how many pages became free or cached.

        Data of working pages is copied to other tiers as far as they have slots, see `Context.offloaded_pages`.
        """
        freed = len(context.working)
        first = context.tail.depth
        context.computed = max(context.computed, context.seq_len)
        for position, page in enumerate(context.working[: self.pages_for(context.working_tokens)]):
            offloaded = OffloadedPage(min(self.page_size, context.working_tokens - position * self.page_size))
            self.tiers.save(offloaded, page)
            if not offloaded.lost:
                context.offloaded_pages[first + position] = offloaded
        if context.manual_commit:
            context.recommit_pages = max(context.recommit_pages, first)
            if context.working_tokens and context.manual_pages is None:
                context.manual_pages = context.recommit_pages
        return freed + self.release_pages(context)

    def release_pages(self, context: Context) -> int:
        """Free the working pages and release the hold on committed ones; returns how many of those became cached."""
        self.free_working(context, keep=0)
        context.working_tokens = 0
        context.suspended = True
        context.table = None
        return self.index.release(context.tail)

    def resume(self, context: Context) -> None:
        """End a suspension: the context holds no pages yet, and all its tokens are buffered."""
        context.recent = context.token_bytes()
        context.tail = context.root
        context.suspended = False
        context.table = None
        self.index.acquire(context.root)

    # --- lookup and restore --------------------------------------------------------------------------------------

    def lookup_index(self, context: Context, tokens: int, more: bytes = b"") -> list[PageNode]:
        """The indexed nodes, in any tier, that hold the next full pages within a context's first `tokens` tokens.

        `more` counts as appended to the context. Returns none if working tokens precede those pages.
        """
        if context.working_tokens:
            return []
        start, known = context.tail, context.recent
        if context.suspended:
            start, known = context.root, context.token_bytes()
        if context.manual_pages is not None:
            tokens = min(tokens, context.manual_pages * self.page_size)
        searched = max(tokens - start.depth * self.page_size, 0)
        known = (known + more)[: searched * TOKEN_BYTES]
        if start.parent is None:
            return self.index.search(context.root, known, context.overrides)
        return self.index.walk(start, known, context.root, context.overrides)

    def lookup_tiers(self, context: Context, tokens: int, more: bytes = b"") -> list[TierEntry]:
        """The context's next pages that any tier has, up to the first gap. Arguments as in `lookup_index`.

        Indexed nodes come first, then the context's own offloaded pages.
        """
        entries: list[TierEntry] = [*self.lookup_index(context, tokens, more)]
        first, partial = divmod(context.seq_len, self.page_size)
        if partial:
            return entries
        for number in range(first + len(entries), self.pages_for(tokens)):
            offloaded = context.offloaded_pages.get(number)
            if offloaded is None or offloaded.lost:
                break
            entries.append(offloaded)
            if offloaded.tokens < self.page_size:  # the rest of this page has to be computed first
                break
        return entries

    def restore(self, context: Context, limit: int, ready: Ready, tokens: int | None = None) -> int:
        """Continue a context with up to `limit` pages that are in other tiers, or returned to the device meanwhile.

        `ready` says whether the data of a host slot has arrived, and raises DataLoss if it never will: such a page is
        dropped. Returns how many pages the context gained within its first `tokens` tokens (None: all); each took at
        most one free page. It gains fewer than there are if data has not arrived yet or pages run out. Raises
        OutOfPages if pages run out before the first one; FailedPrecondition for a suspended context (`match` resumes
        it).
        """
        context.raise_if_suspended()
        tokens = context.length if tokens is None else tokens
        gained = 0
        waiting = False  # whether the next page's data has not arrived, or a page for it is missing
        while gained < limit:
            within = self._tokens_to_look_up(context, tokens, limit - gained)
            entries = self.lookup_tiers(context, within)[: limit - gained]
            if entries and not (waiting and entries[0].page == NOWHERE):
                appended = self._append_entries(context, entries, tokens, gained, ready)
                gained += appended
                # If the next entry was lost, the path ends elsewhere now, and there may be another one.
                waiting = appended < len(entries) and not entries[appended].lost
            elif self._fetch(context, within, limit - gained):
                waiting = True  # look again: the fetch may have displaced another page of this path
            else:
                break
        return gained

    def _tokens_to_look_up(self, context: Context, tokens: int, pages: int) -> int:
        """How far into its first `tokens` tokens a context looks for its next `pages` pages.

        At the root, of several paths the longest is taken, whatever the number of pages: all tokens count.
        """
        if not context.tail.depth:
            return tokens
        return min(tokens, context.seq_len + pages * self.page_size)

    def _append_entries(
        self, context: Context, entries: list[TierEntry], tokens: int, gained: int, ready: Ready
    ) -> int:
        """Continue a context with these entries until one cannot be appended; returns how many were.

        `gained` pages were appended before. See `_append_entry`.
        """
        for appended, entry in enumerate(entries):
            if not self._append_entry(context, entry, tokens, gained + appended, ready):
                return appended
        return len(entries)

    def _fetch(self, context: Context, tokens: int, count: int) -> bool:
        """Begin to fetch up to `count` of the context's next pages from disk; returns whether any fetch began.

        At most half of the host slots are used: with more, the fetched pages would displace each other.
        """
        moves_before = len(self.tiers.moves)
        count = max(min(count, self.tiers.host.total // 2), 1)
        for entry in self.lookup_tiers(context, tokens)[:count]:
            if entry in self.tiers.host.order:
                self.tiers.host.order.move_to_end(entry)
            elif entry.host == NOWHERE and entry.disk != NOWHERE:
                self.tiers.fetch(entry)
        return len(self.tiers.moves) > moves_before

    def _append_entry(self, context: Context, entry: TierEntry, tokens: int, gained: int, ready: Ready) -> bool:
        """Continue a context with the next entry of `lookup_tiers`, loading it if needed; returns whether it could.

        Raises OutOfPages only if `gained` is 0, because then nothing has changed yet.
        """
        full_working_pages = context.working_tokens // self.page_size
        if isinstance(entry, PageNode):
            needs_page = entry.page == NOWHERE
        else:
            needs_page = full_working_pages >= len(context.working)
        if entry.page == NOWHERE and not self._has_arrived(entry, ready):
            return False
        if needs_page and not gained:
            self.raise_if_unavailable(1)
        if needs_page and not self.available:
            return False
        if entry.page == NOWHERE:
            self.tiers.protect(entry)
        if isinstance(entry, PageNode):
            if needs_page:
                page = self.allocate(1, _tail_page(context))[0]
                self.tiers.load(entry, page)
                self.index.place(entry, page)
            self.attach_prefix(context, [entry])
        else:
            if needs_page:
                self.add_working(context, 1)
            self._load_working(context, entry, full_working_pages, tokens)
        return True

    def _load_working(self, context: Context, entry: OffloadedPage, position: int, tokens: int) -> None:
        """Load offloaded data into the working page at `position`, and commit that page where it may be."""
        number = context.seq_len // self.page_size
        self.tiers.load(entry, context.working[position])
        self.tiers.drop(context.offloaded_pages.pop(number))
        count = min(entry.tokens, tokens - context.seq_len)
        context.working_tokens += count
        may_commit = not context.manual_commit or number < context.recommit_pages
        if may_commit and count == self.page_size and position == 0:  # else it commits with the pages before it
            self.commit(context, 1)

    def drop_offloaded(self, context: Context, before: int | None = None) -> None:
        """Drop the context's offloaded pages, with `before` only those with a smaller number."""
        for number in list(context.offloaded_pages):
            if before is None or number < before:
                self.tiers.drop(context.offloaded_pages.pop(number))

    def _has_arrived(self, entry: TierEntry, ready: Ready) -> bool:
        """Whether the entry's data is in a host slot. If it is lost, its copies are dropped."""
        if entry.host == NOWHERE:
            return False
        try:
            return ready(entry.host)
        except DataLoss:
            self.tiers.drop_lost(entry)
            return False

    def _replace_tail(self, context: Context, tail: PageNode) -> None:
        """Make `tail` the context's last node, and move its hold there. A suspended context holds no node."""
        if not context.suspended:
            self.index.acquire(tail)
            self.index.release(context.tail)
        context.tail = tail
        context.table = None


def _tail_page(context: Context) -> int | None:
    """The page of the context's last node; None for a root."""
    return context.tail.page if context.tail.depth else None
