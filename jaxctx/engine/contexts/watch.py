"""`Watch`: one reader of the changes of a tenant's contexts.

A reader pulls events, and gets each context as it is at that time: never an older state than it has seen. Until it
reads, the watch keeps one pending change for each changed context, without the context's state. A reader that is too
far behind gets RESET, and then all contexts again. Called on the step thread; `wake` is called there too.

A reader begins with a listing of all contexts in the order of their ids. A context that the listing has not reached yet
needs no pending change: the listing will return it.

    ids, sorted:   listed: changes are pending ──▶ │ `listed` │ ──▶ not listed yet: changes are not kept
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.types import ContextChange, ContextEvent, ContextInfo, utc_datetime

EVENTS = 128  # at most, in one read

_BEGINNINGS = (ContextChange.CREATED, ContextChange.FORKED, ContextChange.OPENED)
_ENDS = (ContextChange.CLOSED, ContextChange.EXPIRED)


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of a context that the reader has not read yet."""

    context: Context
    change: ContextChange
    at: float  # unix seconds


@dataclass(eq=False)
class Watch:
    """One reader. `wake` is called at the first change after a read that found nothing."""

    tenant: str
    cache: ContextCache
    clock: Callable[[], float]  # unix seconds
    wake: Callable[[], None]
    with_programs: bool = True  # whether changes of contexts that were made for programs are read too
    limit: int = 1024  # pending changes that are kept
    pending: dict[Context, PendingChange] = field(default_factory=dict)  # oldest first
    listed: str | None = ""  # the last id that the listing returned; None: the listing is done
    reset: bool = False  # changes were lost, and the reader has not read RESET yet
    asleep: bool = False  # the last read found nothing

    def note(self, context: Context, change: ContextChange) -> None:
        """Note a change of a context. Several pending changes of one become one: its beginning, its end or the last."""
        if context.of_program and not self.with_programs:
            return
        if self.listed is not None and context.id > self.listed:
            return  # the listing will return it
        before = self.pending.get(context)
        if before is not None and before.change in _BEGINNINGS and change not in _ENDS:
            change = before.change
        self.pending[context] = PendingChange(context, change, self.clock())
        if len(self.pending) > self.limit:
            self._reset()
        if self.asleep:
            self.asleep = False
            self.wake()

    def _reset(self) -> None:
        """The reader is too far behind: drop pending changes, and begin the listing again."""
        self.pending.clear()
        self.listed = ""
        self.reset = True

    def read(self, describe: Callable[[Context], ContextInfo]) -> list[ContextEvent]:
        """Up to `EVENTS` events. If there are none, the reader is woken when there are."""
        now = self.clock()
        events: list[ContextEvent] = []
        if self.reset:
            events.append(ContextEvent(change=ContextChange.RESET, at=utc_datetime(now)))
        changes = self._take_pending(EVENTS - len(events))
        changes += self._list_more(EVENTS - len(events) - len(changes), now)
        for each in changes:
            info = None if each.context.closed else describe(each.context)
            events.append(
                ContextEvent(change=each.change, at=utc_datetime(each.at), context_id=each.context.id, context=info)
            )
        self.reset = False
        self.asleep = not events
        return events

    def _take_pending(self, count: int) -> list[PendingChange]:
        """Remove and return the first pending changes, up to `count`."""
        taken = list(self.pending.values())[:count]
        for each in taken:
            del self.pending[each.context]
        return taken

    def _list_more(self, count: int, now: float) -> list[PendingChange]:
        """The next contexts of the listing, up to `count`."""
        if self.listed is None or count == 0:
            return []
        contexts = self.cache.list(self.tenant, self.listed, count, with_programs=self.with_programs)
        self.listed = contexts[-1].id if len(contexts) == count else None
        return [PendingChange(context, ContextChange.EXISTS, now) for context in contexts]
