"""The catalogue: which versions every name has, of durable snapshots and of those in memory.

Answers from memory, at once. A change of durable versions replaces the name's record before it is seen: that is the
moment in which it happens. Changes of one name come one after the other; if another process was faster, its record is
read and the change is decided anew. The catalogue never looks at manifests or pages.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from jaxctx.errors import DataLoss, JaxctxError, NotFound
from jaxctx.lifetime import DeadlineQueue
from jaxctx.store.objects import ABSENT, READ_AHEAD, Objects, in_flight
from jaxctx.store.records import SnapshotVersion, decode_name, encode_name


@dataclass(frozen=True, slots=True)
class Entry:
    """A name. `generation` is its record's; None: it must be read again before the next change."""

    versions: tuple[SnapshotVersion, ...] = ()  # ascending
    last_version: int = 0
    generation: bytes | None = ABSENT
    damaged: bool = False  # its record failed its checksum: it can only be deleted

    def live(self, now: float) -> tuple[SnapshotVersion, ...]:
        """The versions that are not over."""
        return tuple(version for version in self.versions if not version.lifetime.over(now))

    def keep(self, versions: Iterable[SnapshotVersion]) -> Self:
        """With these versions instead."""
        return replace(self, versions=tuple(versions))


Edit = Callable[[Entry, float], Entry]  # raises instead if it cannot be


def missing(name: str) -> NotFound:
    """The answer for what is not there, is over, or belongs to somebody else."""
    return NotFound(f"no snapshot {name!r} of this version", reason="SNAPSHOT_NOT_FOUND")


def damaged(name: str) -> DataLoss:
    """The answer for a name or version whose record failed its checksum."""
    return DataLoss(f"what is stored of snapshot {name!r} is damaged; deleting it gives the name back")


