"""Pages: which slots of the KV array are free.

A `PagePool` hands out page ids and takes them back. It never sees keys, values, tokens or contexts, and never waits:
running out is an answer, not an event. Called by `contexts` only, which knows what a page that is not free is for:

    free ──allocate──▶ working ──commit──▶ held (n holders) ──last release──▶ cached (no holder) ──evict──▶ free
                          └───────────────────── close, release, merge ────────────────────────────────────▶ free

Pages that lie side by side are read faster than scattered ones, so ids are handed out in runs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from jaxctx.errors import Internal, ResourceExhausted


class OutOfPages(ResourceExhausted):
    """Fewer pages are free or evictable than were asked for. None was taken."""

    default_reason = "OUT_OF_PAGES"


class PagePool:
    """The free pages among `first_page .. first_page + pages - 1`, kept as maximal runs."""

    def __init__(self, pages: int, first_page: int = 0) -> None:
        self.total = pages
        self.first_page = first_page
        self.free = 0
        self._is_free = bytearray(pages)
        self._ends: dict[int, int] = {}  # first page of a free run → the page after its last
        self._starts: dict[int, int] = {}  # and back
        self._by_length: list[tuple[int, int]] = []  # (length, first page), sorted
        self.release(range(first_page, first_page + pages))

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages: the ones that continue page `after` first, then as few runs as the free space allows.

        Deterministic. Raises OutOfPages, and takes none, if fewer are free.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages asked for, {self.free} of {self.total} free")
        taken: list[int] = []
        if count and after is not None and after + 1 in self._ends:
            taken += self._cut(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            best = bisect_left(self._by_length, (missing, 0))  # the shortest run that is long enough, or the longest
            taken += self._cut(self._by_length[min(best, len(self._by_length) - 1)][1], missing)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises Internal, and takes none of them back, if one is free already or not of this pool."""
        pages = list(pages)
        slots = {page - self.first_page for page in pages}
        if len(slots) < len(pages) or any(not 0 <= slot < self.total or self._is_free[slot] for slot in slots):
            raise Internal(f"pages {pages} cannot be given back: free already, or not of this pool")
        for slot in slots:
            self._is_free[slot] = True
        self.free += len(pages)
        for start, end in _runs(pages):
            self._join(start, end)

    def _cut(self, start: int, count: int) -> range:
        """Take up to `count` pages from the front of the free run at `start`."""
        end = self._ends.pop(start)
        del self._by_length[bisect_left(self._by_length, (end - start, start))]
        cut = min(start + count, end)
        if cut < end:
            self._add(cut, end)
        else:
            del self._starts[end]
        self._is_free[start - self.first_page : cut - self.first_page] = bytes(cut - start)
        self.free -= cut - start
        return range(start, cut)

    def _join(self, start: int, end: int) -> None:
        """Add a free run, merged with those that touch it."""
        if (before := self._starts.pop(start, None)) is not None:
            del self._ends[before]
            del self._by_length[bisect_left(self._by_length, (start - before, before))]
            start = before
        if (beyond := self._ends.pop(end, None)) is not None:
            del self._by_length[bisect_left(self._by_length, (beyond - end, end))]
            end = beyond
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        insort(self._by_length, (end - start, start))


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Split into maximal ascending runs: (first page, the page after the last)."""
    start = 0
    for stop in range(1, len(pages) + 1):
        if stop == len(pages) or pages[stop] != pages[stop - 1] + 1:
            yield pages[start], pages[stop - 1] + 1
            start = stop
