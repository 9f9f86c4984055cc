"""The world: random play of a cache against the oracle, on a device that only remembers.

`World` plays one operation on cache and oracle, carries out what the engine would do on the device, and compares
everything. A slot of the device holds a value that depends on all tokens up to it, as KV does, so a wrong, stale,
missed or shared page shows in what a context reads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import pytest
from xxhash import xxh3_128_digest

from jaxctx.cache.contexts import Context, ContextCache, Identity
from jaxctx.cache.tiers import Move, PageCopy
from jaxctx.errors import JaxctxError, NotFound

from .oracle import Expected, Oracle

IDENTITIES = (Identity("t", "m"), Identity("t", "m", salt="x"), Identity("t", "m", adapter="x"))
MAX_CONTEXTS = 7


def constant_digest(data: bytes) -> bytes:
    """A hash that always collides."""
    return b"same"


class World:
    """A cache, an oracle and a device. `play` does one operation on all and raises AssertionError where they differ."""

    def __init__(self, pages: int, page_size: int, digest: Callable[[bytes], bytes] = xxh3_128_digest) -> None:
        ids, ticks = itertools.count(), itertools.count()
        self.cache = ContextCache(
            pages=pages,
            page_size=page_size,
            clock=lambda: float(next(ticks)),
            new_id=lambda: f"{next(ids) * 7919 % 10_007:05}",
            first_page=3,
            digest=digest,
        )
        self.oracle = Oracle(pages, page_size)
        self.page_size = page_size
        self.device: dict[int, list[object]] = {page: ["poison"] * page_size for page in range(3, 3 + pages)}

    def play(self, name: str, a: int, b: int) -> None:
        """One operation; `a` and `b` (0..255) choose the context and the arguments."""
        contexts = self.oracle.contexts
        chosen = contexts[a % len(contexts)] if contexts else None
        before = {e.context: e.context.page_table().tolist() for e in contexts if e is not chosen}
        if name == "create" and len(contexts) < MAX_CONTEXTS:
            self.create(a, b)
        elif name == "create":
            self.close(chosen, b)
        elif chosen is not None:
            getattr(self, name)(chosen, b)
        self.carry_out(self.cache.moves())
        self.oracle.recount()
        for context, pages in before.items():
            assert context.suspended or context.page_table().tolist() == pages, "another context's pages moved"
        self.compare()

    def run(self, steps: Iterable[tuple[str, int, int]]) -> None:
        """Many operations, then the end of all contexts: nothing is left but cached pages."""
        for step in steps:
            self.play(*step)
        while self.oracle.contexts:
            self.play("close", 0, 0)
        self.cache.clear_cached()
        assert self.cache.stats().free == self.oracle.pages

    # --- operations ----------------------------------------------------------------------------------------------

    def both(self, theirs: Callable[[], object], ours: Callable[[], object]) -> object:
        """The cache's answer, which must be the oracle's, if that is an error or a number."""
        answers = []
        for call in (ours, theirs):
            try:
                answers.append(call())
            except JaxctxError as error:
                answers.append(type(error))
        expected, answer = answers
        if isinstance(expected, int | type) or isinstance(answer, type):
            assert answer == expected, f"{answer}, not {expected}"
        return answer

    def create(self, a: int, b: int) -> None:
        identity, manual, pinned = IDENTITIES[max(a % 8 - 5, 0)], b % 5 == 0, b % 7 == 0
        context = self.cache.create(identity, manual_commit=manual, pinned=pinned, tenant=f"t{b % 2}")
        self.oracle.contexts.append(Expected(context, identity, manual, pinned))

    def append(self, e: Expected, b: int) -> None:
        longest = self.oracle.pages * self.page_size
        longest = longest * 5 // 4 if self.oracle.pages < 5 else longest * 2 // 3
        room = longest - len(e.tokens)
        tokens = [int(b % 8 == 1)] * min(b // 8 % (3 * self.page_size + 2), max(room, 0))  # often the same as others'
        self.cache.append(e.context, tokens)
        e.tokens += tokens

    def match(self, e: Expected, b: int) -> None:
        more = [b % 2] * (b % (self.page_size + 1))
        would = self.cache.peek(e.context).device * self.page_size
        found = self.oracle.found(e.identity, e.tokens + more) * self.page_size
        assert self.cache.resident(e.identity, e.tokens + more) == found
        if not e.working_tokens:
            would_find = self.cache.peek(e.context, more).device * self.page_size
            assert would_find == (self.oracle.would_find(e, more) - e.committed) * self.page_size
        assert self.both(lambda: self.cache.match(e.context), lambda: self.oracle.match(e)) == would

    def grow(self, e: Expected, b: int) -> None:
        tokens = b % (4 * self.page_size + 1)
        self.both(lambda: self.cache.grow(e.context, tokens), lambda: self.oracle.grow(e, tokens))

    def settle(self, e: Expected, b: int) -> None:
        room = e.working * self.page_size - e.working_tokens
        self.step(e, b % (min(room, len(e.tokens) - self.oracle.seq_len(e)) + 2))  # sometimes one too many

    def step(self, e: Expected, tokens: int) -> None:
        """The engine's: writes what it computed through the page table, then settles it."""
        start = self.oracle.seq_len(e)
        self.write(e, start, self.values(e)[start : start + tokens])
        self.both(lambda: self.cache.settle(e.context, tokens), lambda: self.oracle.settle(e, tokens))

    def fill(self, e: Expected, b: int) -> None:
        """What the engine does: append, match, make room by suspending others, and settle what was not found."""
        self.append(e, b)
        self.match(e, b)
        missing = -(-(len(e.tokens) - e.committed * self.page_size) // self.page_size) - e.working
        for victim in [*self.oracle.contexts]:
            if self.cache.available() < missing and victim is not e and not victim.pinned:
                self.suspend(victim, 0)
        self.compute(e, 255)

    def compute(self, e: Expected, b: int) -> None:
        """Without a match first, like one of two fills of the same tokens that began at once."""
        tokens = min(len(e.tokens) - self.oracle.seq_len(e), b)
        self.both(lambda: self.cache.grow(e.context, tokens), lambda: self.oracle.grow(e, tokens))
        if tokens <= e.working * self.page_size - e.working_tokens:
            self.step(e, tokens)

    def scribble(self, e: Expected, b: int) -> None:
        """Rejected drafts and steps in flight leave anything behind the settled tokens."""
        start = self.oracle.seq_len(e)
        self.write(e, start, [f"draft {b}"] * (len(e.context.page_table()) * self.page_size - start))

    def fork(self, e: Expected, b: int) -> None:
        if len(self.oracle.contexts) == MAX_CONTEXTS:
            return
        children: list[Expected] = []
        answer = self.both(lambda: self.cache.fork(e.context), lambda: children.append(self.oracle.fork(e)))
        if children:
            assert isinstance(answer, Context)
            children[0].context = answer
            self.oracle.contexts += children

    def truncate(self, e: Expected, b: int) -> None:
        tokens = b % (self.page_size + 3)
        self.both(lambda: self.cache.truncate(e.context, tokens), lambda: self.oracle.truncate(e, tokens))

    def rewind(self, e: Expected, b: int) -> None:
        to = b % (len(e.tokens) + 2)
        self.both(lambda: self.cache.rewind(e.context, to), lambda: self.oracle.rewind(e, to))

    def reserve(self, e: Expected, b: int) -> None:
        available = self.cache.available()
        pages = (b % 3, b % (self.oracle.pages + 2), available, available + 1)[b % 4]
        self.both(lambda: self.cache.reserve(e.context, pages), lambda: self.oracle.reserve(e, pages))

    def commit(self, e: Expected, b: int) -> None:
        pages = b % (e.working + 2)
        self.both(lambda: self.cache.commit(e.context, pages), lambda: self.oracle.commit(e, pages))

    def release(self, e: Expected, b: int) -> None:
        pages = b % (e.working + 2)
        self.both(lambda: self.cache.release(e.context, pages), lambda: self.oracle.release(e, pages))

    def suspend(self, e: Expected, b: int) -> None:
        self.both(lambda: self.cache.suspend(e.context), lambda: self.oracle.suspend(e))

    def touch(self, e: Expected, b: int) -> None:
        e.context.busy = b % 4 == 0
        self.cache.touch(e.context)
        if not e.suspended:
            self.oracle.use(e)

    def close(self, e: Expected, b: int) -> None:
        self.cache.close(e.context)
        self.oracle.contexts.remove(e)
        with pytest.raises(NotFound):
            self.cache.append(e.context, [1])

    def clear(self, e: Expected, b: int) -> None:
        cached = self.oracle.cached()
        assert self.cache.clear_cached() == len(cached)
        for key in cached:
            del self.oracle.resident[key]

    # --- the device ----------------------------------------------------------------------------------------------

    def values(self, e: Expected) -> list[object]:
        """What each token's slot holds: something of the identity and of all tokens up to it."""
        value, values = IDENTITIES.index(e.identity), []
        for token in e.tokens:
            value = hash((value, token))
            values.append(value)
        return values

    def write(self, e: Expected, start: int, values: list[object]) -> None:
        """Through the page table, beyond the settled tokens; what lies past the last page is not written."""
        pages = e.context.page_table().tolist()
        for position, value in enumerate(values, start):
            number, slot = divmod(position, self.page_size)
            if number < len(pages):
                assert number >= e.committed, "a committed page is written"
                self.device[pages[number]][slot] = value

    def carry_out(self, moves: list[Move]) -> None:
        for move in moves:
            assert isinstance(move, PageCopy)
            self.device[move.target] = self.device[move.source][:]

    # --- the comparison ------------------------------------------------------------------------------------------

    def compare(self) -> None:
        cache, oracle = self.cache, self.oracle
        cache.check()
        stats, cached = cache.stats(), len(oracle.cached())
        assert (stats.free, stats.cached) == (oracle.free(), cached)
        assert stats.free + stats.cached + stats.held == stats.total == oracle.pages
        assert cache.available() == stats.free + stats.cached
        for page in self.device:
            if cache.memory.pool.is_free(page):
                self.device[page] = ["poison"] * self.page_size
        holders = [set(oracle.keys(e)) for e in oracle.contexts]
        for e in oracle.contexts:
            self.compare_context(e, [sum(key in keys for keys in holders) for key in oracle.keys(e)])
        victims = [e.context for e in oracle.contexts if not (e.pinned or e.context.busy or e.suspended)]
        assert list(cache.victims()) == [c for c in victims if c.committed_pages or c.working_pages]
        kept = {key for e in oracle.contexts if e.context not in victims for key in oracle.keys(e)}
        own = {key for e in oracle.contexts for key in oracle.keys(e)} - kept
        assert cache.suspendable() == len(own) + sum(c.working_pages for c in victims)
        assert set(cache) == {e.context for e in oracle.contexts}
        assert len(cache) == len(oracle.contexts)
        for tenant in ("t0", "t1"):
            ids = sorted(e.context.id for e in oracle.contexts if e.context.tenant == tenant)
            assert [context.id for context in cache.list(tenant, "", 99)] == ids

    def compare_context(self, e: Expected, refcounts: list[int]) -> None:
        c, seq_len = e.context, self.oracle.seq_len(e)
        assert (c.committed_pages, c.working_pages, c.working_tokens) == (e.committed, e.working, e.working_tokens)
        assert (c.seq_len, c.buffered_tokens, c.length) == (seq_len, len(e.tokens) - seq_len, len(e.tokens))
        assert (c.suspended, c.pinned, c.manual_commit) == (e.suspended, e.pinned, e.manual)
        assert self.cache.get(c.tenant, c.id) is c
        assert c.tokens().tolist() == e.tokens
        middle = len(e.tokens) // 2
        assert c.tokens(middle, max(seq_len, middle)).tolist() == e.tokens[middle : max(seq_len, middle)]
        pages = c.page_table().tolist()
        assert len(pages) == e.committed + e.working
        assert [value for page in pages for value in self.device[page]][:seq_len] == self.values(e)[:seq_len]
        assert self.cache.refcounts(c) == refcounts + [1] * e.working


OPERATIONS = {
    "create": 8,
    "append": 8,
    "match": 4,
    "grow": 3,
    "settle": 4,
    "fill": 16,
    "compute": 16,
    "scribble": 3,
    "fork": 6,
    "truncate": 4,
    "rewind": 8,
    "reserve": 5,
    "commit": 3,
    "release": 4,
    "suspend": 6,
    "touch": 3,
    "close": 4,
    "clear": 1,
}


def random_steps(seed: int, count: int) -> list[tuple[str, int, int]]:
    """Operations with their arguments, the same for the same seed."""
    source = random.Random(seed)
    names = source.choices([*OPERATIONS], [*OPERATIONS.values()], k=count)
    return [(name, source.randrange(256), source.randrange(256)) for name in names]
