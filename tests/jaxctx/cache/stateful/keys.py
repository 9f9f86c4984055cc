"""Keys: names for everything that a committed page depends on, as the oracle knows them."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import TypeAlias

import numpy as np

from jaxctx.cache.context_cache import Context, Identity

Key: TypeAlias = int
Override: TypeAlias = tuple[bytes, str]  # of a token: that of its attention, and its adapter


class Keys:
    """Numbered as they come up. A root stands before the first page of an identity, and is its own owner."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.owner: list[Key] = []
        self.depth: list[int] = []
        self.published: set[Key] = set()  # roots whose pages everybody finds
        self._roots: dict[Identity, Key] = {}
        self._keys: dict[tuple[Key, Key, tuple[int, ...], tuple[Override, ...]], Key] = {}

    def root(self, identity: Identity) -> Key:
        if identity not in self._roots:
            self._roots[identity] = self._new_key(len(self.owner), 0)
        return self._roots[identity]

    def _new_key(self, owner: Key, depth: int) -> Key:
        self.owner.append(owner)
        self.depth.append(depth)
        return len(self.owner) - 1

    def key(self, before: Key, owner: Key, tokens: list[int], overrides: list[Override]) -> Key:
        name = (before, owner, tuple(tokens), tuple(overrides))
        if name not in self._keys:
            self._keys[name] = self._new_key(owner, self.depth[before] + 1)
        return self._keys[name]

    def chain(self, context: Context) -> list[Key]:
        """The keys of a context's committed pages."""
        chain = context.chain()
        root = chain[0].parent if chain else context.root
        assert root is not None
        assert root.identity is not None
        key, keys, adapter = self.root(root.identity), [], root.identity.adapter
        for node in chain:
            assert node.owner.identity is not None
            overrides = page_overrides(node.overrides, self.page_size, adapter)
            tokens = np.frombuffer(node.tokens, np.int32).tolist()
            key, adapter = self.key(key, self.root(node.owner.identity), tokens, overrides), overrides[-1][1]
            keys.append(key)
        return keys

    def walk(
        self, key: Key, owner: Key, tokens: list[int], overrides: list[Override], start: int, among: Collection[Key]
    ) -> list[Key]:
        """The keys, of those `among`, that continue `key` for the tokens from `start` on."""
        path: list[Key] = []
        size = self.page_size
        while start + size <= len(tokens):
            page = tuple(tokens[start : start + size]), tuple(overrides[start : start + size])
            found = -1
            if self.owner[key] == owner or self.owner[key] in self.published:
                found = self._keys.get((key, self.owner[key], *page), -1)
            if found not in among and self.owner[key] != owner:
                found = self._keys.get((key, owner, *page), -1)
            if found not in among:
                break
            path.append(found)
            key, start = found, start + size
        return path


def page_overrides(page: bytes, size: int, adapter: str) -> list[Override]:
    """What each token of a page is computed with; `adapter` is that of the page before it."""
    decoded, overrides = decode_page(page, 0), list[Override]()
    for offset in range(size):
        adapter = decoded.get(~offset, adapter.encode()).decode()
        overrides.append((decoded.get(offset, b""), adapter))
    return overrides


def decode_page(page: bytes, first: int) -> dict[int, bytes]:
    """The overrides by index, of a page whose first token has the index `first`; switches by ~offset if that is 0."""
    overrides: dict[int, bytes] = {}
    start = 0
    while start < len(page):
        offset, length = array("i", page[start : start + 8])
        overrides[first + offset] = page[start + 8 : start + 8 + length]
        start += 8 + length
    return overrides
