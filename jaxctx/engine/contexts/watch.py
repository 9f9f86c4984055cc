"""Watch: what happens to the contexts of a tenant, for readers who want to know.

A reader pulls, and is told of a context as it is at that moment: never of an older state than it knows. Until then only
the names of what it has yet to be told are kept, one entry a context, and a reader that lags too far is told everything
anew (RESET). Called on the step thread; the reader's `wake` is called there too.

    ids, sorted:   told as they were when the listing came by ──listed──▶ not told: the listing will
                   what happens to these is pending
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.types import ContextChange, ContextEvent, ContextInfo, utc_datetime

EVENTS = 128  # at most, of one read

_BIRTHS = (ContextChange.CREATED, ContextChange.FORKED, ContextChange.OPENED)
_ENDS = (ContextChange.CLOSED, ContextChange.EXPIRED)


@dataclass(eq=False)
class Watch:
    """One reader. `wake` is called when something is there after a read that found nothing."""

    tenant: str
    cache: ContextCache
    clock: Callable[[], float]  # unix seconds
    wake: Callable[[], None]
    with_programs: bool = True  # whether the reader wants to know of contexts that were made for programs
    limit: int = 1024  # contexts that the reader may lag behind
    pending: dict[Context, tuple[ContextChange, float]] = field(default_factory=dict)
    listed: str | None = ""  # the last id that the listing told; None: it is at its end
    reset: bool = False
    asleep: bool = False

    def note(self, context: Context, change: ContextChange) -> None:
        """Something happened. What is pending of a context becomes one event: its birth, its end or its last change."""
        if context.of_program and not self.with_programs:
            return
        if self.listed is not None and context.id > self.listed:
            return
        before = self.pending.get(context)
        if before is not None and before[0] in _BIRTHS and change not in _ENDS:
            change = before[0]
        self.pending[context] = change, self.clock()
        if len(self.pending) > self.limit:
            self.pending.clear()
            self.listed, self.reset = "", True
        if self.asleep:
            self.asleep = False
            self.wake()

    def read(self, describe: Callable[[Context], ContextInfo]) -> list[ContextEvent]:
        """What there is to tell, up to `EVENTS`; nothing: the reader is woken when there is."""
        now, count = self.clock(), EVENTS - self.reset
        events = [ContextEvent(change=ContextChange.RESET, at=utc_datetime(now))] if self.reset else []
        told = [(context, *self.pending.pop(context)) for context in list(self.pending)[:count]]
        count -= len(told)
        if self.listed is not None and count:
            contexts = self.cache.list(self.tenant, self.listed, count, with_programs=self.with_programs)
            told += [(context, ContextChange.EXISTS, now) for context in contexts]
            self.listed = contexts[-1].id if len(contexts) == count else None
        for context, change, at in told:
            info = None if context.closed else describe(context)
            events.append(ContextEvent(change=change, at=utc_datetime(at), context_id=context.id, context=info))
        self.reset, self.asleep = False, not events
        return events
