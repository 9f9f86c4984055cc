"""Stored pages: shared pages are stored once, and what nobody needs is collected."""

import pytest

from jaxctx.errors import (
    NotFound,
    Unavailable,
)
from jaxctx.store import PagesGone
from jaxctx.store.pages import GRACE_S

from .builders import (
    PAGE_BYTES,
    START,
    Clock,
    MemoryObjects,
    check,
    described,
    lineage,
    open_store,
    page,
    save,
)
from .fault_injection import Interrupted


def test_shared_pages_are_stored_once():
    objects = MemoryObjects()
    store = open_store(objects)
    save(store, range(40), "a")
    assert objects.bytes_in("packs/") == 10 * PAGE_BYTES
    for restarted in (store, open_store(objects, seed="b")):
        assert save(restarted, range(40), f"same{restarted is store}")[1] == 0
        assert objects.bytes_in("packs/") == 10 * PAGE_BYTES
    assert save(store, [*range(20), *range(100, 110)], "b")[1] == 3
    assert objects.bytes_in("packs/") == 13 * PAGE_BYTES
    for name, tokens in (("a", range(40)), ("sameTrue", range(40)), ("b", [*range(20), *range(100, 110)])):
        check(open_store(objects, seed="c"), tokens, name)


def test_delete_keeps_what_others_need(objects):
    store = open_store(objects)
    save(store, range(16), "a")
    save(store, [*range(8), 99], "b")
    assert [one.version for one in store.remove("t", "a")] == [1]
    with pytest.raises(NotFound):
        store.get("t", "a")
    store.expire()
    assert len(objects.list("packs/")) == 2
    assert len(objects.list("manifests/")) == 1
    check(store, [*range(8), 99], "b")
    store.remove("t", "b")
    store.expire()
    assert objects.list("packs/") == objects.list("manifests/") == objects.list("names/") == []
    assert save(store, range(16))[1] == 4  # collected pages are stored again


class _Interrupted(MemoryObjects):
    """Calls `then` once, before it answers or does what `at` names."""

    at, then = None, None

    def _call(self, *call):
        if call == self.at:
            self.at = None
            self.then()

    def list(self, prefix):
        self._call("list", prefix)
        return super().list(prefix)

    def delete(self, key):
        self._call("delete", key.partition("/")[0])
        super().delete(key)


def test_what_comes_and_goes_while_a_collection_looks_around():
    """Its pack is seen, its manifest is not: that manifest must not vouch for the pack to the next collection."""

    def come_and_go():
        save(store, range(12), "passing")
        store.remove("t", "passing")

    objects = _Interrupted()
    store = open_store(objects)
    store.collect()
    objects.at, objects.then = ("list", "packs/"), come_and_go
    store.collect()
    store.collect()
    save(store, range(12))
    check(store, range(12))
    store.remove("t", "a")
    store.collect()
    assert not objects.values


def test_a_collection_that_a_crash_ends_between_packs_and_manifests():
    """The manifest that is left is nobody's: its pages are not there any more."""

    def crash():
        raise KeyboardInterrupt

    objects = _Interrupted()
    store = open_store(objects)
    save(store, range(12))
    objects.at, objects.then = ("delete", "manifests"), crash
    store.remove("t", "a")
    with pytest.raises(KeyboardInterrupt):
        store.collect()
    assert (objects.count("packs/"), objects.count("manifests/")) == (0, 1)
    clock = Clock(START + 2 * GRACE_S)
    restarted = open_store(objects, clock, seed="b")
    restarted.collect()
    save(restarted, range(12))
    check(restarted, range(12))


def test_what_may_be_named_is_not_deleted():
    """The record was replaced, but neither that nor what it says comes through; then all is well again."""
    objects, errors = MemoryObjects(), []

    class Breaking(Interrupted):
        def replace(self, key, value, expected):
            super().replace(key, value, expected)
            errors.append(2)
            self.point()

    def point():
        if errors and errors[0]:
            errors[0] -= 1
            raise Unavailable("broken", reason="STORE_FAILED")

    store = open_store(Breaking(objects, point))
    with pytest.raises(Unavailable):
        save(store, range(8))
    check(open_store(objects, seed="b"), range(8))
    store.collect()
    check(store, range(8))


# --- pages that another process deletes


def test_a_save_that_shares_pages_which_are_gone_fails_before_it_is_acknowledged():
    """And the next one stores them anew."""
    objects = MemoryObjects()
    store, other = open_store(objects), open_store(objects, seed="b")
    save(other, range(8), "deleted")
    store.refresh_tenant("t")
    save(store, range(20, 24), "loads what is stored")
    writer = store.begin(held := lineage([*range(8), 8]))
    assert [*writer.missing] == [2]
    writer.add(2, page(held.page_keys()[2]))
    other.remove("t", "deleted")
    other.collect()
    before = dict(objects.values)
    with pytest.raises(PagesGone) as error:
        writer.finish(described(), attachment=b"attached")
    assert (error.value.code, error.value.reason) == ("UNAVAILABLE", "STORE_FAILED")
    assert objects.values == before
    with pytest.raises(NotFound):
        store.get("t", "a")
    assert save(store, held)[1] == 3
    check(open_store(objects, seed="c"), held.tokens)


def test_a_collection_finds_out_which_pages_are_gone():
    objects = MemoryObjects()
    store, other = open_store(objects), open_store(objects, seed="b")
    save(other, range(8), "deleted")
    store.refresh_tenant("t")
    save(store, range(20, 24), "kept")
    other.remove("t", "deleted")
    other.collect()
    store.collect()
    assert save(store, range(8))[1] == 2
    assert save(store, range(20, 24), "again")[1] == 0


def test_once_its_manifest_is_stored_others_keep_the_pages_that_a_save_shares():
    objects = MemoryObjects()
    store, other = open_store(objects), open_store(objects, seed="b")
    save(other, range(8), "deleted")
    store.refresh_tenant("t")
    fetch = objects.fetch

    def delete_before_it_looks(*arguments):
        other.remove("t", "deleted")
        other.collect()
        return fetch(*arguments)

    objects.fetch = delete_before_it_looks
    assert save(store, range(8))[1] == 0
    objects.fetch = fetch
    check(open_store(objects, seed="c"), range(8))
