"""Memory: pool, index and tiers as one, and the moves of pages between them and the contexts.

Every page is free (pool), a working page of one context, or a node's (index); the methods here are the only places
where one becomes the other. They trust their arguments: `contexts` and `control` have refused before what would be an
error, so only `take` raises, and it comes first wherever it is needed; `restore` is `ContextCache.restore`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxctx.cache.attention_overrides import encode_page
from jaxctx.cache.context import Context, OffloadedPage
from jaxctx.cache.page_pool import OutOfPages, PagePool
from jaxctx.cache.prefix_index import NOWHERE, TOKEN_BYTES, PageNode, PrefixIndex
from jaxctx.cache.tiers import TierEntry, Tiers
from jaxctx.errors import DataLoss

Ready = Callable[[int], bool]  # whether the data of a host slot has arrived; DataLoss if it never will


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

    @property
    def available(self) -> int:
        """Pages that can be taken at once: free or evictable."""
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
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def must_have(self, count: int) -> None:
        """Raises OutOfPages unless `count` pages can be taken."""
        if count > self.available:
            raise OutOfPages(f"{count} pages are not to be had")  # how many are is what others leave

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Free pages, if possible next to page `after`; cached ones are evicted as needed, least recently used first.

        Raises OutOfPages and takes none.
        """
        self.must_have(count)
        if count > self.pool.free:
            self.evict(count - self.pool.free)
        return self.pool.allocate(count, after)

    def evict(self, count: int) -> None:
        """Make `count` cached pages free; other tiers keep what they have room for."""
        pages = []
        for _ in range(count):
            node, page = self.index.evict()
            self.tiers.save(node, page)
            pages.append(page)
        self.pool.release(pages)

    def add_working(self, context: Context, count: int) -> None:
        """Append empty working pages, if possible next to the context's last page. Raises OutOfPages."""
        last = context.working[-1] if context.working else context.tail.page if context.tail.depth else None
        context.working += self.take(count, last)

    def free_working(self, context: Context, keep: int) -> None:
        """Free all working pages but the first `keep`; the others' tokens are the caller's business."""
        self.pool.release(context.working[keep:])
        del context.working[keep:]

    def commit(self, context: Context, count: int) -> int:
        """Commit the first `count` working pages, all full; returns how many were merged with equal committed ones."""
        page_bytes = self.index.page_bytes
        duplicates: list[int] = []
        for position, page in enumerate(context.working[:count]):
            tokens = context.recent[position * page_bytes : (position + 1) * page_bytes]
            marks = encode_page(context.marks, context.tail.depth * self.page_size, self.page_size)
            context.tail = self.index.commit(context.tail, context.root, tokens, marks, page)
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
        """Let indexed nodes that hold the context's next tokens continue its chain."""
        self._move_hold(context, path[-1])
        context.recent = context.recent[len(path) * self.index.page_bytes :]
        self.drop_offloaded(context, before=context.tail.depth)  # whoever fills it waits until there is room again

    def shorten(self, context: Context, length: int) -> None:
        """Drop all tokens but the first `length`, and the hold on nodes that are not full any more."""
        tail, pages = context.tail, length // self.page_size
        if pages < tail.depth:
            cut = [*tail.lineage(pages)][-1]  # the first page that goes
            context.recent = cut.tokens
            context.working_tokens = 0
            self._move_hold(context, cut.parent if pages else context.root)
        tokens = length - context.tail.depth * self.page_size
        context.recent = context.recent[: tokens * TOKEN_BYTES]
        context.working_tokens = min(context.working_tokens, tokens)
        context.marks = {index: mark for index, mark in context.marks.items() if index < length}
        context.computed = min(context.computed, length)
        for number, offloaded in [*context.offloaded_pages.items()]:
            offloaded.tokens = min(offloaded.tokens, length - number * self.page_size)
            if offloaded.tokens <= 0:
                self.tiers.drop(context.offloaded_pages.pop(number))
        if context.manual_pages is not None and length < context.manual_pages * self.page_size:
            context.manual_pages = None

    def suspend(self, context: Context) -> int:
        """Give up all pages, keep the tokens; returns how many pages became free or cached.

        Other tiers keep what was in working pages if they have room, in its `offloaded_pages`.
        """
        freed = len(context.working)
        first, context.computed = context.tail.depth, max(context.computed, context.seq_len)
        for position, page in enumerate(context.working[: self.pages_for(context.working_tokens)]):
            offloaded = OffloadedPage(min(self.page_size, context.working_tokens - position * self.page_size))
            self.tiers.save(offloaded, page)
            if not offloaded.lost:
                context.offloaded_pages[first + position] = offloaded
        if context.manual_commit and context.working_tokens and context.manual_pages is None:
            context.manual_pages = first
        return freed + self.release_pages(context)

    def release_pages(self, context: Context) -> int:
        """Free its working pages, and release its hold on committed ones; returns how many of those became cached."""
        self.free_working(context, keep=0)
        context.working_tokens = 0
        context.suspended = True
        context.table = None
        return self.index.release(context.tail)

    def wake(self, context: Context) -> None:
        """Undo a suspension: no pages, and all tokens buffered."""
        context.recent = context.token_bytes()
        context.tail = context.root
        context.suspended = False
        context.table = None
        self.index.acquire(context.root)

    def path(self, context: Context, tokens: int, more: bytes = b"") -> list[PageNode]:
        """The indexed nodes that hold the next full pages of a context's first `tokens` tokens, in whichever tier.

        `more` counts as appended. None where working tokens stand before.
        """
        if context.working_tokens:
            return []
        start, known = context.tail, context.recent
        if context.suspended:
            start, known = context.root, context.token_bytes()
        if context.manual_pages is not None:
            tokens = min(tokens, context.manual_pages * self.page_size)
        known = (known + more)[: max(tokens - start.depth * self.page_size, 0) * TOKEN_BYTES]
        if start.parent is None:
            return self.index.search(context.root, known, context.marks)
        return self.index.walk(start, known, context.root, context.marks)

    def restore(self, context: Context, limit: int, ready: Ready, tokens: int | None = None) -> int:
        """Continue a context with up to `limit` pages that are in other tiers, or came to the device meanwhile.

        `ready` says whether the data of a host slot has arrived, and raises DataLoss if it never will: such a page is
        forgotten. Returns how many pages it gained, within its first `tokens` tokens; each took at most one free page.
        Fewer than there are if one's data has not arrived yet, or there are no more pages. Raises OutOfPages if there
        is not even one; FailedPrecondition for a suspended context (`match` wakes it).
        """
        context.raise_if_suspended()
        tokens = context.length if tokens is None else tokens
        gained, waits = 0, False
        while gained < limit:
            # At the root there may be several ways, of which the longest is taken, not the longest within `limit`.
            most = context.seq_len + (limit - gained) * self.page_size if context.tail.depth else tokens
            within = min(tokens, most)
            ahead = self.lookup_tiers(context, within)[: limit - gained]
            if ahead and not (waits and ahead[0].page == NOWHERE):
                begun = gained
                for item in ahead:
                    if waits := not self._bring(context, item, tokens, gained, ready):
                        break
                    gained += 1
                waits = waits and not ahead[gained - begun].lost  # what is lost is no way any more
            elif self._fetch(context, within, limit - gained):
                waits = True  # but what is fetched may have cost another page its place, and with it this way
            else:
                break
        return gained

    def _fetch(self, context: Context, tokens: int, count: int) -> bool:
        """Fetch up to `count` of its next pages; was it any? To half of the slots: more would drive each other off."""
        begun = len(self.tiers.moves)
        for item in self.lookup_tiers(context, tokens)[: max(min(count, self.tiers.host.total // 2), 1)]:
            if item in self.tiers.host.order:
                self.tiers.host.order.move_to_end(item)
            elif item.host == NOWHERE and item.disk != NOWHERE:
                self.tiers.fetch(item)
        return len(self.tiers.moves) > begun

    def _bring(self, context: Context, item: TierEntry, tokens: int, gained: int, ready: Ready) -> bool:
        """Continue a context with the next item `ahead`, loaded if it is not on the device; was that possible?"""
        number, used = context.seq_len // self.page_size, context.working_tokens // self.page_size
        has_page = item.page != NOWHERE or (isinstance(item, OffloadedPage) and used < len(context.working))
        if item.page == NOWHERE and not self._arrived(item, ready):
            return False
        if not (has_page or gained):
            self.must_have(1)  # nothing was gained before: an error changes nothing
        if not (has_page or self.available):
            return False
        if item.page == NOWHERE:
            self.tiers.hold(item)
        if isinstance(item, PageNode):
            if not has_page:
                page = self.take(1, context.tail.page if context.tail.depth else None)[0]
                self.tiers.load(item, page)
                self.index.place(item, page)
            self.attach_prefix(context, [item])
            return True
        if not has_page:
            self.add_working(context, 1)
        self.tiers.load(item, context.working[used])
        self.tiers.drop(context.offloaded_pages.pop(number))
        count = min(item.tokens, tokens - context.seq_len)
        context.working_tokens += count
        commits = not context.manual_commit if context.manual_pages is None else number < context.manual_pages
        if commits and count == self.page_size and not used:  # else with those before it
            self.commit(context, 1)
        return True

    def lookup_tiers(self, context: Context, tokens: int, more: bytes = b"") -> list[TierEntry]:
        """What of a context's next pages some tier has, as far as it goes without a gap; arguments of `path`.

        Behind what the index holds that is offloaded data.
        """
        items: list[TierEntry] = [*self.path(context, tokens, more)]
        first, partial = divmod(context.seq_len, self.page_size)
        for number in () if partial else range(first + len(items), self.pages_for(tokens)):
            offloaded = context.offloaded_pages.get(number)
            if offloaded is None or offloaded.lost:
                break
            items.append(offloaded)
            if offloaded.tokens < self.page_size:  # what follows has to be computed first
                break
        return items

    def drop_offloaded(self, context: Context, before: int | None = None) -> None:
        """Forget offloaded data; with `before` only of pages before this one, whose tokens have KV again."""
        for number in [number for number in context.offloaded_pages if before is None or number < before]:
            self.tiers.drop(context.offloaded_pages.pop(number))

    def _arrived(self, item: TierEntry, ready: Ready) -> bool:
        """Whether its data is in a host slot. Lost data is forgotten."""
        if item.host == NOWHERE:
            return False
        try:
            return ready(item.host)
        except DataLoss:
            self.tiers.lose(item)
            return False

    def _move_hold(self, context: Context, tail: PageNode | None) -> None:
        """Another last node for the context; a suspended one holds neither."""
        assert tail is not None
        if not context.suspended:
            self.index.acquire(tail)
            self.index.release(context.tail)
        context.tail = tail
        context.table = None
