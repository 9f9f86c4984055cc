"""The catalogue: which versions every name has, of durable snapshots and of those in memory.

Answers from memory, at once. A change of durable versions replaces the name's record before it is seen: that is the
moment in which it happens. Changes of one name come one after the other; if another process was faster, its record is
read and the change is decided anew. The catalogue never looks at manifests or pages.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from jaxctx.errors import DataLoss, InvalidArgument, JaxctxError, NotFound
from jaxctx.store.objects import ABSENT, Objects
from jaxctx.store.records import decode_name, encode_name
from jaxctx.store.snapshot import Version

LONGEST_NAME = 120  # bytes, of a durable snapshot's name and tenant: in hex they are file names
_READ_AHEAD = 64  # records


@dataclass(frozen=True, slots=True)
class Entry:
    """A name. `generation` is its record's; None: it must be read again before the next change."""

    versions: tuple[Version, ...] = ()  # ascending
    last_version: int = 0
    generation: bytes | None = ABSENT
    damaged: bool = False  # its record failed its checksum: it can only be deleted

    def live(self, now: float) -> tuple[Version, ...]:
        """The versions that are not over."""
        return tuple(version for version in self.versions if not version.lifetime.over(now))

    def keep(self, versions: Iterable[Version]) -> Entry:
        """With these versions instead."""
        return replace(self, versions=tuple(versions))


Edit = Callable[[Entry, float], Entry]  # raises instead if it cannot be


def missing(name: str) -> NotFound:
    """The answer for what is not there, is over, or belongs to somebody else."""
    return NotFound(f"no snapshot {name!r} of this version", reason="SNAPSHOT_NOT_FOUND")


