"""The contexts that one open page draws, and which changes it has not been sent yet.

Changes of a context that nobody took yet are one change, so that the feed is as large however slowly the page reads.
It keeps the contexts that were used last; it never calls anybody.

    WatchContexts ──apply──▶ contexts and their changes ──take_changes──▶ the page
                       └───▶ contexts whose pages are to be read ──take_page_requests──▶ GetContext
"""

from dataclasses import dataclass, field

from jaxctx.v1.context_pb2 import Context
from jaxctx.v1.context_service_pb2 import CONTEXT_CHANGE_RESET, WatchContextsResponse

MAX_CONTEXTS = 200
MAX_PAGES_AT_ONCE = 4096  # of the contexts whose pages are read in one turn; one context is read however many it has
MAX_PAGE_REQUESTS = 12  # contexts whose pages are read in one turn
MAX_REREADS = 4  # contexts that did not change themselves and are read again in one turn


@dataclass(frozen=True, slots=True)
class PageCounts:
    """What changes whenever the pages of a context do."""

    committed: int
    working: int
    state: int
    engine_id: str

    @classmethod
    def of(cls, context: Context) -> "PageCounts":
        """Those of a context."""
        return cls(context.committed_pages, context.working_pages, context.state, context.engine_id)


@dataclass(frozen=True, slots=True)
class ContextChanges:
    """What changed since changes were last taken."""

    reset: bool  # forget all contexts first
    changed: list[Context]
    removed: list[str]  # ids
    left_out: bool  # the caller has had more contexts than are kept


@dataclass(slots=True)
class ContextFeed:
    """The contexts of one page."""

    limit: int = MAX_CONTEXTS
    contexts: dict[str, Context] = field(default_factory=dict)  # up to twice the limit
    changed: set[str] = field(default_factory=set)  # ids of contexts, not sent as they are now
    removed: set[str] = field(default_factory=set)  # ids that were sent, of contexts that are gone
    sent: set[str] = field(default_factory=set)  # ids that the page knows
    was_reset: bool = True  # the page may hold contexts of an earlier connection
    left_out: bool = False
    unread: dict[str, None] = field(default_factory=dict)  # contexts whose own pages changed; oldest first
    uncertain: dict[str, None] = field(default_factory=dict)  # contexts whose pages have other holders now, perhaps
    holders_changed: bool = False  # a context came or went since pages were last requested

    def apply(self, change: WatchContextsResponse) -> None:
        """Take note of a change."""
        if change.change == CONTEXT_CHANGE_RESET:
            self._reset()
            return
        if not change.HasField("context"):
            self._remove(change.context_id)
            return
        before = self.contexts.get(change.context_id)
        self.contexts[change.context_id] = change.context
        self.changed.add(change.context_id)
        self.removed.discard(change.context_id)
        if before is None:
            self.holders_changed = True
        if before is None or PageCounts.of(before) != PageCounts.of(change.context):
            self.unread[change.context_id] = None
        if len(self.contexts) >= 2 * self.limit:
            self._keep_last_used()

    def take_changes(self) -> ContextChanges | None:
        """What changed since the last call; None: nothing."""
        self._keep_last_used()
        if not (self.was_reset or self.changed or self.removed):
            return None
        changed = [self.contexts[context_id] for context_id in sorted(self.changed)]
        changes = ContextChanges(self.was_reset, changed, sorted(self.removed), self.left_out)
        self.sent.update(self.changed)
        self.sent.difference_update(self.removed)
        self.changed.clear()
        self.removed.clear()
        self.was_reset = False
        return changes

    def take_page_requests(self) -> list[str]:
        """The ids of contexts whose pages are to be read now: first those whose own pages changed."""
        if self.holders_changed:
            self.uncertain = dict.fromkeys([*self.uncertain, *self.contexts])
            self.holders_changed = False
        rereads = [context_id for context_id in self.uncertain if context_id not in self.unread]
        wanted = [*self.unread, *rereads[:MAX_REREADS]][:MAX_PAGE_REQUESTS]
        taken: list[str] = []
        pages = 0
        for context_id in wanted:
            context = self.contexts[context_id]
            pages += context.committed_pages + context.working_pages
            if taken and pages > MAX_PAGES_AT_ONCE:
                break
            self.unread.pop(context_id, None)
            self.uncertain.pop(context_id, None)
            taken.append(context_id)
        return taken

    def _reset(self) -> None:
        for collection in (self.contexts, self.changed, self.removed, self.sent, self.unread, self.uncertain):
            collection.clear()
        self.was_reset, self.left_out, self.holders_changed = True, False, False

    def _remove(self, context_id: str) -> None:
        if self.contexts.pop(context_id, None) is None:
            return
        self.changed.discard(context_id)
        self.unread.pop(context_id, None)
        self.uncertain.pop(context_id, None)
        if context_id in self.sent:
            self.removed.add(context_id)
        self.holders_changed = True

    def _keep_last_used(self) -> None:
        """Forget the contexts beyond the limit that were not used for longest."""
        surplus = len(self.contexts) - self.limit
        if surplus <= 0:
            return
        self.left_out = True
        for context in sorted(self.contexts.values(), key=_last_use)[:surplus]:
            self._remove(context.context_id)


def _last_use(context: Context) -> float:
    """When a context was last used, in seconds."""
    return context.used_at.seconds + context.used_at.nanos * 1e-9
