"""Invariants: all counts of a cache from scratch, by walks over everything. AssertionError where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from jaxctx.cache.context import Context
from jaxctx.cache.context_cache import ContextCache
from jaxctx.cache.context_table import ContextTable
from jaxctx.cache.page_pool import PagePool
from jaxctx.cache.prefix_index import NOWHERE, TOKEN_BYTES, PageNode, PrefixIndex
from jaxctx.cache.tiers import TierEntry, Tiers


def check(cache: ContextCache) -> None:
    """Pages, holders, hashes, slots and tables add up."""
    manager, table = cache.block_manager, cache.context_table
    check_context_table(table)
    check_pool(manager.pool)
    check_index(manager.index, Counter(context.tail for context in table if not context.suspended))
    taken = [node.page for node in nodes(manager.index) if node.page != NOWHERE]
    offloaded = [item for context in table for item in context.offloaded_pages.values()]
    check_tiers(manager.tiers, {*nodes(manager.index), *offloaded})
    for context in table:
        check_context(context, manager.index)
        taken += context.working
    assert len(set(taken)) == len(taken), f"pages with two owners: {sorted(taken)}"
    assert len(taken) + manager.pool.free == manager.pool.total, (
        f"{len(taken)} owned, {manager.pool.free} free: some lost"
    )
    assert not any(is_free(manager.pool, page) for page in taken), "a page in use is in the pool"


def check_context(context: Context, index: PrefixIndex) -> None:
    assert len(context.recent) % TOKEN_BYTES == 0
    assert 0 <= context.working_tokens <= len(context.recent) // TOKEN_BYTES
    assert context.working_tokens <= len(context.working) * context.page_size, "tokens without pages"
    assert all(0 <= at < context.length for at in context.attention_overrides), "overrides of other tokens"
    assert all(0 < switch.start <= context.length for switch in context.adapter_switches), "switches beyond the end"
    assert not (context.suspended and (context.working or context.working_tokens)), "suspended with pages"
    chain = context.chain()
    start = chain[0].parent if chain else context.tail
    assert context.root is index.root(context.identity), "another root"
    assert start.parent is None, "lineage ends at no root"
    assert all(node.owner in (context.root, start) for node in chain), "a page of somebody else"
    assert context.suspended or all(holds(index, node) for node in chain), "a page of a chain is not indexed"
    table = context.page_table().tolist()
    committed = [] if context.suspended else [node.page for node in chain]
    assert table == committed + context.working, f"stale page table {table}"


def check_context_table(table: ContextTable) -> None:
    contexts = [*table]
    assert table._contexts == {(context.tenant, context.id): context for context in contexts}
    assert not any(context.closed for context in contexts)
    resident = {context for context in contexts if not context.suspended}
    holding = {context for context in resident if context.committed_pages or context.working}
    ordered = set(table.by_use)
    assert holding <= ordered, "a context with pages is no victim"
    assert ordered <= resident
    pinned = {context for context in contexts if context.pinned}
    assert {context for tenant in table._pinned for context in table.pinned(tenant)} == pinned
    by_namespace = {(name, context) for name in table._namespaces for context in table.in_namespace(name)}
    assert by_namespace == {(context.identity.namespace, context) for context in contexts}
    assert all(table._pinned.values())
    assert all(table._namespaces.values())
    ids = table._ids
    assert sorted(table._contexts) == [(tenant, item) for tenant in sorted(ids) for item in ids[tenant]]


def is_free(pool: PagePool, page: int) -> bool:
    """Whether nobody has this page."""
    return bool(pool._is_free[page - pool.first_page])


def runs(pool: PagePool) -> list[tuple[int, int]]:
    """The free runs as (first page, length), in page order."""
    return sorted((pool.first_page + start, length) for length, start in pool._runs)


def check_pool(pool: PagePool) -> None:
    """The runs are maximal and are the free pages."""
    free = [page for start, length in runs(pool) for page in range(start, start + length)]
    assert free == [pool.first_page + slot for slot in range(pool.total) if pool._is_free[slot]]
    assert len(free) == pool.free
    assert not {start for start, _ in runs(pool)} & {start + length for start, length in runs(pool)}, "two runs touch"
    assert pool._runs == sorted(pool._runs)
    assert not pool._is_free[pool.total], "a page that is not there"


def nodes(index: PrefixIndex) -> Iterator[PageNode]:
    """Every indexed node."""
    todo = [*index._roots.values()]
    while todo:
        children = todo.pop().children.values()
        yield from children
        todo += children


def holds(index: PrefixIndex, node: PageNode) -> bool:
    """Whether this very node is indexed."""
    parent = node.parent
    return parent is not None and index.child(parent, node.owner, node.tokens, node.overrides) is node


def check_index(index: PrefixIndex, tails: Mapping[PageNode, int]) -> None:
    """`tails` says of how many contexts a node is the last one."""
    known = list(nodes(index))
    holders = Counter(tails)
    holders.update(node.parent for node in known if node.holders and node.parent is not None)
    for node in {*known, *tails}:
        assert node.holders == holders[node], f"{holders[node]} holders, not {node.holders}"
    for node in known:
        assert holds(index, node), "a node that cannot be found"
        assert node.parent is not None
        assert node.parent.depth == node.depth - 1
        assert node.parent.parent is None or holds(index, node.parent), "a node whose parent is not indexed"
        assert not node.lost, "an indexed node without data"
        assert len(node.tokens) == index.page_bytes
        assert node.page == NOWHERE or node.parent.parent is None or node.parent.page != NOWHERE, "a gap on the way"
    assert all(node.indexed for node in known), "a node on the index that was forgotten"
    assert set(index._cached) == {node for node in known if not node.holders and node.page != NOWHERE}
    place = {node: position for position, node in enumerate(index._cached)}
    for node in index._cached:
        assert node.parent not in place or place[node] < place[node.parent], "a parent would go before its child"


def check_tiers(tiers: Tiers, items: set[TierEntry]) -> None:
    """`items`, all that may have copies, have one slot each and no others are used."""
    for slots, tier in ((tiers.host, "host"), (tiers.disk, "disk")):
        taken = [slot for item in items if 0 <= (slot := getattr(item, tier)) < slots.total]
        assert len(set(taken)) == len(taken), f"two copies in one {tier} slot"
        assert sorted(taken + slots.free) == list(range(slots.total)), f"{tier} slots lost"
        assert set(slots.order) == {item for item in items if 0 <= getattr(item, tier) < slots.total}, tier
