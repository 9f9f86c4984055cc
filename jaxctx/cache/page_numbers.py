"""Numbers of pages as tenants see them: in the order in which each was first shown them, from 1.

Where a page lies in the pool, and which page comes next, tells what others take and give back. A number tells a tenant
only whether two pages are one and the same. A page that was free in between is another one, with another number.
"""

from collections import defaultdict
from collections.abc import Iterable

from jaxctx.cache.page_pool import PagePool

ROOM = 1024  # numbers of a tenant that are kept without looking which pages are gone


class PageNumbers:
    """Of the pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._numbers: defaultdict[str, dict[tuple[int, int], int]] = defaultdict(dict)  # by tenant, then by page
        self._last: defaultdict[str, int] = defaultdict(int)
        self._room: defaultdict[str, int] = defaultdict(lambda: ROOM)

    def of(self, tenant: str, pages: Iterable[int]) -> list[int]:
        """What the tenant calls these pages, none of which is free."""
        numbers, told = self._numbers[tenant], list[int]()
        for page in pages:
            name = page, self._pool.taking(page)
            if name not in numbers:
                self._last[tenant] += 1
                numbers[name] = self._last[tenant]
            told.append(numbers[name])
        if len(numbers) > self._room[tenant]:
            for page, taking in [*numbers]:
                if self._pool.taking(page) != taking:
                    del numbers[page, taking]
            self._room[tenant] = max(ROOM, 2 * len(numbers))
        return told
