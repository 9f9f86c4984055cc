"""Writing the pages of a snapshot and reading them back, on every kind of objects that needs no server."""

import numpy as np
import pytest

from jaxctx.errors import (
    DataLoss,
    NotFound,
)

from .builders import (
    PAGE_BYTES,
    START,
    MemoryObjects,
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
