"""The oracle: what every operation must do, without nodes, hashes, holders or page ids.

Contexts are token lists, the index is a set of prefixes with the time each lost its last holder, and free pages are a
number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from jaxctx.cache.contexts import Context, Identity, OutOfPages
from jaxctx.errors import FailedPrecondition, InvalidArgument, OutOfRange

Key = tuple[Identity, tuple[int, ...]]  # a committed page: all tokens up to its end


@dataclass(eq=False)
class Expected:
    """What a context should look like."""

    context: Context
    identity: Identity
    manual: bool
    pinned: bool
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    working: int = 0
    working_tokens: int = 0
    suspended: bool = False
    by_hand: int | None = None  # no more pages than these are committed but by hand


class Oracle:
    """The meaning of the operations. Each method checks first, then changes, and returns what the cache should."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.contexts: list[Expected] = []  # least recently used first
        self.resident: dict[Key, int] = {}  # when it lost its last holder
        self._stamps = itertools.count()
        self._was_held: set[Key] = set()

    def keys(self, expected: Expected) -> list[Key]:
        ends = range(self.page_size, expected.committed * self.page_size + 1, self.page_size)
        return [(expected.identity, tuple(expected.tokens[:end])) for end in ends]

    def seq_len(self, expected: Expected) -> int:
        return expected.committed * self.page_size + expected.working_tokens

    def recount(self) -> int:
        """Stamps what is held no longer, deepest first; returns how many that were."""
        held = {key for expected in self.contexts for key in self.keys(expected)}
        released = sorted(self._was_held - held, key=lambda key: -len(key[1]))
        for key in released:
            self.resident[key] = next(self._stamps)
        self._was_held = held
        return len(released)

    def cached(self) -> list[Key]:
        return sorted(self.resident.keys() - self._was_held, key=self.resident.__getitem__)

    def free(self) -> int:
        return self.pages - len(self.resident) - sum(expected.working for expected in self.contexts)

    def take(self, count: int) -> None:
        self.recount()
        cached = self.cached()
        if count > self.free() + len(cached):
            raise OutOfPages("")
        for key in cached[: max(count - self.free(), 0)]:
            del self.resident[key]

    def found(self, identity: Identity, tokens: list[int]) -> int:
        pages = 0
        while (pages + 1) * self.page_size <= len(tokens) and (
            (identity, tuple(tokens[: (pages + 1) * self.page_size])) in self.resident
        ):
            pages += 1
        return pages

    def would_find(self, e: Expected, more: list[int] | None = None) -> int:
        """Pages on the device that are its committed ones, or would be by a match."""
        tokens = e.tokens + (more or [])
        return self.found(e.identity, tokens if e.by_hand is None else tokens[: e.by_hand * self.page_size])

    def use(self, expected: Expected) -> None:
        self.contexts.remove(expected)
        self.contexts.append(expected)

    def match(self, e: Expected) -> int:
        if e.suspended:
            e.suspended = False
            self.use(e)
        if e.working_tokens:
            return 0
        before, e.committed = e.committed, self.would_find(e)
        return (e.committed - before) * self.page_size

    def grow(self, e: Expected, tokens: int) -> None:
        self._must_be_resident(e)
        missing = max(-(-(e.working_tokens + tokens) // self.page_size) - e.working, 0)
        self.take(missing)
        e.working += missing

    def settle(self, e: Expected, tokens: int) -> int:
        self._must_be_resident(e)
        if tokens > len(e.tokens) - self.seq_len(e):
            raise OutOfRange("")
        if e.working_tokens + tokens > e.working * self.page_size:
            raise FailedPrecondition("")
        e.working_tokens += tokens
        full = e.working_tokens // self.page_size
        return self._commit(e, min(full, max((e.by_hand or 0) - e.committed, 0)) if e.manual else full)

    def fork(self, e: Expected) -> Expected:
        pages = -(-e.working_tokens // self.page_size)
        self.take(pages)
        child = Expected(e.context, e.identity, e.manual, False, e.tokens[:], e.committed, pages)
        child.working_tokens, child.suspended, child.by_hand = e.working_tokens, e.suspended, e.by_hand
        return child

    def truncate(self, e: Expected, tokens: int) -> None:
        if tokens > len(e.tokens) - e.committed * self.page_size:
            raise OutOfRange("")
        self._keep(e, len(e.tokens) - tokens)

    def rewind(self, e: Expected, to: int) -> None:
        if to > len(e.tokens):
            raise OutOfRange("")
        if to < e.committed * self.page_size:
            needs_page = to % self.page_size > 0 and not e.working
            others = {key for other in self.contexts if other is not e for key in self.keys(other)}
            if needs_page and self.free() + len(self.cached()) == 0 and self.keys(e)[-1] in others:
                raise OutOfPages("")
            e.working_tokens = 0
            e.working = min(e.working, to % self.page_size, 1)
            self._keep(e, to)
            if needs_page:
                self.take(1)
                e.working = 1
            e.working_tokens = to % self.page_size
        else:
            self._keep(e, to)

    def reserve(self, e: Expected, pages: int) -> None:
        if pages > self.pages:
            raise InvalidArgument("")
        if e.suspended:
            held = {key for other in self.contexts for key in self.keys(other)}
            found = self.would_find(e)
            chain = {(e.identity, tuple(e.tokens[: n * self.page_size])) for n in range(1, found + 1)}
            if pages + len(chain - held) > self.free() + len(self.cached()):
                raise OutOfPages("")
            self.match(e)
        self.take(pages)
        e.working += pages

    def commit(self, e: Expected, pages: int) -> None:
        if pages > e.working:
            raise OutOfRange("")
        if pages * self.page_size > e.working_tokens:
            raise FailedPrecondition("")
        self._commit(e, pages)
        e.by_hand = None

    def release(self, e: Expected, pages: int) -> None:
        if pages > e.working:
            raise OutOfRange("")
        e.working -= pages
        if e.working * self.page_size < e.working_tokens:
            self._keep(e, (e.committed + e.working) * self.page_size)

    def suspend(self, e: Expected) -> int:
        if e.suspended:
            return 0
        if e.manual and e.working_tokens and e.by_hand is None:
            e.by_hand = e.committed
        freed, e.suspended = e.working, True
        e.committed = e.working = e.working_tokens = 0
        return freed + self.recount()

    def _must_be_resident(self, e: Expected) -> None:
        if e.suspended:
            raise FailedPrecondition("")

    def _commit(self, e: Expected, pages: int) -> int:
        merged = 0
        for _ in range(pages):
            e.committed, e.working = e.committed + 1, e.working - 1
            e.working_tokens -= self.page_size
            key = self.keys(e)[-1]
            merged += key in self.resident
            self.resident.setdefault(key, -1)
        return merged

    def _keep(self, e: Expected, length: int) -> None:
        del e.tokens[length:]
        e.committed = min(e.committed, length // self.page_size)
        e.working_tokens = min(e.working_tokens, length - e.committed * self.page_size)
        if e.by_hand is not None and length < e.by_hand * self.page_size:
            e.by_hand = None
