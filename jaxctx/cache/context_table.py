"""Registry: which contexts there are, by tenant and id, in the order of their last use, and until when.

Knows no pages and no tokens. A context whose lifetime is over is never shown again, from that instant on; whoever owns
the cache closes it soon after (`lifetimes`). Called by `contexts` only.
"""

import builtins
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from jaxctx.cache.context import Context
from jaxctx.errors import AlreadyExists, NotFound
from jaxctx.lifetime import DeadlineQueue, Lifetime

EXPIRED_KEPT = 10_000  # ids of each tenant's last expired contexts that are remembered as such


def context_expired(context_id: str) -> NotFound:
    """What there is to say of a context whose time is over."""
    return NotFound(f"context {context_id!r} has expired", reason="CONTEXT_EXPIRED")


class ContextTable:
    """Contexts that are not closed; those that are not suspended are also kept in the order of use."""

    def __init__(self, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self._clock, self._new_id = clock, new_id
        self._contexts: dict[tuple[str, str], Context] = {}
        self._ids: dict[str, builtins.list[str]] = {}  # of each tenant, sorted
        self.by_use: OrderedDict[Context, None] = OrderedDict()  # not suspended ones, least recently used first
        self._expired: dict[str, OrderedDict[str, None]] = {}  # ids of each tenant, oldest first
        self.lifetimes: DeadlineQueue[Context] = DeadlineQueue()

    def __len__(self) -> int:
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

    def count(self, tenant: str) -> int:
        return len(self._ids.get(tenant, ()))

    def unused(self, tenant: str, context_id: str | None) -> str:
        """`context_id`, or AlreadyExists; None: a new id."""
        context_id = self._new_id() if context_id is None else context_id
        if (tenant, context_id) in self._contexts:
            raise AlreadyExists(f"there is a context {context_id!r} already")
        return context_id

    def enter(self, context: Context) -> None:
        """A new context of an unused id; it counts as used now."""
        self._contexts[context.tenant, context.id] = context
        insort(self._ids.setdefault(context.tenant, []), context.id)
        if context.tenant in self._expired:
            self._expired[context.tenant].pop(context.id, None)
        self.lifetimes.set(context, context.lifetime.at)
        self.use(context)

    def leave(self, context: Context) -> None:
        """It is no more. If its time was over, that is remembered for a while."""
        self.by_use.pop(context, None)
        self.lifetimes.set(context, None)
        del self._contexts[context.tenant, context.id]
        ids = self._ids[context.tenant]
        del ids[bisect_left(ids, context.id)]
        if not ids:
            del self._ids[context.tenant]
        if context.lifetime.over(self._clock()):
            remembered = self._expired.setdefault(context.tenant, OrderedDict())
            remembered[context.id] = None
            if len(remembered) > EXPIRED_KEPT:
                remembered.popitem(last=False)

    def get(self, tenant: str, context_id: str) -> Context:
        """Raises NotFound, for another tenant's context just the same; CONTEXT_EXPIRED if it was the caller's own."""
        context = self._contexts.get((tenant, context_id))
        if context_id in self._expired.get(tenant, ()) or (context and context.lifetime.over(self._clock())):
            raise context_expired(context_id)
        if context is None:
            raise NotFound(f"no context {context_id!r}")
        return context

    def list(self, tenant: str, after: str, limit: int, *, with_programs: bool = True) -> builtins.list[Context]:
        """Up to `limit` of the tenant's contexts in id order, beginning after the id `after`; those that were made for
        programs only `with_programs`.
        """
        now, ids = self._clock(), self._ids.get(tenant, [])
        following = (self._contexts[tenant, ids[place]] for place in range(bisect_right(ids, after), len(ids)))
        shown = (
            context
            for context in following
            if not context.lifetime.over(now) and (with_programs or not context.of_program)
        )
        return [*islice(shown, limit)]

    def use(self, context: Context) -> None:
        """It is used now: to the end of the order of use, if it is not suspended; a sliding lifetime begins again."""
        context.raise_if_closed()
        context.used_at = self._clock()
        if context.lifetime.sliding:
            self.set_lifetime(context, context.lifetime.used(context.used_at))
        if not context.suspended:
            self.by_use[context] = None
            self.by_use.move_to_end(context)

    def set_lifetime(self, context: Context, lifetime: Lifetime) -> None:
        """It ends with this one."""
        context.raise_if_closed()
        context.lifetime = lifetime
        self.lifetimes.set(context, lifetime.at)
