"""Writing one snapshot's pages and reading them back."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from jaxctx.errors import Cancelled, JaxctxError
from jaxctx.store.objects import Buffer, Objects, Pending, in_flight
from jaxctx.store.pages import Pages
from jaxctx.store.records import ContextRecord, Manifest, PageLocation, SnapshotVersion, checksum, encode_manifest

PACK_BYTES = 32 << 20  # that are collected before they are written
READ_AHEAD_BYTES = 8 << 20
_UPLOADS = 2  # packs that become durable while the next one is collected

Commit = Callable[[SnapshotVersion, int | None], SnapshotVersion]


class SnapshotWriter:
    """A durable save. Give it the pages that are `missing`, in any order, then `finish`; or `abort`.

    Nothing is visible before `finish` returns. After an error the writer is of no more use, and what it wrote is gone.
    Methods wait for each other, so it may be aborted while another thread adds.
    """

    def __init__(self, objects: Objects, pages: Pages, commit: Commit, lineage: ContextRecord) -> None:
        self._objects, self._pages, self._commit, self._lineage = objects, pages, commit, lineage
        self._keys = lineage.page_keys()
        self._places = pages.find(self._keys)
        self._manifest = pages.new_id()
        pages.pin([self._manifest])
        self._pins = [place.pack for place in self._places if place] + [self._manifest]
        self._pack, self._data = "", list[Buffer]()  # the pages of a pack that are collected
        self._writing: deque[Pending[object]] = deque()
        self._written: list[str] = []  # keys to delete if it comes to nothing
        self._open = True
        self._given_up = False
        self._lock = threading.RLock()
        self.missing: Sequence[int] = [number for number, place in enumerate(self._places) if place is None]
        """Numbers of the pages whose data the store did not have when the save began."""

    def add(self, number: int, data: Buffer) -> None:
        """The data of one missing page, which must not change until `finish` or `abort` returns."""
        view, size = memoryview(data).cast("B"), self._lineage.page_bytes
        with self._lock:
            if not self._open or self._places[number] is not None or len(view) != size:
                raise ValueError(f"page {number} of {len(view)} bytes: not missing, not a page, or too late")
            if self._data and (len(self._data) + 1) * size > PACK_BYTES:
                self._write(f"packs/{self._pack}", self._data, _UPLOADS)
                self._data = []
            if not self._data:
                self._pack = self._pages.new_id()
                self._pages.pin([self._pack])
                self._pins.append(self._pack)
            self._places[number] = PageLocation(self._pack, len(self._data) * size, checksum(view))
            self._data.append(view)

    def finish(self, version: SnapshotVersion, overwrite: int | None = None) -> SnapshotVersion:
        """Make it durable and visible; `version` describes the lineage. Raises what `SnapshotStore.put` raises."""
        with self._lock:
            places = [place for place in self._places if place is not None]
            if not self._open or len(places) < len(self._places):
                raise ValueError(f"{len(self._places) - len(places)} pages are missing, or the writer is closed")
            manifest = Manifest(self._manifest, self._lineage, self._keys, places)
            if self._data:
                self._write(f"packs/{self._pack}", self._data, 0)  # the manifest refers to packs that last
            self._write(f"manifests/{manifest.id}", [encode_manifest(manifest)], 0)
            try:
                if self._given_up:
                    raise Cancelled("the save was given up")
                version = self._commit(replace(version, durable=True, manifest=manifest.id), overwrite)
            except JaxctxError as error:
                # It may be that the record was replaced and this is not known: the next collection looks.
                self._close(delete=error.code not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"))
                raise
            self._pages.add(manifest)
            self._close(delete=False)
            return version

    def abort(self) -> None:
        """Give up; what was written is deleted, now or by the next collection. Nothing once finished.

        A `finish` on another thread ends with Cancelled, unless it has made the snapshot visible already.
        """
        self._given_up = True
        with self._lock:
            if self._open:
                self._close(delete=True)

    def _write(self, key: str, parts: Sequence[Buffer], behind: int) -> None:
        """Begin to write an object, and wait until at most `behind` of all are not durable yet."""
        self._written.append(key)
        try:
            self._writing.append(self._objects.write(key, parts))
            while len(self._writing) > behind:
                self._writing.popleft()()
        except JaxctxError:
            self.abort()
            raise

    def _close(self, *, delete: bool) -> None:
        self._open, self._data = False, []
        for wait in self._writing:
            with suppress(JaxctxError):
                wait()
        for key in self._written if delete else ():
            with suppress(JaxctxError):
                self._objects.delete(key)
        self._pages.unpin(self._pins, self._manifest)


class SnapshotReader:
    """What a durable version holds, for as long as it is open, even if the version is deleted."""

    def __init__(self, objects: Objects, pages: Pages, manifest: Manifest) -> None:
        """The manifest and its packs are pinned already."""
        self._objects, self._pages, self._manifest = objects, pages, manifest
        self.lineage: ContextRecord = manifest.lineage
        self._open = True

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, memoryview | None]]:
        """The data of pages, in the order asked for; None for one that is lost. Reads ahead a few MiB."""
        runs = list(self._runs(numbers))
        ahead = READ_AHEAD_BYTES // max(self._objects.part_bytes, self.lineage.page_bytes)
        parts = in_flight(map(self._fetch, runs), ahead)
        for run in runs:  # and no name for the data: the memory of one part serves the next
            yield from self._checked(run, next(parts))

    def close(self) -> None:
        """Its pages may be collected from now on."""
        if self._open:
            self._open = False
            self._pages.unpin([self._manifest.id, *self._manifest.packs], self._manifest.id)

    def _runs(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """The numbers, cut where the next page does not lie behind the one before it, or the read gets too long."""
        size, run, places = self.lineage.page_bytes, list[int](), self._manifest.places
        for number in numbers:
            if run:
                last, place = places[run[-1]], places[number]
                adjacent = (last.pack, last.offset + size) == (place.pack, place.offset)
                if not adjacent or len(run) * size >= self._objects.part_bytes:
                    yield run
                    run = []
            run.append(number)
        if run:
            yield run

    def _fetch(self, run: list[int]) -> Pending[Buffer | None]:
        place, size = self._manifest.places[run[0]], len(run) * self.lineage.page_bytes
        return self._objects.fetch(f"packs/{place.pack}", place.offset, place.offset + size)

    def _checked(self, run: list[int], data: Buffer | None) -> Iterator[tuple[int, memoryview | None]]:
        if data is None and len(run) > 1:  # a part is lost: which?
            for number in run:
                yield from self._checked([number], self._fetch([number])())
            return
        view, size = memoryview(data or b""), self.lineage.page_bytes
        for index, number in enumerate(run):
            page, place = view[index * size : (index + 1) * size], self._manifest.places[number]
            if len(page) == size and checksum(page) == place.checksum:
                yield number, page
            else:
                self._pages.forget(self._manifest.keys[number], place)
                yield number, None
