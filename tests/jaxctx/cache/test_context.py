"""The state of one context: layout, page table and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from jaxctx.errors import FailedPrecondition, NotFound

from .builders import TOKENS, filled, layout, new_cache, used


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 1001), (1001, 1001)])
def test_tokens_out_of_range(start, stop):
    context = filled(new_cache(), TOKENS)
    with pytest.raises(IndexError):
        context.tokens(start, stop)


def test_page_ids_are_one_run_of_the_pool():
    context = filled(new_cache(), TOKENS)
    assert context.page_table().tolist() == list(range(1, 64))
    assert context.page_table().dtype == np.int32
    context.page_table()[0] = 9  # of a copy
    assert context.page_table()[0] == 1


@pytest.mark.parametrize(
    ("count", "expected"), [(1000, (62, 1, 8)), (1024, (64, 0, 0)), (0, (0, 0, 0)), (1, (0, 1, 1))]
)
def test_layout(count, expected):
    cache = new_cache()
    context = filled(cache, np.arange(count))
    assert layout(context) == expected
    assert (context.seq_len, context.buffered_tokens, context.length) == (count, 0, count)
    assert used(cache) == len(context.page_table()) == expected[0] + expected[1]
    assert context.tokens().tolist() == list(range(count))


def test_tokens_of_a_part():
    context = filled(new_cache(), TOKENS)
    for start, stop in ((0, 0), (0, 1000), (15, 17), (16, 32), (990, 1000), (1000, 1000)):
        assert context.tokens(start, stop).tolist() == TOKENS[start:stop].tolist()


def test_a_closed_context_refuses_and_a_suspended_one_too():
    cache = new_cache()
    context = filled(cache, TOKENS[:20])
    context.raise_if_suspended()
    cache.suspend(context)
    context.raise_if_closed()
    with pytest.raises(FailedPrecondition):
        context.raise_if_suspended()
    cache.close(context)
    with pytest.raises(NotFound):
        context.raise_if_closed()