class SnapshotIndex:
    """Thread-safe; every method but `change`, `look`, `refresh` and `settle` answers without I/O."""

    def __init__(self, objects: Objects, clock: Callable[[], float]) -> None:
        self._objects, self._clock = objects, clock
        self.on_gone: Callable[[Sequence[SnapshotVersion]], object] = (
            lambda versions: None
        )  # called once for each, at once
        self._lock = threading.Lock()  # guards what follows
        self._tenants: dict[str, dict[str, Entry]] = {}
        self._ends: DeadlineQueue[tuple[str, str]] = DeadlineQueue()  # when the next version of a name is over
        self._stripes = [threading.Lock() for _ in range(64)]  # one change at a time for each name
        for tenant, name, stored, generation in self._read_all():
            self._merge(tenant, name, stored, generation)

    def entry(self, tenant: str, name: str) -> Entry:
        """What is known of a name; an empty entry of one that is not there."""
        with self._lock:
            return self._tenants.get(tenant, {}).get(name, Entry())

    def names(self, tenant: str) -> dict[str, Entry]:
        with self._lock:
            return dict(self._tenants.get(tenant, {}))

    def all(self) -> list[tuple[str, str, Entry]]:  # tenant, name, entry
        with self._lock:
            return [(tenant, name, entry) for tenant, names in self._tenants.items() for name, entry in names.items()]

    def manifests(self) -> set[str]:
        """That some version refers to, whether it is over or not."""
        return {version.manifest for _, _, entry in self.all() for version in entry.versions if version.durable}

    def take_endings(self, now: float) -> list[tuple[str, str]]:
        """The names of which a version is over; they are not told again, unless `remind` is called."""
        with self._lock:
            return self._ends.due(now)

    def remind(self, tenant: str, name: str, at: float) -> None:
        """Tell of this name again."""
        with self._lock:
            self._ends.set((tenant, name), at)

    def change(self, tenant: str, name: str, edit: Edit) -> tuple[Entry, Entry]:
        """Replace the entry of a name by what `edit` makes of it; the entry before and after.

        After an I/O error the entry is what the store has now: most often the old one, which is put back if it can be.
        """
        with self._stripe(tenant, name):
            while True:
                before = self.entry(tenant, name)
                if before.generation is None:
                    before = self._reload(tenant, name)
                after = edit(before, self._clock())
                generation = self._persist(tenant, name, before, after)
                if generation is not None:
                    return before, self._install(tenant, name, replace(after, generation=generation))
                self._reload(tenant, name)

    def look(self, tenant: str, name: str) -> None:
        """Take over what other processes made of a name since. What is known stays where the store fails, or if the
        latest version is in memory: then the name is ours.
        """
        if all(version.durable for version in self.entry(tenant, name).versions[-1:]):
            with suppress(JaxctxError), self._stripe(tenant, name):
                self._reload(tenant, name)

    def refresh(self) -> None:
        """Take over what other processes changed since."""
        for tenant, name, _, generation in self._read_all():
            if self.entry(tenant, name).generation != generation:
                with self._stripe(tenant, name):
                    self._reload(tenant, name)

    def _read_all(self) -> Iterator[tuple[str, str, bytes | None, bytes]]:
        names = [parsed for key in self._objects.list("names/") if (parsed := _parse_key(key))]
        records = in_flight((self._objects.read(_key(tenant, name)) for tenant, name in names), READ_AHEAD)
        for (tenant, name), (stored, generation) in zip(names, records, strict=True):
            yield tenant, name, stored, generation

    def settle(self) -> None:
        """Read the records again of which it is not known whether a change came through."""
        for tenant, name, entry in self.all():
            if entry.generation is None:
                self.change(tenant, name, lambda entry, now: entry)

    def _persist(self, tenant: str, name: str, before: Entry, after: Entry) -> bytes | None:
        """The generation of the record once it says `after`; None if it was not that of `before`."""
        assert before.generation is not None
        old, new = _record(tenant, name, before), _record(tenant, name, after)
        if old == new and before.damaged == after.damaged:
            return before.generation
        key = _key(tenant, name)
        try:
            return self._objects.replace(key, new, before.generation)
        except JaxctxError:
            self._install(tenant, name, replace(before, generation=None))
            with suppress(JaxctxError):  # then it stays unknown: the next change or collection begins by reading it
                stored, generation = self._objects.read(key)()
                if stored == new != old and not before.damaged:
                    self._objects.replace(key, old, generation)
                self._reload(tenant, name)
            raise

    def _reload(self, tenant: str, name: str) -> Entry:
        stored, generation = self._objects.read(_key(tenant, name))()
        entry = self.entry(tenant, name)
        return entry if entry.generation == generation else self._merge(tenant, name, stored, generation)

    def _merge(self, tenant: str, name: str, stored: bytes | None, generation: bytes) -> Entry:
        """Take over the durable versions of a record; those in memory stay unless their numbers are taken."""
        decoded = decode_name(stored, tenant, name) if stored is not None else (0, ())
        last_version, durable = decoded or (0, ())
        entry, numbers = self.entry(tenant, name), {version.version for version in durable}
        memory = [version for version in entry.versions if not version.durable]
        held = [version for version in memory if version.version not in numbers]
        self.on_gone([version for version in memory if version.version in numbers])
        versions = tuple(sorted((*durable, *held), key=lambda version: version.version))
        last_version = max(last_version, *(version.version for version in versions), 0)
        return self._install(tenant, name, Entry(versions, last_version, generation, damaged=decoded is None))

    def _stripe(self, tenant: str, name: str) -> threading.Lock:
        return self._stripes[hash((tenant, name)) % len(self._stripes)]

    def _install(self, tenant: str, name: str, entry: Entry) -> Entry:
        with self._lock:
            names = self._tenants.setdefault(tenant, {})
            if entry.versions or entry.damaged or entry.generation != ABSENT:
                names[name] = entry
            else:
                names.pop(name, None)
            ends = (version.lifetime.at for version in entry.versions)
            self._ends.set((tenant, name), min((at for at in ends if at is not None), default=None))
        return entry


def _record(tenant: str, name: str, entry: Entry) -> bytes | None:
    durable = [version for version in entry.versions if version.durable]
    return encode_name(tenant, name, entry.last_version, durable) if durable else None


def _key(tenant: str, name: str) -> str:
    """In hex, a file name for each: of up to 120 bytes, which is more than the validator lets through."""
    return f"names/t{tenant.encode().hex()}/n{name.encode().hex()}"


def _parse_key(key: str) -> tuple[str, str] | None:
    tenant, _, name = key.partition("/")
    try:
        parsed = bytes.fromhex(tenant[1:]).decode(), bytes.fromhex(name[1:]).decode()
        return parsed if _key(*parsed) == f"names/{key}" else None
    except ValueError:
        return None  # not ours
