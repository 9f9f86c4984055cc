"""Context table: which contexts exist, by tenant and id, in the order of their last use, and until when.

It knows neither pages nor tokens. A context whose lifetime has ended is never shown again from that instant on; the
owner of the cache closes it soon after (`lifetimes`). Called by `context_cache`, and read by the engine.
"""

import builtins
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from jaxctx.cache.context import Context
from jaxctx.errors import AlreadyExists, NotFound
from jaxctx.lifetime import DeadlineQueue, Lifetime

MAX_EXPIRED_IDS = 10_000  # ids of each tenant's last expired contexts that are remembered as expired


def context_expired(context_id: str) -> NotFound:
    """The error for a context whose lifetime has ended."""
    return NotFound(f"context {context_id!r} has expired", reason="CONTEXT_EXPIRED")


class ContextTable:
    """All contexts that are not closed. Those that are not suspended are also kept in the order of use."""

    def __init__(self, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self._clock = clock
        self._new_id = new_id
        self._contexts: dict[tuple[str, str], Context] = {}  # by tenant and id
        self._ids: dict[str, builtins.list[str]] = {}  # of each tenant, sorted
        # Not suspended ones, least recently used first. Those without pages may be missing, see `skip_in_order`.
        self.by_use: OrderedDict[Context, None] = OrderedDict()
        self._namespaces: dict[str, dict[Context, None]] = {}  # those of each namespace
        self._pinned: dict[str, dict[Context, None]] = {}  # the pinned ones of each tenant
        self._expired: dict[str, OrderedDict[str, None]] = {}  # ids of each tenant's expired contexts, oldest first
        self.lifetimes: DeadlineQueue[Context] = DeadlineQueue()

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

    def count(self, tenant: str) -> int:
        """How many contexts the tenant has."""
        return len(self._ids.get(tenant, ()))

    def tenants(self) -> Iterable[str]:
        """The tenants that have contexts, hidden ones too."""
        return self._ids.keys()

    def unused_id(self, tenant: str, context_id: str | None) -> str:
        """`context_id`, or a new id for None. Raises AlreadyExists if the tenant has a context of this id."""
        if context_id is None:
            context_id = self._new_id()
        if (tenant, context_id) in self._contexts:
            raise AlreadyExists(f"there is a context {context_id!r} already")
        return context_id

    def add(self, context: Context) -> None:
        """Add a new context, whose id is unused. It counts as used now."""
        self._contexts[context.tenant, context.id] = context
        self._namespaces.setdefault(context.identity.namespace, {})[context] = None
        insort(self._ids.setdefault(context.tenant, []), context.id)
        if context.tenant in self._expired:
            self._expired[context.tenant].pop(context.id, None)
        self.lifetimes.set(context, context.lifetime.at)
        self.mark_used(context)

    def remove(self, context: Context) -> None:
        """Remove a closed context. If its lifetime had ended, its id is remembered as expired for a while."""
        self.by_use.pop(context, None)
        _discard(self._namespaces, context.identity.namespace, context)
        _discard(self._pinned, context.tenant, context)
        self.lifetimes.set(context, None)
        del self._contexts[context.tenant, context.id]
        ids = self._ids[context.tenant]
        del ids[bisect_left(ids, context.id)]
        if not ids:
            del self._ids[context.tenant]
        if context.lifetime.over(self._clock()):
            expired_ids = self._expired.setdefault(context.tenant, OrderedDict())
            expired_ids[context.id] = None
            if len(expired_ids) > MAX_EXPIRED_IDS:
                expired_ids.popitem(last=False)

    def get(self, tenant: str, context_id: str) -> Context:
        """The tenant's context of this id.

        Raises NotFound, with the reason CONTEXT_EXPIRED if the tenant had one whose lifetime has ended. A context of
        another tenant is not found either, with the same message as for one that does not exist.
        """
        context = self._contexts.get((tenant, context_id))
        has_expired = context is not None and context.lifetime.over(self._clock())
        if has_expired or context_id in self._expired.get(tenant, ()):
            raise context_expired(context_id)
        if context is None:
            raise NotFound(f"no context {context_id!r}")
        return context

    def list(self, tenant: str, after: str, limit: int, *, with_programs: bool = True) -> builtins.list[Context]:
        """Up to `limit` of the tenant's contexts in id order, starting after the id `after`.

        Contexts that the server made for programs are listed only `with_programs`.
        """
        now = self._clock()
        ids = self._ids.get(tenant, [])
        listed: builtins.list[Context] = []
        for position in range(bisect_right(ids, after), len(ids)):
            if len(listed) >= limit:
                break
            context = self._contexts[tenant, ids[position]]
            if context.lifetime.over(now) or (context.of_program and not with_programs):
                continue
            listed.append(context)
        return listed

    def in_namespace(self, namespace: str) -> Iterable[Context]:
        """The contexts of a namespace."""
        return self._namespaces.get(namespace, ())

    def pinned(self, tenant: str) -> Iterable[Context]:
        """The pinned contexts of a tenant."""
        return self._pinned.get(tenant, ())

    def pin(self, context: Context, pinned: bool) -> None:
        """Pin or unpin a context: a pinned one is never suspended under memory pressure."""
        context.pinned = pinned
        if pinned:
            self._pinned.setdefault(context.tenant, {})[context] = None
        else:
            _discard(self._pinned, context.tenant, context)

    def skip_in_order(self, contexts: Iterable[Context]) -> None:
        """Take contexts without pages out of the order of use, so that nobody looks at them twice.

        There may be many more of them than pages. They are back when they take some (`note_pages`), or are used.
        """
        for context in contexts:
            del self.by_use[context]

    def note_pages(self, context: Context) -> None:
        """The context takes pages, if it is not suspended. If it holds none yet, it is the last in the order of use."""
        if not (context.suspended or context.holds_pages):
            self.by_use[context] = None
            self.by_use.move_to_end(context)

    def mark_used(self, context: Context) -> None:
        """The context is used now: it moves to the end of the order of use, and a sliding lifetime starts again.

        A suspended context is in no order of use. Raises NotFound if it is closed.
        """
        context.raise_if_closed()
        context.used_at = self._clock()
        if context.lifetime.sliding:
            self.set_lifetime(context, context.lifetime.used(context.used_at))
        if not context.suspended:
            self.by_use[context] = None
            self.by_use.move_to_end(context)

    def set_lifetime(self, context: Context, lifetime: Lifetime) -> None:
        """Give the context another lifetime. Raises NotFound if it is closed."""
        context.raise_if_closed()
        context.lifetime = lifetime
        self.lifetimes.set(context, lifetime.at)


def _discard(groups: dict[str, dict[Context, None]], key: str, context: Context) -> None:
    """Take the context out of a group, if it is there, and the group away if nothing is left."""
    group = groups.get(key, {})
    group.pop(context, None)
    if not group:
        groups.pop(key, None)
