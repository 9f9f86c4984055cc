"""Audit: what only a walk over lineages or all contexts can tell. Reads, never changes.

Called by `contexts` and the engine's operations.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from jaxctx.cache.context import Context
from jaxctx.cache.prefix_index import PageNode


def refcounts(context: Context, contexts: Iterable[Context]) -> list[int]:
    """How many of `contexts` that are of its namespace hold each page of the context's page table."""
    chain, namespace = set(context.chain()), context.identity.namespace
    others = (other for other in contexts if not other.suspended and other.identity.namespace == namespace)
    shared = Counter(next((node.depth for node in other.tail.lineage() if node in chain), 0) for other in others)
    holders = [*accumulate(shared[depth] for depth in range(context.committed_pages, 0, -1))]  # of the last page first
    return holders[::-1] + [1] * context.working_pages


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
