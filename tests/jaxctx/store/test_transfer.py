"""Writing the pages of a snapshot and reading them back, on every kind of objects that needs no server."""

import numpy as np
import pytest

from jaxctx.errors import (
    AlreadyExists,
    DataLoss,
    NotFound,
    Unauthenticated,
)

from .builders import (
    PAGE_BYTES,
    START,
    MemoryObjects,
    attachment_of,
    check,
    described,
    lineage,
    lost_pages,
    open_store,
    page,
    same,
    save,
)


def test_round_trip(objects):
    store = open_store(objects)
    held = lineage(
        range(30),
        seq_len=22,
        salt="s",
        attention_overrides={5: b"override", 21: b""},
        committed_pages=4,
        working_tokens=6,
    )
    saved, written = save(store, held)
    assert written == 6
    assert (saved.version, saved.parent_version, saved.durable, saved.created_at) == (1, 0, True, START)
    assert (saved.tokens, saved.seq_len, saved.pages, saved.size_bytes) == (30, 22, 6, 6 * PAGE_BYTES)
    assert (saved.model_revision, saved.salt, saved.context_id) == ("m", "s", "c")
    for again in (store, open_store(objects, seed="b")):
        assert again.get("t", "a") == saved
        reader = again.open(again.get("t", "a"))
        assert same(reader.lineage, held)
        assert lost_pages(reader) == 0
        order = [3, 0, 1, 2, 5, 5, 4]
        assert [number for number, _ in reader.read(order)] == order
        reader.close()


def test_a_snapshot_without_pages(objects):
    store = open_store(objects)
    save(store, lineage([1, 2, 3], seq_len=0))
    check(open_store(objects), [1, 2, 3])


def test_many_packs(objects, monkeypatch):
    monkeypatch.setattr("jaxctx.store.transfer.PACK_BYTES", 3 * PAGE_BYTES)
    monkeypatch.setattr(type(objects), "part_bytes", 2 * PAGE_BYTES)
    store = open_store(objects)
    save(store, range(200))
    assert len(objects.list("packs/")) == 17
    check(open_store(objects), range(200))


def test_any_buffer_is_a_page(objects):
    store = open_store(objects)
    writer = store.begin(held := lineage(range(4)))
    data = np.frombuffer(page(held.page_keys()[0]), np.float32).reshape(2, 4)
    writer.add(0, data)
    writer.finish(described())
    check(store, range(4))


def test_pages_of_a_save_in_progress_stay(objects):
    store = open_store(objects)
    save(store, range(16))
    held = lineage([*range(16), 16])
    writer = store.begin(held)
    writer.add(4, page(held.page_keys()[4]))
    store.remove("t", "a")
    store.collect()
    writer.finish(described("b"))
    store.collect()
    check(store, held.tokens, "b")


def test_abort_leaves_nothing(objects):
    store = open_store(objects)
    writer = store.begin(held := lineage(range(16)))
    for number in writer.missing[:3]:
        writer.add(number, page(held.page_keys()[number]))
    with pytest.raises(ValueError, match="missing"):
        writer.finish(described())
    with pytest.raises(ValueError, match="not missing"):
        writer.add(0, bytes(PAGE_BYTES))
    with pytest.raises(ValueError, match="not a page"):
        writer.add(3, b"short")
    writer.abort()
    with pytest.raises(ValueError, match="too late"):
        writer.add(3, bytes(PAGE_BYTES))
    assert objects.list("packs/") == objects.list("manifests/") == []
    assert store.list("t") == []


def test_what_goes_wrong_after_the_commit_deletes_nothing():
    store = open_store(objects := MemoryObjects())

    def fails(versions):
        raise Unauthenticated("not one of the errors after which the record is unknown")

    store.on_gone(fails)
    with pytest.raises(Unauthenticated):
        save(store, range(8))
    check(open_store(objects, seed="b"), range(8))


def test_an_open_snapshot_outlives_its_name(objects):
    store = open_store(objects)
    version, _ = save(store, range(16))
    reader = store.open(version)
    store.remove("t", "a")
    assert store.collect() == 0
    assert lost_pages(reader) == 0
    reader.close()
    store.expire()
    assert objects.list("packs/") == []
    with pytest.raises(NotFound):
        store.open(version)


