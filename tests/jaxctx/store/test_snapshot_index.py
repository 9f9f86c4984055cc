"""The index of versions: several processes, restarts, and records of unknown state."""

import pytest

from jaxctx.errors import (
    NotFound,
    Unavailable,
)

from .builders import (
    Clock,
    MemoryObjects,
    check,
    described,
    lineage,
    open_store,
    page,
    save,
)
from .fault_injection import SCENARIOS, Interrupted, check_no_garbage, prepare, state


def test_what_gives_way_to_another_process_is_told(objects):
    first, second, gone = open_store(objects, seed="a"), open_store(objects, seed="b"), []
    first.on_gone(gone.extend)
    first.put(described(held="mine"))
    save(second, range(8))
    assert save(first, range(9), overwrite=1)[0].version == 2
    assert [one.held for one in gone] == ["mine"]
    check(first, range(8), version=1)


def test_a_refresh_shows_what_others_made_of_a_name(objects):
    first, second = open_store(objects, seed="a"), open_store(objects, seed="b")
    first.refresh_name("t", "a")
    assert first.list("t") == []
    saved, _ = save(second, range(8))
    with pytest.raises(NotFound):
        first.get("t", "a")
    first.refresh_name("t", "a")
    assert first.get("t", "a") == saved
    save(second, range(9), overwrite=1)
    changed = second.update("t", "a", labels={"k": "v"})
    first.refresh_name("t", "a")
    assert [one.version for one in first.history("t", "a")] == [2, 1]
    assert first.get("t", "a") == changed
    check(first, range(9))
    second.remove("t", "a")
    first.refresh_name("t", "a")
    with pytest.raises(NotFound):
        first.get("t", "a")
    assert first.usage("t") == (0, 0)
    assert save(first, range(5))[0].version == 1


def test_a_refresh_that_changes_nothing_keeps_what_is_known_of_a_save(objects):
    store = open_store(objects)
    writer = store.begin(held := lineage(range(8)))
    for number in writer.missing:
        writer.add(number, page(held.page_keys()[number]))
    writer.finish(described(saving="mine"))
    store.refresh_name("t", "a")
    assert store.get("t", "a").saving == "mine"


def test_no_refresh_of_what_is_in_memory(objects, monkeypatch):
    """Nor does a store that fails hide what is known."""
    store, other = open_store(objects), open_store(objects, seed="b")
    store.put(described("held", held="mine"))
    saved, _ = save(store, range(8))
    other.refresh_name("t", "a")
    other.remove("t", "a")

    def fails(key, part=slice(None)):
        raise Unavailable("gone", reason="STORE_FAILED")

    monkeypatch.setattr(objects, "read", lambda key: pytest.fail(f"read {key}"))
    store.refresh_name("t", "held")
    monkeypatch.setattr(objects, "read", fails)
    for name in ("held", "a", "unknown"):
        store.refresh_name("t", name)
    assert (store.get("t", "held").held, store.get("t", "a")) == ("mine", saved)
    with pytest.raises(NotFound):
        store.get("t", "unknown")


def test_restart_reads_names_only():
    objects = MemoryObjects()
    store = open_store(objects)
    for number in range(5):
        save(store, [number, *range(40)], f"{number}")
    objects.calls.clear()
    restarted = open_store(objects, seed="b")
    assert len(restarted.list("t")) == 5
    assert {key.split("/")[0] for _, key in objects.calls} == {"names"}
    objects.calls.clear()
    restarted.open(restarted.get("t", "3")).close()
    assert [key.split("/")[0] for _, key in objects.calls] == ["manifests"]
    objects.calls.clear()
    assert save(restarted, [3, *range(41)], "new")[1] == 1
    restarted.collect()
    reads = [key for call, key in objects.calls if call in ("read", "fetch")]
    assert len(reads) == 5
    assert all(key.startswith("manifests/") for key in reads)


@pytest.mark.parametrize("scenario", ["save", "overwrite", "delete", "take", "update"])
def test_it_stays_unknown_whether_the_record_was_replaced(scenario):
    """The commit fails, and so does looking what came of it: the next collection looks again, and loses nothing."""
    for happened in (False, True):
        objects = MemoryObjects()
        prepare(objects)
        old, broken, well = state(objects), [], []

        class Breaking(Interrupted):
            def replace(self, key, value, expected):
                if well or happened:  # noqa: B023
                    result = super().replace(key, value, expected)
                if not well:  # noqa: B023
                    broken.append(True)  # noqa: B023
                    self.point()
                return result

        def point(broken=broken):
            if broken:
                raise Unavailable("broken", reason="STORE_FAILED")

        store = open_store(Breaking(objects, point), clock := Clock(), seed="now")
        with pytest.raises(Unavailable):
            SCENARIOS[scenario](store)
        with pytest.raises(Unavailable):
            store.collect()
        store.expire()  # tries, and says nothing
        found = state(objects)
        assert (found == old) != happened
        broken.clear()
        well.append(True)
        store.collect()
        assert state(objects, "again") == found
        check_no_garbage(objects, store, clock)
        assert {one.name for one in store.list("t")} == set(found)
