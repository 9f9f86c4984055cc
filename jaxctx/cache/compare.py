"""Compare: where two contexts part, and what they share. Reads, never changes; walks lineage by page, O(pages).

Called by the engine's operations.
"""

from __future__ import annotations

import numpy as np

from jaxctx.cache.context import Context


def compare(a: Context, b: Context) -> tuple[int, int]:
    """Equal tokens at the front, buffered ones included; physical pages that both hold now (a suspended one: none)."""
    shared = len(np.intersect1d(a.page_table(), b.page_table(), assume_unique=True))
    return _common_tokens(a, b), shared


def _common_tokens(a: Context, b: Context) -> int:
    size, pages = a.page_size, min(a.tail.depth, b.tail.depth)
    left, right, equal = a.tail.ancestor(pages), b.tail.ancestor(pages), pages
    while left is not right:  # before a node that both have, all is equal
        if left.tokens != right.tokens:
            equal = left.depth - 1
        if left.parent is None or right.parent is None:  # two roots: of different salts
            break
        left, right = left.parent, right.parent
    start, stop = equal * size, min(a.length, b.length)
    different = np.flatnonzero(a.tokens(start, stop) != b.tokens(start, stop))
    return start + int(different[0]) if len(different) else stop
