"""Context cache: the entry point of this package. Every operation on contexts, what it guarantees and what it refuses.

A `ContextCache` decides; it never moves data. Data movements are returned by `moves`, which the engine calls after
every operation; it carries them out in the given order before its next step. Nothing here waits: what does not fit
raises OutOfPages, and the engine suspends `victims`, queues the request or refuses it. Every operation is atomic: one
that raises has changed nothing. One thread owns a cache and its contexts.

    append ──▶ buffered ──the engine computes; mark_computed──▶ working ──full──▶ committed
                  ├──────────match: a committed page has these tokens───────────────▲
                  └──────────restore: another tier has them─────────────────────────┘
"""

import builtins
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxctx.cache.block_manager import BlockManager, Ready
from jaxctx.cache.context import Context, OffloadedPage
from jaxctx.cache.context_table import ContextTable
from jaxctx.cache.overrides import MAX_SWITCHES, NO_OVERRIDES, switched
from jaxctx.cache.page_numbers import PageNumbers
from jaxctx.cache.page_pool import OutOfPages
from jaxctx.cache.prefix_index import TOKEN_BYTES, Identity, PageNode, TokenIds, encode_tokens, would_release
from jaxctx.cache.tiers import Move, MoveKind, PrefixMatch, count_on_device, summarize
from jaxctx.errors import FailedPrecondition, OutOfRange
from jaxctx.lifetime import FOREVER, DeadlineQueue, Lifetime
from jaxctx.types import AdapterSpan

__all__ = ["Context", "ContextCache", "Identity", "OutOfPages", "PrefixMatch"]

MAX_ANCESTORS = 100  # how many of a context's nearest ancestors are remembered
PUBLISHED = "\0published:"  # prefix of a publication's namespace; no tenant's name begins like this


