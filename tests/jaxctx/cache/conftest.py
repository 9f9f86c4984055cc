"""The harness of this room: random play of a cache against an oracle of plain token lists, on a mock device.

`Oracle` says what every operation must do, without nodes, hashes, holders or page ids: contexts are token lists, the
index is a set of prefixes, and free pages are a number. `World` plays one operation on cache and oracle, carries out
what the engine would do on the device, and compares everything. A slot of the device holds a value that depends on all
tokens up to it, as KV does, so a wrong, stale, missed or shared page shows in what a context reads.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from xxhash import xxh3_128_digest

from jaxctx.cache.contexts import Context, ContextCache, Identity, OutOfPages
from jaxctx.errors import FailedPrecondition, InvalidArgument, JaxctxError, NotFound, OutOfRange

IDENTITIES = (Identity("t", "m"), Identity("t", "m", salt="x"), Identity("t", "m", adapter="x"))
MAX_CONTEXTS = 7

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

    def use(self, expected: Expected) -> None:
        self.contexts.remove(expected)
        self.contexts.append(expected)

    def match(self, e: Expected) -> int:
        if e.suspended:
            e.suspended = False
            self.use(e)
        if e.working_tokens:
            return 0
        before, e.committed = e.committed, self.found(e.identity, e.tokens)
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
        return 0 if e.manual else self._commit(e, e.working_tokens // self.page_size)

    def fork(self, e: Expected) -> Expected:
        pages = -(-e.working_tokens // self.page_size)
        self.take(pages)
        child = Expected(e.context, e.identity, e.manual, False, e.tokens[:], e.committed, pages)
        child.working_tokens, child.suspended = e.working_tokens, e.suspended
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
            found = self.found(e.identity, e.tokens)
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

    def release(self, e: Expected, pages: int) -> None:
        if pages > e.working:
            raise OutOfRange("")
        e.working -= pages
        if e.working * self.page_size < e.working_tokens:
            self._keep(e, (e.committed + e.working) * self.page_size)

    def suspend(self, e: Expected) -> int:
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
        would = self.cache.resident_extension(e.context, [])
        found = self.oracle.found(e.identity, e.tokens + more) * self.page_size
        assert self.cache.resident(e.identity, e.tokens + more) == found
        if not e.working_tokens:
            assert self.cache.resident_extension(e.context, more) == found - e.committed * self.page_size
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
            assert isinstance(answer, tuple)
            children[0].context, copies = answer
            self.carry_out(copies)
            self.oracle.contexts += children

    def truncate(self, e: Expected, b: int) -> None:
        tokens = b % (self.page_size + 3)
        self.both(lambda: self.cache.truncate(e.context, tokens), lambda: self.oracle.truncate(e, tokens))

    def rewind(self, e: Expected, b: int) -> None:
        to = b % (len(e.tokens) + 2)
        self.carry_out(self.both(lambda: self.cache.rewind(e.context, to), lambda: self.oracle.rewind(e, to)))

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

    def carry_out(self, copies: object) -> None:
        if isinstance(copies, list):
            for copy in copies:
                self.device[copy.target] = self.device[copy.source][:]

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


class Play:
    """What the tests of this folder need of this file."""

    world = World
    operations = tuple(OPERATIONS)
    random_steps = staticmethod(random_steps)


@pytest.fixture(scope="session")
def play() -> type[Play]:
    return Play
