"""The harness of the stateful tests: random operations on a cache and on the oracle, with a fake device.

`Harness.run_operation` does one operation on cache and oracle, carries out what the engine would do, and compares. A
slot of the fake device holds a value that depends on all tokens and overrides up to it, as KV does. Hence a wrong,
stale, missed or wrongly shared page shows in what a context reads.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from jaxctx.cache import page_control
from jaxctx.cache.attention_overrides import encode_override
from jaxctx.cache.audit import refcounts
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context import Context
from jaxctx.cache.context_cache import ContextCache, Identity, PrefixMatch
from jaxctx.cache.prefix_index import NOWHERE, PageNode
from jaxctx.errors import AlreadyExists, JaxctxError, NotFound
from tests.jaxctx.cache.invariants import check, nodes

from .fake_device import Data, FakeDevice, Slot
from .keys import Key, Override, page_overrides
from .oracle import Expected, Oracle

TENANTS = tuple(Identity(namespace, "m") for namespace in "tuv")
IDENTITIES = (*TENANTS, Identity("t", "m", salt="x"), Identity("t", "m", adapter="x"))
ADAPTERS = ("", "x", "y")
MAX_CONTEXTS = 8
UNBOUNDED = 10_000  # a number of host slots that are never all in use
FOR_ALL = {"clear", "arrive", "lose", "touch"}
FOR_SNAPSHOTS = {*FOR_ALL, "suspend", "close"}


@dataclass(frozen=True)
class Setup:
    """Sizes of pool and tiers. Everything is compared after every `every`-th operation, and after some that raised."""

    pages: int
    page_size: int
    host: int = 0
    disk: int = 0
    every: int = 1


@dataclass(frozen=True)
class Saved:
    """A snapshot of a context, outside of the cache."""

    identity: Identity
    manual: bool
    tokens: list[int]
    attention_overrides: list[bytes]
    adapters: list[str]
    pages: list[Data]
    seq_len: int
    committed: int


class Harness:
    """A cache, an oracle and a fake device; `run_operation` raises AssertionError where they differ."""

    def __init__(self, setup: Setup) -> None:
        ids, ticks = itertools.count(), itertools.count()
        self.cache = ContextCache(
            BlockManager(setup.pages, setup.page_size, setup.host, setup.disk, first_page=3),
            clock=lambda: float(next(ticks)),
            new_id=lambda: f"{next(ids) * 7919 % 1_000_003:07}",
        )
        self.setup = setup
        self.page_size = setup.page_size
        self.unbounded = setup.host >= UNBOUNDED
        self.oracle = Oracle(setup.pages, setup.page_size, setup.host > 0, self.unbounded)
        self.device = FakeDevice(3, setup.pages, setup.page_size)
        self.saved: list[Saved] = []
        self.operations = 0
        self.refused = 0  # operations that raised: nothing may have changed
        self._values: WeakKeyDictionary[PageNode, tuple[Data, str]] = WeakKeyDictionary()

    def run_operation(self, name: str, a: int, b: int) -> None:
        """One operation; `a` and `b` (0..255) choose the context and the arguments."""
        contexts = self.oracle.contexts
        chosen = contexts[a % len(contexts)] if contexts else None
        self.operations += 1
        refused = self.refused
        full = chosen is None or self.operations % self.setup.every == 0
        before = {e.context: e.context.page_table().tolist() for e in contexts if e is not chosen} if full else {}
        was_empty = chosen is not None and not (chosen.committed or chosen.working)
        if name == "create" and len(contexts) < MAX_CONTEXTS:
            self.create(a, b)
        elif name == "create":
            self.close(chosen, b)
        elif name == "revive":
            self.revive(b)
        elif chosen is not None and chosen.role == "publication" and name not in FOR_ALL:
            if name in ("publish", "close"):
                self.close(chosen, b)
        elif chosen is not None and chosen.role == "snapshot" and name not in FOR_SNAPSHOTS:
            self.fork(chosen, 2)
        elif chosen is not None:
            getattr(self, name)(chosen, b)
        if was_empty and chosen in contexts and (chosen.committed or chosen.working):
            self.oracle.use(chosen)  # its first pages count as a use, but not for its lifetime
        self.device.now += 1
        self.settle_moves()
        self.oracle.recount()
        for context, pages in before.items():
            assert context.suspended or context.page_table().tolist() == pages, "another context's pages moved"
        if full or (self.refused > refused and self.refused % (self.setup.every // 4 + 1) == 0):
            self.compare()
        else:
            self.compare_counts()
            if not chosen.context.closed:
                self.compare_context(chosen)

    def end(self) -> None:
        """The end of all contexts: nothing is left but what is cached, and then nothing."""
        self.compare()
        while self.oracle.contexts:
            self.run_operation("close", 0, 0)
        self.clear(None, 0)
        self.settle_moves()
        assert self.cache.block_manager.pool.free == self.oracle.pages
        assert not self.device.host, "host slots are left"
        assert not [*nodes(self.cache.block_manager.index)]

    def settle_moves(self) -> None:
        self.device.carry_out(self.cache.moves())
        self.device.spoil(self.cache)

    # --- operations ----------------------------------------------------------------------------------------------

    def both(self, actual: Callable[[], object], expected: Callable[[], object]) -> object:
        """The cache's answer, which must be the oracle's, if that is an error or a number."""
        answers = []
        for call in (actual, expected):
            try:
                answers.append(call())
            except JaxctxError as error:
                answers.append(type(error))
        answer, expected_answer = answers
        if isinstance(expected_answer, int | type) or isinstance(answer, type):
            assert answer == expected_answer, f"{answer}, not {expected_answer}"
            self.refused += isinstance(answer, type)
        return answer

    def create(self, a: int, b: int) -> None:
        self.enter(IDENTITIES[(0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4)[a % 12]], b % 5 == 0, b)

    def enter(self, identity: Identity, manual: bool, b: int) -> Expected:
        pinned = b % 7 == 0
        context = self.cache.create(identity, manual_commit=manual, tenant=f"t{b % 2}")
        self.cache.pin(context, pinned)
        root, group = self.oracle.keys.root(identity), replace(identity, namespace="")
        self.oracle.contexts.append(Expected(context, root, group, manual, pinned, adapter=identity.adapter))
        return self.oracle.contexts[-1]

    def append(self, e: Expected, b: int) -> None:
        longest = self.setup.pages * self.page_size
        longest = longest * 5 // 4 if self.setup.pages < 5 else longest * 2 // 3
        count = min(b // 8 % (3 * self.page_size + 2), max(longest - len(e.tokens), 0))
        tokens = [int(b % 8 == 1)] * count  # often the same as others'
        overrides = [self.override(len(e.tokens) + n, b) for n in range(count)] if b % 8 in (2, 3) else []
        self.put(e, tokens, overrides)

    def put(self, e: Expected, tokens: list[int], overrides: list[bytes]) -> None:
        self.cache.append(e.context, tokens, overrides)
        overrides = overrides or [b""] * len(tokens)
        before = e.values[-1] if e.values else e.group.salt
        e.values += values_of(before, tokens, [(override, e.adapter) for override in overrides])
        e.tokens += tokens
        e.attention_overrides += overrides
        e.adapters += [e.adapter] * len(tokens)

    def switch(self, e: Expected, b: int) -> None:
        self.switch_to(e, ADAPTERS[b % 3])

    def switch_to(self, e: Expected, adapter: str) -> None:
        self.both(
            lambda: self.cache.switch_adapter(e.context, f"name of {adapter}", adapter),
            lambda: self.oracle.switch_adapter(e, adapter),
        )

    def override(self, index: int, b: int) -> bytes:
        """Some are written out, and yet the usual way."""
        ranges = ((), [(0, index), (index, index + 1)], [(index, index + 1)], [(0, 1), (index, index + 1)])[b // 8 % 4]
        return encode_override(index, index + (b % 16 == 2), [(start, stop) for start, stop in ranges if start < stop])

    def match(self, e: Expected, b: int) -> None:
        more = [b % 2] * (b % (self.page_size + 1))
        limit = b % (len(e.tokens) + 1) if b % 4 == 0 else None
        self.look(e, more, None if limit is None else limit + len(more))
        if self.oracle.exact(e):
            self.both(lambda: self.cache.match(e.context, limit), lambda: self.oracle.match(e, limit))
            return
        count = self.cache.match(e.context, limit)
        self.oracle.wake(e)
        found = self.oracle.keys.chain(e.context)
        owners = {e.root, *(other.root for other in self.oracle.published if other.group == e.group)}
        gained = {self.oracle.keys.owner[key] for key in found[e.committed :]}
        assert gained <= owners, "found what it may not find"
        assert self.oracle.on_device.keys() >= {*found}, "matched what is not on the device"
        assert found[: e.committed] == e.chain
        assert count == (len(found) - e.committed) * self.page_size
        e.chain = found
        self.oracle.drop_offloaded(e)

    def look(self, e: Expected, more: list[int], limit: int | None) -> None:
        """What would be found, by a new context and by this one."""
        oracle, stranger = self.oracle, Expected(e.context, e.root, e.group, False)
        overrides = [(b"", e.context.identity.adapter)] * len(e.tokens + more)
        found = self.cache.find(e.context.identity, e.tokens + more)
        ways = [oracle.search(stranger, e.tokens + more, overrides, oracle.kept)]
        if not self.unbounded:
            ways.append(oracle.search(stranger, e.tokens + more, overrides, oracle.on_device))
        self.compare_found(found, ways, 0, oracle.exact(stranger))
        found = self.cache.peek(e.context, more, limit)
        ways = [oracle.path(e, more, among, limit) for among in (oracle.kept, oracle.on_device)][: len(ways)]
        reached = oracle.seq_len(e) + len(ways[0]) * self.page_size
        limit = len(e.tokens) + len(more) if limit is None else limit
        offloaded = len(oracle.offloaded(e, reached, limit)) if reached < limit else 0
        self.compare_found(found, ways, offloaded, oracle.exact(e))

    def compare_found(self, found: PrefixMatch, ways: list[list[int]], offloaded: int, exact: bool) -> None:
        total, most = found.device + found.host + found.disk, len(ways[0]) + offloaded
        warm = self.oracle.warm(ways[-1])
        if exact:
            assert (found.device, found.unheld) == (len(warm), len({*warm} - self.oracle.held)), found
        if exact or not offloaded:
            assert total <= most, f"{found}, where {most} can be"
        if self.unbounded and exact:
            assert total == most, f"{found} of {most}"

    def restore(self, e: Expected, b: int) -> None:
        pages = (1, 2, b % 8, 99)[b % 4]
        limit = len(e.tokens) - (min(b % 7, len(e.tokens)) if b % 3 == 0 else 0)
        oracle, ready = self.oracle, self.device.ready
        if e.suspended:
            self.both(lambda: self.cache.restore(e.context, pages, ready, limit), lambda: oracle.grow(e, 0))
            return
        plain, most = oracle.plain(e), oracle.restorable(e, limit, pages)
        try:
            gained = self.cache.restore(e.context, pages, ready, limit)
        except JaxctxError:
            assert self.cache.block_manager.available == 0
            assert most > 0
            self.refused += 1
            gained = 0
        oracle.follow(e, gained)
        if gained < pages and self.cache.block_manager.available:
            more = self.cache.peek(e.context, tokens=limit)
            assert more.device == 0, "a restore left what is on the device"
            moves = [*self.cache.block_manager.tiers.moves, *self.device.on_the_way()]
            assert moves or not more.host + more.disk, "a restore neither loads nor waits"
        if plain:
            assert gained <= most, f"{gained} pages gained of {most}"
        if plain and self.unbounded and self.cache.block_manager.available:
            assert gained == most, f"{gained} pages gained, not {most}"

    def grow(self, e: Expected, b: int) -> None:
        tokens = b % (4 * self.page_size + 1)
        self.both(lambda: self.cache.grow(e.context, tokens), lambda: self.oracle.grow(e, tokens))

    def mark_computed(self, e: Expected, b: int) -> None:
        free_slots = e.working * self.page_size - e.working_tokens
        self.step(e, b % (min(free_slots, len(e.tokens) - self.oracle.seq_len(e)) + 2))  # sometimes one too many

    def step(self, e: Expected, tokens: int, hold: bool = False) -> None:
        """The engine's: writes what it computed through the page table, then settles it."""
        start = self.oracle.seq_len(e)
        self.write(e, start, e.values[start : start + tokens])
        self.both(
            lambda: self.cache.mark_computed(e.context, tokens, hold=hold),
            lambda: self.oracle.mark_computed(e, tokens, hold),
        )

    def fill(self, e: Expected, b: int) -> None:
        """What the engine does: append, match, restore, make room by suspending others, and compute the rest."""
        self.append(e, b)
        self.match(e, b)
        if self.setup.host and b % 4:
            self.settle_moves()
            self.restore(e, 3)
            self.settle_moves()
        missing = self.oracle.pages_for(len(e.tokens) - e.committed * self.page_size) - e.working
        for victim in [*self.oracle.contexts]:
            if self.cache.block_manager.available < missing and victim is not e and not victim.pinned:
                self.suspend(victim, 0)
        self.settle_moves()
        self.compute(e, 255)

    def compute(self, e: Expected, b: int, hold: bool = False) -> None:
        """Without a match first, like one of two fills of the same tokens that began at once."""
        tokens = min(len(e.tokens) - self.oracle.seq_len(e), b)
        self.both(lambda: self.cache.grow(e.context, tokens), lambda: self.oracle.grow(e, tokens))
        self.settle_moves()
        if tokens <= e.working * self.page_size - e.working_tokens:
            self.step(e, tokens, hold)

    def keep(self, e: Expected, b: int) -> None:
        """A pass that keeps what it computed in working pages, until `commit_full`."""
        if e.held or b % 3 == 0:
            self.both(lambda: self.cache.commit_full(e.context), lambda: self.oracle.commit_full(e))
        else:
            self.compute(e, b, hold=True)

    def scribble(self, e: Expected, b: int) -> None:
        """Rejected drafts and steps in flight leave anything behind the settled tokens."""
        start = self.oracle.seq_len(e)
        self.write(e, start, [f"draft {b}"] * (len(e.context.page_table()) * self.page_size - start))

    def fork(self, e: Expected, b: int) -> None:
        """Every fourth child is a snapshot: hidden, and only forked again."""
        if len(self.oracle.contexts) == MAX_CONTEXTS:
            return
        tenant = (None, "\0t0", "t0", None)[b % 4]
        children: list[Expected] = []
        answer = self.both(
            lambda: self.cache.fork(e.context, tenant=tenant), lambda: children.append(self.oracle.fork(e))
        )
        for child in children:
            child.context, child.role = answer, "snapshot" if b % 4 == 1 else ""
        self.oracle.contexts += children

    def publish(self, e: Expected, b: int) -> None:
        if len(self.oracle.contexts) == MAX_CONTEXTS:
            return
        name = f"p{b % 2}"
        known = [other.context.id for other in self.oracle.published]
        answers: list[object] = []

        def ours() -> None:
            if not e.suspended and name in known:
                raise AlreadyExists("")
            context = answers[0] if answers else e.context
            publication = self.oracle.publish(e, context.identity)
            publication.context = context
            self.oracle.contexts.append(publication)

        self.both(lambda: answers.append(self.cache.publish(e.context, name, tenant="p")), ours)

    def truncate(self, e: Expected, b: int) -> None:
        tokens = b % (self.page_size + 3)
        self.both(lambda: page_control.truncate(self.cache, e.context, tokens), lambda: self.oracle.truncate(e, tokens))

    def rewind(self, e: Expected, b: int) -> None:
        to = b % (len(e.tokens) + 2)
        self.both(lambda: page_control.rewind(self.cache, e.context, to), lambda: self.oracle.rewind(e, to))

    def take_back(self, e: Expected, b: int) -> None:
        to = b % (len(e.tokens) + 2)
        self.both(lambda: page_control.take_back(self.cache, e.context, to), lambda: self.oracle.take_back(e, to))

    def reserve(self, e: Expected, b: int) -> None:
        available = self.cache.block_manager.available
        pages = (b % 3, b % (self.setup.pages + 2), available, available + 1)[b % 4]
        if not e.suspended or self.oracle.exact(e):
            self.both(lambda: page_control.reserve(self.cache, e.context, pages), lambda: self.oracle.reserve(e, pages))

    def commit(self, e: Expected, b: int) -> None:
        pages = b % (e.working + 2)
        self.both(lambda: page_control.commit(self.cache, e.context, pages), lambda: self.oracle.commit(e, pages))

    def release(self, e: Expected, b: int) -> None:
        pages = b % (e.working + 2)
        self.both(lambda: page_control.release(self.cache, e.context, pages), lambda: self.oracle.release(e, pages))

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
        if e.role == "publication":
            self.oracle.unpublish(e)
        try:
            self.cache.append(e.context, [1])
        except NotFound:
            return
        raise AssertionError("a closed context takes tokens")

    def clear(self, e: Expected | None, b: int) -> None:
        self.both(self.cache.clear_cached, self.oracle.clear)

    # --- what comes from elsewhere -------------------------------------------------------------------------------

    def arrive(self, e: Expected, b: int) -> None:
        """Time goes by; what is fetched from now on takes this long."""
        self.device.now += b % 16
        self.device.delay = b % 5

    def lose(self, e: Expected, b: int) -> None:
        """Some slots of the disk cannot be read."""
        self.device.lose(b)

    def save(self, e: Expected, b: int) -> None:
        """All of it that is on the device, to where no cache reaches."""
        if not e.suspended and len(self.saved) < 3:
            pages = [self.device.pages[page][:] for page in e.context.page_table().tolist()]
            layout = (pages, self.oracle.seq_len(e), e.committed)
            lists = (e.tokens[:], e.attention_overrides[:], e.adapters[:])
            self.saved.append(Saved(e.context.identity, e.manual, *lists, *layout))

    def revive(self, b: int) -> None:
        """A context of what was saved; its pages come as from a store, some late and some never."""
        if not self.saved or len(self.oracle.contexts) == MAX_CONTEXTS:
            return
        saved = self.saved.pop(b % len(self.saved))
        e = self.enter(saved.identity, saved.manual, b)
        for place, adapter in enumerate(saved.adapters):
            if adapter != e.adapter:
                self.switch_to(e, adapter)
            self.put(e, saved.tokens[place : place + 1], saved.attention_overrides[place : place + 1])
        known = len(self.oracle.path(e, [], self.oracle.kept, saved.seq_len))
        slots = self.cache.offload(e.context, saved.seq_len, saved.committed)
        e.recommit = saved.committed if e.manual else 0
        if e.manual and saved.seq_len > saved.committed * self.page_size:
            e.manual_pages = saved.committed
            known = min(known, saved.committed)
        numbers = range(self.oracle.pages_for(saved.seq_len))[-len(slots) :] if slots else range(0)
        assert [number for number, _ in slots] == [*numbers], "pages are missing"
        if self.unbounded and self.oracle.plain(e):
            assert len(numbers) == self.oracle.pages_for(saved.seq_len) - known
        for number, slot in slots:
            e.offloaded_pages[number] = min(self.page_size, saved.seq_len - number * self.page_size)
            lost = not self.unbounded and (b + number) % 16 == 0
            late = 0 if self.unbounded else b % 8
            self.device.host[slot] = Slot(None if lost else saved.pages[number], self.device.now + late)

    # --- the comparison ------------------------------------------------------------------------------------------

    def write(self, e: Expected, start: int, values: Data) -> None:
        """Through the page table, beyond the settled tokens; what lies past the last page is not written."""
        pages = e.context.page_table().tolist()
        for position, value in enumerate(values, start):
            number, slot = divmod(position, self.page_size)
            if number < len(pages):
                assert number >= e.committed, "a committed page is written"
                self.device.pages[pages[number]][slot] = value

    def compare(self) -> None:
        cache, oracle = self.cache, self.oracle
        check(cache)
        self.compare_counts()
        holders = defaultdict[str, list[set[Key]]](list)  # by namespace: nobody learns what others hold
        for e in oracle.contexts:
            holders[e.context.identity.namespace].append(set(e.chain))
        for e in oracle.contexts:
            self.compare_context(e)
            mine = holders[e.context.identity.namespace]
            counts = [sum(key in keys for keys in mine) for key in e.chain] + [1] * e.working
            assert refcounts(e.context, cache.context_table) == counts
        victims = [e for e in oracle.contexts if not (e.pinned or e.context.busy or e.suspended)]
        assert [*cache.victims()] == [e.context for e in victims if e.committed or e.working]
        own = (
            set().union(*(e.chain for e in victims)).difference(*(e.chain for e in oracle.contexts if e not in victims))
        )
        suspendable = len(own) + sum(e.working for e in victims)
        self.compare_victims(victims)
        assert (cache.victims_for(suspendable + 1), cache.victims_for(0)) == (None, [])
        assert (cache.victims_for(suspendable) is None) == (suspendable < 0)
        assert set(cache.context_table) == {e.context for e in oracle.contexts}
        assert len(cache.context_table) == len(oracle.contexts)
        for tenant in ("t0", "t1", "p", "\0t0"):
            ids = sorted(e.context.id for e in oracle.contexts if e.context.tenant == tenant)
            assert [context.id for context in cache.list(tenant, "", 99)] == ids
        for node in nodes(cache.block_manager.index):
            self.compare_node(node)

    def compare_victims(self, victims: list[Expected]) -> None:
        """The first victims are found by whose suspension so many pages are free or cached."""
        chosen: list[Context] = []
        holders = Counter(key for e in self.oracle.contexts for key in e.chain)
        available = 0
        for e in victims:
            holders.subtract(e.chain)
            more = e.working + sum(holders[key] == 0 for key in e.chain)
            if e.committed or e.working:
                chosen.append(e.context)
            if more:
                assert self.cache.victims_for(available + 1) == self.cache.victims_for(available + more) == chosen
            available += more

    def compare_counts(self) -> None:
        pool, cached = self.cache.block_manager.pool, self.oracle.cached()
        assert (pool.free, self.cache.block_manager.index.cached) == (self.oracle.free(), cached)
        assert pool.total == self.setup.pages
        assert self.cache.block_manager.available == pool.free + cached

    def compare_context(self, e: Expected) -> None:
        c, seq_len = e.context, self.oracle.seq_len(e)
        assert (c.committed_pages, c.working_pages, c.working_tokens) == (e.committed, e.working, e.working_tokens)
        assert (c.seq_len, c.buffered_tokens, c.length) == (seq_len, len(e.tokens) - seq_len, len(e.tokens))
        assert (c.suspended, c.pinned, c.manual_commit) == (e.suspended, e.pinned, e.manual)
        assert e.manual or e.held or c.working_tokens < self.page_size, "a full page was not committed"
        assert self.cache.get(c.tenant, c.id) is c
        assert c.tokens().tolist() == e.tokens
        middle = len(e.tokens) // 2
        assert c.tokens(middle, max(seq_len, middle)).tolist() == e.tokens[middle : max(seq_len, middle)]
        assert c.attention_overrides == {
            index: override for index, override in enumerate(e.attention_overrides) if override
        }
        assert (c.identity.adapter, c.adapter_spans[-1].adapter_revision) == ([*e.adapters, e.adapter][0], e.adapter)
        for span, stop in zip(c.adapter_spans, [*(span.start for span in c.adapter_switches), c.length], strict=True):
            assert set(e.adapters[span.start : stop]) <= {span.adapter_revision}
            assert span.start < stop or span == c.adapter_spans[-1]
        assert all(a.adapter_revision != b.adapter_revision for a, b in itertools.pairwise(c.adapter_spans))
        assert (c.recommit_pages, c.manual_pages) == (e.recommit, e.manual_pages)
        assert e.offloaded_pages.keys() >= {n for n, offloaded in c.offloaded_pages.items() if not offloaded.lost}, (
            "offloaded what is computed"
        )
        pages = c.page_table().tolist()
        assert len(pages) == e.committed + e.working
        assert [value for page in pages for value in self.device.pages[page]][:seq_len] == e.values[:seq_len]

    def compare_node(self, node: PageNode) -> None:
        """Every copy of a page holds what its tokens say, or is known to be lost."""
        true, _ = self.values(node)
        if node.page != NOWHERE:
            assert self.device.pages[node.page] == true, "a page of other tokens"
        for store, slot in ((self.device.host, node.host), (self.device.disk, node.disk)):
            if slot != NOWHERE:
                assert store[slot].data in (true, None), "a copy of other tokens"

    def values(self, node: PageNode) -> tuple[Data, str]:
        """What the slots of a page hold, and its last token's adapter."""
        if node not in self._values:
            assert node.parent is not None
            before: object
            if node.parent.parent is None:
                assert node.parent.identity is not None
                before, adapter = node.parent.identity.salt, node.parent.identity.adapter
            else:
                data, adapter = self.values(node.parent)
                before = data[-1]
            tokens = memoryview(node.tokens).cast("i").tolist()
            overrides = page_overrides(node.overrides, self.page_size, adapter)
            self._values[node] = values_of(before, tokens, overrides), overrides[-1][1]
        return self._values[node]


def values_of(before: object, tokens: list[int], overrides: list[Override]) -> Data:
    """What the slots of tokens hold, after a slot that holds `before`."""
    values: Data = []
    for token, override in zip(tokens, overrides, strict=True):
        before = hash((before, token, override))
        values.append(before)
    return values
