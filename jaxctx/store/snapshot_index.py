"""Snapshot index: which versions every name has, of durable snapshots and of those in memory.

Reads are answered from memory, at once. A change of durable versions replaces the name's record in the store first; it
becomes visible at that moment. Changes of one name come one after the other. If another process was faster, its record
is read and the change is decided anew. The index never looks at manifests or pages.

    change(edit) ──▶ compare-and-swap of the name's record ──▶ visible in memory
                        └── another process was faster: read its record, edit again

An object store may swap a record and then say that it did not, because the reply was lost and the request repeated.
Hence every record has the ids of its latest changes, also that of a deleted name: whoever finds its own there has made
the change, whatever others made of the name since. A record of a deleted name goes when no change can be in doubt any
more, where the object store deletes on condition; elsewhere it stays.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from jaxctx.errors import DataLoss, JaxctxError, NotFound
from jaxctx.lifetime import DeadlineQueue
from jaxctx.store.objects import ABSENT, READ_AHEAD, Objects, in_flight
from jaxctx.store.records import NameRecord, SnapshotVersion, decode_name, encode_name


@dataclass(frozen=True, slots=True)
class Entry:
    """The known state of a name. `generation` is that of its record; None: read it again before the next change."""

    versions: tuple[SnapshotVersion, ...] = ()  # ascending
    last_version: int = 0
    generation: bytes | None = ABSENT
    damaged: bool = False  # its record failed its checksum: it can only be deleted
    change_ids: tuple[str, ...] = ()  # of the latest changes of its record, the last one first
    deleted_at: float = 0.0  # when its record was made, if that is of a deleted name; in unix seconds

    @property
    def is_deleted(self) -> bool:
        """Whether there is nothing of it but the record of a deleted name."""
        return not (self.versions or self.damaged or self.generation in (None, ABSENT))

    def live(self, now: float) -> tuple[SnapshotVersion, ...]:
        """The versions that have not expired."""
        return tuple(version for version in self.versions if not version.lifetime.over(now))

    def keep(self, versions: Iterable[SnapshotVersion]) -> Self:
        """The same entry with these versions instead."""
        return replace(self, versions=tuple(versions))


REFRESH_S = 5.0  # how old what is known of a tenant's names may be, beside what this process changed
REFRESH_SHARE = 0.02  # of the time is spent on that at most, for each tenant
SELDOM_AGE_S = 600.0  # names that were deleted so long ago are looked at seldom:
SELDOM_LOOKS = 16  # at one of so many looks at the names of a tenant
KEPT_CHANGES = 32  # ids of changes in a record: more are not made while one process waits for its reply

Edit: TypeAlias = Callable[[Entry, float], Entry]  # makes the new entry, given the time; may raise to refuse


def not_found(name: str) -> NotFound:
    """The error for a version that does not exist, has expired, or belongs to another tenant."""
    return NotFound(f"no snapshot {name!r} of this version", reason="SNAPSHOT_NOT_FOUND")


def data_loss(name: str) -> DataLoss:
    """The error for a name or version whose record failed its checksum."""
    return DataLoss(f"what is stored of snapshot {name!r} is damaged; deleting it gives the name back")


class SnapshotIndex:
    """Names and versions of all tenants. Thread-safe.

    Only `change`, `refresh_name`, `refresh_tenant`, `refresh` and `resolve_unknown` do I/O; they may raise Unavailable
    (STORE_FAILED) or ResourceExhausted (STORE_FULL).
    """

    def __init__(self, objects: Objects, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        """`new_id` makes the ids of changes; `clock` returns unix seconds."""
        self._objects = objects
        self._clock = clock
        self._new_id = new_id
        # Called with versions that were removed, once for each, from any thread.
        self.on_gone: Callable[[Sequence[SnapshotVersion]], object] = _ignore
        self._lock = threading.Lock()  # guards what follows
        self._tenants: dict[str, dict[str, Entry]] = {}
        self._expiries: DeadlineQueue[tuple[str, str]] = DeadlineQueue()  # when the next version of a name expires
        self._refreshed: dict[str, tuple[float, float]] = {}  # by tenant: when, and for how long that will do
        self._looks: Counter[str] = Counter()  # by tenant: how often
        self._name_locks = [threading.Lock() for _ in range(64)]  # chosen by hash; one change of a name at a time
        for tenant, name, stored, generation in self._read_names(self._list_names(None)):
            self._merge(tenant, name, stored, generation)

    def entry(self, tenant: str, name: str) -> Entry:
        """The entry of a name; an empty one if it does not exist."""
        with self._lock:
            return self._tenants.get(tenant, {}).get(name, Entry())

    def names(self, tenant: str) -> dict[str, Entry]:
        """All names of a tenant and their entries."""
        with self._lock:
            return dict(self._tenants.get(tenant, {}))

    def all(self) -> list[tuple[str, str, Entry]]:
        """Tenant, name and entry of every name."""
        entries: list[tuple[str, str, Entry]] = []
        with self._lock:
            for tenant, names in self._tenants.items():
                for name, entry in names.items():
                    entries.append((tenant, name, entry))
        return entries

    def manifests(self) -> set[str]:
        """The ids of the manifests that some version refers to, expired versions included."""
        manifests: set[str] = set()
        for _, _, entry in self.all():
            manifests.update(version.manifest for version in entry.versions if version.durable)
        return manifests

    def pop_expired(self, now: float) -> list[tuple[str, str]]:
        """The tenants and names of which a version has expired. They are not returned again, unless `retry_expiry`."""
        with self._lock:
            return self._expiries.due(now)

    def retry_expiry(self, tenant: str, name: str, at: float) -> None:
        """Let `pop_expired` return this name again, from the time `at` on."""
        with self._lock:
            self._expiries.set((tenant, name), at)

    def change(self, tenant: str, name: str, edit: Edit) -> tuple[Entry, Entry]:
        """Replace the entry of a name by what `edit` makes of it; returns the entry before, and what `edit` made of it.

        Others may have changed it again by then: `entry` has what is known now. After an I/O error it is what the store
        has: usually the old one, which is restored if possible.
        """
        with self._name_lock(tenant, name):
            while True:
                before = self.entry(tenant, name)
                if before.generation is None:
                    before = self._reload(tenant, name)
                after = edit(before, self._clock())
                if self._persist(tenant, name, before, after):
                    return before, after

    def refresh_name(self, tenant: str, name: str) -> None:
        """Read the changes of a name by other processes.

        Nothing changes if the store fails, or if the latest version is in memory: then this process owns the name.
        """
        versions = self.entry(tenant, name).versions
        if not versions or versions[-1].durable:
            with suppress(JaxctxError), self._name_lock(tenant, name):
                self._reload(tenant, name)

    def refresh_tenant(self, tenant: str) -> None:
        """Read the changes of a tenant's names by other processes, unless that was done a moment ago.

        Nothing changes if the store fails, and as to names whose latest version is in memory: this process owns them.
        Meanwhile other calls for the same tenant return at once. Where records of deleted names stay, those that were
        deleted long ago are read at some of the looks only: there may be many more of them than of others.
        """
        begun = self._clock()
        with self._lock:
            last, enough_s = self._refreshed.get(tenant, (-math.inf, 0.0))
            if last <= begun < last + enough_s:
                return
            self._refreshed[tenant] = begun, math.inf
            also_seldom = self._looks[tenant] % SELDOM_LOOKS == 0
            self._looks[tenant] += 1
        try:
            with suppress(JaxctxError):
                self._refresh(tenant, also_owned=False, also_seldom=also_seldom)
        finally:
            # A tenant may have thousands of names, and each is a request to an object store.
            ended = self._clock()
            with self._lock:
                self._refreshed[tenant] = ended, max(REFRESH_S, (ended - begun) / REFRESH_SHARE)

    def refresh(self) -> None:
        """Read what other processes changed, of all names."""
        self._refresh(None, also_owned=True, also_seldom=True)

    def _refresh(self, tenant: str | None, *, also_owned: bool, also_seldom: bool) -> None:
        """Reload the names of a tenant (None: of all) that changed in the store, or went from it.

        `also_owned`: those too whose latest version is in memory, which may have to give way. `also_seldom`: those too
        that are known to have been deleted long ago.
        """
        names = self._list_names(tenant)
        listed = set(names)
        if not also_seldom:
            names = [key for key in names if not self._is_seldom_read(self.entry(*key))]
        changed: list[tuple[str, str]] = []
        for owner, name, _, generation in self._read_names(names):
            if self.entry(owner, name).generation != generation:
                changed.append((owner, name))
        for owner, name, entry in self.all():
            if tenant in (None, owner) and (owner, name) not in listed and entry.generation != ABSENT:
                changed.append((owner, name))
        for owner, name in changed:
            versions = self.entry(owner, name).versions
            if also_owned or not versions or versions[-1].durable:
                with self._name_lock(owner, name):
                    self._reload(owner, name)

    def _is_seldom_read(self, entry: Entry) -> bool:
        """Whether the record is of a name that was deleted long ago, so that it is not likely to change."""
        return entry.is_deleted and entry.deleted_at + SELDOM_AGE_S < self._clock()

    def _list_names(self, tenant: str | None) -> list[tuple[str, str]]:
        """Tenant and name of every name in the store, or of one tenant's."""
        folder = "" if tenant is None else _folder(tenant)
        parsed_keys = [_parse_key(folder + key) for key in self._objects.list(f"names/{folder}")]
        return [parsed for parsed in parsed_keys if parsed is not None]

    def _read_names(self, names: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, bytes | None, bytes]]:
        """Tenant, name, record (None: deleted) and generation of each of these names."""
        records = in_flight((self._objects.read(_key(tenant, name)) for tenant, name in names), READ_AHEAD)
        for (tenant, name), (stored, generation) in zip(names, records, strict=True):
            yield tenant, name, stored, generation

    def resolve_unknown(self) -> None:
        """Read the records again of which it is unknown whether a change succeeded."""
        for tenant, name, entry in self.all():
            if entry.generation is None:
                self.change(tenant, name, _no_change)

    def _persist(self, tenant: str, name: str, before: Entry, after: Entry) -> bool:
        """Replace the record of `before` by that of `after`, and make it visible.

        False if another process was faster: then its record is known, and nothing else has changed.
        """
        assert before.generation is not None
        if _record(tenant, name, before) == _record(tenant, name, after) and before.damaged == after.damaged:
            self._install(tenant, name, replace(after, generation=before.generation))
            return True
        change_ids = (self._new_id(), *before.change_ids)[:KEPT_CHANGES]
        after = replace(after, change_ids=change_ids, deleted_at=self._clock())
        key, new = _key(tenant, name), self._stored(tenant, name, after)
        try:
            generation = self._objects.replace(key, new, before.generation)
            if generation is not None:
                self._install(tenant, name, replace(after, generation=generation))
                return True
            found = self._objects.read(key)()
        except JaxctxError:
            self._install(tenant, name, replace(before, generation=None))
            with suppress(JaxctxError):  # on failure it stays unknown: the next change or collection reads it first
                if self._is_made_after_all(tenant, name, before, after):
                    return True
            raise
        return self._take_over(tenant, name, after, *found)

    def _is_made_after_all(self, tenant: str, name: str, before: Entry, after: Entry) -> bool:
        """Undo a change that failed, and may have been made; whether another process built on it before that."""
        key, old, new = _key(tenant, name), self._stored(tenant, name, before), self._stored(tenant, name, after)
        stored, generation = self._objects.read(key)()
        if stored == new != old and not before.damaged:
            if self._objects.replace(key, old, generation) is not None:
                self._reload(tenant, name)
                return False
            stored, generation = self._objects.read(key)()
        return self._take_over(tenant, name, after, stored, generation)

    def _take_over(self, tenant: str, name: str, after: Entry, stored: bytes | None, generation: bytes) -> bool:
        """Make the name's record visible; whether the change to `after` is in it: it was made, and its reply lost."""
        record = _decode(tenant, name, stored)
        change_ids = () if record is None else record.change_ids
        was_made = after.change_ids[0] in change_ids
        if was_made:  # first as it was then: the record knows nothing of versions in memory
            self._install(tenant, name, replace(after, generation=generation))
        if not was_made or change_ids[0] != after.change_ids[0]:
            self._merge(tenant, name, stored, generation)
        return was_made

    def _stored(self, tenant: str, name: str, entry: Entry) -> bytes | None:
        """The record that the store has of an entry; None: none.

        What is absent has no ids: of two processes that take a snapshot, neither would know whether it had it.
        """
        record = _record(tenant, name, entry)
        if record is None and self._objects.replies_may_be_lost:
            deleted = NameRecord(entry.last_version, (), entry.change_ids, entry.deleted_at)
            record = encode_name(tenant, name, deleted)
        return record

    def drop_deleted(self, age_s: float) -> bool:
        """Delete the records of names that were deleted so long ago, where the store deletes on condition.

        Returns whether others are left, which get as old.
        """
        if not self._objects.deletes_on_condition:
            return False
        left = False
        for tenant, name, known in self.all():
            if not known.is_deleted:
                continue
            with self._name_lock(tenant, name):
                entry = self.entry(tenant, name)
                if entry.generation is None or not entry.is_deleted:
                    continue
                if entry.deleted_at + age_s >= self._clock():
                    left = True
                    continue
                with suppress(JaxctxError):  # the next collection tries again
                    if self._objects.replace(_key(tenant, name), None, entry.generation) is None:
                        self._reload(tenant, name)
                    else:
                        self._install(tenant, name, Entry())
        return left

    def _reload(self, tenant: str, name: str) -> Entry:
        """The entry after reading the name's record."""
        stored, generation = self._objects.read(_key(tenant, name))()
        entry = self.entry(tenant, name)
        return entry if entry.generation == generation else self._merge(tenant, name, stored, generation)

    def _merge(self, tenant: str, name: str, stored: bytes | None, generation: bytes) -> Entry:
        """Take over the durable versions of a record; those in memory stay unless their numbers are used there."""
        decoded = _decode(tenant, name, stored)
        record = decoded or NameRecord()
        numbers = {version.version for version in record.versions}
        in_memory = [version for version in self.entry(tenant, name).versions if not version.durable]
        kept = [version for version in in_memory if version.version not in numbers]
        self.on_gone([version for version in in_memory if version.version in numbers])
        versions = tuple(sorted((*record.versions, *kept), key=lambda version: version.version))
        last_version = max(record.last_version, *(version.version for version in versions), 0)
        damaged, change_ids = decoded is None, tuple(record.change_ids)
        entry = Entry(versions, last_version, generation, damaged, change_ids, record.deleted_at)
        return self._install(tenant, name, entry)

    def _name_lock(self, tenant: str, name: str) -> threading.Lock:
        return self._name_locks[hash((tenant, name)) % len(self._name_locks)]

    def _install(self, tenant: str, name: str, entry: Entry) -> Entry:
        """Make the entry visible, and return it."""
        with self._lock:
            names = self._tenants.setdefault(tenant, {})
            if entry.versions or entry.damaged or entry.generation != ABSENT:
                names[name] = entry
            else:
                names.pop(name, None)
            expiries = [version.lifetime.at for version in entry.versions if version.lifetime.at is not None]
            self._expiries.set((tenant, name), min(expiries, default=None))
        return entry


