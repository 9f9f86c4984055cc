"""Audit: what only a walk over lineages or all contexts can tell. Reads, never changes.

Called by `contexts` and the engine's operations.
"""

from collections.abc import Iterable

import numpy as np

from jaxctx.cache.context import Context
from jaxctx.cache.prefix import PageNode


def refcounts(context: Context, contexts: Iterable[Context]) -> list[int]:
    """How many of `contexts` that are of its namespace hold each page of the context's page table."""
    if context.suspended:
        return []
    chain, namespace = set(context.chain()), context.identity.namespace
    counts = [0] * (context.committed_pages + 1)
    for other in contexts:
        if other.suspended or other.identity.namespace != namespace:
            continue
        shared = next((node for node in other.tail.lineage() if node in chain), None)
        if shared is not None:
            counts[shared.depth] += 1
    for depth in reversed(range(context.committed_pages)):
        counts[depth] += counts[depth + 1]
    return counts[1:] + [1] * context.working_pages


def held(contexts: Iterable[Context]) -> int:
    """How many pages contexts that are not suspended hold together."""
    working, nodes = 0, set[PageNode]()
    for context in contexts:
        working += context.working_pages
        for node in context.tail.lineage():
            if node in nodes:
                break
            nodes.add(node)
    return working + len(nodes)


def compare(a: Context, b: Context) -> tuple[int, int]:
    """Where two contexts part, O(tokens): equal tokens at the front, buffered ones included; pages that both hold now.

    A suspended context holds none.
    """
    shared = len(np.intersect1d(a.page_table(), b.page_table(), assume_unique=True))
    length = min(a.length, b.length)
    different = np.flatnonzero(a.tokens(0, length) != b.tokens(0, length))
    return int(different[0]) if len(different) else length, shared
