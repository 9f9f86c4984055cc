"""Transfer: writing the pages and the attachment of one durable snapshot, and reading them back.

SnapshotWriter: add(page) …, attachment ──▶ packs ──▶ manifest ──▶ record of the name: visible and durable
SnapshotReader: page numbers ──▶ reads of adjacent pages, ahead of use ──▶ pages with the right checksum
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from jaxctx.errors import Cancelled, DataLoss, JaxctxError, Unavailable
from jaxctx.store.objects import READ_AHEAD, Buffer, Objects, Pending, in_flight
from jaxctx.store.pages import Pages
from jaxctx.store.records import (
    AttachmentLocation,
    ContextRecord,
    Manifest,
    PageLocation,
    SnapshotVersion,
    checksum,
    encode_manifest,
)

PACK_BYTES = 32 << 20  # pages are gathered up to this size before they are written as one pack
READ_AHEAD_BYTES = 8 << 20
_UPLOADS = 2  # packs that become durable while the next one is gathered


class PagesGone(Unavailable):
    """A save shared stored pages that another process has deleted. A new save of the same context stores them anew."""


class Commit(Protocol):
    """Gives a version its name: `SnapshotStore.put`."""

    def __call__(
        self, version: SnapshotVersion, overwrite: int | None, max_versions: int | None, /
    ) -> SnapshotVersion: ...


class SnapshotWriter:
    """A durable save: `add` the pages that are `missing`, in any order, then `finish`; or `abort`.

    Nothing is visible before `finish` returns. After an error the writer must not be used again, and what it wrote is
    deleted. Methods wait for each other, so the writer may be aborted while another thread adds pages.
    """

    def __init__(self, objects: Objects, pages: Pages, commit: Commit, lineage: ContextRecord) -> None:
        self._objects = objects
        self._pages = pages
        self._commit = commit
        self._lineage = lineage
        self._keys = lineage.page_keys()
        self._locations = pages.find(self._keys)
        self._manifest = pages.new_id()
        pages.pin([self._manifest])
        self._pins = [location.pack for location in self._locations if location is not None]
        self._shared = set(self._pins)  # packs that were there before
        self._pins.append(self._manifest)
        self._pack = ""  # id of the pack that is being gathered
        self._data: list[Buffer] = []  # its pages
        self._writing: deque[Pending[object]] = deque()  # objects that are not durable yet
        self._written: list[str] = []  # keys to delete if the save fails
        self._open = True
        self._given_up = False
        self._lock = threading.RLock()
        self.missing: Sequence[int] = [number for number, location in enumerate(self._locations) if location is None]
        """Numbers of the pages whose data the store did not have when the save began."""

    def add(self, number: int, data: Buffer) -> None:
        """The data of one missing page, which must not change until `finish` or `abort` returns."""
        view = memoryview(data).cast("B")
        size = self._lineage.page_bytes
        with self._lock:
            if not self._open or self._locations[number] is not None or len(view) != size:
                raise ValueError(f"page {number} of {len(view)} bytes: not missing, not a page, or too late")
            if self._data and (len(self._data) + 1) * size > PACK_BYTES:
                self._write(f"packs/{self._pack}", self._data, _UPLOADS)
                self._data = []
            if not self._data:
                self._pack = self._pages.new_id()
                self._pages.pin([self._pack])
                self._pins.append(self._pack)
            self._locations[number] = PageLocation(self._pack, len(self._data) * size, checksum(view))
            self._data.append(view)

    def finish(
        self,
        version: SnapshotVersion,
        overwrite: int | None = None,
        *,
        attachment: bytes = b"",
        max_versions: int | None = None,
    ) -> SnapshotVersion:
        """Make it durable and visible, with this attachment; `version` describes the lineage.

        Raises what `SnapshotStore.put` raises, and PagesGone.
        """
        with self._lock:
            locations = [location for location in self._locations if location is not None]
            if not self._open or len(locations) < len(self._locations):
                raise ValueError(f"{len(self._locations) - len(locations)} pages are missing, or the writer is closed")
            attachment_location = self._write_attachment(attachment) if attachment else None
            manifest = Manifest(self._manifest, self._lineage, self._keys, locations, attachment_location)
            if self._data:
                self._write(f"packs/{self._pack}", self._data, _UPLOADS)
            self._wait(0)  # the manifest must refer to durable packs only
            self._write(f"manifests/{manifest.id}", [encode_manifest(manifest)], 0)
            self._check_shared()  # only now: the manifest keeps others from deleting what is still there
            try:
                if self._given_up:
                    raise Cancelled("the save was given up")
                version = replace(version, durable=True, manifest=manifest.id, attachment_bytes=len(attachment))
                version = self._commit(version, overwrite, max_versions)
            except JaxctxError as error:
                # After these errors the record may have been replaced: the next collection finds out. After any
                # other the index knows.
                unknown = error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
                self._close(delete=not unknown)
                raise
            self._pages.add(manifest)
            self._close(delete=False)
            return version

    def abort(self) -> None:
        """Give up: what was written is deleted, now or by the next collection. Does nothing after `finish`.

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
        except JaxctxError:
            self.abort()
            raise
        self._wait(behind)

    def _wait(self, behind: int) -> None:
        """Wait until at most `behind` of the objects are not durable yet."""
        try:
            while len(self._writing) > behind:
                self._writing.popleft()()
        except JaxctxError:
            self.abort()
            raise

    def _check_shared(self) -> None:
        """Look whether the packs are still there that this save shares with others. Raises PagesGone."""
        packs = sorted(self._shared)
        try:
            first_bytes = in_flight((self._objects.fetch(f"packs/{pack}", 0, 1) for pack in packs), READ_AHEAD)
            gone = [pack for pack, data in zip(packs, first_bytes, strict=True) if not data]
            for pack in gone:
                self._pages.forget_pack(pack)
            if gone:
                message = "another process deleted pages that the snapshot shares; saving it again stores them"
                raise PagesGone(message, reason="STORE_FAILED", retry_after_s=1.0)
        except JaxctxError:
            self.abort()
            raise

    def _write_attachment(self, attachment: bytes) -> AttachmentLocation:
        """Begin to write the attachment as a pack of its own, and return where it will be.

        A pack is deleted as a whole: in one with pages it would outlive its version as long as another one shares them.
        """
        pack = self._pages.new_id()
        self._pages.pin([pack])
        self._pins.append(pack)
        self._write(f"packs/{pack}", [attachment], _UPLOADS)
        return AttachmentLocation(pack, len(attachment), checksum(attachment))

    def _close(self, *, delete: bool) -> None:
        """Wait for the writes, delete what was written if asked for, and undo the pins.

        What a version names is never deleted, whatever went wrong after it got its name.
        """
        self._open = False
        self._data = []
        for wait in self._writing:
            with suppress(JaxctxError):
                wait()
        if delete and not self._pages.is_named(self._manifest):
            for key in self._written:
                with suppress(JaxctxError):
                    self._objects.delete(key)
        self._pages.unpin(self._pins, self._manifest)


