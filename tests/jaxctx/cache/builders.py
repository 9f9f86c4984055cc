"""Builders: a cache, and contexts filled as the engine does it."""

from __future__ import annotations

import itertools

import numpy as np

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import ContextCache, Identity

from .invariants import check

IDENTITY = Identity("tenant", "model", kv_dtype="bfloat16")
TOKENS = np.arange(1000, dtype=np.int32) * 7 % 31


def new_cache(pages=200, page_size=16, host=0, disk=0):
    ids, ticks = itertools.count(), itertools.count()
    manager = BlockManager(pages, page_size, host, disk)
    return ContextCache(manager, clock=lambda: float(next(ticks)), new_id=lambda: f"c{next(ids):04}")


def fill(cache, context, tokens):
    """What the engine does for a fill; returns (resident, computed)."""
    cache.append(context, tokens)
    found = cache.match(context)
    computed = context.buffered_tokens
    cache.grow(context, computed)
    cache.mark_computed(context, computed)
    check(cache)
    return found, computed


def filled(cache, tokens, **options):
    context = cache.create(IDENTITY, **options)
    fill(cache, context, tokens)
    return context


def layout(context):
    return context.committed_pages, context.working_pages, context.working_tokens


def used(cache):
    return cache.block_manager.pool.total - cache.block_manager.available


def would_find(cache, context, more):
    """Tokens that a match would move once `more` is appended."""
    return cache.peek(context, more).device * cache.page_size


def resident(cache, tokens):
    """How many of `tokens` a match would find for a new context."""
    return cache.find(IDENTITY, tokens).device * cache.page_size