class Catalogue:
    """Thread-safe; every method but `change`, `refresh` and `settle` answers without I/O."""

    def __init__(self, objects: Objects | None, clock: Callable[[], float]) -> None:
        self._objects, self._clock = objects, clock
        self._lock = threading.Lock()  # guards what follows
        self._tenants: dict[str, dict[str, Entry]] = {}
        self._manifests: set[str] = set()  # that the entries name; no two name the same
        self._lost: list[Version] = []  # in memory, removed by none of the caller's requests
        self._endings: list[tuple[float, str, str]] = []  # a heap of (when, tenant, name); some no longer true
        self._stripes = [threading.Lock() for _ in range(64)]  # one change at a time for each name
        for tenant, name, stored, generation in self._read_all():
            self._merge(tenant, name, stored, generation)

    # What is there

    def entry(self, tenant: str, name: str) -> Entry:
        """What is known of a name; an empty entry of one that is not there."""
        with self._lock:
            return self._tenants.get(tenant, {}).get(name, Entry())

    def live(self, tenant: str, name: str) -> tuple[Version, ...]:
        """The versions of a name, ascending. Raises NotFound, DataLoss."""
        entry = self.entry(tenant, name)
        if versions := entry.live(self._clock()):
            return versions
        if entry.damaged:
            raise damaged(name)
        raise missing(name)

    def latest(self, tenant: str, prefix: str, after: str, limit: int) -> list[Version]:
        """The latest version of each name that begins with `prefix`, in name order, starting after `after`."""
        found: list[Version] = []
        now = self._clock()
        with self._lock:
            names = self._tenants.get(tenant, {})
            for name in sorted(name for name in names if name > after and name.startswith(prefix)):
                if len(found) == limit:
                    break
                if versions := names[name].live(now):
                    found.append(versions[-1])
        return found

    def count(self) -> int:
        """Versions of all tenants, those that are over but not removed yet among them."""
        with self._lock:
            return sum(len(entry.versions) for names in self._tenants.values() for entry in names.values())

    def all(self, tenant: str) -> list[Version]:
        """Every version of the tenant."""
        now = self._clock()
        with self._lock:
            return [version for entry in self._tenants.get(tenant, {}).values() for version in entry.live(now)]

    def next_ending(self) -> float | None:
        """When the next version is over; now if one was lost."""
        with self._lock:
            if self._lost:
                return self._clock()
            while self._endings:
                at, tenant, name = self._endings[0]
                entry = self._tenants.get(tenant, {}).get(name, Entry())
                if any(version.lifetime.at is not None and version.lifetime.at <= at for version in entry.versions):
                    return at
                heapq.heappop(self._endings)
        return None

    def take_endings(self, now: float) -> set[tuple[str, str]]:
        """The names of which a version is over; they are not told again, unless `remind` is called."""
        due = set()
        with self._lock:
            while self._endings and self._endings[0][0] <= now:
                due.add(heapq.heappop(self._endings)[1:])
        return due

    def remind(self, tenant: str, name: str, at: float) -> None:
        """Tell of this name again."""
        with self._lock:
            heapq.heappush(self._endings, (at, tenant, name))

    def lose(self, versions: Iterable[Version]) -> None:
        """Remember versions that are gone, for whoever holds what is behind those in memory."""
        with self._lock:
            self._lost += versions

    def take_lost(self) -> list[Version]:
        """The versions given to `lose` since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def manifests(self) -> set[str]:
        """That some version refers to, whether it is over or not."""
        with self._lock:
            return set(self._manifests)

    @property
    def damaged(self) -> bool:
        """Whether some name's record is damaged, so that what it refers to is not known."""
        with self._lock:
            return any(entry.damaged for names in self._tenants.values() for entry in names.values())

    # Changes

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

    def refresh(self) -> None:
        """Take over what other processes changed since."""
        for tenant, name, _, generation in self._read_all():
            with self._stripe(tenant, name):
                entry = self.entry(tenant, name)
                if entry.generation != generation:
                    self._reload(tenant, name)

    def _read_all(self) -> Iterator[tuple[str, str, bytes | None, bytes]]:
        if self._objects is None:
            return
        names = [parsed for key in self._objects.list("names/") if (parsed := _parse_key(key))]
        for start in range(0, len(names), _READ_AHEAD):
            batch = names[start : start + _READ_AHEAD]
            asked = [self._objects.read(_key(tenant, name)) for tenant, name in batch]
            for (tenant, name), wait in zip(batch, asked, strict=True):
                yield tenant, name, *wait()

    def settle(self) -> None:
        """Read the records again of which it is not known whether a change came through."""
        with self._lock:
            unknown = [
                (tenant, name)
                for tenant, names in self._tenants.items()
                for name, entry in names.items()
                if entry.generation is None
            ]
        for tenant, name in unknown:
            self.change(tenant, name, lambda entry, now: entry)

    def _persist(self, tenant: str, name: str, before: Entry, after: Entry) -> bytes | None:
        """The generation of the record once it says `after`; None if it was not that of `before`."""
        assert before.generation is not None
        old, new = _record(tenant, name, before), _record(tenant, name, after)
        if self._objects is None or (old == new and before.damaged == after.damaged):
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
        assert self._objects is not None
        return self._merge(tenant, name, *self._objects.read(_key(tenant, name))())

    def _merge(self, tenant: str, name: str, stored: bytes | None, generation: bytes) -> Entry:
        """Take over the durable versions of a record; those in memory stay unless their numbers are taken."""
        decoded = decode_name(stored, tenant, name) if stored is not None else (0, ())
        last_version, durable = decoded or (0, ())
        entry, numbers = self.entry(tenant, name), {version.version for version in durable}
        memory = [version for version in entry.versions if not version.durable]
        held = [version for version in memory if version.version not in numbers]
        self.lose(version for version in memory if version.version in numbers)
        versions = tuple(sorted((*durable, *held), key=lambda version: version.version))
        last_version = max(last_version, *(version.version for version in versions), 0)
        return self._install(tenant, name, Entry(versions, last_version, generation, damaged=decoded is None))

    def _stripe(self, tenant: str, name: str) -> threading.Lock:
        return self._stripes[hash((tenant, name)) % len(self._stripes)]

    def _install(self, tenant: str, name: str, entry: Entry) -> Entry:
        with self._lock:
            names = self._tenants.setdefault(tenant, {})
            old = names.get(name, Entry())
            self._manifests -= _manifests(old)
            self._manifests |= _manifests(entry)
            if entry.versions or entry.damaged or entry.generation != ABSENT:
                names[name] = entry
            else:
                names.pop(name, None)
            for at in {v.lifetime.at for v in entry.versions} - {v.lifetime.at for v in old.versions}:
                if at is not None:
                    heapq.heappush(self._endings, (at, tenant, name))
        return entry


def _manifests(entry: Entry) -> set[str]:
    return {version.manifest for version in entry.versions if version.durable}


def damaged(name: str) -> DataLoss:
    """The answer for a name or version whose record failed its checksum."""
    return DataLoss(f"what is stored of snapshot {name!r} is damaged; deleting it gives the name back")


def _record(tenant: str, name: str, entry: Entry) -> bytes | None:
    durable = [version for version in entry.versions if version.durable]
    return encode_name(tenant, name, entry.last_version, durable) if durable else None


def _key(tenant: str, name: str) -> str:
    for field, text in (("tenant", tenant), ("name", name)):
        if len(text.encode()) > LONGEST_NAME:
            raise InvalidArgument.field(field, f"at most {LONGEST_NAME} bytes")
    return f"names/t{tenant.encode().hex()}/n{name.encode().hex()}"


def _parse_key(key: str) -> tuple[str, str] | None:
    tenant, _, name = key.partition("/")
    try:
        parsed = bytes.fromhex(tenant[1:]).decode(), bytes.fromhex(name[1:]).decode()
        return parsed if _key(*parsed) == f"names/{key}" else None
    except (ValueError, InvalidArgument):
        return None  # not ours
