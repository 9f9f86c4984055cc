"""The lifecycle of contexts, beside their tokens: time to live, pins, and the notification of every change.

Every operation that changes a context calls `notify_changed` afterwards: the context's version grows, watches get the
change, and if the context is pinned, its pages are charged to its tenant. `expire` closes expired contexts before any
other operation can find them.

A sliding time to live starts again with each use: an operation that changes a context's tokens or pages, computes,
forks or saves it. A writer is a use as long as it runs, and so is a call that holds the context until it has forked it.
Reading a context or changing its settings is no use. Called on the step thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.cache.context_table import context_expired
from jaxctx.engine.contexts.quotas import Quotas, is_hidden
from jaxctx.engine.contexts.watch import Watch
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.errors import Cancelled, JaxctxError
from jaxctx.lifetime import DeadlineQueue, Lifetime
from jaxctx.types import ContextChange, Ttl, UpdateContextRequest

MAX_WAIT_S = 60.0  # check at least this often: the wall clock may be set forward


class ContextLifecycle:
    """Lifetime, pins and change notifications of all contexts of one engine."""

    def __init__(self, cache: ContextCache, scheduler: Scheduler, quotas: Quotas, clock: Callable[[], float]) -> None:
        """`clock` returns unix seconds."""
        self.quotas = quotas
        self.clock = clock
        self.watches: defaultdict[str, set[Watch]] = defaultdict(set)  # the readers of changes, by tenant
        self.expired = 0  # contexts that expired, in total
        self.held: Counter[Context] = Counter()  # contexts that calls are about to fork, and by how many
        self._cache = cache
        self._scheduler = scheduler
        self._pin_ends: DeadlineQueue[Context] = DeadlineQueue()

    def notify_changed(self, context: Context, change: ContextChange = ContextChange.CHANGED) -> None:
        """Note that the context's tokens, pages or settings have changed."""
        context.version += 1
        if context.pinned and not is_hidden(
            context.tenant
        ):  # what the engine holds for a moment is no pin of a tenant's
            self.quotas.charge(context.tenant, context, self._pages(context))
        for watch in self.watches.get(context.tenant, ()):
            watch.note(context, change)

    def notify_suspended(self, context: Context) -> None:
        """Note that the context was suspended."""
        self.notify_changed(context, ContextChange.SUSPENDED)

    def add_watch(self, watch: Watch) -> None:
        """Notify this watch of changes from now on."""
        self.watches[watch.tenant].add(watch)

    def remove_watch(self, watch: Watch) -> None:
        """Forget a watch, if it was ever added."""
        self.watches[watch.tenant].discard(watch)

    def has_writer(self, context: Context) -> bool:
        """Whether the context has a writer: a request, or a call that holds it."""
        return context in self.held or self._scheduler.writer_of(context) is not None

    def hold(self, context: Context) -> None:
        """Keep the context's tokens as they are, for a call that is going to fork it: nobody may write to it."""
        self.held[context] += 1

    def release(self, context: Context) -> None:
        """End a hold. The context may be closed."""
        self.held[context] -= 1
        if not self.held[context]:
            del self.held[context]
        if not context.closed:
            self.notify_changed(context)

    def wake_watches(self) -> None:
        """Wake all watches, so that their readers see that the engine stops."""
        for watches in self.watches.values():
            for watch in watches:
                watch.wake()

    def begin(self, context: Context, settings: UpdateContextRequest, change: ContextChange) -> None:
        """Give a new context its settings and announce it. Raises PIN_BUDGET, and then the context is closed."""
        try:
            self.update(context, settings)
        except JaxctxError:
            self._cache.close(context)
            raise
        self.notify_changed(context, change)

    def update(self, context: Context, settings: UpdateContextRequest) -> None:
        """Change what is given. Raises PIN_BUDGET, and then nothing has changed.

        A new priority holds for a waiting request too, not for one that runs. `pin_s` goes with `pinned`.
        """
        if settings.pinned is not None and (settings.pinned or context.pinned):  # first, as only this may be refused
            self.pin(context, settings.pinned, settings.pin_s)
        if settings.priority is not None and settings.priority != context.priority:
            context.priority = settings.priority
            self._scheduler.reprioritise(context)
        self.update_retention(context, settings.ttl, settings.labels)

    def update_retention(self, context: Context, ttl: Ttl | None, labels: Mapping[str, str] | None) -> None:
        """Set the context's time to live from now on, and all of its labels; None: as they are."""
        if ttl is not None:
            self._cache.set_lifetime(context, self.new_lifetime(ttl))
        if labels is not None:
            context.labels = dict(labels)

    def new_lifetime(self, ttl: Ttl) -> Lifetime:
        """The lifetime of an object that begins now."""
        return Lifetime.begin(ttl.seconds, ttl.sliding, self.clock())

    def pin(self, context: Context, pinned: bool, pin_s: float | None = None) -> None:
        """Pin for so many seconds (None: until it is unpinned), or unpin. Raises PIN_BUDGET.

        A pinned context is never suspended under memory pressure.
        """
        pages = self._pages(context) if pinned else 0
        self.quotas.check_pin(context.tenant, context, pages)
        self.quotas.charge(context.tenant, context, pages)
        self._cache.pin(context, pinned)
        context.pinned_until = self.clock() + pin_s if pinned and pin_s is not None else None
        self._pin_ends.set(context, context.pinned_until)
        self._scheduler.reconsider()  # another context may be suspendable now

    def check_growth(self, context: Context, pages: int) -> None:
        """Raises PIN_BUDGET if its tenant has pinned the context and may not pin so many pages of it."""
        if context.pinned and not is_hidden(context.tenant):
            self.quotas.check_pin(context.tenant, context, pages)

    def _pages(self, context: Context) -> int:
        """Pages that the context holds, or that its writer was promised."""
        held = context.committed_pages + context.working_pages
        writer = self._scheduler.writer_of(context)
        if writer is None:
            return held
        promised = -(-writer.worst_case_tokens // context.page_size)
        return max(held, promised)

    def close(
        self,
        context: Context,
        change: ContextChange = ContextChange.CLOSED,
        error: JaxctxError | None = None,
    ) -> None:
        """Close a context. Its writer is ended first, with `error` (None: Cancelled, because it was closed)."""
        writer = self._scheduler.writer_of(context)
        if writer is not None:
            self._scheduler.end(writer)
            self.notify_changed(context)
            writer.reply.set_error(error or Cancelled("the context was closed"))
        self.pin(context, False)
        self._cache.close(context)
        self.notify_changed(context, change)

    def expire(self) -> float:
        """Close expired contexts and end expired pins; returns seconds until the next may expire."""
        now = self.clock()
        for context in self._cache.lifetimes.due(now):
            if context.lifetime.sliding and self.has_writer(context):
                self._cache.set_lifetime(context, context.lifetime.anew(now))
            else:
                self.close(context, ContextChange.EXPIRED, context_expired(context.id))
                self.expired += 1
        for context in self._pin_ends.due(now):
            self.pin(context, False)
            self.notify_changed(context)
        return self._seconds_to_next_end(now)

    def _seconds_to_next_end(self, now: float) -> float:
        """Until the next lifetime or pin may end; 0 to MAX_WAIT_S."""
        ends = [end for end in (self._cache.lifetimes.next, self._pin_ends.next) if end is not None]
        if not ends:
            return MAX_WAIT_S
        return min(max(min(ends) - now, 0.0), MAX_WAIT_S)
