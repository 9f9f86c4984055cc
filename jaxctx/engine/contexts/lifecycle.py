"""Lives: contexts from birth to end, beside their tokens: time to live, pins, and the word of every change.

Whatever changes a context says so here (`changed`), once it has: its version grows, its readers learn of it, and if it
is pinned its tenant is charged what it holds now. Whatever is over is ended here (`reap`), before anybody looks.

A sliding time to live begins again with each use: whatever changes a context's tokens or pages, computes, forks or
saves it, and as long as it has a writer. Settings, and looking at it, are no use. Called on the step thread.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.context_table import context_expired
from jaxctx.engine.contexts.watch import Watch
from jaxctx.engine.scheduler.page_budget import Quotas
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.errors import Cancelled, JaxctxError
from jaxctx.lifetime import DeadlineQueue, Lifetime
from jaxctx.store import SnapshotVersion
from jaxctx.types import (
    ContextChange,
    ContextInfo,
    CreateContextRequest,
    Expiry,
    OpenRequest,
    Publication,
    RetentionUpdate,
    Snapshot,
    UpdateContextRequest,
    named,
    utc_datetime,
)

T = TypeVar("T", ContextInfo, Publication, Snapshot)
PATIENCE_S = 60.0  # clocks are set now and then: look at least so often whether something is over


def told(kind: type[T], source: Context | SnapshotVersion, *more: object, **others: object) -> T:
    """An answer: when its source began and ends, what it and `more` call by the names of its fields, and `others`."""
    end = source.lifetime
    same = named(kind, source, *more) | {"created_at": utc_datetime(source.created_at), "expiry": None}
    if end.at is not None and end.seconds is not None:
        same["expiry"] = Expiry(at=utc_datetime(end.at), seconds=end.seconds, sliding=end.sliding)
    return kind(**same | others)


@dataclass(eq=False)
class ContextLifecycle:
    """Of one engine."""

    cache: ContextCache
    scheduler: Scheduler
    clock: Callable[[], float]  # unix seconds

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.scheduler.config)
        self.watches: defaultdict[str, set[Watch]] = defaultdict(set)  # of those who read along, by tenant
        self.expired = 0
        self._pins: DeadlineQueue[Context] = DeadlineQueue()
        self.scheduler.budget.on_suspend = partial(self.notify_changed, change=ContextChange.SUSPENDED)

    def notify_changed(self, context: Context, change: ContextChange = ContextChange.CHANGED) -> None:
        """Its tokens, pages or settings are others now."""
        context.version += 1
        if context.pinned:
            self.quotas.charge(context.tenant, context, self._pages(context))
        for watch in self.watches.get(context.tenant, ()):
            watch.note(context, change)

    def wake_watches(self) -> None:
        """So that they find out that the engine has stopped."""
        for watch in chain.from_iterable(self.watches.values()):
            watch.wake()

    def begin(self, context: Context, request: CreateContextRequest | OpenRequest, change: ContextChange) -> None:
        """A new context gets what was asked for. Raises PIN_BUDGET, and then it is gone."""
        try:
            self.update(context, UpdateContextRequest(**{"labels": {}} | named(UpdateContextRequest, request)))
        except JaxctxError:
            self.cache.close(context)
            raise
        self.notify_changed(context, change)

    def update(self, context: Context, request: UpdateContextRequest) -> None:
        """A new priority holds for a waiting request too, not for one that runs. `pin_s` goes with `pinned`."""
        if request.pinned is not None and (request.pinned or context.pinned):  # the only one that may be refused
            self.pin(context, request.pinned, request.pin_s)
        if request.priority is not None and request.priority != context.priority:
            context.priority = request.priority
            self.scheduler.reprioritise(context)
        self.change(context, request)

    def change(self, context: Context, settings: RetentionUpdate | UpdateContextRequest) -> None:
        """It gets labels, and ends so long from now, where that is given."""
        if settings.ttl is not None:
            self.cache.set_lifetime(context, Lifetime.begin(settings.ttl.seconds, settings.ttl.sliding, self.clock()))
        if settings.labels is not None:
            context.labels = dict(settings.labels)

    def pin(self, context: Context, pinned: bool, pin_s: float | None = None) -> None:
        """Never a victim for so long, or until it is taken back; or from now on a victim again. Raises PIN_BUDGET."""
        pages = self._pages(context) if pinned else 0
        self.quotas.check_pin(context.tenant, context, pages)
        self.quotas.charge(context.tenant, context, pages)
        context.pinned = pinned
        context.pinned_until = self.clock() + pin_s if pinned and pin_s is not None else None
        self._pins.set(context, context.pinned_until)
        self.scheduler.reconsider()  # there may be another victim

    def check_growth(self, context: Context, pages: int) -> None:
        """Before it may grow to so many pages: raises PIN_BUDGET if it is pinned and its tenant may not pin them."""
        if context.pinned:
            self.quotas.check_pin(context.tenant, context, pages)

    def _pages(self, context: Context) -> int:
        """That it holds, or was promised."""
        held, writer = context.committed_pages + context.working_pages, self.scheduler.writers.get(context)
        return held if writer is None else max(held, -(-writer.worst_case_tokens // context.page_size))

    def close(
        self, context: Context, change: ContextChange = ContextChange.CLOSED, why: JaxctxError | None = None
    ) -> None:
        """Give up a context; its writer is ended first, and told why."""
        if (writer := self.scheduler.writers.get(context)) is not None:
            self.scheduler.fail(writer, why or Cancelled("the context was closed"))
        self.pin(context, False)
        self.cache.close(context)
        self.notify_changed(context, change)

    def expire(self) -> float:
        """Close the contexts that are over, their writers first, and end pins; returns seconds until there is more."""
        now = self.clock()
        for context in self.cache.lifetimes.due(now):
            if context in self.scheduler.writers and context.lifetime.sliding:
                self.cache.set_lifetime(context, context.lifetime.anew(now))
                continue
            self.close(context, ContextChange.EXPIRED, context_expired(context.id))
            self.expired += 1
        for context in self._pins.due(now):
            self.pin(context, False)
            self.notify_changed(context)
        ends = [at for at in (self.cache.lifetimes.next, self._pins.next) if at is not None]
        return min(max(min(ends, default=now + PATIENCE_S) - now, 0.0), PATIENCE_S)
