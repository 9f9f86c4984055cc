"""The oracle: what every operation must do, without nodes, hashes, holders or page ids.

Contexts are token lists and lists of keys. A key is a name for everything that a committed page depends on: the key of
the page before, who may find it, its tokens and its overrides. The device is the set of keys that are on it, with the
time each lost its last holder, and free pages are a number. Of the other tiers the oracle knows only what could be in
them (`kept`), or what is in them where nothing is ever dropped (`unbounded`); what `restore` gained is an argument,
which it checks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from jaxctx.cache.context_cache import Context, Identity, OutOfPages
from jaxctx.errors import FailedPrecondition, OutOfRange

from .keys import Key, Keys, Override


@dataclass(eq=False)
class Expected:
    """What a context should look like."""

    context: Context
    root: Key
    group: Identity  # its identity without the namespace: who may find what is published
    manual: bool
    pinned: bool = False
    role: str = ""  # "snapshot" and "publication" are only forked and closed
    tokens: list[int] = field(default_factory=list)
    attention_overrides: list[bytes] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)  # of each token
    adapter: str = ""  # of the next one
    values: list[object] = field(default_factory=list)  # what its slots hold
    chain: list[Key] = field(default_factory=list)
    working: int = 0
    working_tokens: int = 0
    suspended: bool = False
    held: bool = False
    recommit: int = 0  # pages that commit by themselves when they come back, of one that commits by hand
    manual_pages: int | None = None  # pages in front of working tokens that may come back
    offloaded_pages: dict[int, int] = field(default_factory=dict)  # tokens that may be offloaded, by page

    @property
    def committed(self) -> int:
        return len(self.chain)

    @property
    def overrides(self) -> list[Override]:
        """What each token is computed with."""
        return [*zip(self.attention_overrides, self.adapters, strict=True)]


class Oracle:
    """The meaning of the operations. Each method checks first, then changes, and returns what the cache should."""

    def __init__(self, pages: int, page_size: int, tiers: bool, unbounded: bool) -> None:
        self.pages, self.page_size, self.tiers, self.unbounded = pages, page_size, tiers, unbounded
        self.contexts: list[Expected] = []  # least recently used first
        self.published: list[Expected] = []
        self.on_device: dict[Key, int] = {}  # when it lost its last holder
        self.kept: set[Key] = set()  # what some tier may have; all of them, if unbounded
        self.held: set[Key] = set()
        self.keys = Keys(page_size)
        self._stamp = 0

    # --- paths ---------------------------------------------------------------------------------------------------

    def search(self, e: Expected, tokens: list[int], overrides: list[Override], among: Collection[Key]) -> list[Key]:
        """As a new context like `e` would."""
        best = self.keys.walk(e.root, e.root, tokens, overrides, 0, among)
        for other in self.published:
            if other.group == e.group:
                path = self.keys.walk(other.root, e.root, tokens, overrides, 0, among)
                best = path if len(path) > len(best) else best
        return best

    def path(self, e: Expected, more: list[int], among: Collection[Key], limit: int | None = None) -> list[Key]:
        """The keys that would continue a context's chain (or, if suspended, be it), once `more` is appended."""
        if e.working_tokens:
            return []
        tokens, overrides = e.tokens + more, e.overrides + [(b"", e.adapter)] * len(more)
        if limit is not None:
            tokens = tokens[:limit]
        if e.manual_pages is not None:
            tokens = tokens[: e.manual_pages * self.page_size]
        if e.suspended or not e.chain:
            return self.search(e, tokens, overrides, among)
        return self.keys.walk(e.chain[-1], e.root, tokens, overrides, e.committed * self.page_size, among)

    def among(self) -> Collection[Key]:
        """What a path is made of: what is on the device, and elsewhere too if that is known."""
        return self.kept if self.unbounded else self.on_device

    def exact(self, e: Expected) -> bool:
        """Whether it is known which way a path goes."""
        return self.unbounded or not self.tiers or self.plain(e)

    def plain(self, e: Expected) -> bool:
        """Whether there is one way only: no publications."""
        lineage = self.keys.owner[e.chain[0]] if e.chain else e.root
        return lineage == e.root and all(other.group != e.group for other in self.published)

    def warm(self, path: list[Key]) -> list[Key]:
        """The front of a path that is on the device."""
        return path[: next((n for n, key in enumerate(path) if key not in self.on_device), len(path))]

    # --- pages ---------------------------------------------------------------------------------------------------

    def seq_len(self, e: Expected) -> int:
        return len(e.chain) * self.page_size + e.working_tokens

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def recount(self) -> int:
        """Stamps what is held no longer, deepest first; returns how many that were."""
        held = set[Key]().union(*[e.chain for e in self.contexts if not e.suspended])
        released = self.held - held
        for key in sorted(released, key=self.keys.depth.__getitem__, reverse=True) if released else ():
            self._stamp += 1
            self.on_device[key] = self._stamp
        self.held = held
        return len(released)

    def cached(self) -> int:
        return len(self.on_device) - len(self.held)

    def free(self) -> int:
        return self.pages - len(self.on_device) - sum([e.working for e in self.contexts])

    def take(self, count: int) -> None:
        self.recount()
        free = self.free()
        if count > free + self.cached():
            raise OutOfPages("")
        if count > free:
            cached = sorted(self.on_device.keys() - self.held, key=self.on_device.__getitem__)
            for key in cached[: count - free]:
                del self.on_device[key]
                if not self.tiers:
                    self.kept.remove(key)

    def place(self, key: Key) -> None:
        self.on_device.setdefault(key, -1)
        self.kept.add(key)

    def clear(self) -> int:
        cached = self.cached()
        self.on_device = {key: stamp for key, stamp in self.on_device.items() if key in self.held}
        self.kept = set(self.on_device)
        for e in self.contexts:
            there = {number for number, offloaded in e.context.offloaded_pages.items() if not offloaded.lost}
            e.offloaded_pages = {
                number: e.offloaded_pages[number] for number in there
            }  # what is on its way from elsewhere
        return cached

    # --- operations ----------------------------------------------------------------------------------------------

    def use(self, e: Expected) -> None:
        self.contexts.remove(e)
        self.contexts.append(e)

    def wake(self, e: Expected) -> None:
        if e.suspended:
            e.suspended = False
            self.use(e)

    def match(self, e: Expected, limit: int | None) -> int:
        self.wake(e)
        warm = self.warm(self.path(e, [], self.among(), limit))
        e.chain += warm
        self.drop_offloaded(e)
        return len(warm) * self.page_size

    def grow(self, e: Expected, tokens: int) -> None:
        self._must_be_resident(e)
        missing = max(self.pages_for(e.working_tokens + tokens) - e.working, 0)
        self.take(missing)
        e.working += missing

    def mark_computed(self, e: Expected, tokens: int, hold: bool) -> int:
        self._must_be_resident(e)
        if tokens > len(e.tokens) - self.seq_len(e):
            raise OutOfRange("")
        if e.working_tokens + tokens > e.working * self.page_size:
            raise FailedPrecondition("")
        e.working_tokens += tokens
        self.drop_offloaded(e)
        e.held = hold and self._full(e) > 0
        return 0 if hold else self._commit(e, self._full(e))

    def commit_full(self, e: Expected) -> None:
        if e.held:
            e.held = False
            self._commit(e, self._full(e))

    def fork(self, e: Expected) -> Expected:
        pages = self.pages_for(e.working_tokens)
        self.take(pages)
        lists = {name: getattr(e, name)[:] for name in ("tokens", "attention_overrides", "adapters", "values", "chain")}
        return replace(e, pinned=False, role="", working=pages, offloaded_pages={}, **lists)

    def switch_adapter(self, e: Expected, adapter: str) -> None:
        e.adapter = adapter
        if not e.tokens:  # it is as if it had been created with this adapter
            e.root = self.keys.root(replace(e.context.identity, adapter=adapter))
            e.group = replace(e.group, adapter=adapter)

    def truncate(self, e: Expected, tokens: int) -> None:
        if tokens > len(e.tokens) - e.committed * self.page_size:
            raise OutOfRange("")
        self._keep(e, len(e.tokens) - tokens)

    def rewind(self, e: Expected, to: int) -> None:
        if to > len(e.tokens):
            raise OutOfRange("")
        if to < e.committed * self.page_size:
            needs_page = to % self.page_size > 0 and not e.working
            others = {key for other in self.contexts if other is not e and not other.suspended for key in other.chain}
            if needs_page and self.free() + self.cached() == 0 and e.chain[-1] in others:
                raise OutOfPages("")
            e.working_tokens, e.held = 0, False
            e.working = min(e.working, to % self.page_size, 1)
            self._keep(e, to)
            if needs_page:
                self.take(1)
                e.working = 1
            e.working_tokens = to % self.page_size
        else:
            self._keep(e, to)

    def take_back(self, e: Expected, to: int) -> None:
        if to > len(e.tokens):
            raise OutOfRange("")
        if to < e.committed * self.page_size:
            e.working_tokens, e.held, e.working = 0, False, 0
        self._keep(e, to)

    def reserve(self, e: Expected, pages: int) -> None:
        if e.suspended:
            chain = self.warm(self.path(e, [], self.among()))
            if pages + len({*chain} - self.held) > self.free() + self.cached():
                raise OutOfPages("")
            self.match(e, None)
        self.take(pages)
        e.working += pages

    def commit(self, e: Expected, pages: int) -> None:
        if pages > e.working:
            raise OutOfRange("")
        if pages * self.page_size > e.working_tokens:
            raise FailedPrecondition("")
        self._commit(e, pages)
        e.manual_pages = None

    def release(self, e: Expected, pages: int) -> None:
        if pages > e.working:
            raise OutOfRange("")
        e.working -= pages
        if e.working * self.page_size < e.working_tokens:
            self._keep(e, (e.committed + e.working) * self.page_size)

    def suspend(self, e: Expected) -> int:
        if e.suspended:
            return 0
        if e.manual:
            e.recommit = max(e.recommit, e.committed)
        if e.manual and e.working_tokens and e.manual_pages is None:
            e.manual_pages = e.recommit
        self.drop_offloaded(e)
        for position in range(self.pages_for(e.working_tokens) if self.tiers else 0):
            tokens = min(self.page_size, e.working_tokens - position * self.page_size)
            e.offloaded_pages[e.committed + position] = tokens
        freed, e.suspended, e.held = e.working, True, False
        e.working = e.working_tokens = 0
        e.chain = []
        return freed + self.recount()

    def publish(self, e: Expected, identity: Identity) -> Expected:
        self._must_be_resident(e)
        self.take(e.committed)
        root = self.keys.root(identity)
        publication = Expected(e.context, root, e.group, False, pinned=True, role="publication")
        for key in range(e.committed):
            part = slice(key * self.page_size, (key + 1) * self.page_size)
            before = publication.chain[-1] if publication.chain else root
            publication.chain.append(self.keys.key(before, root, e.tokens[part], e.overrides[part]))
            self.place(publication.chain[-1])
        end = e.committed * self.page_size
        publication.tokens, publication.attention_overrides = e.tokens[:end], e.attention_overrides[:end]
        publication.adapters = e.adapters[:end]
        publication.adapter = publication.adapters[-1] if end else e.context.identity.adapter
        publication.values = e.values[:end]
        self.published.append(publication)
        self.keys.published.add(root)
        return publication

    def unpublish(self, publication: Expected) -> None:
        self.published.remove(publication)
        self.keys.published.remove(publication.root)

    def restorable(self, e: Expected, limit: int, pages: int) -> int:
        """The most pages that a restore can gain."""
        known = self.path(e, [], self.kept, limit)
        reached = self.seq_len(e) + len(known) * self.page_size
        return min(len(known) + len(self.offloaded(e, reached, limit)), pages)

    def offloaded(self, e: Expected, reached: int, limit: int) -> list[int]:
        """Tokens of the offloaded pages behind the first `reached` tokens."""
        number, aligned = divmod(reached, self.page_size)
        tokens: list[int] = []
        while not aligned and reached + sum(tokens) < limit and number + len(tokens) in e.offloaded_pages:
            tokens.append(min(e.offloaded_pages[number + len(tokens)], limit - reached - sum(tokens)))
            if tokens[-1] < self.page_size:
                break
        return tokens

    def follow(self, e: Expected, gained: int) -> None:
        """After a restore that gained so many pages: the same, as the layout of the context says it was done."""
        chain, had = self.keys.chain(e.context), e.committed + self.pages_for(e.working_tokens)
        new = chain[e.committed :]
        assert chain[: e.committed] == e.chain, "a restore changed what was there"
        warm = self.warm(new)
        cold = new[len(warm) :]
        assert not self.on_device.keys() & {*cold}, "a page on the device is loaded"
        taken = e.context.working_pages - e.working + len(cold)
        assert 0 <= taken <= gained, f"{taken} pages taken for {gained}"
        e.chain += warm
        self.take(taken)
        for number, key in enumerate(cold, e.committed):
            offloaded = e.offloaded_pages.get(number) == self.page_size and (not e.manual or number < e.recommit)
            assert key in self.kept or offloaded, "a page that was in no tier"
            self.place(key)
        e.chain += cold
        assert e.manual_pages is None or e.committed <= e.manual_pages, "a page committed by itself"
        e.working, e.working_tokens = e.context.working_pages, e.context.working_tokens
        for number in [number for number in e.offloaded_pages if number not in e.context.offloaded_pages]:
            del e.offloaded_pages[number]  # it was loaded, or is lost
        self.drop_offloaded(e)
        pages = e.committed + self.pages_for(e.working_tokens)
        assert pages == had + gained, f"{gained} pages gained, and {pages - had} more in its table"

    # --- their parts ---------------------------------------------------------------------------------------------

    def _must_be_resident(self, e: Expected) -> None:
        if e.suspended:
            raise FailedPrecondition("")

    def _full(self, e: Expected) -> int:
        """Working pages that commit by themselves."""
        full = e.working_tokens // self.page_size
        return min(full, max(e.recommit - e.committed, 0)) if e.manual else full

    def _commit(self, e: Expected, pages: int) -> int:
        merged = 0
        for _ in range(pages):
            part = slice(e.committed * self.page_size, (e.committed + 1) * self.page_size)
            before = e.chain[-1] if e.chain else e.root
            key = self.keys.key(before, e.root, e.tokens[part], e.overrides[part])
            if self.keys.owner[before] in self.keys.published - {e.root}:
                theirs = self.keys.key(before, self.keys.owner[before], e.tokens[part], e.overrides[part])
                if theirs in self.kept and self.tiers and not self.unbounded:
                    chosen = self.keys.chain(e.context)[e.committed]
                    assert chosen in (key, theirs), "committed as something else"
                    key = chosen
                elif theirs in self.kept and key not in self.kept:
                    key = theirs
            e.chain.append(key)
            e.working -= 1
            e.working_tokens -= self.page_size
            merged += key in self.on_device
            self.place(key)
        return merged

    def _keep(self, e: Expected, length: int) -> None:
        if length < len(e.tokens):
            e.adapter = e.adapters[length]  # it goes on as it did from there
        del e.tokens[length:], e.attention_overrides[length:], e.adapters[length:], e.values[length:]
        del e.chain[length // self.page_size :]
        e.working_tokens = min(e.working_tokens, length - e.committed * self.page_size)
        e.offloaded_pages = {
            number: min(tokens, length - number * self.page_size)
            for number, tokens in e.offloaded_pages.items()
            if length > number * self.page_size
        }
        e.recommit = min(e.recommit, length // self.page_size)
        if e.manual_pages is not None and length < e.manual_pages * self.page_size:
            e.manual_pages = None

    def drop_offloaded(self, e: Expected) -> None:
        """What has KV again is not needed."""
        before = self.pages_for(self.seq_len(e))
        e.offloaded_pages = {number: tokens for number, tokens in e.offloaded_pages.items() if number >= before}
