"""Audit: what only a walk over all contexts can tell. Counts holders from scratch and compares every account.

Reads, never changes. Called by `contexts`; `check` by tests after every operation, and by an engine that is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from jaxctx.cache.context import Context
from jaxctx.cache.pages import PagePool
from jaxctx.cache.prefix import TOKEN_BYTES, PageNode, PrefixIndex


def refcounts(context: Context, contexts: Iterable[Context]) -> list[int]:
    """How many of `contexts` hold each page of the context's page table."""
    if context.suspended:
        return []
    chain = set(_lineage(context.tail))
    counts = [0] * (context.committed_pages + 1)
    for other in contexts:
        shared = None if other.suspended else next((node for node in _lineage(other.tail) if node in chain), None)
        if shared is not None:
            counts[shared.depth] += 1
    for depth in reversed(range(context.committed_pages)):
        counts[depth] += counts[depth + 1]
    return counts[1:] + [1] * context.working_pages


def check(
    pool: PagePool,
    index: PrefixIndex,
    contexts: Mapping[tuple[str, str], Context],
    by_use: Iterable[Context],
) -> None:
    """Raises AssertionError where pages, holders, hashes or tables do not add up."""
    pool.check()
    index.check(Counter(context.tail for context in contexts.values() if not context.suspended))
    taken = [node.page for node in index.nodes()]
    for (tenant, context_id), context in contexts.items():
        assert (context.tenant, context.id) == (tenant, context_id)
        _check_context(context, index)
        taken += context.working
    assert len(set(taken)) == len(taken), f"pages with two owners: {sorted(taken)}"
    assert len(taken) + pool.free == pool.total, f"{len(taken)} pages owned and {pool.free} free of {pool.total}"
    assert not any(map(pool.is_free, taken)), "a page in use is in the pool"
    order = list(by_use)
    assert set(order) == {context for context in contexts.values() if not context.suspended}
    assert len(order) == len(set(order))


def _check_context(context: Context, index: PrefixIndex) -> None:
    assert not context.closed
    assert len(context.recent) % TOKEN_BYTES == 0
    assert 0 <= context.working_tokens <= len(context.recent) // TOKEN_BYTES
    assert context.working_tokens <= len(context.working) * context.page_size, "tokens without pages"
    assert context.manual_commit or context.working_tokens < context.page_size, "a full page was not committed"
    assert not (context.suspended and (context.working or context.working_tokens)), "suspended with pages"
    lineage = [*_lineage(context.tail)]
    assert lineage[-1] is context.root is index.root(context.identity), "lineage ends at another root"
    assert context.suspended or all(map(index.holds, lineage[:-1])), "a page of a chain is not indexed"
    table = context.page_table().tolist()
    committed = [] if context.suspended else [node.page for node in reversed(lineage[:-1])]
    assert table == committed + context.working, f"stale page table {table}"


def _lineage(tail: PageNode | None) -> Iterable[PageNode]:
    while tail is not None:
        yield tail
        tail = tail.parent
