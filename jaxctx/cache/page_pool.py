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

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="OUT_OF_PAGES", retry_after_s=1.0)


class PagePool:
    """The free pages among `first_page .. first_page + pages - 1`."""

    def __init__(self, pages: int, first_page: int = 0) -> None:
        self.total = pages
        self.first_page = first_page
        self.free = 0
        self._takings = 0
        self._taken_at = [0] * pages  # by slot: which of all takings took it last
        self._is_free = bytearray(pages + 1)  # by slot, the page's distance to the first; the one behind all never is
        self._runs: list[tuple[int, int]] = []  # maximal ones of free pages: (length, first slot), sorted
        self.release(range(first_page, first_page + pages))

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages: the ones that continue page `after` first, then as few runs as the free space allows.

        `after` is not free. Deterministic. Raises OutOfPages, and takes none, if fewer are free.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages are not to be had")
        self._takings += 1
        taken: list[int] = []
        if count and after is not None and self._is_free[after + 1 - self.first_page]:
            taken += self._cut(after + 1 - self.first_page, count)
        while len(taken) < count:
            missing = count - len(taken)
            best = bisect_left(self._runs, (missing, 0))  # the shortest run that is long enough, or the longest
            taken += self._cut(self._runs[min(best, len(self._runs) - 1)][1], missing)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises Internal, and takes none of them back, if one is free already or not of this pool."""
        slots = [page - self.first_page for page in pages]
        if len({*slots}) < len(slots) or any(not 0 <= slot < self.total or self._is_free[slot] for slot in slots):
            raise Internal(f"pages {pages} cannot be given back: free already, or not of this pool")
        self.free += len(slots)
        for start, end in _runs(slots):  # each one joins those that touch it
            before, beyond = self._is_free.rfind(0, 0, start) + 1, self._is_free.find(0, end)
            for left, right in ((before, start), (end, beyond)):
                if left < right:
                    self._forget(left, right)
            self._is_free[start:end] = b"\1" * (end - start)
            insort(self._runs, (beyond - before, before))

    def taking(self, page: int) -> int:
        """Which taking took this page: another one each time that it is taken."""
        return self._taken_at[page - self.first_page]

    def _cut(self, start: int, count: int) -> range:
        """Take up to `count` pages from the front of the free run that begins with slot `start`."""
        end = self._is_free.find(0, start)
        cut = min(start + count, end)
        self._forget(start, end)
        if cut < end:
            insort(self._runs, (end - cut, cut))
        self._is_free[start:cut] = bytes(cut - start)
        self._taken_at[start:cut] = [self._takings] * (cut - start)
        self.free -= cut - start
        return range(self.first_page + start, self.first_page + cut)

    def _forget(self, start: int, end: int) -> None:
        del self._runs[bisect_left(self._runs, (end - start, start))]


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Split into maximal ascending runs: (first, the one after the last)."""
    start = 0
    for stop in range(1, len(slots) + 1):
        if stop == len(slots) or slots[stop] != slots[stop - 1] + 1:
            yield slots[start], slots[stop - 1] + 1
            start = stop