class SnapshotReader:
    """Reads a durable version. Its pages and its attachment stay until `close`, even if the version is deleted."""

    def __init__(self, objects: Objects, pages: Pages, manifest: Manifest) -> None:
        """The caller has pinned the manifest and its packs; `close` undoes that."""
        self._objects = objects
        self._pages = pages
        self._manifest = manifest
        self.lineage: ContextRecord = manifest.lineage
        self._open = True

    def attachment(self) -> bytes:
        """The attachment of the version, empty if it has none. Raises DataLoss if it is lost or damaged."""
        location = self._manifest.attachment
        if location is None:
            return b""
        data = self._objects.fetch(f"packs/{location.pack}", 0, location.size_bytes)()
        if data is None or len(data) != location.size_bytes or checksum(data) != location.checksum:
            raise DataLoss("the attachment is lost or damaged")
        return bytes(data)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, memoryview | None]]:
        """Number and data of each page, in the given order; None for a page that is lost. Reads ahead a few MiB."""
        runs = list(self._runs(numbers))
        ahead = READ_AHEAD_BYTES // max(self._objects.part_bytes, self.lineage.page_bytes)
        parts = in_flight(map(self._fetch, runs), ahead)
        for run in runs:
            yield from self._verify(run, next(parts))  # no name for the data, so that its memory can be used again

    def close(self) -> None:
        """Its pages and its attachment may be collected from now on."""
        if self._open:
            self._open = False
            self._pages.unpin([self._manifest.id, *self._manifest.packs], self._manifest.id)

    def _runs(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """The numbers in runs that one read each serves: adjacent pages of one pack, up to `part_bytes`."""
        size = self.lineage.page_bytes
        locations = self._manifest.locations
        run: list[int] = []
        for number in numbers:
            if run:
                last, location = locations[run[-1]], locations[number]
                adjacent = (last.pack, last.offset + size) == (location.pack, location.offset)
                if not adjacent or len(run) * size >= self._objects.part_bytes:
                    yield run
                    run = []
            run.append(number)
        if run:
            yield run

    def _fetch(self, run: list[int]) -> Pending[Buffer | None]:
        """Begin to read the pages of a run."""
        first = self._manifest.locations[run[0]]
        size = len(run) * self.lineage.page_bytes
        return self._objects.fetch(f"packs/{first.pack}", first.offset, first.offset + size)

    def _verify(self, run: list[int], data: Buffer | None) -> Iterator[tuple[int, memoryview | None]]:
        """Number and data of each page of a run; None for a page that is missing or fails its checksum."""
        if data is None and len(run) > 1:  # some page cannot be read: find out which
            for number in run:
                yield from self._verify([number], self._fetch([number])())
            return
        view = memoryview(data or b"")
        size = self.lineage.page_bytes
        for position, number in enumerate(run):
            page = view[position * size : (position + 1) * size]
            location = self._manifest.locations[number]
            if len(page) == size and checksum(page) == location.checksum:
                yield number, page
            else:
                self._pages.forget(self._manifest.keys[number], location)
                yield number, None
