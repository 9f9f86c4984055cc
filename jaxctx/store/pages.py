"""Pages of durable snapshots: which are stored, where, and which are needed; and garbage collection.

A manifest is needed while a version names it or a writer or reader has pinned it. A pack is needed while a needed
manifest has pages or its attachment in it, or a writer or reader has pinned it. A pack is deleted as a whole: as long
as one of its pages is needed, all its bytes stay. Hence an attachment has a pack of its own.

    version ──names──▶ manifest ──page locations──▶ pack
    writer, reader ──pin──▶ manifest and packs, until they are closed

Other processes may use the same store. Their objects are recognised by ids of other runs, and are left alone until they
are `GRACE_S` old and no name needs them. A save that shares pages of theirs looks whether these are still there once
its own manifest is, which the collections of others heed from then on. A collection that had begun before can still
delete them; that is found when the snapshot is opened.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from jaxctx.store.objects import READ_AHEAD, Objects, in_flight
from jaxctx.store.records import Manifest, PageLocation, decode_manifest
from jaxctx.store.snapshot_index import SnapshotIndex

GRACE_S = 3600.0  # no save takes longer
RETRY_S = 10.0  # after a collection, or the removal of a version, that failed


class Pages:
    """Locations of stored pages, pins and collection. Thread-safe.

    Manifests are read when they are first needed; pages are never read.
    """

    def __init__(
        self, objects: Objects, index: SnapshotIndex, clock: Callable[[], float], new_id: Callable[[], str]
    ) -> None:
        self._objects = objects
        self._index = index
        self._clock = clock
        self._new_id = new_id
        self._run = new_id()  # part of every id that this process makes
        self._seen = index.manifests()  # manifests that versions named since the start: their removal is known
        self._reading = threading.Lock()  # held while manifests are read, and during a collection
        self._loaded = False
        self.next_collection: float | None = clock()  # when there may be something to collect
        self._lock = threading.Lock()  # guards what follows
        self._locations: dict[bytes, PageLocation] = {}  # by page key
        self._packs: dict[str, frozenset[str] | None] = {}  # packs of each known manifest; None: it is damaged
        self._pins: Counter[str] = Counter()  # ids of manifests and packs

    def new_id(self) -> str:
        """A new id for a pack or manifest; it includes the time and the run of this process."""
        return f"{int(self._clock()):010x}-{self._run}-{self._new_id()}"

    def find(self, keys: Iterable[bytes]) -> list[PageLocation | None]:
        """Where the pages of these keys are stored, None for one that is not. Pins their packs, once for each page."""
        if not self._loaded:
            with self._reading:
                self._read(self._index.manifests())
                self._loaded = True
        with self._lock:
            locations = [self._locations.get(key) for key in keys]
            self._pins.update(location.pack for location in locations if location is not None)
        return locations

    def pin(self, ids: Iterable[str]) -> None:
        """Keep these manifests and packs from being collected."""
        with self._lock:
            self._pins.update(ids)

    def unpin(self, ids: Iterable[str], manifest: str) -> None:
        """Undo one `pin` of each. Unless a version names the manifest, a collection is due."""
        with self._lock:
            self._pins.subtract(ids)
            self._pins = +self._pins  # without those that are 0 now
        if not self.is_named(manifest):
            self.collect_at(self._clock())

    def collect_at(self, at: float) -> None:
        """From the time `at` on there may be something to collect."""
        with self._lock:
            if self.next_collection is None or at < self.next_collection:
                self.next_collection = at

    def add(self, manifest: Manifest) -> None:
        """The manifest is stored: its pages can be found from now on."""
        with self._lock:
            self._packs[manifest.id] = manifest.packs
            for key, location in zip(manifest.keys, manifest.locations, strict=True):
                self._locations.setdefault(key, location)

    def forget_pack(self, pack: str) -> None:
        """The pack is gone: the next save of any of its pages must store it again."""
        with self._lock:
            for key, location in list(self._locations.items()):
                if location.pack == pack:
                    del self._locations[key]

    def is_named(self, manifest: str) -> bool:
        """Whether a version names this manifest."""
        return manifest in self._index.manifests()

    def forget(self, key: bytes, location: PageLocation) -> None:
        """The page at this location is damaged: the next save of its key must store it again."""
        with self._lock:
            if self._locations.get(key) == location:
                del self._locations[key]

    def _read(self, ids: Iterable[str]) -> None:
        """Read the manifests of these ids that are not known yet."""
        unknown = [manifest_id for manifest_id in ids if manifest_id not in self._packs]
        named = self._index.manifests()
        records = in_flight((self._objects.read(f"manifests/{manifest_id}") for manifest_id in unknown), READ_AHEAD)
        for manifest_id, (stored, _) in zip(unknown, records, strict=True):
            if stored is None:
                continue
            manifest = decode_manifest(stored, manifest_id)
            if manifest is not None and manifest_id in named:
                self.add(manifest)
            else:
                # Its pages must not be found: if no version names it, a collection may have deleted the packs.
                with self._lock:
                    self._packs[manifest_id] = manifest.packs if manifest is not None else None

    def collect(self) -> int:
        """Delete the manifests and packs that are not needed; returns how many."""
        with self._reading:
            self.next_collection = None
            try:
                return self._collect()
            except BaseException:
                self.collect_at(self._clock() + RETRY_S)
                raise

    def _collect(self) -> int:
        """The collection itself; `self._reading` is held."""
        self._index.resolve_unknown()
        with self._lock:
            located = {location.pack for location in self._locations.values()}
        manifests = set(self._objects.list("manifests/"))
        packs = set(self._objects.list("packs/"))
        self._seen = (self._seen | self._index.manifests()) & manifests
        foreign = {manifest_id for manifest_id in manifests - self._seen if not self._is_ours(manifest_id)}
        if any(map(self._is_old, foreign)):
            self._index.refresh()
        self._read(manifests)
        self._loaded = True
        dead_manifests, dead_packs = self._find_garbage(manifests, packs, foreign)
        for pack_id in located - packs:  # another process deleted them
            self.forget_pack(pack_id)
        # Manifests are deleted after packs: they say which packs are garbage, if not all of them can be deleted now.
        for pack_id in dead_packs:
            self._objects.delete(f"packs/{pack_id}")
        for manifest_id in dead_manifests:
            if manifest_id in manifests:
                self._objects.delete(f"manifests/{manifest_id}")
            with self._lock:
                self._packs.pop(manifest_id, None)
        if self._index.drop_deleted(GRACE_S):
            self.collect_at(self._clock() + GRACE_S)
        return len(dead_manifests & manifests) + len(dead_packs)

    def _find_garbage(self, manifests: set[str], packs: set[str], foreign: set[str]) -> tuple[set[str], set[str]]:
        """Which of the listed `manifests` and `packs` to delete. Pages of those packs can no longer be found.

        `foreign` are manifests of other processes that no name mentions. If a record is damaged, nobody can say what
        it refers to: then no pack is deleted, and no foreign manifest.
        """
        damaged = any(entry.damaged for _, _, entry in self._index.all())
        with self._lock:
            named = self._index.manifests()
            pinned = self._pins.keys()
            dead = (manifests | self._packs.keys()) - named - pinned
            young = {manifest_id for manifest_id in dead & foreign if damaged or not self._is_old(manifest_id)}
            dead -= young
            kept = self._packs.keys() - dead
            damaged = damaged or any(self._packs[manifest_id] is None for manifest_id in kept)
            of_dead = self._packs_of(dead)
            unneeded = packs - self._packs_of(kept) - pinned
            dead_packs = set()
            if not damaged:
                for pack_id in unneeded:
                    if pack_id in of_dead or self._is_ours(pack_id) or self._is_old(pack_id):
                        dead_packs.add(pack_id)
            for key, location in list(self._locations.items()):
                if location.pack in dead_packs:
                    del self._locations[key]
        if young or unneeded != dead_packs:
            self.collect_at(self._clock() + GRACE_S)
        return dead, dead_packs

    def _packs_of(self, manifests: Iterable[str]) -> set[str]:
        """The packs of these manifests, as far as they are known and not damaged."""
        packs: set[str] = set()
        for manifest_id in manifests:
            packs.update(self._packs.get(manifest_id) or ())
        return packs

    def _is_ours(self, object_id: str) -> bool:
        """Whether this process made the id, see `new_id`."""
        return object_id.split("-")[1:2] == [self._run]

    def _is_old(self, object_id: str) -> bool:
        """Whether the id was made more than `GRACE_S` ago; False for an id that no store made."""
        try:
            return int(object_id.partition("-")[0], 16) + GRACE_S < self._clock()
        except ValueError:
            return False
