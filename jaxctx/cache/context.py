"""Context: the state of one token sequence and its pages.

A context consists of the node of its last committed page, its working pages, and the tokens that are in no committed
page yet:

    committed pages, by lineage        │ working pages                    │
    root ◀── node ◀── node ◀── tail    │ 7 (full, if manual)   8 (partly) │ 9 (reserved)
    tokens in the nodes                │ recent: working tokens ··· buffered tokens ···

Anyone may read a context. Only this package changes it, except for `busy`, `pinned`, `pinned_until`, `version`,
`priority`, `adapter` and `labels`, which belong to the engine. A suspended context has given up its pages: its nodes
are only token lineage, and all its tokens count as buffered. The data of its working pages may be offloaded to other
tiers, to be loaded instead of computed (`offloaded_pages`).
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from jaxctx.cache.overrides import Overrides
from jaxctx.cache.prefix_index import TOKEN_BYTES, Identity, PageNode, TierPlacement
from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.lifetime import FOREVER, Lifetime
from jaxctx.types import AdapterSpan


@dataclass(slots=True, eq=False)
class OffloadedPage(TierPlacement):
    """Data of a page that is not committed, kept in other tiers, to be loaded into a working page."""

    tokens: int  # how many of the page's tokens are valid


@dataclass(slots=True, eq=False, kw_only=True)
class Context:
    """One token sequence and its pages. `used_at` and `created_at` are in seconds of the cache's clock."""

    id: str
    tenant: str
    identity: Identity
    page_size: int
    ancestors: tuple[tuple[str, int], ...] = ()  # the parent first: its id, and its length when it was forked
    priority: int = 0
    pinned: bool = False
    manual_commit: bool = False
    adapter: str = ""  # what the adapter of its first token was called; the identity has its content
    snapshot: str = ""  # the snapshot that it was opened from
    labels: Mapping[str, str] = field(default_factory=dict)
    of_program: bool = False  # made by the server for one of the tenant's programs; lists may leave it out
    created_at: float
    used_at: float = 0.0
    busy: bool = False  # whether a writer holds it
    saving: bool = False  # whether it is pinned only until a save has ended
    lifetime: Lifetime = FOREVER
    pinned_until: float | None = None  # None: not pinned, or pinned without end
    version: int = 0  # grows with every change

    root: PageNode
    tail: PageNode  # the last committed page; held by this context unless it is suspended
    working: list[int] = field(default_factory=list)  # page ids; those with tokens come first
    recent: bytes = b""  # int32 bytes of working tokens, then buffered ones; forks share it
    # By token index, as `cache.attention_overrides` encodes them; forks share the mapping.
    attention_overrides: Mapping[int, bytes] = field(default_factory=dict)
    adapter_switches: tuple[AdapterSpan, ...] = ()  # where it goes on with another adapter, see `cache.overrides`
    working_tokens: int = 0  # tokens with KV in working pages
    suspended: bool = False
    computed: int = 0  # tokens that had KV when it was suspended, or saved as the snapshot that it was opened from
    offloaded_pages: dict[int, OffloadedPage] = field(default_factory=dict)  # by page number in its sequence
    # Of one that commits manually: pages, the first ones, that were committed when it was suspended, or saved as the
    # snapshot that it was opened from. They commit by themselves when they come back.
    recommit_pages: int = 0
    # The same, if there were working tokens behind them, whose place no cached page must take. None: there were none.
    manual_pages: int | None = None
    closed: bool = False
    table: "array[int] | None" = None  # int32 ids of its committed pages; None: collected when asked for

    def raise_if_closed(self) -> None:
        """Raises NotFound if it is closed."""
        if self.closed:
            raise NotFound(f"no context {self.id!r}")

    def raise_if_suspended(self) -> None:
        """Raises NotFound if it is closed, FailedPrecondition if it is suspended."""
        self.raise_if_closed()
        if self.suspended:
            raise FailedPrecondition(f"context {self.id!r} is suspended")

    @property
    def committed_pages(self) -> int:
        """Full immutable pages this context holds."""
        return 0 if self.suspended else self.tail.depth

    @property
    def working_pages(self) -> int:
        """Pages of its own, reserved ones without tokens included."""
        return len(self.working)

    @property
    def holds_pages(self) -> bool:
        """Whether it holds any."""
        return bool(self.working or self.committed_pages)

    @property
    def seq_len(self) -> int:
        """Tokens with KV: `committed_pages * page_size + working_tokens`."""
        return self.committed_pages * self.page_size + self.working_tokens

    @property
    def buffered_tokens(self) -> int:
        """Tokens without KV."""
        return self.length - self.seq_len

    @property
    def length(self) -> int:
        """All tokens: `seq_len + buffered_tokens`. Suspension does not change it."""
        return self.tail.depth * self.page_size + len(self.recent) // TOKEN_BYTES

    @property
    def overrides(self) -> Overrides:
        """What of its tokens is not computed in the default way."""
        return Overrides(self.attention_overrides, self.adapter_switches)

    @property
    def adapter_spans(self) -> tuple[AdapterSpan, ...]:
        """Which adapter computes which of its tokens: the first span begins at 0, the last one has the next token."""
        first = AdapterSpan(start=0, adapter=self.adapter, adapter_revision=self.identity.adapter)
        return (first, *self.adapter_switches)

    def tokens(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " tokens"]:
        """The tokens `[start, stop)`, buffered ones included; `stop` None: to the end. O(length - start).

        Raises IndexError unless `0 <= start <= stop <= length`.
        """
        length = self.length
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start} to {stop} of {length}")
        first_page = min(start // self.page_size, self.tail.depth)
        offset = first_page * self.page_size
        return np.frombuffer(self.token_bytes(first_page), np.int32)[start - offset : stop - offset]

    def token_bytes(self, first_page: int = 0) -> bytes:
        """All tokens from committed page (or lineage node) number `first_page` on, as int32 bytes."""
        parts = [node.tokens for node in self.tail.lineage(first_page)]
        parts.reverse()
        parts.append(self.recent)
        return b"".join(parts)

    def chain(self) -> list[PageNode]:
        """The nodes of its committed pages (of its lineage, if suspended) in sequence order."""
        nodes = list(self.tail.lineage())
        nodes.reverse()
        return nodes

    def page_table(self) -> Int32[np.ndarray, " pages"]:
        """Physical page ids, int32 `[pages]`, committed ones first; empty if suspended.

        The ids of committed pages are cached; after a fork, match or rewind they are collected again, in O(pages).
        """
        if self.table is None:
            pages: list[int] = []
            node: PageNode | None = None if self.suspended else self.tail
            while node is not None and node.parent is not None:  # faster than `chain`, and on the path of every step
                pages.append(node.page)
                node = node.parent
            self.table = array("i", reversed(pages))
        return np.array(self.table + array("i", self.working))
