"""Page numbers as tenants see them: a tenant's pages, numbered from 1 in the order in which it first saw each.

A page id reveals where the page is in the pool, and a series of ids reveals what other tenants allocate and release. A
page number reveals to a tenant only whether two pages are the same. A page that was free in between counts as a new
page and gets a new number.
"""

from collections import defaultdict
from collections.abc import Iterable

from jaxctx.cache.page_pool import PagePool

MIN_NUMBERS_KEPT = 1024  # of a tenant; above that, numbers of pages that were freed are dropped now and then


class PageNumbers:
    """Page numbers of all tenants, for the pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # By tenant, then by page id and the allocation that took the page.
        self._numbers: defaultdict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self._last: defaultdict[str, int] = defaultdict(int)
        self._max_kept: dict[str, int] = {}  # by tenant; above that many numbers, those of freed pages are dropped

    def of(self, tenant: str, pages: Iterable[int]) -> list[int]:
        """The tenant's numbers of these pages, in their order. None of the pages may be free."""
        numbers = self._numbers[tenant]
        result: list[int] = []
        for page in pages:
            key = page, self._pool.allocation_of(page)
            if key not in numbers:
                self._last[tenant] += 1
                numbers[key] = self._last[tenant]
            result.append(numbers[key])
        if len(numbers) > self._max_kept.get(tenant, MIN_NUMBERS_KEPT):
            self._drop_freed(numbers)
            self._max_kept[tenant] = max(MIN_NUMBERS_KEPT, 2 * len(numbers))
        return result

    def _drop_freed(self, numbers: dict[tuple[int, int], int]) -> None:
        """Remove the numbers of pages that were freed since they were numbered."""
        for page, allocation in list(numbers):
            if self._pool.allocation_of(page) != allocation:
                del numbers[page, allocation]