def _ignore(versions: Sequence[SnapshotVersion]) -> None:
    """The `on_gone` of an index without a listener."""


def _no_change(entry: Entry, now: float) -> Entry:
    """An edit that changes nothing; `change` reads the record if it is unknown."""
    return entry


def _record(tenant: str, name: str, entry: Entry) -> bytes | None:
    """The record of the entry's durable versions; None if it has none."""
    durable = [version for version in entry.versions if version.durable]
    return encode_name(tenant, name, NameRecord(entry.last_version, durable, entry.change_ids)) if durable else None


def _decode(tenant: str, name: str, stored: bytes | None) -> NameRecord | None:
    """A name's record, an empty one if there is none; None if it is damaged."""
    return NameRecord() if stored is None else decode_name(stored, tenant, name)


def _folder(tenant: str) -> str:
    """What the keys of a tenant's names begin with, after "names/"."""
    return f"t{tenant.encode().hex()}/"


def _key(tenant: str, name: str) -> str:
    """The key of a name's record: both in hex, each a file name. The validator limits them to less than 120 bytes."""
    return f"names/{_folder(tenant)}n{name.encode().hex()}"


def _parse_key(key: str) -> tuple[str, str] | None:
    """Tenant and name of a key that `_key` made, without "names/"; None for any other key."""
    tenant_part, _, name_part = key.partition("/")
    try:
        tenant = bytes.fromhex(tenant_part[1:]).decode()
        name = bytes.fromhex(name_part[1:]).decode()
    except ValueError:
        return None
    return (tenant, name) if _key(tenant, name) == f"names/{key}" else None
