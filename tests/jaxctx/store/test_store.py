"""Names, versions, takes, races and lifetimes, on every kind of objects that needs no server."""

import secrets
import sys
import threading
import time

import pytest

from jaxctx.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    NotFound,
)
from jaxctx.lifetime import Lifetime
from jaxctx.store import SnapshotStore

from .builders import (
    PAGE_BYTES,
    START,
    Clock,
    MemoryObjects,
    check,
    described,
    expired,
    lineage,
    lost_pages,
    open_store,
    save,
)


def test_overwrite_and_history(objects):
    store = open_store(objects)
    save(store, range(8))
    with pytest.raises(AlreadyExists) as error:
        save(store, range(9))
    assert error.value.reason == "ALREADY_EXISTS"
    with pytest.raises(Aborted) as aborted:
        save(store, range(9), overwrite=2)
    assert aborted.value.reason == "VERSION_MISMATCH"
    with pytest.raises(NotFound) as missing:
        save(store, range(9), "b", overwrite=1)
    assert missing.value.reason == "SNAPSHOT_NOT_FOUND"
    for arguments in (("t", "a"), ("t", "a", 7), ("t", "b", 1)):
        with pytest.raises((AlreadyExists, Aborted, NotFound)):
            store.check(*arguments)
    second, _ = save(store, range(9), overwrite=1)
    assert (second.version, second.parent_version) == (2, 1)
    in_memory = store.put(described(held="mine"), overwrite=2)
    assert (in_memory.version, in_memory.parent_version, in_memory.durable) == (3, 2, False)
    store.check("t", "a", 3)
    save(store, range(10), overwrite=3)
    assert [one.version for one in store.history("t", "a")] == [4, 3, 2, 1]
    assert store.get("t", "a", 3).held == "mine"
    check(store, range(8), version=1)
    check(store, range(10))
    restarted = open_store(objects, seed="b")
    assert [one.version for one in restarted.history("t", "a")] == [4, 2, 1]
    assert store.collect() == 0  # what failed left nothing
    store.remove("t", "a", 4)
    assert save(store, range(11), overwrite=3)[0].version == 5  # a number is not given twice
    assert store.remove("t", "a")
    assert save(store, range(3))[0].version == 1


def test_the_oldest_version_goes(objects):
    store, gone = open_store(objects, history=3), []
    store.on_gone(gone.extend)
    store.put(described(held="first"))
    for version in range(1, 6):
        save(store, range(version * 4), overwrite=version)
    assert [one.version for one in store.history("t", "a")] == [6, 5, 4]
    assert [one.held for one in gone if not one.durable] == ["first"]
    store.expire()
    assert len(objects.list("manifests/")) == 3
    assert expired(store) == []


def test_all_versions_are_kept_unless_told_otherwise(objects):
    store = open_store(objects)
    for version in range(40):
        store.put(described(held=version), version or None)
    assert [one.held for one in store.history("t", "a")] == [*reversed(range(40))]


def test_names_of_others_do_not_exist(objects):
    store = open_store(objects)
    save(store, range(8))
    for call in (store.get, store.history, store.remove, store.update):
        with pytest.raises(NotFound) as error:
            call("other", "a")
        assert error.value.reason == "SNAPSHOT_NOT_FOUND"
    assert store.list("other") == []
    assert store.usage("other") == (0, 0)
    assert store.usage("t") == (1, 2 * PAGE_BYTES)


def test_list_in_name_order(objects):
    store = open_store(objects)
    for name in ("b", "a/2", "a/1", "é", "../x", "a/1"):
        save(store, range(4), name, overwrite=1 if name == "a/1" and store.list("t", "a/1") else None)
    store.put(described("a/3"))
    names = ["../x", "a/1", "a/2", "a/3", "b", "é"]
    assert [one.name for one in store.list("t")] == names
    assert [one.name for one in store.list("t", "a/")] == names[1:4]
    assert [one.name for one in store.list("t", "a/", "a/1", 1)] == ["a/2"]
    assert store.list("t", "a/1")[0].version == 2
    names.remove("a/3")
    assert [one.name for one in open_store(objects, seed="b").list("t")] == names


