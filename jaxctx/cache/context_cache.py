"""Contexts: the front of this room. Every operation on contexts, with what it promises and what it refuses.

A `ContextCache` decides; it never moves data. What must be moved is told as `moves`, which the engine takes after every
operation and carries out in the given order before its next step. Nothing here waits: what does not fit raises
OutOfPages, and the engine suspends `victims`, queues or refuses. Every operation is atomic: one that raises has changed
nothing. One thread owns a cache and its contexts.

    append ──▶ buffered ──the engine computes; settle──▶ working ──full──▶ committed
                  ├──────────match: a committed page holds them already────────▲
                  └──────────restore: another tier does────────────────────────┘
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxctx.cache import audit
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context import Context, OffloadedPage
from jaxctx.cache.context_table import ContextTable
from jaxctx.cache.page_numbers import PageNumbers
from jaxctx.cache.page_pool import OutOfPages
from jaxctx.cache.prefix_index import TOKEN_BYTES, Identity, PageNode, TokenIds, encode_tokens
from jaxctx.cache.tiers import Move, MoveKind, PrefixMatch, found, on_device
from jaxctx.errors import FailedPrecondition, OutOfRange
from jaxctx.lifetime import FOREVER

__all__ = ["Context", "ContextCache", "Identity", "OutOfPages", "PrefixMatch"]


ANCESTORS = 100  # of a context that are remembered, the nearest
PUBLISHED = "\0published:"  # begins the namespace of a publication; a tenant's name cannot


class ContextCache:
    """All contexts of one engine, their pages in `memory`, and the prefixes they share.

    `clock` and `new_id` are the world: what time it is, and an id nobody has.
    Every method with a context raises NotFound if it is closed.
    """

    def __init__(self, memory: BlockManager, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self.block_manager = memory
        self.page_numbers = PageNumbers(memory.pool)
        self.page_size = memory.page_size
        self.restore = memory.restore
        self.context_table = ContextTable(clock, new_id)
        self.get, self.list, self.count = self.context_table.get, self.context_table.list, self.context_table.count
        self.set_lifetime, self.lifetimes = self.context_table.set_lifetime, self.context_table.lifetimes
        self.touch = self.context_table.use
        self._clock = clock
        self._new_id = new_id
        self.publications: dict[PageNode, Context] = {}  # by their roots

    def moves(self) -> list[Move]:
        """What is to be moved since the last call, in order."""
        moves, self.block_manager.tiers.moves = self.block_manager.tiers.moves, []
        return moves

    def pending_move_to_host(self, slot: int) -> MoveKind | None:
        """How a host slot gets its data by moves that were not taken yet: SAVE or FETCH; None if it has it."""
        for move in reversed(self.block_manager.tiers.moves):
            if move.target == slot and move.way in (MoveKind.SAVE, MoveKind.FETCH):
                return move.way
        return None

    def create(
        self, identity: Identity, *, tenant: str = "", context_id: str | None = None, manual_commit: bool = False
    ) -> Context:
        """A new, empty context, of no end. Raises AlreadyExists if the tenant has one of this id."""
        root = self.block_manager.index.root(identity)
        context = Context(
            id=self.context_table.unused(tenant, context_id),
            tenant=tenant,
            identity=identity,
            page_size=self.page_size,
            manual_commit=manual_commit,
            created_at=self._clock(),
            root=root,
            tail=root,
        )
        self.block_manager.index.acquire(root)
        self.context_table.enter(context)
        return context

    def fork(self, context: Context, *, context_id: str | None = None, tenant: str | None = None) -> Context:
        """A child that begins as `context` stands now, at a cost that does not depend on its length.

        Committed pages are shared; working pages with tokens are copied, reserved empty ones are not inherited;
        buffered tokens are the same. The child is not pinned and no program's, and lives as long as its parent was to
        live, from now on. The child of a suspended context is suspended, and what is offloaded stays the parent's. With
        `tenant` it is filed under that one, for ever, but shares pages as its parent does. Works while a writer holds
        the context: what is not settled yet is buffered, or unknown, in the child.

        Raises AlreadyExists, OutOfPages.
        """
        context.raise_if_closed()
        now = self._clock()
        lifetime = context.lifetime.anew(now) if tenant is None else FOREVER
        tenant = context.tenant if tenant is None else tenant
        sources = context.working[: self.block_manager.pages_for(context.working_tokens)]
        child = replace(
            context,
            id=self.context_table.unused(tenant, context_id),
            tenant=tenant,
            ancestors=((context.id, context.length), *context.ancestors)[:ANCESTORS],
            pinned=False,
            pinned_until=None,
            busy=False,
            of_program=False,
            lifetime=lifetime,
            version=0,
            created_at=now,
            working=self.block_manager.take(len(sources)),
            offloaded_pages={},
            table=None,
        )
        if not child.suspended:
            self.block_manager.index.acquire(child.tail)
        self.context_table.enter(child)
        self.block_manager.tiers.copy(sources, child.working)
        return child

    def publish(self, context: Context, publication_id: str, *, tenant: str) -> Context:
        """A context of `tenant` with copies of all committed pages, which contexts of every namespace find from now on.

        Only those of the same model, adapter, KV type and salt, that is. Raises OutOfPages, AlreadyExists;
        FailedPrecondition for a suspended context.
        """
        context.raise_if_suspended()
        publication_id = self.context_table.unused(tenant, publication_id)
        pages = self.block_manager.take(context.committed_pages)
        identity = replace(context.identity, namespace=PUBLISHED + self._new_id())  # nothing cached of another one
        publication = self.create(identity, tenant=tenant, context_id=publication_id)
        publication.pinned = True
        self.block_manager.tiers.copy(context.page_table().tolist(), pages)
        index, root = self.block_manager.index, publication.root
        for node, page in zip(context.chain(), pages, strict=True):
            publication.tail = index.commit(publication.tail, root, node.tokens, node.marks, page)
        publication.marks = {index: mark for index, mark in context.marks.items() if index < publication.length}
        index.publish(root)
        self.publications[root] = publication
        return publication

    def close(self, context: Context) -> None:
        """Give up a context; of the pages that only it held, committed ones stay cached and working ones are free.

        Nobody finds a publication any more; who shares its pages keeps them.
        """
        context.raise_if_closed()
        if context.identity.namespace.startswith(PUBLISHED):
            self.block_manager.index.unpublish(context.root)
            del self.publications[context.root]
        if not context.suspended:
            self.block_manager.release_pages(context)
        self.block_manager.drop_offloaded(context)
        context.closed = True
        self.context_table.leave(context)

    def append(self, context: Context, tokens: TokenIds, marks: Sequence[bytes] = ()) -> None:
        """Add tokens, `[tokens]` int32, to the buffered ones; takes no pages.

        `marks`, if there are any, has one for every token; see `marks`.
        """
        context.raise_if_closed()
        first = context.length
        context.recent += encode_tokens(tokens)
        if any(marks):
            context.marks = {**context.marks, **{at: mark for at, mark in enumerate(marks, first) if mark}}

    def match(self, context: Context, tokens: int | None = None) -> int:
        """Move buffered tokens that pages on the device hold already into the context's chain; returns how many.

        Looks no further than the context's first `tokens` tokens. Wakes a suspended context first: all its tokens are
        buffered, and matched from the beginning; what is not found stays buffered, to be restored or computed. Finds
        nothing where working tokens stand before the buffered ones.
        """
        context.raise_if_closed()
        if context.suspended:
            self.block_manager.wake(context)
            self.touch(context)
        path = self.block_manager.path(context, context.length if tokens is None else tokens)
        path = path[: on_device(path)]
        if path:
            self.block_manager.attach_prefix(context, path)
            if publication := self.publications.get(path[0].owner):
                self.touch(publication)
        return len(path) * self.page_size

    def offload(self, context: Context, computed: int, committed: int) -> list[tuple[int, int]]:
        """Make room, beyond the tiers' own, for data of a new context's first `computed` tokens that is on its way.

        What no tier holds is expected; returns its pages, (place in the sequence, host slot). `committed` of its pages
        are to commit, though it commits by hand. `restore` takes them as their data arrives.
        """
        context.raise_if_suspended()
        context.computed = computed
        context.manual_pages = committed if context.manual_commit and computed > committed * self.page_size else None
        first, slots = context.tail.depth + len(self.block_manager.path(context, computed)), []
        for number in range(first, self.block_manager.pages_for(computed)):
            offloaded = OffloadedPage(min(self.page_size, computed - number * self.page_size))
            self.block_manager.tiers.stage(offloaded)
            context.offloaded_pages[number] = offloaded
            slots.append((number, offloaded.host))
        return slots

    def find(self, identity: Identity, tokens: TokenIds) -> PrefixMatch:
        """What a new context filled with `tokens` would find."""
        index = self.block_manager.index
        return found(index.search(index.root(identity), encode_tokens(tokens), marks={}))

    def peek(self, context: Context, more: TokenIds = (), tokens: int | None = None) -> PrefixMatch:
        """What a context would find once `more` is appended, within its first `tokens` tokens. Changes nothing."""
        context.raise_if_closed()
        added = encode_tokens(more)
        tokens = context.length + len(added) // TOKEN_BYTES if tokens is None else tokens
        return found(self.block_manager.lookup_tiers(context, tokens, added))

    def grow(self, context: Context, tokens: int) -> None:
        """Have working pages for `tokens` tokens beyond `seq_len`, evicting cached pages as needed.

        Raises OutOfPages and takes none; FailedPrecondition for a suspended context (`match` restores it).
        """
        context.raise_if_suspended()
        missing = self.block_manager.pages_for(context.working_tokens + tokens) - len(context.working)
        if missing > 0:
            self.block_manager.add_working(context, missing)

    def mark_computed(self, context: Context, tokens: int, *, hold: bool = False) -> int:
        """The KV of the first `tokens` buffered tokens is on the device now: they become working tokens.

        Full working pages commit, unless the context commits by hand or `hold` keeps them until `commit_full`. Returns
        how many of them others had committed meanwhile: those were merged, the duplicates are free. Raises OutOfRange
        if fewer tokens are buffered, FailedPrecondition if there are no pages for them.
        """
        context.raise_if_suspended()
        if not 0 <= tokens <= context.buffered_tokens:
            raise OutOfRange(f"{tokens} tokens to settle, {context.buffered_tokens} buffered")
        if context.working_tokens + tokens > len(context.working) * self.page_size:
            raise FailedPrecondition(f"no working pages for {tokens} more tokens")
        context.working_tokens += tokens
        full = self._full(context)
        merged = self.block_manager.commit(context, full) if full and not hold else 0
        if context.offloaded_pages:
            self.block_manager.drop_offloaded(context, before=-(-context.seq_len // self.page_size))
        return merged

    def commit_full(self, context: Context) -> None:
        """Commit the full pages that a settle held back."""
        context.raise_if_closed()
        self.block_manager.commit(context, self._full(context))

    def suspend(self, context: Context) -> int:
        """Give up all pages and keep the tokens; returns how many pages became free or evictable."""
        context.raise_if_closed()
        if context.suspended:
            return 0
        del self.context_table.by_use[context]
        return self.block_manager.suspend(context)

    def victims(self) -> Iterator[Context]:
        """Contexts that may be suspended: idle, not pinned, holding pages; least recently used first."""
        idle = (each for each in [*self.context_table.by_use] if not (each.busy or each.pinned))
        return (each for each in idle if each.committed_pages or each.working)

    def suspendable(self) -> int:
        """Pages that would become available if all victims were suspended. Walks all contexts, if there is a victim."""
        victims, contexts = {*self.victims()}, self.context_table.by_use
        return audit.held(contexts) - audit.held(each for each in contexts if each not in victims) if victims else 0

    def clear_cached(self) -> int:
        """Forget every page that nobody holds, in all tiers; returns how many were on the device."""
        count = self.block_manager.index.cached
        self.block_manager.evict(count)
        self.block_manager.tiers.clear()
        return count

    def _full(self, context: Context) -> int:
        """Its working pages that commit without being told to."""
        full = context.working_tokens // self.page_size
        if context.manual_commit:
            full = min(full, max((context.manual_pages or 0) - context.tail.depth, 0))
        return full
