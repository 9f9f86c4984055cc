"""Registry: which contexts there are, by tenant and id, and in the order of their last use.

Knows no pages and no tokens. Called by `contexts` only.
"""

from __future__ import annotations

import builtins
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator

from jaxctx.cache.context import Context
from jaxctx.errors import AlreadyExists, NotFound


class Registry:
    """Contexts that are not closed; those that are not suspended are also kept in the order of use."""

    def __init__(self) -> None:
        self._contexts: dict[tuple[str, str], Context] = {}
        self._ids: dict[str, builtins.list[str]] = {}  # of each tenant, sorted
        self._by_use: OrderedDict[Context, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

    def by_use(self) -> builtins.list[Context]:
        """Contexts that are not suspended, least recently used first."""
        return [*self._by_use]

    def unused(self, tenant: str, context_id: str) -> str:
        """`context_id`, or AlreadyExists."""
        if (tenant, context_id) in self._contexts:
            raise AlreadyExists(f"there is a context {context_id!r} already")
        return context_id

    def enter(self, context: Context) -> None:
        """A new context of an unused id; it counts as used now."""
        self._contexts[context.tenant, context.id] = context
        insort(self._ids.setdefault(context.tenant, []), context.id)
        self.use(context)

    def leave(self, context: Context) -> None:
        """It is no more."""
        self._by_use.pop(context, None)
        del self._contexts[context.tenant, context.id]
        ids = self._ids[context.tenant]
        del ids[bisect_left(ids, context.id)]
        if not ids:
            del self._ids[context.tenant]

    def get(self, tenant: str, context_id: str) -> Context:
        """Raises NotFound, for another tenant's context just the same."""
        context = self._contexts.get((tenant, context_id))
        if context is None:
            raise NotFound(f"no context {context_id!r}")
        return context

    def list(self, tenant: str, after: str, limit: int) -> builtins.list[Context]:
        """Up to `limit` of the tenant's contexts in id order, beginning after the id `after`."""
        ids = self._ids.get(tenant, [])
        start = bisect_right(ids, after)
        return [self._contexts[tenant, context_id] for context_id in ids[start : start + limit]]

    def use(self, context: Context) -> None:
        """To the end of the order of use, if it is not suspended."""
        if not context.suspended:
            self._by_use[context] = None
            self._by_use.move_to_end(context)

    def rest(self, context: Context) -> None:
        """Out of the order of use: it was suspended."""
        self._by_use.pop(context, None)

    def check(self) -> None:
        """Raises AssertionError where the three accounts differ."""
        contexts = [*self]
        assert self._contexts == {(context.tenant, context.id): context for context in contexts}
        assert not any(context.closed for context in contexts)
        assert set(self._by_use) == {context for context in contexts if not context.suspended}
        assert sorted(self._contexts) == [(tenant, item) for tenant in sorted(self._ids) for item in self._ids[tenant]]
