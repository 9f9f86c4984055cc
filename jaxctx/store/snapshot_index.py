"""Snapshot index: which versions every name has, of durable snapshots and of those in memory.

Reads are answered from memory, at once. A change of durable versions replaces the name's record in the store first; it
becomes visible at that moment. Changes of one name come one after the other. If another process was faster, its record
is read and the change is decided anew. The index never looks at manifests or pages.

    change(edit) ──▶ compare-and-swap of the name's record ──▶ visible in memory
                        └── another process was faster: read its record, edit again

An object store may swap a record and then say that it did not, because the reply was lost and the request repeated.
Hence every record has an id of its change, also that of a deleted name: whoever reads its own record has made the
change.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from jaxctx.errors import DataLoss, JaxctxError, NotFound
from jaxctx.lifetime import DeadlineQueue
from jaxctx.store.objects import ABSENT, READ_AHEAD, Objects, in_flight
from jaxctx.store.records import SnapshotVersion, decode_name, encode_name


@dataclass(frozen=True, slots=True)
class Entry:
    """The known state of a name. `generation` is that of its record; None: read it again before the next change."""

    versions: tuple[SnapshotVersion, ...] = ()  # ascending
    last_version: int = 0
    generation: bytes | None = ABSENT
    damaged: bool = False  # its record failed its checksum: it can only be deleted

    def live(self, now: float) -> tuple[SnapshotVersion, ...]:
        """The versions that have not expired."""
        return tuple(version for version in self.versions if not version.lifetime.over(now))

    def keep(self, versions: Iterable[SnapshotVersion]) -> Self:
        """The same entry with these versions instead."""
        return replace(self, versions=tuple(versions))


REFRESH_S = 5.0  # how old what is known of a tenant's names may be, beside what this process changed
REFRESH_SHARE = 0.02  # of the time is spent on that at most, for each tenant


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
        self._name_locks = [threading.Lock() for _ in range(64)]  # chosen by hash; one change of a name at a time
        for tenant, name, stored, generation in self._read_names(None):
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
        """Replace the entry of a name by what `edit` makes of it; returns the entry before and after.

        After an I/O error the entry is what the store has now: usually the old one, which is restored if possible.
        """
        with self._name_lock(tenant, name):
            while True:
                before = self.entry(tenant, name)
                if before.generation is None:
                    before = self._reload(tenant, name)
                after = edit(before, self._clock())
                generation = self._persist(tenant, name, before, after)
                if generation is not None:
                    return before, self._install(tenant, name, replace(after, generation=generation))
                self._reload(tenant, name)

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
        Meanwhile other calls for the same tenant return at once.
        """
        begun = self._clock()
        with self._lock:
            last, enough_s = self._refreshed.get(tenant, (-math.inf, 0.0))
            if last <= begun < last + enough_s:
                return
            self._refreshed[tenant] = begun, math.inf
        try:
            with suppress(JaxctxError):
                self._refresh(tenant, also_owned=False)
        finally:
            # A tenant may have thousands of names, and each is a request to an object store.
            ended = self._clock()
            with self._lock:
                self._refreshed[tenant] = ended, max(REFRESH_S, (ended - begun) / REFRESH_SHARE)

    def refresh(self) -> None:
        """Read what other processes changed, of all names."""
        self._refresh(None, also_owned=True)

    def _refresh(self, tenant: str | None, *, also_owned: bool) -> None:
        """Reload the names of a tenant (None: of all) that changed in the store, or went from it.

        `also_owned`: those too whose latest version is in memory, which may have to give way.
        """
        listed: set[tuple[str, str]] = set()
        changed: list[tuple[str, str]] = []
        for owner, name, _, generation in self._read_names(tenant):
            listed.add((owner, name))
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

    def _read_names(self, tenant: str | None) -> Iterator[tuple[str, str, bytes | None, bytes]]:
        """Tenant, name, record (None: deleted) and generation of every name in the store, or of one tenant's."""
        folder = "" if tenant is None else _folder(tenant)
        parsed_keys = [_parse_key(folder + key) for key in self._objects.list(f"names/{folder}")]
        names = [parsed for parsed in parsed_keys if parsed is not None]
        records = in_flight((self._objects.read(_key(tenant, name)) for tenant, name in names), READ_AHEAD)
        for (tenant, name), (stored, generation) in zip(names, records, strict=True):
            yield tenant, name, stored, generation

    def resolve_unknown(self) -> None:
        """Read the records again of which it is unknown whether a change succeeded."""
        for tenant, name, entry in self.all():
            if entry.generation is None:
                self.change(tenant, name, _no_change)

    def _persist(self, tenant: str, name: str, before: Entry, after: Entry) -> bytes | None:
        """Write the record of `after`; returns its generation, or None if the generation was not that of `before`."""
        assert before.generation is not None
        old = _record(tenant, name, before)
        if old == _record(tenant, name, after) and before.damaged == after.damaged:
            return before.generation
        key = _key(tenant, name)
        change_id = self._new_id()
        new = _record(tenant, name, after, change_id)
        marks_deletion = new is None and self._objects.replies_may_be_lost
        if marks_deletion:
            # What is absent has no id: of two processes that take a snapshot, neither would know whether it had it.
            new = encode_name(tenant, name, after.last_version, (), change_id)
        try:
            generation = self._objects.replace(key, new, before.generation)
            if generation is None and self._objects.replies_may_be_lost:
                stored, found = self._objects.read(key)()
                generation = found if stored == new else None
        except JaxctxError:
            self._install(tenant, name, replace(before, generation=None))
            with suppress(JaxctxError):  # on failure it stays unknown: the next change or collection reads it first
                stored, generation = self._objects.read(key)()
                if stored == new != old and not before.damaged:
                    self._objects.replace(key, old, generation)
                self._reload(tenant, name)
            raise
        if generation is not None and marks_deletion and self._objects.deletes_on_condition:
            with suppress(JaxctxError):  # such a record may stay
                generation = self._objects.replace(key, None, generation) or generation
        return generation

    def _reload(self, tenant: str, name: str) -> Entry:
        """The entry after reading the name's record."""
        stored, generation = self._objects.read(_key(tenant, name))()
        entry = self.entry(tenant, name)
        return entry if entry.generation == generation else self._merge(tenant, name, stored, generation)

    def _merge(self, tenant: str, name: str, stored: bytes | None, generation: bytes) -> Entry:
        """Take over the durable versions of a record; those in memory stay unless their numbers are used there."""
        decoded = decode_name(stored, tenant, name) if stored is not None else (0, ())
        last_version, durable = decoded or (0, ())
        numbers = {version.version for version in durable}
        in_memory = [version for version in self.entry(tenant, name).versions if not version.durable]
        kept = [version for version in in_memory if version.version not in numbers]
        self.on_gone([version for version in in_memory if version.version in numbers])
        versions = tuple(sorted((*durable, *kept), key=lambda version: version.version))
        last_version = max(last_version, *(version.version for version in versions), 0)
        return self._install(tenant, name, Entry(versions, last_version, generation, damaged=decoded is None))

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


def _record(tenant: str, name: str, entry: Entry, change_id: str = "") -> bytes | None:
    """The record of the entry's durable versions; None if it has none."""
    durable = [version for version in entry.versions if version.durable]
    return encode_name(tenant, name, entry.last_version, durable, change_id) if durable else None


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
