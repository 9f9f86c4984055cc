"""Tiers: which copies are kept, in which order they are given up, and the moves that say so."""

from jaxctx.cache.context import OffloadedPage
from jaxctx.cache.prefix_index import NOWHERE
from jaxctx.cache.tiers import Move, MoveKind, PrefixMatch, Tiers, count_on_device, summarize

from .invariants import check_tiers


def saved(tiers: Tiers, count: int) -> list[OffloadedPage]:
    """Entries that were saved from the pages 100, 101, and so on."""
    entries = [OffloadedPage(1) for _ in range(count)]
    for page, entry in enumerate(entries, 100):
        tiers.save(entry, page)
    return entries


def test_what_leaves_the_device_is_copied_to_the_host_then_to_disk_then_lost() -> None:
    tiers = Tiers(host=2, disk=1)
    a, b, c, d = entries = saved(tiers, 4)
    assert tiers.moves == [
        Move(MoveKind.SAVE, 100, 0),
        Move(MoveKind.SAVE, 101, 1),
        Move(MoveKind.SPILL, 0, 0),
        Move(MoveKind.SAVE, 102, 0),
        Move(MoveKind.SPILL, 1, 0),
        Move(MoveKind.SAVE, 103, 1),
    ]
    assert a.lost
    assert (b.host, b.disk) == (NOWHERE, 0)
    assert (c.host, d.host) == (0, 1)
    check_tiers(tiers, set(entries))


def test_without_slots_nothing_is_kept() -> None:
    tiers = Tiers(host=0, disk=0)
    (entry,) = saved(tiers, 1)
    assert entry.lost
    assert tiers.moves == []


def test_a_loaded_copy_is_the_first_to_be_given_up() -> None:
    tiers = Tiers(host=2, disk=0)
    a, b = saved(tiers, 2)
    tiers.protect(b)
    tiers.load(b, 7)
    c = OffloadedPage(1)
    tiers.save(c, 8)
    assert tiers.moves[-2:] == [Move(MoveKind.LOAD, 1, 7), Move(MoveKind.SAVE, 8, 1)]
    assert (a.host, b.host, c.host) == (0, NOWHERE, 1)


def test_a_protected_copy_is_not_given_up() -> None:
    tiers = Tiers(host=1, disk=0)
    (entry,) = saved(tiers, 1)
    tiers.protect(entry)
    other = OffloadedPage(1)
    tiers.save(other, 8)
    assert other.lost
    assert entry.host == 0


def test_a_fetch_keeps_the_copy_on_disk() -> None:
    tiers = Tiers(host=1, disk=2)
    a, b = saved(tiers, 2)
    tiers.fetch(a)
    assert tiers.moves[-2:] == [Move(MoveKind.SPILL, 0, 1), Move(MoveKind.FETCH, 0, 0)]
    assert (a.host, a.disk, b.host, b.disk) == (0, 0, NOWHERE, 1)
    check_tiers(tiers, {a, b})


def test_a_drop_frees_all_slots_of_an_entry() -> None:
    tiers = Tiers(host=1, disk=2)
    a, b = saved(tiers, 2)
    tiers.fetch(a)
    tiers.drop(a)
    assert a.lost
    assert (tiers.host.used, tiers.disk.used) == (0, 1)
    tiers.clear()
    assert b.lost
    assert (tiers.host.used, tiers.disk.used) == (0, 0)


def test_staged_slots_are_beyond_the_tier_and_used_once() -> None:
    tiers = Tiers(host=2, disk=0)
    first, second = OffloadedPage(1), OffloadedPage(1)
    tiers.stage(first)
    tiers.stage(second)
    assert (first.host, second.host) == (2, 3)
    tiers.drop(first)
    assert tiers.moves == [Move(MoveKind.DROP, 2)]
    assert len(tiers.host.free) == 2


def test_a_path_is_counted_by_tier() -> None:
    on_device = OffloadedPage(1)
    on_device.page = 5
    on_host, on_disk = OffloadedPage(1), OffloadedPage(3)
    on_host.host, on_disk.disk = 0, 0
    path = [on_device, on_host, on_disk]
    assert count_on_device(path) == 1
    assert summarize(path) == PrefixMatch(device=1, unheld=0, host=1, disk=1, offloaded=3)
    assert summarize([]) == PrefixMatch(0, 0, 0, 0)
