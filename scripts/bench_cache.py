#!/usr/bin/env python3
"""Measures the cache's bookkeeping on this machine: forks, lookups, page operations and tiers. Needs no device.

    python scripts/bench_cache.py

Prints the best of several rounds in CPU time of this process: what else runs on the machine adds little to that, and
on a quiet one it is the time on the clock.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity

PAGE_SIZE = 16
PAGES = 16_384
LONG = 32_768
IDENTITY = Identity("bench", "model")


def new_cache(host_slots: int = 0, disk_slots: int = 0) -> ContextCache:
    """An empty cache with numbered contexts."""
    ids = itertools.count()
    manager = BlockManager(PAGES, PAGE_SIZE, host_slots, disk_slots)
    return ContextCache(manager, clock=time.monotonic, new_id=lambda: f"{next(ids):08}")


def filled(cache: ContextCache, tokens: np.ndarray) -> Context:
    """A context with the KV of `tokens`."""
    context = cache.create(IDENTITY)
    cache.append(context, tokens)
    cache.match(context)
    cache.grow(context, context.buffered_tokens)
    cache.mark_computed(context, context.buffered_tokens)
    return context


def best_s(rounds: int, run: Callable[[], object]) -> float:
    """The least seconds that one of `rounds` runs took."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def fork_s(tokens: int, count: int = 1000, *, computed: bool = True) -> float:
    """Seconds per fork of a context of `tokens` tokens, which have KV if `computed`, else are buffered."""
    cache = new_cache()
    parent = filled(cache, np.arange(tokens if computed else 0, dtype=np.int32))
    cache.append(parent, np.arange(0 if computed else tokens, dtype=np.int32))
    return best_s(5, lambda: [cache.fork(parent) for _ in range(count)]) / count


def lookup_s() -> tuple[float, float]:
    """Seconds to find a resident prompt of 32k tokens, and to attach a new context to it."""
    cache = new_cache()
    prompt = np.arange(LONG, dtype=np.int32)
    filled(cache, prompt)
    assert cache.find(IDENTITY, prompt).device * cache.page_size == LONG

    def attach() -> None:
        context = cache.create(IDENTITY)
        cache.append(context, prompt)
        assert cache.match(context) == LONG
        cache.close(context)

    return best_s(30, lambda: cache.find(IDENTITY, prompt)), best_s(30, attach)


def fill_operations_s(host_slots: int = 0, disk_slots: int = 0) -> float:
    """Page operations a second: a pool's worth of pages allocated, hashed, committed and released, then evicted.

    With tiers, what is evicted is also saved, and what was saved before is spilled; that is not counted.
    """
    cache = new_cache(host_slots, disk_slots)
    generator = np.random.default_rng(0)
    rounds = []
    for _ in range(5):
        prompts = [generator.integers(0, 1 << 17, LONG, np.int32) for _ in range(PAGES * PAGE_SIZE // LONG)]
        start = time.process_time()
        for prompt in prompts:
            cache.close(filled(cache, prompt))
            cache.moves()
        rounds.append(time.process_time() - start)
    return 4 * PAGES / min(rounds[2:])  # allocate, commit, release, evict; at first nothing had to be evicted


def restore_s() -> tuple[float, float]:
    """Seconds a page to suspend a context of 32k tokens by force of others, and to restore it from host memory."""
    cache = new_cache(2 * PAGES)
    context = filled(cache, np.arange(LONG, dtype=np.int32))
    pages = LONG // PAGE_SIZE
    suspended, restored = [], []
    for _ in range(5):
        start = time.process_time()
        cache.suspend(context)
        cache.block_manager.evict(pages)
        suspended.append(time.process_time() - start)
        start = time.process_time()
        cache.match(context)
        assert cache.restore(context, pages, lambda slot: True) == pages
        restored.append(time.process_time() - start)
        cache.moves()
    return min(suspended) / pages, min(restored) / pages


def decode_operations_s(streams: int = 64, tokens: int = 256) -> float:
    """Tokens a second, one by one for `streams` contexts in turn: append, grow, mark_computed, page_table."""
    cache = new_cache()
    contexts = [filled(cache, np.full(2048, stream, np.int32)) for stream in range(streams)]

    def decode() -> None:
        for token in range(tokens):
            for context in contexts:
                cache.append(context, [token])
                cache.grow(context, 1)
                cache.mark_computed(context, 1)
                context.page_table()

    return streams * tokens / best_s(2, decode)


def main() -> None:
    """Print one line per figure."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    short, long = fork_s(1032), fork_s(LONG + 8)
    print(f"fork of 1k tokens      {short * 1e6:8.1f} µs")
    print(f"fork of 32k tokens     {long * 1e6:8.1f} µs   {long / short:.2f} times the 1k one")
    short, long = fork_s(1032, computed=False), fork_s(LONG + 8, computed=False)
    print(f"  all of them buffered {long * 1e6:8.1f} µs   {long / short:.2f} times the 1k one")
    lookup, attach = lookup_s()
    print(f"lookup of 32k tokens   {lookup * 1e3:8.2f} ms")
    print(f"create, append, match, close of 32k tokens {attach * 1e3:.2f} ms")
    print(f"page operations        {fill_operations_s():8,.0f} /s")
    print(f"  with tiers           {fill_operations_s(PAGES // 2, PAGES // 2):8,.0f} /s")
    suspend, restore = restore_s()
    print(f"suspend and evict      {suspend * 1e6:8.2f} µs per page")
    print(f"restore                {restore * 1e6:8.2f} µs per page")
    print(f"decode bookkeeping     {1e6 / decode_operations_s():8.2f} µs per token")


if __name__ == "__main__":
    main()
