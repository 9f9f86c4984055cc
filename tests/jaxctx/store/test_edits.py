"""What each edit makes of a name's entry. `test_store` has their effects."""

from dataclasses import replace

import pytest

from jaxctx.errors import Aborted, AlreadyExists, NotFound
from jaxctx.lifetime import Lifetime
from jaxctx.store import edits
from jaxctx.store.records import SnapshotVersion
from jaxctx.store.snapshot_index import Entry

NOW = 100.0
VERSION = SnapshotVersion(
    tenant="t",
    name="n",
    tokens=1,
    seq_len=1,
    pages=1,
    size_bytes=8,
    model_revision="",
    salt="",
    manual_commit=False,
    context_id="c",
)


def entry_of(*numbers: int) -> Entry:
    return Entry(tuple(replace(VERSION, version=number) for number in numbers), last_version=max(numbers, default=0))


def numbers(entry: Entry) -> list[int]:
    return [version.version for version in entry.versions]


def test_a_version_is_added_as_the_latest_and_the_oldest_may_go() -> None:
    entry = edits.add_version(entry_of(1, 2), NOW, version=VERSION, overwrite=2, history=2)
    assert numbers(entry) == [2, 3]
    assert (entry.versions[-1].parent_version, entry.versions[-1].created_at) == (2, NOW)
    with pytest.raises(AlreadyExists):
        edits.add_version(entry_of(1), NOW, version=VERSION, overwrite=None, history=None)


def test_a_version_that_was_added_is_not_added_again() -> None:
    """By its manifest: the record has landed, and nobody heard of it."""
    mine = replace(VERSION, manifest="mine")
    entry = edits.add_version(entry_of(1), NOW, version=mine, overwrite=1, history=None)
    assert edits.find_added(entry, mine) is entry.versions[-1]
    assert edits.add_version(entry, NOW + 1, version=mine, overwrite=1, history=None) is entry
    other = replace(VERSION, manifest="other")
    assert edits.find_added(entry, other) is edits.find_added(entry, VERSION) is None
    with pytest.raises(Aborted):
        edits.add_version(entry, NOW + 1, version=other, overwrite=1, history=None)


def test_taking_the_latest_takes_the_name() -> None:
    latest = replace(VERSION, version=2)
    assert numbers(edits.take_version(entry_of(1, 2), NOW, version=latest, latest=True)) == []
    assert numbers(edits.take_version(entry_of(1, 2), NOW, version=latest, latest=False)) == [1]
    with pytest.raises(Aborted):
        edits.take_version(entry_of(1, 2, 3), NOW, version=latest, latest=True)


def test_one_version_or_all_are_removed() -> None:
    assert numbers(edits.remove_version(entry_of(1, 2), NOW, name="n", number=1)) == [2]
    assert numbers(edits.remove_version(entry_of(1, 2), NOW, name="n", number=None)) == []
    with pytest.raises(NotFound):
        edits.remove_version(entry_of(1), NOW, name="n", number=7)


def test_an_update_changes_what_is_given_and_keeps_the_version() -> None:
    update = edits.VersionUpdate("n", None, lifetime=None, labels={"a": "b"})
    entry = update(entry_of(1, 2), NOW)
    assert update.changed is entry.versions[-1]
    assert [version.labels for version in entry.versions] == [{}, {"a": "b"}]


def test_a_use_starts_only_its_own_sliding_lifetime_again() -> None:
    lifetime = Lifetime.begin(10.0, True, NOW)
    entry = Entry(tuple(replace(VERSION, version=number, lifetime=lifetime) for number in (1, 2)))
    used = edits.use_version(entry, NOW + 5, version=entry.versions[0])
    assert [version.lifetime.at for version in used.versions] == [NOW + 15, NOW + 10]


def test_expired_versions_are_left_out() -> None:
    over = replace(VERSION, lifetime=Lifetime.begin(10.0, False, NOW - 20))
    assert edits.keep_live(Entry((over, VERSION)), NOW).versions == (VERSION,)
