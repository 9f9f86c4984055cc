"""The index of versions: several processes, restarts, and records of unknown state."""

import pytest

from jaxctx.errors import (
    Aborted,
    NotFound,
    Unavailable,
)
from jaxctx.store.pages import GRACE_S
from jaxctx.store.snapshot_index import KEPT_CHANGES, REFRESH_S, SELDOM_AGE_S, SELDOM_LOOKS

from .builders import (
    PAGE_BYTES,
    Clock,
    MemoryObjects,
    RemoteObjects,
    attachment_of,
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
    reads = [key for call, key in objects.calls if call == "read"]
    assert len(reads) == 5
    assert all(key.startswith("manifests/") for key in reads)
    assert [key.split("/")[0] for call, key in objects.calls if call == "fetch"] == ["packs"]  # is it still there?


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


# --- what other processes made of all names


def test_a_tenants_names_are_read_again_after_a_while(objects):
    """What was saved, changed and deleted elsewhere, by a process that may be gone by now."""
    clock = Clock()
    first, second = open_store(objects, clock), open_store(objects, clock, seed="b")
    for name in ("deleted", "changed"):
        save(first, range(8), name)
    save(first, range(8), "not mine", tenant="u")
    first.refresh_tenant("t")
    second.refresh_tenant("t")
    second.remove("t", "deleted")
    save(second, range(12), "changed", 1)
    save(second, range(4), "new")
    save(second, range(4), "not mine, too", tenant="u")
    first.refresh_tenant("t")
    assert [one.name for one in first.list("t")] == ["changed", "deleted"], "it has just looked"
    clock.now += REFRESH_S
    first.refresh_tenant("t")
    assert [(one.name, one.version) for one in first.list("t")] == [("changed", 2), ("new", 1)]
    assert first.usage("t") == (3, (2 + 3 + 1) * PAGE_BYTES)
    assert [one.name for one in first.list("u")] == ["not mine"], "another tenant's are not looked at"
    check(first, range(4), "new")


def test_a_look_at_all_names_leaves_alone_what_is_in_memory(objects):
    store, other, gone = open_store(objects), open_store(objects, seed="b"), []
    store.on_gone(gone.extend)
    store.put(described("held", held="mine"))
    save(other, range(8), "held")
    store.refresh_tenant("t")
    assert (store.get("t", "held").held, gone) == ("mine", [])


def test_a_look_that_fails_hides_nothing_and_is_not_repeated_at_once(objects, monkeypatch):
    clock, looks = Clock(), []
    store = open_store(objects, clock)
    save(store, range(8))

    def fails(prefix):
        looks.append(prefix)
        clock.now += 10
        raise Unavailable("gone", reason="STORE_FAILED")

    monkeypatch.setattr(objects, "list", fails)
    store.refresh_tenant("t")
    clock.now += 100  # it took long, so the next one comes late
    store.refresh_tenant("t")
    assert (len(looks), store.usage("t")[0]) == (1, 1)
    clock.now += 1000
    store.refresh_tenant("t")
    assert len(looks) == 2


def test_while_one_looks_at_all_names_others_do_not_wait(objects, monkeypatch):
    clock, store = Clock(), None
    listed, looks = objects.list, []

    def look(prefix):
        looks.append(prefix)
        clock.now += 100
        store.refresh_tenant("t")
        return listed(prefix)

    store = open_store(objects, clock)
    monkeypatch.setattr(objects, "list", look)
    store.refresh_tenant("t")
    assert len(looks) == 1


def test_a_collection_forgets_names_that_were_deleted_elsewhere():
    """Once there is anything of others that is old: it reads all names again."""
    objects, clock = MemoryObjects(), Clock()
    store, other = open_store(objects, clock), open_store(objects, clock, seed="b")
    save(store, range(8))
    other.refresh_name("t", "a")
    other.remove("t", "a")
    save(other, range(20, 24), "of others")
    clock.now += 100_000
    store.collect()
    assert [one.name for one in store.list("t")] == ["of others"]


# --- replies that are lost


@pytest.fixture(params=["deletes on condition", "does not"])
def remote(request) -> RemoteObjects:
    return RemoteObjects(deletes_on_condition=request.param == "deletes on condition")


def test_a_save_whose_reply_is_lost_is_saved(remote):
    store = open_store(remote)
    remote.loses_next_reply = True
    first, _ = save(store, range(8), attachment=b"attached")
    remote.loses_next_reply = True
    second, _ = save(store, range(9), overwrite=1)
    assert (first.version, second.version, second.parent_version) == (1, 2, 1)
    for each in (store, open_store(remote, seed="b")):
        check(each, range(8), version=1)
        check(each, range(9))
        assert attachment_of(each, version=1) == b"attached"
    assert store.collect() == 0


def test_a_save_whose_reply_is_lost_and_that_another_process_changes_at_once(remote):
    store, other = open_store(remote), open_store(remote, seed="b")

    def change():
        other.refresh_name("t", "a")
        other.update("t", "a", labels={"k": "v"})

    remote.loses_next_reply, remote.before_retry = True, change
    saved, _ = save(store, range(8))
    assert saved.version == 1
    assert store.get("t", "a").labels == {"k": "v"}
    check(open_store(remote, seed="c"), range(8))


def test_a_save_whose_reply_is_lost_and_that_another_process_takes_at_once(remote):
    """It was saved before it was taken. Saved once more it would be had twice."""
    store, other, taken = open_store(remote), open_store(remote, seed="b"), []

    def take():
        other.refresh_name("t", "a")
        taken.extend(other.take(other.get("t", "a"), latest=True))

    remote.loses_next_reply, remote.before_retry = True, take
    saved, _ = save(store, range(8))
    assert [version.manifest for version in taken] == [saved.manifest]
    for each in (store, other, open_store(remote, seed="c")):
        assert each.list("t") == []
    store.collect()
    assert (remote.count("packs/"), remote.count("manifests/")) == (0, 0)


@pytest.mark.parametrize("latest", [False, True])
def test_a_take_whose_reply_is_lost_and_whose_name_another_process_changes_at_once(remote, latest):
    """Who took it has it, though the name's record is another one by now."""
    store, other, gone = open_store(remote), open_store(remote, seed="b"), []
    store.on_gone(gone.extend)
    found, _ = save(store, range(8))
    if not latest:
        save(store, range(9), overwrite=1)

    def change():
        other.refresh_name("t", "a")
        save(other, range(12), overwrite=None if latest else 2)

    remote.loses_next_reply, remote.before_retry = True, change
    assert store.take(found, latest=latest) == [found]
    assert gone == [found]
    for each in (store, open_store(remote, seed="c")):
        check(each, range(12))
        assert [one.version for one in each.history("t", "a")] == ([1] if latest else [3, 2])


def test_a_removal_whose_reply_is_lost_forgets_what_was_in_memory(remote):
    store, other, gone = open_store(remote), open_store(remote, seed="b"), []
    store.on_gone(gone.extend)
    save(store, range(8))
    store.put(described(held="mine"), overwrite=1)

    def change():
        other.refresh_name("t", "a")
        save(other, range(12))

    remote.loses_next_reply, remote.before_retry = True, change
    store.remove("t", "a")
    assert [one.held for one in gone] == [None, "mine"]
    assert [one.version for one in store.history("t", "a")] == [1]
    check(store, range(12))


@pytest.mark.parametrize("others", [KEPT_CHANGES - 1, KEPT_CHANGES])
def test_a_change_is_known_behind_so_many_changes_of_others(remote, others):
    store, other = open_store(remote), open_store(remote, seed="b")
    save(store, range(8))
    save(store, range(9), overwrite=1)
    found = store.get("t", "a", 1)

    def change():
        other.refresh_name("t", "a")
        for number in range(others):
            other.update("t", "a", labels={"k": f"{number}"})

    remote.loses_next_reply, remote.before_retry = True, change
    if others < KEPT_CHANGES:
        assert store.take(found, latest=False) == [found]
    else:
        with pytest.raises(NotFound):
            store.take(found, latest=False)


def test_a_take_that_fails_after_it_was_made_and_whose_name_another_process_saved_is_a_take(remote):
    store, other = open_store(remote), open_store(remote, seed="b")
    found, _ = save(store, range(8))
    replace_object = remote.replace

    def fails_once(key, value, expected):
        remote.replace = replace_object
        replace_object(key, value, expected)
        other.refresh_name("t", "a")
        save(other, range(12))
        raise Unavailable("gone", reason="STORE_FAILED")

    remote.replace = fails_once
    assert store.take(found, latest=True) == [found]
    check(store, range(12))


def test_a_save_that_fails_after_it_was_made_and_that_another_process_changes_before_it_is_undone(remote):
    """The save cannot be undone any more, so it is one."""
    store, other = open_store(remote), open_store(remote, seed="b")
    replace_object = remote.replace

    def fails_once(key, value, expected):
        remote.replace = changed_first
        replace_object(key, value, expected)
        raise Unavailable("gone", reason="STORE_FAILED")

    def changed_first(key, value, expected):
        remote.replace = replace_object
        other.refresh_name("t", "a")
        other.update("t", "a", labels={"k": "v"})
        return replace_object(key, value, expected)

    remote.replace = fails_once
    saved, _ = save(store, range(8))
    assert saved.version == 1
    assert store.get("t", "a").labels == {"k": "v"}
    check(open_store(remote, seed="c"), range(8))


def test_other_changes_whose_replies_are_lost(remote):
    store = open_store(remote)
    save(store, range(8))
    save(store, range(9), overwrite=1)
    remote.loses_next_reply = True
    assert store.update("t", "a", labels={"k": "v"}).labels == {"k": "v"}
    found = store.get("t", "a", 1)
    remote.loses_next_reply = True
    assert store.take(found, latest=False) == [found]
    found = store.get("t", "a")
    remote.loses_next_reply = True
    assert store.take(found, latest=True) == [found]
    save(store, range(10))
    remote.loses_next_reply = True
    assert [one.version for one in store.remove("t", "a")] == [1]
    for each in (store, open_store(remote, seed="b")):
        assert (each.list("t"), each.usage("t")) == ([], (0, 0))
    store.collect()
    assert (remote.count("packs/"), remote.count("manifests/")) == (0, 0)
    save(store, range(11))
    check(open_store(remote, seed="c"), range(11))


@pytest.mark.parametrize("latest", [False, True])
def test_who_was_slower_knows_that_it_got_nothing(remote, latest):
    """Though both would write the same, but for the ids of their changes."""
    store, other = open_store(remote), open_store(remote, seed="b")
    if not latest:
        save(store, range(8))
    found, _ = save(store, range(9), overwrite=None if latest else 1)
    if not latest:
        found = store.get("t", "a", 1)
    other.refresh_name("t", "a")
    assert other.take(found, latest=latest)
    with pytest.raises((NotFound, Aborted)):
        store.take(found, latest=latest)
    remaining = [] if latest else [2]
    assert [one.version for one in store.list("t")] == remaining


def test_names_that_were_deleted_long_ago_are_read_at_some_looks_only():
    """Where their records stay. Another process may use such a name again all the same."""
    remote, clock = RemoteObjects(deletes_on_condition=False), Clock()
    store, other = open_store(remote, clock), open_store(remote, clock, seed="b")
    for name in ("deleted", "kept"):
        save(store, range(8), name)
    store.remove("t", "deleted")

    def names_read() -> int:
        clock.now += REFRESH_S
        remote.calls.clear()
        store.refresh_tenant("t")
        return sum(call == "read" for call, _ in remote.calls)

    assert [names_read(), names_read()] == [2, 2]
    clock.now += SELDOM_AGE_S
    assert [names_read() for _ in range(SELDOM_LOOKS)].count(2) == 1
    save(other, range(12), "deleted")
    for _ in range(SELDOM_LOOKS):
        names_read()
    assert [one.name for one in store.list("t")] == ["deleted", "kept"]
    assert names_read() == 2


@pytest.mark.parametrize("collector", ["the same process", "another one"])
def test_where_deletes_have_conditions_nothing_is_left_of_a_name_after_a_while(collector):
    """While a change may be in doubt, its record stays, whoever collects."""
    objects, clock = RemoteObjects(), Clock()
    store = open_store(objects, clock)
    save(store, range(8))
    store.remove("t", "a")
    store.expire()
    assert [*objects.values] == ["names/t74/n61"]
    if collector == "another one":
        store = open_store(objects, clock, seed="b")
        store.expire()
    clock.now += GRACE_S / 2
    store.collect()
    assert [*objects.values] == ["names/t74/n61"]
    clock.now += GRACE_S
    store.expire()
    assert not objects.values
    save(store, range(8))
    check(store, range(8))


def test_the_record_of_a_deleted_name_that_another_process_uses_again_stays():
    objects, clock = RemoteObjects(), Clock()
    store, other = open_store(objects, clock), open_store(objects, clock, seed="b")
    save(store, range(8))
    store.remove("t", "a")
    save(other, range(12))
    clock.now += GRACE_S + 1
    store.collect()
    for each in (store, open_store(objects, clock, seed="c")):
        check(each, range(12))
