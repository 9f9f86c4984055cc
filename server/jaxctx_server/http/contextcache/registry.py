"""What one server knows of kept contexts beside its store: which are in use now, and which have expired.

Nothing here is needed to find a context. After a restart, or once too many others have come, an expired one is simply
unknown. Used on the event loop only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from jaxctx.errors import NotFound
from jaxctx_server.http.contextcache.errors import busy, expired, not_found

MAX_REMEMBERED = 10_000  # contexts whose end is remembered, of all tenants


@dataclass(frozen=True, slots=True)
class ContextKey:
    """A kept context: its tenant and its session id."""

    tenant: str
    session_id: str


class ContextRegistry:
    """The kept contexts that this server was asked about."""

    def __init__(self, wall_time: Callable[[], float] = time.time) -> None:
        """`wall_time` is in seconds since 1970, as the ends of contexts are."""
        self._wall_time = wall_time
        self._in_use: set[ContextKey] = set()
        self._ends: OrderedDict[ContextKey, float] = (
            OrderedDict()
        )  # seconds since 1970; first the one that was asked about least recently

    def claim(self, key: ContextKey) -> None:
        """Note that a request uses a context from now on. Raises Aborted (context_busy) if another one does."""
        if key in self._in_use:
            raise busy(key.session_id)
        self._in_use.add(key)

    def release(self, key: ContextKey) -> None:
        """Note that the use has ended. Nothing happens twice."""
        self._in_use.discard(key)

    def now(self) -> float:
        """Seconds since 1970."""
        return self._wall_time()

    def remember(self, key: ContextKey, ends_at: float | None) -> None:
        """Note when a context ends, in seconds since 1970. None: never."""
        self._ends.pop(key, None)
        if ends_at is None:
            return
        self._ends[key] = ends_at
        if len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)

    def forget(self, key: ContextKey) -> None:
        """Note that a context was deleted."""
        self._ends.pop(key, None)

    def missing(self, key: ContextKey) -> NotFound:
        """The error for a context that is not there: it has expired, as far as that is known, or it never was."""
        end = self._ends.get(key)
        return expired(key.session_id) if end is not None and end <= self._wall_time() else not_found(key.session_id)