def test_a_lost_manifest_is_a_loss_of_its_version_alone():
    objects = MemoryObjects()
    store = open_store(objects)
    save(store, range(8))
    lost, _ = save(store, range(9), overwrite=1)
    objects.delete(f"manifests/{lost.manifest}")
    with pytest.raises(DataLoss):
        store.open(lost)
    check(store, range(8), version=1)
    assert [one.version for one in store.remove("t", "a", 2)] == [2]
    store.collect()
    check(store, range(8))


# --- attachments


def test_an_attachment_comes_back_after_a_restart():
    objects = MemoryObjects()
    made, _ = save(open_store(objects), range(10), attachment=b"\x00attached\xff")
    assert made.attachment_bytes == 10
    again = open_store(objects, seed="b")
    assert again.get("t", "a") == made
    assert attachment_of(again) == b"\x00attached\xff"
    check(again, range(10))


def test_a_version_without_an_attachment_has_an_empty_one_and_no_object():
    store = open_store(objects := MemoryObjects())
    made, _ = save(store, range(10))
    assert (made.attachment_bytes, attachment_of(store), objects.count("packs/")) == (0, b"", 1)


def test_a_context_without_tokens_may_have_an_attachment():
    store = open_store(objects := MemoryObjects())
    save(store, [], attachment=b"alone")
    assert (attachment_of(store), objects.bytes_in("packs/")) == (b"alone", 5)


def test_an_attachment_is_durable_before_the_manifest_is_written():
    """Also where no page is: `write` returns at once, and the object is volatile until somebody waited for it."""
    objects = MemoryObjects()
    store = open_store(objects)
    save(store, range(8))
    written = objects.write
    volatile: list[set[str]] = []

    def write(key, parts):
        if key.startswith("manifests/"):
            volatile.append(set(objects.volatile))
        return written(key, parts)

    objects.write = write
    save(store, range(8), "b", attachment=b"attached")
    save(store, range(20), "c", attachment=b"attached")
    assert volatile == [set(), set()]


def test_an_attachment_goes_with_its_version_though_its_pages_are_shared():
    store = open_store(objects := MemoryObjects())
    save(store, range(8), attachment=b"a" * 100)
    save(store, range(12), "b", attachment=b"b" * 1000)
    pages = 3 * PAGE_BYTES
    assert objects.bytes_in("packs/") == pages + 1100
    store.remove("t", "a")
    store.collect()
    assert objects.bytes_in("packs/") == pages + 1000
    assert attachment_of(store, "b") == b"b" * 1000
    store.remove("t", "b")
    store.collect()
    assert not objects.values


def test_an_attachment_that_is_read_stays_though_its_version_is_deleted():
    store = open_store(objects := MemoryObjects())
    save(store, range(8), attachment=b"attached")
    reader = store.open(store.get("t", "a"))
    store.remove("t", "a")
    store.collect()
    assert reader.attachment() == b"attached"
    reader.close()
    store.collect()
    assert not objects.values


def test_the_attachment_of_a_refused_save_is_deleted():
    store = open_store(objects := MemoryObjects())
    save(store, range(8))
    before = dict(objects.values)
    with pytest.raises(AlreadyExists):
        save(store, range(8), attachment=b"attached")
    assert objects.values == before


def test_an_attachment_is_not_collected_while_it_is_being_saved():
    store = open_store(MemoryObjects())
    commit_of_index = store._index.change

    def collect_first(*arguments):
        store.collect()
        return commit_of_index(*arguments)

    store._index.change = collect_first
    save(store, range(8), attachment=b"attached")
    store._index.change = commit_of_index
    assert attachment_of(store) == b"attached"


def test_at_most_as_many_versions_are_kept_as_the_save_says():
    store = open_store(objects := MemoryObjects(), history=3)
    for number in range(4):
        save(store, range(8), overwrite=number or None, attachment=b"%d" % number)
    assert [one.version for one in store.history("t", "a")] == [4, 3, 2]
    save(store, range(8), overwrite=4, max_versions=9)
    assert [one.version for one in store.history("t", "a")] == [5, 4, 3]
    save(store, range(8), overwrite=5, attachment=b"last", max_versions=1)
    assert [one.version for one in store.history("t", "a")] == [6]
    store.collect()
    assert (objects.count("manifests/"), attachment_of(store)) == (1, b"last")
