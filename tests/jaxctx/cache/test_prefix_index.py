from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest

from jaxctx.cache.overrides import NO_OVERRIDES
from jaxctx.cache.prefix_index import Identity, PrefixIndex, encode_tokens

from .invariants import check_index

IDENTITY = Identity("tenant", "model")


def page(*tokens: int) -> bytes:
    return encode_tokens(tokens)


def chain(index: PrefixIndex, identity: Identity, *pages: bytes, first: int = 1):
    """Commits pages one after the other, as one context would; the last node is held once."""
    node = root = index.root(identity)
    index.acquire(node)
    for number, tokens in enumerate(pages, first):
        node = index.commit(node, root, tokens, b"", number)
    return node


def drop(index: PrefixIndex) -> int:
    """Evicts a page that no other tier keeps."""
    node, page_id = index.evict()
    node.forget()
    return page_id


def test_what_was_committed_is_found_by_its_tokens():
    index = PrefixIndex(2)
    tail = chain(index, IDENTITY, page(1, 2), page(3, 4))
    root = index.root(IDENTITY)
    assert index.search(root, page(1, 2, 3, 4, 5), NO_OVERRIDES) == [tail.parent, tail]
    assert index.search(root, page(1, 2, 3), NO_OVERRIDES) == [tail.parent]
    assert index.search(root, page(3, 4), NO_OVERRIDES) == []
    assert index.walk(tail, b"", root, NO_OVERRIDES) == []


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_identities_that_differ_in_any_field_share_nothing(field):
    index = PrefixIndex(2)
    chain(index, IDENTITY, page(1, 2))
    other = replace(IDENTITY, **{field: "other"})
    assert index.search(index.root(other), page(1, 2), NO_OVERRIDES) == []


def test_no_two_identities_have_the_same_bytes():
    values = ["", "X", "XX", "salt", "adapter\x00X"]
    encoded = {Identity(*choice).encode() for choice in itertools.product(values, repeat=5)}
    assert len(encoded) == len(values) ** 5
    assert Identity("", "", salt="X").encode() != Identity("", "", adapter="X").encode()


def test_a_page_is_named_by_everything_before_it():
    index = PrefixIndex(1)
    one, two = chain(index, IDENTITY, page(1), page(7)), chain(index, IDENTITY, page(2), page(7), first=3)
    assert one is not two
    assert index.search(index.root(IDENTITY), page(2, 7), NO_OVERRIDES) == [two.parent, two]
    assert index.search(index.root(IDENTITY), page(7), NO_OVERRIDES) == [], (
        "a page of the same tokens has another parent"
    )


def test_a_parent_outlives_its_children_and_goes_after_them():
    index = PrefixIndex(1)
    tail = chain(index, IDENTITY, page(1), page(2), page(3))
    middle = tail.parent
    assert middle is not None
    index.acquire(middle)
    assert index.release(tail) == 1, "what another holder needs stays held"
    assert index.release(middle) == 2
    assert [drop(index) for _ in range(3)] == [3, 2, 1]
    with pytest.raises(KeyError):
        index.evict()


def test_the_least_recently_released_goes_first():
    index = PrefixIndex(1)
    one, two = chain(index, IDENTITY, page(1)), chain(index, IDENTITY, page(2), first=2)
    index.release(one)
    index.release(two)
    index.acquire(one)
    index.release(one)
    assert [drop(index), drop(index)] == [2, 1]


def test_an_equal_page_is_merged_and_holders_move():
    index = PrefixIndex(1)
    one = chain(index, IDENTITY, page(1))
    two = chain(index, IDENTITY, page(1), first=2)
    assert one is two
    assert (one.page, one.holders) == (1, 2)
    check_index(index, {one: 2})


def test_roots_live_as_long_as_somebody_needs_them():
    index = PrefixIndex(1)
    tail = chain(index, IDENTITY, page(1))
    root = weakref.ref(index.root(IDENTITY))
    index.release(tail)
    del tail
    assert root() is index.root(IDENTITY)
    drop(index)
    gc.collect()
    assert root() is None


@pytest.mark.parametrize(
    "tokens", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), range(1, 3), [np.int64(1), 2]], ids=repr
)
def test_tokens_come_in_many_shapes(tokens):
    assert np.frombuffer(encode_tokens(tokens), np.int32).tolist() == [1, 2]


def test_no_tokens_are_no_bytes():
    assert encode_tokens([]) == encode_tokens(np.array([], np.int64)) == b""
