"""Prefix index: committed pages by their tokens, and the lineage that contexts share.

A `PageNode` is one full, immutable page of a token sequence; its parent is the page before. A context holds only its
last node, so a fork shares all pages before it at no cost. The `PrefixIndex` finds nodes from a root on, child by
child, and keeps nodes without holders until their pages are needed. It never allocates pages and does not know what a
context is. Called by `block_manager` and `context_cache` only.

    node.holders = contexts whose last node it is + its children that are held

    held ──holders drop to 0──▶ cached ──evict──▶ in another tier ──dropped there──▶ removed from the index; its
      ▲                           │ ▲                   │                            tokens stay while referenced
      └─────────acquire───────────┘ └───────place───────┘

When a node becomes cached, its parent loses one holder. Hence a parent is held at least as long as any of its children,
and is cached and evicted after all of them. Every node of the index can therefore be reached from its root, and on any
path from a root the nodes on the device come first.

Every node has an owner: the root of the identity whose contexts may find it. Where a private sequence continues a
published one, the child's owner differs from its parent's. Children are keyed by their owners too, so the readers of a
publication share nothing that follows it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from jaxctx.cache.overrides import Overrides

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]  # validated by the caller

TOKEN_BYTES = 4  # tokens are kept as the bytes of int32
NOWHERE = -1  # the page or slot of data that is not in that tier


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that determines a page's KV, apart from tokens and overrides. Different identities share no pages."""

    namespace: str
    model_revision: str
    adapter: str = ""  # digest of the content of the first token's; empty: none. Switches are overrides
    kv_dtype: str = ""
    salt: str = ""

    def encode(self) -> bytes:
        """The fields with their names, each with its length: no two identities have the same bytes."""
        tagged_fields = (
            ("namespace", self.namespace),
            ("model_revision", self.model_revision),
            ("adapter", self.adapter),
            ("kv_dtype", self.kv_dtype),
            ("salt", self.salt),
        )
        encoded = bytearray()
        for name, value in tagged_fields:
            for part in (name.encode(), value.encode()):
                encoded += len(part).to_bytes(4, "little") + part
        return bytes(encoded)


@dataclass(slots=True, eq=False, kw_only=True)
class TierPlacement:
    """Where the data of one page is: its page on the device and its slots in the other tiers, or NOWHERE."""

    page: int = NOWHERE
    host: int = NOWHERE
    disk: int = NOWHERE

    @property
    def lost(self) -> bool:
        """Whether no tier has the data."""
        return self.page == self.host == self.disk == NOWHERE


@dataclass(slots=True, eq=False, weakref_slot=True)
class PageNode(TierPlacement):
    """One committed page in its sequence. A root (no parent, no tokens, no page) precedes the first page."""

    parent: PageNode | None
    tokens: bytes
    owner: PageNode = field(init=False)  # the root of the identity whose contexts may find it
    identity: Identity | None = None  # set for a root only
    overrides: bytes = b""  # of its tokens, see `cache.overrides`
    holders: int = 0  # contexts whose last node this is, and children that are held
    depth: int = 0  # pages up to and including this one; 0 for a root
    children: dict[tuple[PageNode, bytes, bytes], PageNode] = field(
        default_factory=dict
    )  # by owner, tokens and overrides
    indexed: bool = False  # whether it is one of its parent's children

    def lineage(self, after: int = 0) -> Iterator[PageNode]:
        """This node and its ancestors, the nearest first, as long as their depth exceeds `after`; never the root."""
        node = self
        while node.depth > after:
            yield node
            assert node.parent is not None
            node = node.parent

    def forget(self) -> None:
        """Remove the node from the index, because no tier has its data any more."""
        assert self.parent is not None
        del self.parent.children[self.owner, self.tokens, self.overrides]
        self.indexed = False


