"""Saving, opening, versions, time: on every kind of objects that needs no server."""

import secrets
import sys
import threading
import time

import numpy as np
import pytest

from jaxctx.errors import Aborted, AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from jaxctx.lifetime import Lifetime
from jaxctx.store import SnapshotStore
from jaxctx.store.objects import open_objects
from jaxctx.store.pages import GRACE_S

from .saving import (
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
    page,
    same,
    save,
)


@pytest.fixture(params=["directory", "file url", "memory url", "all of memory", "dictionary"])
def objects(request, tmp_path):
    urls = {"directory": f"{tmp_path}/a b/deep", "file url": f"file://{tmp_path}/%C3%A9", "memory url": "memory://x"}
    urls["all of memory"] = "memory://"  # as README has it
    if request.param == "dictionary":
        yield MemoryObjects()
    else:
        opened = open_objects(urls[request.param])
        yield opened
        opened.close()


def test_round_trip(objects):
    store = open_store(objects)
    held = lineage(range(30), seq_len=22, salt="s", marks={5: b"mark", 21: b""}, committed_pages=4, working_tokens=6)
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


@pytest.mark.parametrize(
    "other",
    [
        {"identity": b"another"},
        {"salt": "x"},
        {"model_revision": "n"},
        {"kv_dtype": "bfloat16"},
        {"marks": {1: b"m"}},
        {"page_size": 8},
        {"page_bytes": 64},
    ],
)
def test_pages_of_other_identity_are_not_shared(other):
    mine = lineage(range(16))
    theirs = lineage(range(16), **other)
    assert not set(mine.page_keys()) & set(theirs.page_keys())


def test_a_partial_page_is_not_a_longer_one():
    assert lineage(range(6)).page_keys()[0] == lineage(range(8)).page_keys()[0]
    assert lineage(range(6)).page_keys()[1] != lineage(range(8)).page_keys()[1]
    assert lineage(range(8), seq_len=6).page_keys() == lineage(range(6)).page_keys()
    late = lineage(range(8), marks={6: b"m"}).page_keys()
    assert late[0] == lineage(range(8)).page_keys()[0]
    assert late[1] != lineage(range(8)).page_keys()[1]


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


def test_what_gives_way_to_another_process_is_told(objects):
    first, second, gone = open_store(objects, seed="a"), open_store(objects, seed="b"), []
    first.on_gone(gone.extend)
    first.put(described(held="mine"))
    save(second, range(8))
    assert save(first, range(9), overwrite=1)[0].version == 2
    assert [one.held for one in gone] == ["mine"]
    check(first, range(8), version=1)


def test_a_look_shows_what_others_made_of_a_name(objects):
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


def test_a_look_that_changes_nothing_keeps_what_is_known_of_a_save(objects):
    store = open_store(objects)
    writer = store.begin(held := lineage(range(8)))
    for number in writer.missing:
        writer.add(number, page(held.page_keys()[number]))
    writer.finish(described(saving="mine"))
    store.refresh_name("t", "a")
    assert store.get("t", "a").saving == "mine"


def test_no_look_at_what_is_in_memory(objects, monkeypatch):
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


def test_long_names(tmp_path):
    """Even a longer name than the validator lets through makes a file name."""
    store = open_store(str(tmp_path))
    save(store, range(4), "n" * 120)
    assert store.get("t", "n" * 120).version == 1


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


@pytest.mark.parametrize("url", ["bogus://x", "s3://"])
def test_unusable_urls(url):
    with pytest.raises(InvalidArgument) as error:
        open_objects(url)
    assert error.value.violations[0].field == "store"


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
