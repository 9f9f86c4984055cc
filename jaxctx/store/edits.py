"""Edits: how a name's versions change. Each makes the new entry of a name, given the old one and the time.

`SnapshotIndex.change` applies an edit, and applies it again if another process has changed the name meanwhile. So an
edit has no effects: it returns the new entry, or raises to refuse. `SnapshotStore` binds the other arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxctx.errors import Aborted, AlreadyExists
from jaxctx.lifetime import Lifetime
from jaxctx.store.records import SnapshotVersion
from jaxctx.store.snapshot_index import Entry, data_loss, not_found


def add_version(
    entry: Entry, now: float, *, version: SnapshotVersion, overwrite: int | None, history: int | None
) -> Entry:
    """With this version as the latest, and at most `history` versions (None: any number).

    The same entry if the version is in it: it was added, but the reply was lost. Raises as `check_overwrite`.
    """
    if find_added(entry, version) is not None:
        return entry
    kept = check_overwrite(entry, version.name, overwrite, now)
    number = entry.last_version + 1 if kept else 1
    new = replace(version, version=number, parent_version=overwrite or 0, created_at=now)
    versions = [*kept, new]
    if history is not None:
        versions = versions[-history:]
    return replace(entry.keep(versions), last_version=number)


def find_added(entry: Entry, version: SnapshotVersion) -> SnapshotVersion | None:
    """This durable version as it was added, with its number; None if it was not. No other one has its manifest."""
    if version.manifest:
        for one in entry.versions:
            if one.manifest == version.manifest:
                return one
    return None


def take_version(entry: Entry, now: float, *, version: SnapshotVersion, latest: bool) -> Entry:
    """Without exactly this version; with `latest` without any.

    Raises Aborted (VERSION_MISMATCH) with `latest` if another version is the latest; NotFound, DataLoss.
    """
    live = entry.live(now)
    if latest and live and key_of(live[-1]) != key_of(version):
        raise Aborted(f"snapshot {version.name!r} was saved anew meanwhile", reason="VERSION_MISMATCH")
    kept = [one for one in live if key_of(one) != key_of(version)]
    if len(kept) == len(live):
        raise data_loss(version.name) if entry.damaged else not_found(version.name)
    return entry.keep(() if latest else kept)


def remove_version(entry: Entry, now: float, *, name: str, number: int | None) -> Entry:
    """Without the version of this number; None: without any, even if the record is damaged. Raises NotFound."""
    if entry.damaged and number is None:
        return replace(entry.keep(()), damaged=False)
    found = find_version(entry, now, name, number)
    if number is None:
        return entry.keep(())
    return entry.keep([one for one in entry.versions if one is not found])


@dataclass(slots=True)
class VersionUpdate:
    """The edit that changes lifetime and labels of a version; None leaves either as it is."""

    name: str
    number: int | None  # of the version; None: the latest
    lifetime: Lifetime | None
    labels: Mapping[str, str] | None
    changed: SnapshotVersion | None = None  # the version as the latest call made it

    def __call__(self, entry: Entry, now: float) -> Entry:
        """Raises NotFound, DataLoss."""
        found = find_version(entry, now, self.name, self.number)
        changed = found
        if self.lifetime is not None:
            changed = replace(changed, lifetime=self.lifetime)
        if self.labels is not None:
            changed = replace(changed, labels=self.labels)
        self.changed = changed
        return entry.keep(changed if one is found else one for one in entry.versions)


def use_version(entry: Entry, now: float, *, version: SnapshotVersion) -> Entry:
    """With a sliding lifetime of exactly this version started again, if it still exists."""
    versions = list(entry.versions)
    for position, one in enumerate(versions):
        if key_of(one) == key_of(version):
            versions[position] = replace(one, lifetime=one.lifetime.used(now))
    return entry.keep(versions)


def keep_live(entry: Entry, now: float) -> Entry:
    """Without the expired versions."""
    return entry.keep(entry.live(now))


def find_version(entry: Entry, now: float, name: str, number: int | None) -> SnapshotVersion:
    """The version of this number, None for the latest. Raises NotFound, DataLoss."""
    for version in reversed(entry.live(now)):
        if number in (None, version.version):
            return version
    raise data_loss(name) if entry.damaged else not_found(name)


def key_of(version: SnapshotVersion) -> tuple[int, float, str, int]:
    """What identifies a version for ever. Its number alone does not: a new version may get it later."""
    return version.version, version.created_at, version.manifest, id(version.held)


def check_overwrite(entry: Entry, name: str, overwrite: int | None, now: float) -> tuple[SnapshotVersion, ...]:
    """The live versions of the name. Raises unless the name may get a new version that overwrites `overwrite`."""
    if entry.damaged:
        raise data_loss(name)
    kept = entry.live(now)
    if overwrite is None and kept:
        raise AlreadyExists(f"snapshot {name!r} exists; its version is {kept[-1].version}")
    if overwrite is not None and not kept:
        raise not_found(name)
    if overwrite is not None and kept[-1].version != overwrite:
        raise Aborted(f"the version is {kept[-1].version}, not {overwrite}", reason="VERSION_MISMATCH")
    return kept
