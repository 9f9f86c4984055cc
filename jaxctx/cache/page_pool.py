"""Page pool: which slots of the KV array are free.

A `PagePool` hands out page ids and takes them back. It never sees keys, values, tokens or contexts, and never waits:
running out is an answer, not an event. Called by `block_manager` only, which knows what a page that is not free is for:

    free ──allocate──▶ working ──commit──▶ held (n holders) ──last release──▶ cached (no holder) ──evict──▶ free
                          └───────────────────── close, release, merge ────────────────────────────────────▶ free

Adjacent pages are read faster than scattered ones. Hence ids are handed out in runs: sequences of adjacent pages.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from jaxctx.errors import Internal, ResourceExhausted


class OutOfPages(ResourceExhausted):
    """Fewer pages are free or evictable than were requested. None was taken."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="OUT_OF_PAGES", retry_after_s=1.0)


class PagePool:
    """The free pages among `first_page .. first_page + pages - 1`."""

    def __init__(self, pages: int, first_page: int = 0) -> None:
        self.total = pages
        self.first_page = first_page
        self.free = 0
        # A slot is the distance of a page to the first one.
        self._allocations = 0  # calls of `allocate` so far
        self._allocated_by = [0] * pages  # by slot: the number of the allocation that took it last
        self._is_free = bytearray(pages + 1)  # by slot; one more at the end, never free, so that searches end there
        self._runs: list[tuple[int, int]] = []  # maximal runs of free pages as (length, first slot), sorted
        self.release(range(first_page, first_page + pages))

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages: first those that follow page `after` directly, then as few runs as possible.

        `after` must not be free. The choice is deterministic. Raises OutOfPages, and takes none, if fewer are free.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages are not available")  # how many are free depends on other tenants
        self._allocations += 1
        taken: list[int] = []
        if count and after is not None and self._is_free[after + 1 - self.first_page]:
            taken += self._cut(after + 1 - self.first_page, count)
        while len(taken) < count:
            missing = count - len(taken)
            fitting = bisect_left(self._runs, (missing, 0))  # the shortest run that is long enough
            longest = len(self._runs) - 1
            _, start = self._runs[min(fitting, longest)]
            taken += self._cut(start, missing)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Make pages free. Raises Internal, and frees none, if one is free already, given twice or not of this pool."""
        slots = [page - self.first_page for page in pages]
        has_duplicates = len(set(slots)) < len(slots)
        if has_duplicates or any(not 0 <= slot < self.total or self._is_free[slot] for slot in slots):
            raise Internal(f"pages {pages} cannot be given back: free already, or not of this pool")
        self.free += len(slots)
        for start, end in _runs(slots):  # a run is joined with the free runs that touch it
            joined_start = self._is_free.rfind(0, 0, start) + 1
            joined_end = self._is_free.find(0, end)
            if joined_start < start:
                self._remove_run(joined_start, start)
            if end < joined_end:
                self._remove_run(end, joined_end)
            self._is_free[start:end] = b"\1" * (end - start)
            insort(self._runs, (joined_end - joined_start, joined_start))

    def allocation_of(self, page: int) -> int:
        """The number of the allocation that took this page last: a new one each time that the page is taken."""
        return self._allocated_by[page - self.first_page]

    def _cut(self, start: int, count: int) -> range:
        """Take up to `count` pages from the front of the free run that begins with slot `start`; their ids."""
        end = self._is_free.find(0, start)
        cut = min(start + count, end)
        self._remove_run(start, end)
        if cut < end:
            insort(self._runs, (end - cut, cut))
        self._is_free[start:cut] = bytes(cut - start)
        self._allocated_by[start:cut] = [self._allocations] * (cut - start)
        self.free -= cut - start
        return range(self.first_page + start, self.first_page + cut)

    def _remove_run(self, start: int, end: int) -> None:
        """Remove the free run of the slots `[start, end)` from the list of runs."""
        del self._runs[bisect_left(self._runs, (end - start, start))]


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Split slots into maximal ascending runs, as (first slot, slot after the last)."""
    start = 0
    for stop in range(1, len(slots) + 1):
        if stop == len(slots) or slots[stop] != slots[stop - 1] + 1:
            yield slots[start], slots[stop - 1] + 1
            start = stop
