"""Context: the state of one token sequence and its pages.

A context is its last committed page's node, its working pages, and the tokens that are in no committed page yet:

    committed pages, by lineage        │ working pages            │
    root ◀── node ◀── node ◀── tail    │ 7 (full, if manual_pages)  8   │ 9 (reserved)
    tokens in the nodes                │ recent: working tokens ··· buffered tokens ···

Everybody may read it; only `ContextCache` changes it, save for `busy`, `pinned` and `pinned_until`, `version`,
`priority` and `labels`, which are the engine's. A suspended context has given up its pages: its nodes are mere token
lineage, and all its tokens count as buffered. What was in its working pages may be offloaded in other tiers, to be loaded
instead of computed (`offloaded_pages`).
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from jaxctx.cache.prefix_index import TOKEN_BYTES, Identity, PageNode, Stored
from jaxctx.errors import FailedPrecondition, NotFound
from jaxctx.lifetime import FOREVER, Lifetime


@dataclass(slots=True, eq=False)
class OffloadedPage(Stored):
    """Data of a page that is no committed one, to be loaded into a working page: `tokens` of it count."""

    tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class Context:
    """See the module docstring. `used_at` and `created_at` are readings of the cache's clock."""

    id: str
    tenant: str
    identity: Identity
    page_size: int
    ancestors: tuple[tuple[str, int], ...] = ()  # the parent first: id, and tokens that it had when it was forked
    priority: int = 0
    pinned: bool = False
    manual_commit: bool = False
    snapshot: str = ""  # that it was opened from
    labels: Mapping[str, str] = field(default_factory=dict)
    of_program: bool = False  # made by the server for a program of the tenant's; lists may leave it out
    created_at: float
    used_at: float = 0.0
    busy: bool = False  # a writer holds it; set by the engine
    lifetime: Lifetime = FOREVER
    pinned_until: float | None = None  # None: not pinned, or for good
    version: int = 0  # grows with every change

    root: PageNode
    tail: PageNode  # held by this context unless it is suspended
    working: list[int] = field(default_factory=list)  # page ids; those with tokens come first
    recent: bytes = b""  # working tokens, then buffered ones; forks share it
    marks: Mapping[int, bytes] = field(default_factory=dict)  # of its tokens, by index; forks share it
    working_tokens: int = 0  # in working pages
    suspended: bool = False
    computed: int = 0  # tokens that had KV when it was suspended or, of one opened from a snapshot, saved
    offloaded_pages: dict[int, OffloadedPage] = field(
        default_factory=dict
    )  # data of pages it had, by place in its sequence
    manual_pages: int | None = None  # committed pages when it was suspended, if it commits by hand and had others too
    closed: bool = False
    table: "array[int] | None" = None  # int32 ids of its committed pages; None: collected again when asked for

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
    def seq_len(self) -> int:
        """Tokens with KV: `committed_pages * page_size + working_tokens`."""
        return self.committed_pages * self.page_size + self.working_tokens

    @property
    def buffered_tokens(self) -> int:
        """Tokens known but without KV."""
        return self.length - self.seq_len

    @property
    def length(self) -> int:
        """All tokens: `seq_len + buffered_tokens`. Suspension does not change it."""
        return self.tail.depth * self.page_size + len(self.recent) // TOKEN_BYTES

    def tokens(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " tokens"]:
        """The tokens from `start` to `stop` (the end), buffered ones included; costs as much as lies behind `start`.

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
        """The tokens from committed page (or lineage node) number `first_page` on, as bytes."""
        pages = [node.tokens for node in self.tail.lineage(first_page)]
        return b"".join([*reversed(pages), self.recent])

    def chain(self) -> list[PageNode]:
        """The nodes of its committed pages (or of its lineage) in order."""
        return [*self.tail.lineage()][::-1]

    def page_table(self) -> Int32[np.ndarray, " pages"]:
        """Physical page ids as they are now, committed ones first; empty if suspended.

        Committed ones are remembered as they come; after a fork, match or rewind they are collected again, in O(pages).
        """
        if self.table is None:
            pages: list[int] = []
            node: PageNode | None = None if self.suspended else self.tail
            while node is not None and node.parent is not None:  # `chain` would take half as long again
                pages.append(node.page)
                node = node.parent
            self.table = array("i", reversed(pages))
        return np.array(self.table + array("i", self.working))
