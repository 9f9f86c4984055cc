"""Prefix: committed pages by what they hold, and the lineage that contexts share.

A `PageNode` is one full, immutable page of a token sequence; its parent is the page before. Contexts hold only their
last node, so a fork shares everything before it at once. The `PrefixIndex` finds nodes from their roots on, child by
child, and keeps the ones that nobody holds until their pages are needed. It never allocates pages and does not know
what a context is. Called by `memory` and `contexts` only.

    node.holders = contexts whose last node it is + its children that are held

    held ──holders drop to 0──▶ cached ──evict──▶ in another tier ──dropped there──▶ off the index for good; its
      ▲                           │ ▲                   │                            tokens stay while referenced
      └─────────acquire───────────┘ └───────place───────┘

When a node becomes cached its parent loses one holder. Hence a parent is held at least as long as any child, is cached
after all of them, and is evicted after all of them: whatever the index holds can be reached from its root, and on any
way from a root the nodes on the device come first.

Every node has an owner, the root of the identity whose contexts may find it. A child of another owner than its parent's
is where a private sequence leaves a published one: children are told apart by their owners too, so that readers of one
publication share nothing behind it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from jaxctx.cache.attention_overrides import encode_page

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]  # whoever has them made sure of that

TOKEN_BYTES = 4  # tokens are kept as the bytes of int32
NOWHERE = -1


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


@dataclass(slots=True, eq=False, kw_only=True)
class Stored:
    """Where the data of one page is: on the device, and in slots of other tiers."""

    page: int = NOWHERE
    host: int = NOWHERE
    disk: int = NOWHERE

    @property
    def lost(self) -> bool:
        """Whether it is nowhere."""
        return self.page == self.host == self.disk == NOWHERE


@dataclass(slots=True, eq=False, weakref_slot=True)
class PageNode(Stored):
    """One committed page in its sequence; a root (no parent, no tokens, no page) stands before the first of each."""

    parent: PageNode | None
    tokens: bytes
    owner: PageNode = field(init=False)  # the root of the identity whose contexts may find it
    identity: Identity | None = None  # of a root
    marks: bytes = b""  # of its tokens, see `marks`
    holders: int = 0
    depth: int = 0  # pages up to and including this one
    children: dict[tuple[PageNode, bytes, bytes], PageNode] = field(default_factory=dict)  # by owner, tokens and marks
    indexed: bool = False  # whether it is one of its parent's children

    def lineage(self, after: int = 0) -> Iterator[PageNode]:
        """This node and those before it, the last first, down to page number `after`; the root is none of them."""
        node = self
        while node.depth > after:
            yield node
            assert node.parent is not None
            node = node.parent

    def forget(self) -> None:
        """Off the index: no tier has its data any more."""
        assert self.parent is not None
        del self.parent.children[self.owner, self.tokens, self.marks]
        self.indexed = False


def encode_tokens(tokens: TokenIds) -> bytes:
    """Token ids, `[tokens]`, as the bytes of int32."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.int32, copy=False).tobytes()
    return array("i", tokens).tobytes()  # several times faster than numpy for the one token of a decode step


class PrefixIndex:
    """Committed pages of all identities."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self._cached: OrderedDict[PageNode, None] = OrderedDict()  # least recently released first
        self._roots: WeakValueDictionary[Identity, PageNode] = WeakValueDictionary()
        self._published: dict[PageNode, Identity] = {}  # roots, and what their readers are, whatever the namespace

    @property
    def cached(self) -> int:
        """Nodes that nobody holds and that still have their page."""
        return len(self._cached)

    def root(self, identity: Identity) -> PageNode:
        """The root of all sequences of this identity. It lives as long as something refers to it."""
        node = self._roots.get(identity)
        if node is None:
            node = PageNode(None, b"", identity=identity)
            node.owner = self._roots[identity] = node
        return node

    def publish(self, root: PageNode) -> None:
        """Let contexts of all namespaces find what begins at this root."""
        self._published[root] = _anybody(root)

    def unpublish(self, root: PageNode) -> None:
        """Undo `publish`: who holds pages of it keeps those, and finds no more."""
        del self._published[root]

    def search(self, root: PageNode, tokens: bytes, marks: Mapping[int, bytes]) -> list[PageNode]:
        """The longest path for a sequence that begins with `tokens`: from its own root, or from a published one."""
        anybody = _anybody(root) if self._published else None
        starts = [root, *(start for start, readers in self._published.items() if readers == anybody)]
        return max((self.walk(start, tokens, root, marks) for start in starts), key=len)

    def walk(self, node: PageNode, tokens: bytes, owner: PageNode, marks: Mapping[int, bytes]) -> list[PageNode]:
        """The indexed nodes that continue `node` with the full pages at the front of `tokens`, as far as there are any.

        `node` is a root or indexed; `marks` by index in the sequence. Nothing is acquired.
        """
        page_bytes = self.page_bytes
        first, page_size = node.depth * page_bytes // TOKEN_BYTES, page_bytes // TOKEN_BYTES
        path = []
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            page_marks = encode_page(marks, first + start // TOKEN_BYTES, page_size) if marks else b""
            child = self.child(node, owner, tokens[start : start + page_bytes], page_marks)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, parent: PageNode, owner: PageNode, tokens: bytes, marks: bytes) -> PageNode | None:
        """The indexed node of these tokens and marks behind `parent`, of this owner or a published parent's."""
        for whose in (parent.owner, owner) if parent.owner in self._published else (owner,):
            if (node := parent.children.get((whose, tokens, marks))) is not None:
                return node
        return None

    def commit(self, parent: PageNode, owner: PageNode, tokens: bytes, marks: bytes, page: int) -> PageNode:
        """Move one hold from `parent` to its child of these tokens: the indexed one, or else a new one with `page`.

        The data of `page` must be on the device by now. An indexed node that has no page takes this one. If the
        answer's page is another, `page` is a duplicate and the caller's to give back.
        """
        if (node := self.child(parent, owner, tokens, marks)) is not None:
            if node.page == NOWHERE:
                self.place(node, page)
            self.acquire(node)
            self.release(parent)
            return node
        node = PageNode(parent, tokens, marks=marks, page=page, holders=1, depth=parent.depth + 1, indexed=True)
        node.owner = owner
        parent.children[owner, tokens, marks] = node
        return node  # the hold on the parent is now that of a held child

    def place(self, node: PageNode, page: int) -> None:
        """An indexed node without a page is on the device now, cached: its data is written, or will be before any read.

        Whatever stands before it is on the device already.
        """
        node.page = page
        self._cached[node] = None

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

    def evict(self) -> tuple[PageNode, int]:
        """Take the page of the least recently released cached node; it stays indexed. KeyError if there is none."""
        node, _ = self._cached.popitem(last=False)
        page, node.page = node.page, NOWHERE
        return node, page


def _anybody(root: PageNode) -> Identity:
    """What a sequence and a publication must have in common."""
    assert root.identity is not None
    return replace(root.identity, namespace="")