class ContextCache:
    """All contexts of one engine, their pages in `block_manager`, and the prefixes that they share.

    `clock` returns the time in seconds, `new_id` an unused id. Every method with a context raises NotFound if the
    context is closed.
    """

    def __init__(self, block_manager: BlockManager, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        self.block_manager = block_manager
        self.page_numbers = PageNumbers(block_manager.pool)
        self.page_size = block_manager.page_size
        self.context_table = ContextTable(clock, new_id)
        self.publications: dict[PageNode, Context] = {}  # by their roots
        self._clock = clock
        self._new_id = new_id

    def moves(self) -> builtins.list[Move]:
        """The data movements that were decided since the last call, in the order in which to carry them out."""
        tiers = self.block_manager.tiers
        moves = tiers.moves
        tiers.moves = []
        return moves

    # --- the table of contexts -----------------------------------------------------------------------------------

    def get(self, tenant: str, context_id: str) -> Context:
        """The tenant's context of this id. Raises NotFound, see `ContextTable.get`."""
        return self.context_table.get(tenant, context_id)

    def list(self, tenant: str, after: str, limit: int, *, with_programs: bool = True) -> builtins.list[Context]:
        """Up to `limit` of the tenant's contexts in id order, after the id `after`; see `ContextTable.list`."""
        return self.context_table.list(tenant, after, limit, with_programs=with_programs)

    def count(self, tenant: str) -> int:
        """How many contexts the tenant has."""
        return self.context_table.count(tenant)

    def touch(self, context: Context) -> None:
        """The context is used now, see `ContextTable.mark_used`."""
        self.context_table.mark_used(context)

    def pin(self, context: Context, pinned: bool) -> None:
        """Pin or unpin a context, see `ContextTable.pin`."""
        self.context_table.pin(context, pinned)

    def set_lifetime(self, context: Context, lifetime: Lifetime) -> None:
        """Give the context another lifetime."""
        self.context_table.set_lifetime(context, lifetime)

    @property
    def lifetimes(self) -> DeadlineQueue[Context]:
        """When the lifetimes of contexts end."""
        return self.context_table.lifetimes

    def pending_move_to_host(self, slot: int) -> MoveKind | None:
        """How a host slot gets its data by moves that were not taken yet: SAVE or FETCH; None if it has it."""
        for move in reversed(self.block_manager.tiers.moves):
            if move.target == slot and move.kind in (MoveKind.SAVE, MoveKind.FETCH):
                return move.kind
        return None

    # --- beginning and end of contexts ---------------------------------------------------------------------------

    def create(
        self, identity: Identity, *, tenant: str = "", context_id: str | None = None, manual_commit: bool = False
    ) -> Context:
        """A new, empty context, without expiry. Raises AlreadyExists if the tenant has one of this id."""
        root = self.block_manager.index.root(identity)
        context = Context(
            id=self.context_table.unused_id(tenant, context_id),
            tenant=tenant,
            identity=identity,
            page_size=self.page_size,
            manual_commit=manual_commit,
            created_at=self._clock(),
            root=root,
            tail=root,
        )
        self.block_manager.index.acquire(root)
        self.context_table.add(context)
        return context

    def fork(self, context: Context, *, context_id: str | None = None, tenant: str | None = None) -> Context:
        """A child with the present state of `context`, at a cost that does not depend on its length.

        Committed pages are shared; working pages with tokens are copied; reserved empty pages are not inherited;
        buffered tokens are the same. The child is not pinned and belongs to no program. Its lifetime is the parent's,
        started now. The child of a suspended context is suspended; offloaded pages stay with the parent. With `tenant`
        the child belongs to that tenant and does not expire, but it shares pages as its parent does. A context may be
        forked while a writer holds it: tokens that are not computed yet are buffered in the child, or missing.

        Raises AlreadyExists, OutOfPages.
        """
        context.raise_if_closed()
        now = self._clock()
        if tenant is None:
            tenant = context.tenant
            lifetime = context.lifetime.anew(now)
        else:
            lifetime = FOREVER
        sources = context.working[: self.block_manager.pages_for(context.working_tokens)]
        child = replace(
            context,
            id=self.context_table.unused_id(tenant, context_id),
            tenant=tenant,
            ancestors=((context.id, context.length), *context.ancestors)[:MAX_ANCESTORS],
            pinned=False,
            pinned_until=None,
            busy=False,
            saving=False,
            of_program=False,
            lifetime=lifetime,
            version=0,
            created_at=now,
            working=self.block_manager.allocate(len(sources)),
            offloaded_pages={},
            table=None,
        )
        if not child.suspended:
            self.block_manager.index.acquire(child.tail)
        self.context_table.add(child)
        self.block_manager.tiers.copy(sources, child.working)
        return child

    def publish(self, context: Context, publication_id: str, *, tenant: str) -> Context:
        """A context of `tenant` with copies of all committed pages, which contexts of every namespace find from now on.

        They must have the same model, adapter, KV type and salt. Raises OutOfPages, AlreadyExists; FailedPrecondition
        for a suspended context.
        """
        context.raise_if_suspended()
        publication_id = self.context_table.unused_id(tenant, publication_id)
        pages = self.block_manager.allocate(context.committed_pages)
        # A new namespace each time, in which no page of an earlier publication can be cached.
        identity = replace(context.identity, namespace=PUBLISHED + self._new_id())
        publication = self.create(identity, tenant=tenant, context_id=publication_id)
        self.pin(publication, True)
        committed = context.page_table().tolist()[: context.committed_pages]
        self.block_manager.tiers.copy(committed, pages)
        index = self.block_manager.index
        root = publication.root
        for node, page in zip(context.chain(), pages, strict=True):
            publication.tail = index.commit(publication.tail, root, node.tokens, node.overrides, page)
        publication.attention_overrides = {
            index: override for index, override in context.attention_overrides.items() if index < publication.length
        }
        publication.adapter_switches = tuple(
            switch for switch in context.adapter_switches if switch.start < publication.length
        )
        index.publish(root)
        self.publications[root] = publication
        return publication

    def close(self, context: Context) -> None:
        """Close a context. Of the pages that only it held, committed ones stay cached and working ones become free.

        A closed publication is found no more; contexts that share its pages keep them.
        """
        context.raise_if_closed()
        if context.identity.namespace.startswith(PUBLISHED):
            self.block_manager.index.unpublish(context.root)
            del self.publications[context.root]
        if not context.suspended:
            self.block_manager.release_pages(context)
        self.block_manager.drop_offloaded(context)
        context.closed = True
        self.context_table.remove(context)

    # --- tokens and their pages ----------------------------------------------------------------------------------

    def append(self, context: Context, tokens: TokenIds, overrides: Sequence[bytes] = ()) -> None:
        """Append tokens, `[tokens]` int32, to the buffered ones; takes no pages.

        `overrides`, if not empty, has one entry a token, as `cache.attention_overrides` encodes it; b"" for none.
        """
        context.raise_if_closed()
        first = context.length
        context.recent += encode_tokens(tokens)
        if any(overrides):
            all_overrides = dict(context.attention_overrides)  # a copy: forks share the mapping
            for index, override in enumerate(overrides, first):
                if override:
                    all_overrides[index] = override
            context.attention_overrides = all_overrides

    def switch_adapter(self, context: Context, adapter: str, revision: str) -> None:
        """Go on with the adapter of this name and content (empty: none) after the tokens that the context has.

        These stay as they are, buffered ones too. An empty context becomes as if it had been created with the adapter.
        A switch that no token followed yet is replaced; one to the content of the last token's adapter is taken back.
        Raises FailedPrecondition where this would be one switch more than MAX_SWITCHES.
        """
        context.raise_if_closed()
        switch = AdapterSpan(start=context.length, adapter=adapter, adapter_revision=revision)
        first, *switches = switched(context.adapter_spans, switch)
        if len(switches) > MAX_SWITCHES:
            raise FailedPrecondition(f"a context switches its adapter at most {MAX_SWITCHES} times")
        if first.adapter_revision != context.identity.adapter:
            self._replace_root(context, replace(context.identity, adapter=revision))
        context.adapter = first.adapter
        context.adapter_switches = tuple(switches)

    def _replace_root(self, context: Context, identity: Identity) -> None:
        """Give an empty context another identity."""
        root = self.block_manager.index.root(identity)
        if not context.suspended:
            self.block_manager.index.acquire(root)
            self.block_manager.index.release(context.root)
        context.identity, context.root, context.tail = identity, root, root

    def match(self, context: Context, tokens: int | None = None) -> int:
        """Attach committed pages on the device that hold the next buffered tokens; returns the number of those tokens.

        Only the context's first `tokens` tokens (None: all) are matched. A suspended context is resumed first: all its
        tokens are buffered then, and matched from the beginning; the rest stays buffered, to be restored or computed.
        Nothing matches if working tokens precede the buffered ones.
        """
        context.raise_if_closed()
        if context.suspended:
            self.block_manager.resume(context)
            self.touch(context)
        path = self.block_manager.lookup_index(context, context.length if tokens is None else tokens)
        path = path[: count_on_device(path)]
        if path:
            self.context_table.note_pages(context)
            self.block_manager.attach_prefix(context, path)
            publication = self.publications.get(path[0].owner)
            if publication is not None:
                self.touch(publication)
        return len(path) * self.page_size

    def restore(self, context: Context, limit: int, ready: Ready, tokens: int | None = None) -> int:
        """Load up to `limit` of the context's next pages from other tiers; see `BlockManager.restore`."""
        self.context_table.note_pages(context)
        return self.block_manager.restore(context, limit, ready, tokens)

    def offload(self, context: Context, computed: int, committed: int) -> builtins.list[tuple[int, int]]:
        """Expect data from a snapshot for the first `computed` tokens of a new context.

        Returns (page number in the sequence, host slot) for every page that no tier holds; the slots are staged ones,
        beyond the tier's own. The caller brings the data there, and `restore` loads it as it arrives. If the context
        commits manually, its first `committed` pages commit all the same.
        """
        context.raise_if_suspended()
        context.computed = computed
        context.recommit_pages = committed if context.manual_commit else 0
        context.manual_pages = None
        if context.manual_commit and computed > committed * self.page_size:
            context.manual_pages = committed
        indexed = self.block_manager.lookup_index(context, computed)
        first = context.tail.depth + len(indexed)
        slots: builtins.list[tuple[int, int]] = []
        for number in range(first, self.block_manager.pages_for(computed)):
            offloaded = OffloadedPage(min(self.page_size, computed - number * self.page_size))
            self.block_manager.tiers.stage(offloaded)
            context.offloaded_pages[number] = offloaded
            slots.append((number, offloaded.host))
        return slots

    def find(self, identity: Identity, tokens: TokenIds) -> PrefixMatch:
        """The pages that a new context filled with `tokens` would find."""
        index = self.block_manager.index
        path = index.search(index.root(identity), encode_tokens(tokens), NO_OVERRIDES)
        return summarize(path)

    def peek(self, context: Context, more: TokenIds = (), tokens: int | None = None) -> PrefixMatch:
        """The pages that a context would find once `more` is appended, within its first `tokens` tokens (None: all).

        Changes nothing.
        """
        context.raise_if_closed()
        added = encode_tokens(more)
        if tokens is None:
            tokens = context.length + len(added) // TOKEN_BYTES
        return summarize(self.block_manager.lookup_tiers(context, tokens, added))

    def grow(self, context: Context, tokens: int) -> None:
        """Make sure of working pages for `tokens` tokens beyond `seq_len`, evicting cached pages as needed.

        Raises OutOfPages and takes none; FailedPrecondition for a suspended context (`match` resumes it).
        """
        context.raise_if_suspended()
        missing = self.block_manager.pages_for(context.working_tokens + tokens) - len(context.working)
        if missing > 0:
            self.context_table.note_pages(context)
            self.block_manager.add_working(context, missing)

    def mark_computed(self, context: Context, tokens: int, *, hold: bool = False) -> int:
        """The KV of the first `tokens` buffered tokens is on the device now: they become working tokens.

        Full working pages commit, unless the context commits manually or `hold` keeps them until `commit_full`. Returns
        how many of them were merged with equal pages that others had committed meanwhile; the duplicates are free.
        Raises OutOfRange if fewer tokens are buffered, FailedPrecondition if there are no pages for them.
        """
        context.raise_if_suspended()
        if not 0 <= tokens <= context.buffered_tokens:
            raise OutOfRange(f"{tokens} tokens computed, {context.buffered_tokens} buffered")
        if context.working_tokens + tokens > len(context.working) * self.page_size:
            raise FailedPrecondition(f"no working pages for {tokens} more tokens")
        context.working_tokens += tokens
        full = self._committable_pages(context)
        merged = self.block_manager.commit(context, full) if full and not hold else 0
        if context.offloaded_pages:
            self.block_manager.drop_offloaded(context, before=self.block_manager.pages_for(context.seq_len))
        return merged

    def commit_full(self, context: Context) -> None:
        """Commit the full pages that `mark_computed` kept with `hold`."""
        context.raise_if_closed()
        self.block_manager.commit(context, self._committable_pages(context))

    # --- memory pressure -----------------------------------------------------------------------------------------

    def suspend(self, context: Context) -> int:
        """Give up all pages and keep the tokens; returns how many pages became free or evictable."""
        context.raise_if_closed()
        if context.suspended:
            return 0
        self.context_table.by_use.pop(context, None)
        return self.block_manager.suspend(context)

    def victims(self) -> Iterator[Context]:
        """Contexts that may be suspended: idle, not pinned, holding pages; least recently used first.

        None may be suspended, used or closed while they are read.
        """
        for context in self.context_table.by_use:
            if not (context.busy or context.pinned) and context.holds_pages:
                yield context

    def victims_for(self, pages: int) -> builtins.list[Context] | None:
        """The first victims by whose suspension so many pages become available; None if all victims have too few.

        Suspends none, and looks at no more contexts, and no more of their pages, than it takes.
        """
        chosen: builtins.list[Context] = []
        empty: builtins.list[Context] = []
        released = Counter[PageNode]()
        available = 0
        for context in self.context_table.by_use:
            if available >= pages:
                break
            if not context.holds_pages:
                empty.append(context)
            elif not (context.busy or context.pinned):
                chosen.append(context)
                available += len(context.working) + would_release(context.tail, released)
        self.context_table.skip_in_order(empty)
        return chosen if available >= pages else None

    def clear_cached(self) -> int:
        """Drop every page without holders, in all tiers; returns how many were on the device."""
        count = self.block_manager.index.cached
        self.block_manager.evict(count)
        self.block_manager.tiers.clear()
        return count

    def _committable_pages(self, context: Context) -> int:
        """How many of the leading working pages are full and commit automatically."""
        full = context.working_tokens // self.page_size
        if context.manual_commit:
            full = min(full, max(context.recommit_pages - context.tail.depth, 0))
        return full
