"""Watch: what happens to the contexts of a tenant, for readers who want to know.

A reader pulls, and is told of a context as it is at that moment: never of an older state than it knows. Until then only
the names of what it has yet to be told are kept, one entry a context, and a reader that lags too far is told everything
anew (RESET). Called on the step thread; the reader's `wake` is called there too.

    ids, sorted:   told as they were when the listing came by ──listed──▶ not told: the listing will
                   what happens to these is pending
"""

from collections import defaultdict
from collections.abc import Callable

from jaxctx.answers import Change, ContextEvent, ContextInfo, moment
from jaxctx.cache.contexts import Context, ContextCache

PENDING = 1024  # contexts that a reader may lag behind
EVENTS = 128  # at most, of one read

_BIRTHS = (Change.CREATED, Change.FORKED, Change.OPENED)
_ENDS = (Change.CLOSED, Change.EXPIRED)


class Watch:
    """One reader. `wake` is called when something is there after a read that found nothing."""

    def __init__(self, tenant: str, wake: Callable[[], None], limit: int = PENDING) -> None:
        self.tenant = tenant
        self.wake = wake
        self.limit = limit
        self.pending: dict[Context, tuple[Change, float]] = {}
        self.listed: str | None = ""  # the last id that the listing told; None: it is at its end
        self.reset = False
        self.asleep = False

    def note(self, context: Context, change: Change, at: float) -> None:
        """Something happened. What is pending of a context becomes one event: its birth, its end or its last change."""
        if self.listed is not None and context.id > self.listed:
            return
        before = self.pending.get(context)
        if before is not None and before[0] in _BIRTHS and change not in _ENDS:
            change = before[0]
        self.pending[context] = change, at
        if len(self.pending) > self.limit:
            self.pending.clear()
            self.listed, self.reset = "", True
        if self.asleep:
            self.asleep = False
            self.wake()


class Watchers:
    """Of one engine. `clock` tells unix seconds."""

    def __init__(self, cache: ContextCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._readers: defaultdict[str, set[Watch]] = defaultdict(set)  # by tenant

    def join(self, watch: Watch) -> None:
        self._readers[watch.tenant].add(watch)

    def leave(self, watch: Watch) -> None:
        """It is forgotten, if it ever came."""
        self._readers[watch.tenant].discard(watch)

    def note(self, context: Context, change: Change) -> None:
        for watch in self._readers.get(context.tenant, ()):
            watch.note(context, change, self._clock())

    def wake_all(self) -> None:
        """So that they find out that the engine has stopped."""
        for readers in self._readers.values():
            for watch in readers:
                watch.wake()

    def read(self, watch: Watch, describe: Callable[[Context], ContextInfo]) -> list[ContextEvent]:
        """What there is to tell, up to `EVENTS`; nothing: the reader is woken when there is."""
        now, count = self._clock(), EVENTS - watch.reset
        events = [ContextEvent(change=Change.RESET, at=moment(now))] if watch.reset else []
        told = [(context, *watch.pending.pop(context)) for context in list(watch.pending)[:count]]
        count -= len(told)
        if watch.listed is not None and count:
            contexts = self._cache.list(watch.tenant, watch.listed, count)
            told += [(context, Change.EXISTS, now) for context in contexts]
            watch.listed = contexts[-1].id if len(contexts) == count else None
        for context, change, at in told:
            info = None if context.closed else describe(context)
            events.append(ContextEvent(change=change, at=moment(at), context_id=context.id, context=info))
        watch.reset, watch.asleep = False, not events
        return events
