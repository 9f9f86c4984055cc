"""Compare: the first divergence of two contexts, and the pages that both hold."""

from dataclasses import replace

import numpy as np
import pytest

from jaxctx.cache.audit import compare
from jaxctx.cache.context import Context
from jaxctx.cache.context_cache import ContextCache

from .builders import IDENTITY, TOKENS, fill, filled, new_cache


def both(a: Context, b: Context) -> tuple[int, int]:
    assert compare(a, b) == compare(b, a)
    return compare(a, b)


def test_itself_and_its_fork() -> None:
    cache = new_cache()
    context = filled(cache, TOKENS)
    assert compare(context, context) == (1000, 63)
    child = cache.fork(context)
    assert both(context, child) == (1000, 62)  # the tail page is a copy
    fill(cache, child, [1, 2, 3])
    assert both(context, child) == (1000, 62)
    fill(cache, context, [1, 2, 4])
    assert both(context, child) == (1002, 62)


def test_empty_ones() -> None:
    cache = new_cache()
    empty, other, full = cache.create(IDENTITY), cache.create(IDENTITY), filled(cache, TOKENS[:20])
    assert compare(empty, empty) == both(empty, other) == both(empty, full) == (0, 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 40, 999])
def test_one_is_a_prefix_of_the_other(length: int) -> None:
    cache = new_cache()
    assert both(filled(cache, TOKENS[:length]), filled(cache, TOKENS)) == (length, length // 16)


@pytest.mark.parametrize("salt", ["", "other"])
@pytest.mark.parametrize("at", [0, 5, 15, 16, 17, 31, 32, 500, 991, 992, 999])
def test_the_first_divergence(at: int, salt: str) -> None:
    cache, changed = new_cache(), TOKENS.copy()
    changed[at] += 1
    b = cache.create(replace(IDENTITY, salt=salt))
    fill(cache, b, changed)
    assert both(filled(cache, TOKENS), b) == (at, 0 if salt else min(at // 16, 62))


def test_other_salts_share_no_pages_though_all_tokens_are_equal() -> None:
    cache = new_cache()
    b = cache.create(replace(IDENTITY, salt="b"))
    fill(cache, b, TOKENS)
    assert both(filled(cache, TOKENS), b) == (1000, 0)


def test_buffered_tokens_count() -> None:
    cache = new_cache()
    a, b = filled(cache, TOKENS[:64]), cache.create(IDENTITY)
    cache.append(b, TOKENS[:70])
    cache.append(a, TOKENS[64:66])
    assert both(a, b) == (66, 0)
    cache.append(a, [30, 30])
    assert both(a, b) == (66, 0)


def test_a_suspended_one_has_tokens_but_holds_no_pages() -> None:
    cache: ContextCache = new_cache()
    a, b = filled(cache, TOKENS[:100]), filled(cache, np.append(TOKENS[:90], [30]))
    cache.suspend(a)
    assert both(a, b) == (90, 0)
    cache.clear_cached()  # what comes back is computed anew: other nodes than b's lineage
    cache.suspend(b)
    fill(cache, a, [])
    assert both(a, b) == (90, 0)
