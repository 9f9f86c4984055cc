"""Pages: which ones are stored, who needs them, and the collection of what nobody does.

A manifest is needed while a version names it or somebody has it pinned; a pack while a needed manifest has pages in it
or somebody has it pinned. A pack is deleted as a whole: as long as one of its pages is needed, all its bytes stay.

Other processes may use the same store. Their objects are known by ids that are not ours, and are left alone until they
are `GRACE_S` old and no name says that they are needed. Two processes that save and delete snapshots with the same
prefix at the same moment can still lose pages of the one that saves; it finds out when it opens it.
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
    """Thread-safe. Reads the manifests that exist when they are first needed, never a page."""

    def __init__(
        self, objects: Objects, catalogue: SnapshotIndex, clock: Callable[[], float], new_id: Callable[[], str]
    ) -> None:
        self._objects, self._catalogue, self._clock, self._new_id = objects, catalogue, clock, new_id
        self._run = new_id()
        self._seen = catalogue.manifests()  # named since we began, so that we know what became of them
        self._reading = threading.Lock()  # held while manifests are read, and for a collection
        self._loaded = False
        self.next_collection: float | None = clock()  # when there may be something to collect
        self._lock = threading.Lock()  # guards what follows
        self._places: dict[bytes, PageLocation] = {}
        self._packs: dict[str, frozenset[str] | None] = {}  # by manifest; None: it is damaged
        self._pins: Counter[str] = Counter()  # ids of manifests and packs

    def new_id(self) -> str:
        """For a pack or manifest; tells when and by whom it was made."""
        return f"{int(self._clock()):010x}-{self._run}-{self._new_id()}"

    def find(self, keys: Iterable[bytes]) -> list[PageLocation | None]:
        """Where the pages of these keys are stored, if they are; the packs are pinned, once for each page."""
        if not self._loaded:
            with self._reading:
                self._read(self._catalogue.manifests())
                self._loaded = True
        with self._lock:
            places = [self._places.get(key) for key in keys]
            self._pins.update(place.pack for place in places if place)
        return places

    def pin(self, ids: Iterable[str]) -> None:
        """Keep these from being collected."""
        with self._lock:
            self._pins.update(ids)

    def unpin(self, ids: Iterable[str], manifest: str) -> None:
        """Take back one `pin` of each; unless a version names the manifest, there may be something to collect."""
        with self._lock:
            self._pins.subtract(ids)
            self._pins = +self._pins
        if manifest not in self._catalogue.manifests():
            self.collect_at(self._clock())

    def collect_at(self, at: float) -> None:
        """There may be something to collect from then on."""
        with self._lock:
            self.next_collection = at if self.next_collection is None else min(at, self.next_collection)

    def add(self, manifest: Manifest) -> None:
        """A manifest is stored; its pages can be found from now on."""
        with self._lock:
            self._packs[manifest.id] = manifest.packs
            for key, place in zip(manifest.keys, manifest.places, strict=True):
                self._places.setdefault(key, place)

    def forget(self, key: bytes, place: PageLocation) -> None:
        """The page is lost: whoever saves it again must store it again."""
        with self._lock:
            if self._places.get(key) == place:
                del self._places[key]

    def _read(self, ids: Iterable[str]) -> None:
        unknown, named = [one for one in ids if one not in self._packs], self._catalogue.manifests()
        records = in_flight((self._objects.read(f"manifests/{one}") for one in unknown), READ_AHEAD)
        for one, (stored, _) in zip(unknown, records, strict=True):
            manifest = decode_manifest(stored, one) if stored is not None else None
            if manifest is not None and one in named:
                self.add(manifest)
            elif stored is not None:
                with self._lock:  # not its pages: of what nobody names, a collection may have deleted the packs
                    self._packs[one] = manifest.packs if manifest else None

    def collect(self) -> int:
        """Delete the manifests and packs that nobody needs; how many."""
        with self._reading:
            self.next_collection = None
            try:
                return self._collect()
            except BaseException:
                self.collect_at(self._clock() + RETRY_S)
                raise

    def _collect(self) -> int:
        self._catalogue.settle()
        manifests, packs = set(self._objects.list("manifests/")), set(self._objects.list("packs/"))
        self._seen = (self._seen | self._catalogue.manifests()) & manifests
        strange = {one for one in manifests - self._seen if not self._ours(one)}
        if any(map(self._old, strange)):
            self._catalogue.refresh()
        self._read(manifests)
        self._loaded = True
        dead_manifests, dead_packs = self._condemn(manifests, packs, strange)
        # A manifest goes last: it tells which packs are nobody's, if not all of them can be deleted now.
        for one in dead_packs:
            self._objects.delete(f"packs/{one}")
        for one in dead_manifests:
            if one in manifests:
                self._objects.delete(f"manifests/{one}")
            with self._lock:
                self._packs.pop(one, None)
        return len(dead_manifests & manifests) + len(dead_packs)

    def _condemn(self, manifests: set[str], packs: set[str], strange: set[str]) -> tuple[set[str], set[str]]:
        """Which of these listed objects to delete; the pages of those packs can no longer be found."""
        unclear = any(entry.damaged for _, _, entry in self._catalogue.all())
        with self._lock:
            named, pinned = self._catalogue.manifests(), self._pins.keys()
            dead = (manifests | self._packs.keys()) - named - pinned
            young = {one for one in dead & strange if unclear or not self._old(one)}
            dead -= young
            kept = self._packs.keys() - dead
            unclear = unclear or any(self._packs[one] is None for one in kept)
            known = {pack for one in dead for pack in self._packs.get(one) or ()}
            needed = {pack for one in kept for pack in self._packs[one] or ()}
            unneeded = packs - needed - pinned
            dead_packs = {one for one in unneeded if one in known or self._ours(one) or self._old(one)}
            if unclear:  # nobody can say what the damaged record refers to
                dead_packs.clear()
            for key in [key for key, place in self._places.items() if place.pack in dead_packs]:
                del self._places[key]
        if young or unneeded != dead_packs:
            self.collect_at(self._clock() + GRACE_S)
        return dead, dead_packs

    def _ours(self, one: str) -> bool:
        return one.split("-")[1:2] == [self._run]

    def _old(self, one: str) -> bool:
        try:
            return int(one.partition("-")[0], 16) + GRACE_S < self._clock()
        except ValueError:
            return False  # not made by a store