def test_take(objects):
    store = open_store(objects)
    store.put(described(held=1))
    save(store, range(8), overwrite=1)
    version = store.get("t", "a")
    reader = store.open(version)
    assert [one.held for one in store.take(version, latest=True)] == [1, None]
    assert lost_pages(reader) == 0
    reader.close()
    with pytest.raises(NotFound):
        store.get("t", "a")
    with pytest.raises(NotFound):
        open_store(objects, seed="b").get("t", "a")
    store.expire()
    assert objects.list("packs/") == []
    old = store.put(described())
    store.put(described(), 1)
    assert store.take(old, latest=False) == [old]  # an old version goes alone
    assert store.get("t", "a").version == 2


def test_what_is_taken_or_used_is_what_was_found(objects):
    """Its number is not enough: a name that was deleted begins again at 1."""
    clock = Clock()
    store = open_store(objects, clock)
    found, _ = save(store, range(8), seconds=10, sliding=True, clock=clock)
    store.remove("t", "a")
    with pytest.raises(NotFound):
        store.take(found, latest=True)
    clock.now += 5
    other, _ = save(store, range(12), seconds=10, sliding=True, clock=clock)
    assert other.version == found.version
    store.touch(found)
    assert store.get("t", "a").lifetime == other.lifetime
    for latest, kind in ((True, Aborted), (False, NotFound)):
        with pytest.raises(kind):
            store.take(found, latest=latest)
    save(store, range(16), overwrite=1)
    with pytest.raises(Aborted) as error:
        store.take(other, latest=True)
    assert error.value.reason == "VERSION_MISMATCH"
    assert [one.version for one in store.history("t", "a")] == [2, 1]


def _race(count, action):
    """How the racers fared: results, and errors."""
    barrier, results, errors = threading.Barrier(count), [], []

    def run(number):
        barrier.wait()
        try:
            results.append(action(number))
        except (NotFound, AlreadyExists, Aborted) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


@pytest.mark.parametrize("processes", [1, 2])
def test_of_racing_takes_one_wins(objects, processes):
    for round_ in range(5):
        first = open_store(objects, seed=f"a{round_}")
        found, _ = save(first, range(8))
        stores = [first, first] if processes == 1 else [first, open_store(objects, seed=f"b{round_}")]
        results, errors = _race(6, lambda number: stores[number % 2].take(found, latest=True))  # noqa: B023
        assert len(results) == 1
        assert all(isinstance(error, NotFound) for error in errors)


@pytest.mark.parametrize("processes", [1, 2])
def test_of_racing_saves_one_wins(objects, processes):
    first = open_store(objects, seed="a")
    stores = [first, first] if processes == 1 else [first, open_store(objects, seed="b")]
    for round_ in range(5):
        overwrite = round_ or None
        results, errors = _race(4, lambda number: save(stores[number % 2], [round_, number], overwrite=overwrite))  # noqa: B023
        assert len(results) == 1
        assert len(errors) == 3
        winner = results[0][0]
        assert winner.version == round_ + 1
    for one in stores:
        one.collect()
    restarted = open_store(objects, seed="c")
    assert len(restarted.history("t", "a")) == 5
    for version in restarted.history("t", "a"):
        reader = restarted.open(version)
        assert lost_pages(reader) == 0
        reader.close()
    assert restarted.collect() == 0


