"""Prefix: committed pages by what they hold, and the lineage that contexts share.

A `PageNode` is one full, immutable page of a token sequence; its parent is the page before. Contexts hold only their
last node, so a fork shares everything before it at once. The `PrefixIndex` finds nodes by a chained hash and keeps the
ones that nobody holds until their pages are needed. It never allocates pages and does not know what a context is.
Called by `contexts` only.

    node.holders = contexts whose last node it is + its children that are held

    held ──holders drop to 0──▶ cached ──evict──▶ evicted: off the index for good, its tokens stay while referenced
      ▲                           │
      └─────────acquire───────────┘

When a node becomes cached its parent loses one holder. Hence a parent is held at least as long as any child, is cached
after all of them, and is evicted after all of them: whatever the index holds can be reached from its root.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from jaxctx.errors import InvalidArgument

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

TOKEN_BYTES = 4  # tokens are kept as the bytes of int32
EVICTED = -1

_CAUSAL = b"\x00"  # what follows the parent's digest: tokens at consecutive positions under a causal mask, no media


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything beside the tokens that determines a page's KV. Contexts of different identities share nothing."""

    namespace: str
    model_revision: str
    adapter: str = ""  # name and revision
    kv_dtype: str = ""
    salt: str = ""

    def encode(self) -> bytes:
        """Fields by name, each with its length, so that no two identities have the same bytes."""
        parts = [part.encode() for field in fields(self) for part in (field.name, str(getattr(self, field.name)))]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


@dataclass(slots=True, eq=False, weakref_slot=True)
class PageNode:
    """One committed page in its sequence; a root (no parent, no tokens, no page) stands before the first of each."""

    parent: PageNode | None
    tokens: bytes
    digest: bytes
    page: int = EVICTED
    holders: int = 0
    depth: int = 0  # pages up to and including this one
    same_digest: PageNode | None = None  # next in the index under this digest: a hash collision

    def ancestor(self, depth: int) -> PageNode:
        """The node `depth` pages from the root on the way to this one."""
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node


def encode_tokens(tokens: TokenIds) -> bytes:
    """Token ids, `[tokens]`, as the bytes of int32. Raises InvalidArgument for anything that those cannot be."""
    try:
        if not isinstance(tokens, np.ndarray):
            return array("i", [*tokens]).tobytes()  # several times faster than numpy for the one token of a decode step
        narrow = tokens.astype(np.int32, casting="same_kind", copy=False)
    except (TypeError, OverflowError) as error:
        raise InvalidArgument.field("tokens", "32-bit integers") from error
    if narrow.ndim != 1 or (narrow is not tokens and (narrow != tokens).any()):
        raise InvalidArgument.field("tokens", "a flat sequence of 32-bit integers")
    return narrow.tobytes()


class PrefixIndex:
    """Committed pages of all identities. `digest` maps bytes to 16 bytes; it nominates, token bytes decide."""

    def __init__(self, page_size: int, digest: Callable[[bytes], bytes] = xxh3_128_digest) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self._digest = digest
        self._by_digest: dict[bytes, PageNode] = {}
        self._cached: OrderedDict[PageNode, None] = OrderedDict()  # least recently released first
        self._roots: WeakValueDictionary[Identity, PageNode] = WeakValueDictionary()

    @property
    def cached(self) -> int:
        """Nodes that nobody holds and that still have their page."""
        return len(self._cached)

    def root(self, identity: Identity) -> PageNode:
        """The root of all sequences of this identity. It lives as long as something refers to it."""
        node = self._roots.get(identity)
        if node is None:
            node = self._roots[identity] = PageNode(None, b"", self._digest(identity.encode()))
        return node

    def walk(self, node: PageNode, tokens: bytes) -> list[PageNode]:
        """The indexed nodes that continue `node` with the full pages at the front of `tokens`, as far as there are any.

        `node` is a root or indexed. Nothing is acquired.
        """
        find, digest, page_bytes = self._by_digest.get, self._digest, self.page_bytes
        path = []
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            page_tokens = tokens[start : start + page_bytes]
            child = find(digest(node.digest + _CAUSAL + page_tokens))
            while child is not None and (child.tokens != page_tokens or child.parent is not node):
                child = child.same_digest
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def commit(self, parent: PageNode, tokens: bytes, page: int) -> PageNode:
        """Move one hold from `parent` to its child of these tokens: the indexed one, or else a new one with `page`.

        The data of `page` must be on the device by now. If the answer's page is another, `page` is a duplicate and the
        caller's to give back.
        """
        if found := self.walk(parent, tokens):
            self.acquire(found[0])
            self.release(parent)
            return found[0]
        digest = self._digest(parent.digest + _CAUSAL + tokens)
        node = PageNode(parent, tokens, digest, page, 1, parent.depth + 1, self._by_digest.get(digest))
        self._by_digest[digest] = node
        return node  # the hold on the parent is now that of a held child

    def acquire(self, node: PageNode) -> None:
        """Add a holder to a root or an indexed node. What was cached on the way to the root becomes held."""
        node.holders += 1
        while node.holders == 1 and node.parent is not None:
            del self._cached[node]
            node = node.parent
            node.holders += 1

    def release(self, node: PageNode) -> int:
        """Take a holder away; returns how many nodes, this one first, became cached by it."""
        cached = len(self._cached)
        node.holders -= 1
        while node.holders == 0 and node.parent is not None:
            self._cached[node] = None
            node = node.parent
            node.holders -= 1
        return len(self._cached) - cached

    def evict(self) -> int:
        """Forget the least recently released cached node; returns its page. Raises KeyError if there is none."""
        node, _ = self._cached.popitem(last=False)
        self._unlink(node)
        page, node.page = node.page, EVICTED
        return page

    def nodes(self) -> Iterator[PageNode]:
        """Every indexed node."""
        for node in self._by_digest.values():
            collided: PageNode | None = node
            while collided is not None:
                yield collided
                collided = collided.same_digest

    def holds(self, node: PageNode) -> bool:
        """Whether this very node is indexed."""
        return node.parent is not None and self.walk(node.parent, node.tokens) == [node]

    def check(self, tails: Mapping[PageNode, int]) -> None:
        """Raises AssertionError unless all accounts agree; `tails` says of how many contexts a node is the last one."""
        nodes = list(self.nodes())
        holders = Counter(tails)
        holders.update(node.parent for node in nodes if node.holders and node.parent is not None)
        for node in {*nodes, *tails}:
            assert node.holders == holders[node], f"{holders[node]} holders, not {node.holders}"
        for node in nodes:
            assert self.holds(node), "a node that cannot be found"
            assert node.parent is not None
            assert node.parent.depth == node.depth - 1
            assert node.parent.parent is None or self.holds(node.parent), "a node whose parent is not indexed"
            assert node.page != EVICTED
            assert len(node.tokens) == self.page_bytes
        assert set(self._cached) == {node for node in nodes if not node.holders}
        place = {node: position for position, node in enumerate(self._cached)}
        for node in self._cached:
            assert node.parent not in place or place[node] < place[node.parent], "a parent would go before its child"

    def _unlink(self, node: PageNode) -> None:
        first = self._by_digest[node.digest]
        if first is not node:
            while first.same_digest is not node:
                assert first.same_digest is not None
                first = first.same_digest
            first.same_digest = node.same_digest
        elif node.same_digest is not None:
            self._by_digest[node.digest] = node.same_digest
        else:
            del self._by_digest[node.digest]
        node.same_digest = None
