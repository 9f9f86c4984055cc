"""Numbers of pages: what tenants see, and what they do not."""

from __future__ import annotations

import random

import pytest

from jaxctx.cache import page_numbers as module
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.page_numbers import PageNumbers
from jaxctx.cache.page_pool import OutOfPages, PagePool


def test_a_page_has_one_number_until_it_is_free_again():
    pool = PagePool(8, first_page=1)
    numbers, pages = PageNumbers(pool), pool.allocate(3)
    assert numbers.of("a", pages) == [1, 2, 3]
    assert numbers.of("a", [*pages[1:], *pool.allocate(1)]) == [2, 3, 4]
    pool.release(pages)
    assert pool.allocate(3) == pages
    assert numbers.of("a", pages) == [5, 6, 7]


def test_each_tenant_has_its_own():
    pool = PagePool(8)
    numbers, pages = PageNumbers(pool), pool.allocate(4)
    assert numbers.of("a", pages[2:]) == [1, 2]
    assert numbers.of("b", pages) == [1, 2, 3, 4]
    assert numbers.of("a", pages) == [3, 4, 1, 2]


def test_numbers_tell_nothing_of_what_others_take_and_give_back():
    """The same of one tenant, whatever a second does meanwhile."""

    def told(others: bool) -> list[list[int]]:
        pool, rng = PagePool(1000), random.Random(1)
        numbers, mine, theirs, seen = PageNumbers(pool), [], [], []
        for _ in range(300):
            if others and rng.getrandbits(1):
                theirs += pool.allocate(rng.randrange(1, 5))
                numbers.of("b", theirs)
            elif others and theirs:
                pool.release([theirs.pop(rng.randrange(len(theirs)))])
            mine += pool.allocate(2)
            seen.append(numbers.of("a", mine))
            if len(mine) > 20:
                pool.release(mine[3:17])
                del mine[3:17]
        return seen

    assert told(others=True) == told(others=False)


def test_those_of_pages_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MIN_NUMBERS_KEPT", 16)
    pool = PagePool(10)
    numbers, kept = PageNumbers(pool), pool.allocate(4)
    first = numbers.of("a", kept)
    for _ in range(1000):
        pages = pool.allocate(5)
        numbers.of("a", pages)
        pool.release(pages)
    assert len(numbers._numbers["a"]) <= 16 + 5
    assert numbers.of("a", kept) == first


def test_what_is_not_to_be_had_tells_no_counts():
    pool = PagePool(7)
    pool.allocate(2)
    manager = BlockManager(7, 4)
    manager.allocate(2)
    for allocate in (pool.allocate, manager.allocate):
        with pytest.raises(OutOfPages) as raised:
            allocate(6)
        assert "5" not in raised.value.message
        assert "7" not in raised.value.message
