from __future__ import annotations

import random

import pytest

from jaxctx.cache.page_pool import OutOfPages, PagePool
from jaxctx.errors import Internal, ResourceExhausted

from .invariants import check_pool, is_free, runs


def test_a_fresh_pool_is_one_run():
    pool = PagePool(8, first_page=1)
    assert runs(pool) == [(1, 8)]
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.free, pool.total) == (5, 8)


def test_pages_continue_the_hinted_one():
    pool = PagePool(10)
    first = pool.allocate(2)
    other = pool.allocate(2)
    pool.release(pool.allocate(2))
    assert pool.allocate(2, after=other[-1]) == [4, 5]
    pool.release(other)
    assert pool.allocate(1, after=first[-1]) == [2]
    assert pool.allocate(3, after=2) == [3, 6, 7], "what is free behind the hint, then elsewhere"


def test_the_shortest_run_that_is_long_enough_is_used():
    pool = PagePool(20)
    pool.allocate(20)
    pool.release([2, 3, 4, 5, 6])
    pool.release([10, 11, 12])
    pool.release([15])
    assert pool.allocate(3) == [10, 11, 12]
    assert pool.allocate(1) == [15]
    assert pool.allocate(4) == [2, 3, 4, 5]


def test_as_few_runs_as_possible():
    pool = PagePool(20)
    pool.allocate(20)
    pool.release([0, 2, 3, 5, 6, 7, 9])
    assert pool.allocate(5) == [5, 6, 7, 2, 3]


def test_neighbours_join_again():
    pool = PagePool(6)
    pool.allocate(6)
    for page in (1, 3, 5, 0, 4, 2):
        pool.release([page])
        check_pool(pool)
    assert runs(pool) == [(0, 6)]


def test_running_out_takes_nothing():
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(OutOfPages) as error:
        pool.allocate(3)
    assert isinstance(error.value, ResourceExhausted)
    assert (error.value.code, error.value.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_PAGES")
    assert pool.free == 2
    check_pool(pool)
    assert pool.allocate(0) == []


@pytest.mark.parametrize("pages", [[3], [0], [9], [-1], [1, 1]], ids=str)
def test_what_cannot_be_given_back_is_refused_whole(pages):
    pool = PagePool(8, first_page=1)
    pool.allocate(2)
    with pytest.raises(Internal):
        pool.release([2, *pages])
    assert pool.free == 6
    check_pool(pool)
    pool.release([2, 1])
    assert runs(pool) == [(1, 8)]


def test_random_use_keeps_every_page_and_every_run_maximal():
    source = random.Random(0)
    pool = PagePool(40, first_page=5)
    taken: list[int] = []
    for _ in range(3000):
        if taken and source.random() < 0.5:
            count = source.randrange(1, min(len(taken), 6) + 1)
            source.shuffle(taken)
            pool.release(taken[:count])
            del taken[:count]
        else:
            count = source.randrange(8)
            if count <= pool.free:
                longest = sorted((length for _, length in runs(pool)), reverse=True)
                fewest = next(n for n in range(len(longest) + 1) if sum(longest[:n]) >= count)
                pages = pool.allocate(count)
                assert sum(page - 1 != before for before, page in zip([-9, *pages], pages, strict=False)) == fewest
                taken += pages
        check_pool(pool)
        assert sorted(taken) == [page for page in range(5, 45) if not is_free(pool, page)]