def encode_tokens(tokens: TokenIds) -> bytes:
    """Token ids, `[tokens]`, as the bytes of an int32 array."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.int32, copy=False).tobytes()
    return array("i", tokens).tobytes()  # faster than numpy for the single token of a decode step


class PrefixIndex:
    """The committed pages of all identities, as trees below their roots."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self._cached: OrderedDict[PageNode, None] = OrderedDict()  # least recently released first
        self._roots: WeakValueDictionary[Identity, PageNode] = WeakValueDictionary()
        self._published: dict[PageNode, Identity] = {}  # published roots; the identity of readers, without namespace

    @property
    def cached(self) -> int:
        """How many nodes have a page on the device and no holder."""
        return len(self._cached)

    def root(self, identity: Identity) -> PageNode:
        """The root of all sequences of this identity. It is kept as long as something refers to it."""
        node = self._roots.get(identity)
        if node is None:
            node = PageNode(None, b"", identity=identity)
            node.owner = node
            self._roots[identity] = node
        return node

    def publish(self, root: PageNode) -> None:
        """Let contexts of all namespaces find the sequences that begin at this root."""
        self._published[root] = _without_namespace(root)

    def unpublish(self, root: PageNode) -> None:
        """Undo `publish`: contexts keep the pages that they hold, and find no further ones."""
        del self._published[root]

    def search(self, root: PageNode, tokens: bytes, overrides: Overrides) -> list[PageNode]:
        """The longest path for a sequence that begins with `tokens`: from its own root, or from a published one."""
        longest = self.walk(root, tokens, root, overrides)
        if self._published:
            reader = _without_namespace(root)
            for start, readers in self._published.items():
                if readers == reader:
                    path = self.walk(start, tokens, root, overrides)
                    if len(path) > len(longest):
                        longest = path
        return longest

    def walk(self, node: PageNode, tokens: bytes, owner: PageNode, overrides: Overrides) -> list[PageNode]:
        """The indexed nodes that continue `node` with the leading full pages of `tokens`, as far as they exist.

        `node` is a root or indexed; `owner` is the root of the reader's identity; `overrides` are those of the whole
        sequence. Nothing is acquired.
        """
        page_bytes = self.page_bytes
        page_size = page_bytes // TOKEN_BYTES
        first = node.depth * page_size  # index of the first of `tokens` in the sequence
        path: list[PageNode] = []
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            page_overrides = overrides.of_page(first + start // TOKEN_BYTES, page_size) if overrides else b""
            child = self.child(node, owner, tokens[start : start + page_bytes], page_overrides)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, parent: PageNode, owner: PageNode, tokens: bytes, overrides: bytes) -> PageNode | None:
        """The indexed child of `parent` with these tokens and overrides that `owner` may find, or None.

        That is a child of this owner or, behind a published parent, one that belongs to the publication.
        """
        owners = (parent.owner, owner) if parent.owner in self._published else (owner,)
        for allowed_owner in owners:
            node = parent.children.get((allowed_owner, tokens, overrides))
            if node is not None:
                return node
        return None

    def commit(self, parent: PageNode, owner: PageNode, tokens: bytes, overrides: bytes, page: int) -> PageNode:
        """Move one hold from `parent` to its child with these tokens, and return the child.

        If the index has no such child, it is made, with `page`. The data of `page` must be on the device by now. An
        indexed node without a page takes this one. If the returned node has another page, `page` is a duplicate, which
        the caller must release.
        """
        node = self.child(parent, owner, tokens, overrides)
        if node is not None:
            if node.page == NOWHERE:
                self.place(node, page)
            self.acquire(node)
            self.release(parent)
            return node
        node = PageNode(parent, tokens, overrides=overrides, page=page, holders=1, depth=parent.depth + 1, indexed=True)
        node.owner = owner
        parent.children[owner, tokens, overrides] = node
        return node  # the hold on the parent now counts for its held child

    def place(self, node: PageNode, page: int) -> None:
        """Give an indexed node a page; the node becomes cached. Its ancestors must be on the device already.

        The data of the page must be written before anything reads it.
        """
        node.page = page
        self._cached[node] = None

    def acquire(self, node: PageNode) -> None:
        """Add a holder to a root or an indexed node. Cached ancestors become held."""
        node.holders += 1
        while node.holders == 1 and node.parent is not None:
            del self._cached[node]
            node = node.parent
            node.holders += 1

    def release(self, node: PageNode) -> int:
        """Remove a holder; returns how many nodes, this one and its ancestors, became cached by it."""
        cached = len(self._cached)
        node.holders -= 1
        while node.holders == 0 and node.parent is not None:
            self._cached[node] = None
            node = node.parent
            node.holders -= 1
        return len(self._cached) - cached

    def evict(self) -> tuple[PageNode, int]:
        """Take the page of the least recently released cached node; it stays indexed. KeyError if there is none."""
        node, _ = self._cached.popitem(last=False)
        page, node.page = node.page, NOWHERE
        return node, page


def would_release(node: PageNode, released: Counter[PageNode]) -> int:
    """What `PrefixIndex.release` would return, after it was called for other nodes.

    `released` counts the holders that each node has lost by then.
    """
    cached = 0
    while node.parent is not None:
        released[node] += 1
        if released[node] < node.holders:
            break
        cached += 1
        node = node.parent
    return cached


def _without_namespace(root: PageNode) -> Identity:
    """What the identities of a publication and of its readers must have in common."""
    assert root.identity is not None
    return replace(root.identity, namespace="")
