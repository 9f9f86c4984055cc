"""Audit: comparisons and counts that need a walk over lineages or over all contexts. Reads, never changes.

Called by `context_cache` and by the engine's context operations.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from jaxctx.cache.context import Context
from jaxctx.cache.prefix_index import PageNode


def refcounts(context: Context, contexts: Iterable[Context]) -> list[int]:
    """For each page of the context's page table: how many of `contexts` hold it, this one included.

    Contexts of other namespaces are not counted. Working pages have one holder.
    """
    chain = set(context.chain())
    shared_depths: Counter[int] = Counter()  # how many contexts share exactly the first `depth` pages
    for other in contexts:
        if not other.suspended and other.identity.namespace == context.identity.namespace:
            shared_depths[_shared_depth(other, chain)] += 1
    counts: list[int] = []
    holders = 0
    for depth in range(context.committed_pages, 0, -1):  # who shares a page shares all pages before it
        holders += shared_depths[depth]
        counts.append(holders)
    counts.reverse()
    return counts + [1] * context.working_pages


def count_held_pages(contexts: Iterable[Context]) -> int:
    """How many pages the contexts that are not suspended hold together. A shared page counts once."""
    working = 0
    nodes = set[PageNode]()
    for context in contexts:
        working += context.working_pages
        for node in context.tail.lineage():
            if node in nodes:
                break  # the nodes before it have been counted as well
            nodes.add(node)
    return working + len(nodes)


def compare(a: Context, b: Context) -> tuple[int, int]:
    """Where two contexts diverge, in O(tokens): the number of equal leading tokens, and of pages that both hold now.

    Buffered tokens count. A suspended context holds no pages.
    """
    shared_pages = len(np.intersect1d(a.page_table(), b.page_table(), assume_unique=True))
    length = min(a.length, b.length)
    different = np.flatnonzero(a.tokens(0, length) != b.tokens(0, length))
    equal_tokens = int(different[0]) if len(different) else length
    return equal_tokens, shared_pages


def _shared_depth(context: Context, chain: set[PageNode]) -> int:
    """How many leading committed pages of the context are in `chain`, a chain of nodes from a root."""
    for node in context.tail.lineage():
        if node in chain:
            return node.depth
    return 0