@pytest.fixture
def restless_threads():
    """They meet everywhere."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_threads")
def test_racing_saves_deletes_and_collections():
    objects = MemoryObjects()
    store = open_store(objects)

    def play(number):
        for turn in range(30):
            name = f"{number}"
            save(store, [*range(12), number % 2, turn % 3], name)
            check(store, [*range(12), number % 2, turn % 3], name)
            store.remove("t", name)
            store.collect()

    results, errors = _race(4, play)
    assert len(results) == 4
    assert not errors
    store.collect()
    assert not objects.values


def test_time_to_live(objects):
    clock = Clock()
    store = open_store(objects, clock)
    save(store, range(8), "fixed", seconds=10, clock=clock)
    save(store, range(9), "slides", seconds=10, sliding=True, clock=clock)
    store.put(described("held", held="mine", lifetime=Lifetime.begin(5, False, clock())))
    save(store, range(10), "ever")
    clock.now = START + 4.999
    assert expired(store) == []
    assert store.get("t", "held").held == "mine"
    clock.now = START + 5
    with pytest.raises(NotFound):
        store.get("t", "held")
    assert [one.held for one in expired(store)] == ["mine"]
    clock.now = START + 9.999
    assert expired(store) == []
    assert store.get("t", "fixed").lifetime.at == START + 10
    store.touch(fixed := store.get("t", "fixed"))
    store.touch(store.get("t", "slides"))
    clock.now = START + 10
    for one in (store, open_store(objects, clock, seed="b")):
        with pytest.raises(NotFound):
            one.get("t", "fixed")
        assert one.get("t", "slides").lifetime.at == START + 19.999
        assert [version.name for version in one.list("t")] == ["ever", "slides"]
        assert one.usage("t")[0] == 2
    store.touch(fixed)  # too late, and no error
    assert [one.name for one in expired(store)] == ["fixed"]
    assert len(objects.list("manifests/")) == 2
    store.update("t", "slides", lifetime=Lifetime(), labels={"k": "v"})
    clock.now = START + 1000
    assert expired(store) == []
    kept = open_store(objects, clock, seed="c").get("t", "slides")
    assert (kept.lifetime, kept.labels) == (Lifetime(), {"k": "v"})
    check(store, range(9), "slides")


def test_a_name_is_free_once_its_versions_are_over(objects):
    clock = Clock()
    store, gone = open_store(objects, clock), []
    store.on_gone(gone.extend)
    store.put(described(held="old", lifetime=Lifetime.begin(1, False, clock())))
    save(store, range(8), overwrite=1, seconds=5, clock=clock)
    clock.now += 5
    assert save(store, range(4))[0].version == 1
    assert [one.held for one in gone] == ["old", None]
    assert expired(store) == []
    check(store, range(4))


def test_without_a_store():
    store = SnapshotStore(None, clock=time.time, new_id=lambda: secrets.token_hex(16))
    store.put(described(held=1))
    assert store.list("t")[0].held == 1
    assert [one.held for one in store.take(store.get("t", "a"), latest=True)] == [1]
    with pytest.raises(FailedPrecondition) as error:
        store.begin(lineage(range(4)))
    assert error.value.reason == "NO_STORE"
    assert (expired(store), store.collect()) == ([], 0)
    store.close()


def test_attachments_count_as_bytes_of_the_tenant_in_memory_and_durable():
    store = open_store(MemoryObjects())
    store.put(described("a", size_bytes=10, attachment_bytes=3, attachment=b"abc"))
    save(store, range(4), "b", attachment=b"12345")
    assert store.usage("t") == (2, 10 + 3 + PAGE_BYTES + 5)
    assert store.get("t", "a").attachment == b"abc"
    assert store.usage("other") == (0, 0)
    store.remove("t", "b")
    assert store.usage("t") == (1, 13)


def test_what_a_save_drops_does_not_count():
    for history, max_versions, dropped in ((None, None, []), (2, None, [1]), (None, 1, [1, 2]), (2, 1, [1, 2])):
        store = open_store(MemoryObjects(), history=history)
        for number in range(2):
            store.put(described(size_bytes=10 + number, held=number), number or None)
        store.put(described("b", size_bytes=5))
        found = store.dropped_by("t", "a", max_versions)
        assert [each.version for each in found] == dropped
        count, size_bytes = store.usage("t", dropped=found)
        assert (count, size_bytes) == (3 - len(dropped), 26 - sum(each.size_bytes for each in found))
        assert store.dropped_by("t", "none", max_versions) == () == store.dropped_by("other", "a", max_versions)
        store.put(described(size_bytes=12), 2, max_versions)
        assert store.usage("t") == (count + 1, size_bytes + 12)


def test_thousands_of_names_are_listed_by_prefix_page_by_page():
    store = open_store(MemoryObjects())
    for number in range(3000):
        store.put(described(f"resp_{number:05}"))
    store.put(described("other"))
    store.put(described("resp_x", tenant="u"))
    listed, after = [], ""
    while page := store.list("t", "resp_", after, 700):
        assert len(page) <= 700
        listed += [one.name for one in page]
        after = page[-1].name
    assert listed == [f"resp_{number:05}" for number in range(3000)]
