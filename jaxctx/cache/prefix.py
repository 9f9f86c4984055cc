"""Prefix: committed pages by what they hold, and the lineage that contexts share.

A `PageNode` is one full, immutable page of a token sequence; its parent is the page before. Contexts hold only their
last node, so a fork shares everything before it at once. The `PrefixIndex` finds nodes by a chained hash and keeps the
ones that nobody holds until their pages are needed. It never allocates pages and does not know what a context is.
Called by `memory` and `contexts` only.

    node.holders = contexts whose last node it is + its children that are held

    held ──holders drop to 0──▶ cached ──evict──▶ in another tier ──dropped there──▶ off the index for good; its
      ▲                           │ ▲                   │                            tokens stay while referenced
      └─────────acquire───────────┘ └───────place───────┘

When a node becomes cached its parent loses one holder. Hence a parent is held at least as long as any child, is cached
after all of them, and is evicted after all of them: whatever the index holds can be reached from its root, and on any
way from a root the nodes on the device come first.

Every node has an owner, the root of the identity whose contexts may find it. A child of another owner than its parent's
is where a private sequence leaves a published one: its hash covers the owner again, so that readers of one publication
share nothing behind it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from jaxctx.cache.marks import encode_page

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]  # whoever has them made sure of that

TOKEN_BYTES = 4  # tokens are kept as the bytes of int32
NOWHERE = -1

# What follows the parent's digest. Tags differ, and each says how long its field is, so that no two pages have one key.
_USUAL = b"\x00"  # tokens at the positions of their indices under a causal mask, no media
_MARKED = b"\x01"
_OWNER = b"\x02"

NO_MARKS: Mapping[int, bytes] = MappingProxyType({})


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
    owner: PageNode = field(init=False)  # the root of the identity whose contexts may find it
    identity: Identity | None = None  # of a root
    published: bool = False  # whether contexts of all namespaces find what stands behind this root
    marks: bytes = b""  # of its tokens, see `marks`
    marked: bool = False  # whether it or a page before it has marks
    page: int = NOWHERE  # on the device
    host: int = NOWHERE  # slots of copies in other tiers
    disk: int = NOWHERE
    holders: int = 0
    depth: int = 0  # pages up to and including this one
    children: int = 0  # indexed ones
    indexed: bool = False

    @property
    def lost(self) -> bool:
        """Whether no tier has its data."""
        return self.page == self.host == self.disk == NOWHERE

    def lineage(self, after: int = 0) -> Iterator[PageNode]:
        """This node and those before it, the last first, down to page number `after`; the root is none of them."""
        node = self
        while node.depth > after:
            yield node
            assert node.parent is not None
            node = node.parent

    def ancestor(self, depth: int) -> PageNode:
        """The node `depth` pages from the root on the way to this one."""
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node


def encode_tokens(tokens: TokenIds) -> bytes:
    """Token ids, `[tokens]`, as the bytes of int32."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.int32, copy=False).tobytes()
    return array("i", tokens).tobytes()  # several times faster than numpy for the one token of a decode step


class PrefixIndex:
    """Committed pages of all identities. `digest` maps bytes to 16 bytes; it nominates, token bytes decide."""

    def __init__(self, page_size: int, digest: Callable[[bytes], bytes] = xxh3_128_digest) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self._digest = digest
        self._by_digest: dict[bytes, list[PageNode]] = {}  # more than one: a hash collision
        self._cached: OrderedDict[PageNode, None] = OrderedDict()  # least recently released first
        self._roots: WeakValueDictionary[Identity, PageNode] = WeakValueDictionary()
        self._published: dict[Identity, list[PageNode]] = {}  # roots, by the identity without its namespace

    @property
    def cached(self) -> int:
        """Nodes that nobody holds and that still have their page."""
        return len(self._cached)

    def root(self, identity: Identity) -> PageNode:
        """The root of all sequences of this identity. It lives as long as something refers to it."""
        node = self._roots.get(identity)
        if node is None:
            node = PageNode(None, b"", self._digest(identity.encode()), identity=identity)
            node.owner = self._roots[identity] = node
        return node

    def publish(self, root: PageNode) -> None:
        """Let contexts of all namespaces find what begins at this root."""
        root.published = True
        self._published.setdefault(_anybody(root), []).append(root)

    def unpublish(self, root: PageNode) -> None:
        """Undo `publish`: who holds pages of it keeps those, and finds no more."""
        root.published = False
        roots = self._published[_anybody(root)]
        roots.remove(root)
        if not roots:
            del self._published[_anybody(root)]

    def search(self, root: PageNode, tokens: bytes, marks: Mapping[int, bytes] = NO_MARKS) -> list[PageNode]:
        """The longest path for a sequence that begins with `tokens`: from its own root, or from a published one."""
        published = self._published.get(_anybody(root), ()) if self._published else ()
        return max((self.walk(start, tokens, root, marks) for start in (root, *published)), key=len)

    def walk(
        self, node: PageNode, tokens: bytes, owner: PageNode, marks: Mapping[int, bytes] = NO_MARKS
    ) -> list[PageNode]:
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
        for whose in (parent.owner, owner) if parent.owner is not owner and parent.owner.published else (owner,):
            for node in self._by_digest.get(self._key(parent, whose, tokens, marks), ()):
                if node.tokens == tokens and node.parent is parent and node.marks == marks and node.owner is whose:
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
        node = PageNode(
            parent,
            tokens,
            self._key(parent, owner, tokens, marks),
            marks=marks,
            marked=bool(marks) or parent.marked,
            page=page,
            holders=1,
            depth=parent.depth + 1,
            indexed=True,
        )
        node.owner = owner
        self._by_digest.setdefault(node.digest, []).append(node)
        parent.children += 1
        return node  # the hold on the parent is now that of a held child

    def _key(self, parent: PageNode, owner: PageNode, tokens: bytes, marks: bytes) -> bytes:
        data = parent.digest
        if owner is not parent.owner:
            data += _OWNER + owner.digest
        return self._digest(data + (_MARKED + len(marks).to_bytes(4) + marks if marks else _USUAL) + tokens)

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

    def forget(self, node: PageNode) -> None:
        """Off the index: no tier has its data any more."""
        nodes = self._by_digest[node.digest]
        nodes.remove(node)
        if not nodes:
            del self._by_digest[node.digest]
        node.indexed = False
        assert node.parent is not None
        node.parent.children -= 1


def _anybody(root: PageNode) -> Identity:
    """What a sequence and a publication must have in common."""
    assert root.identity is not None
    return replace(root.identity, namespace="")
