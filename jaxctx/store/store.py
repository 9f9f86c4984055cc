"""The snapshot store: the catalogue of all snapshots, and the durable ones' pages. See the package for the layout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from jaxctx.errors import Aborted, AlreadyExists, FailedPrecondition, JaxctxError
from jaxctx.lifetime import Lifetime
from jaxctx.store.objects import Objects, open_objects
from jaxctx.store.pages import RETRY_S, Pages
from jaxctx.store.records import ContextRecord, SnapshotVersion, decode_manifest
from jaxctx.store.snapshot_index import Edit, Entry, SnapshotIndex, damaged, missing
from jaxctx.store.transfer import SnapshotReader, SnapshotWriter


class SnapshotStore:
    """Named versions of contexts. Thread-safe and blocking: only what is said to answer at once does no I/O.

    Any method may raise Unavailable (STORE_FAILED) or ResourceExhausted (STORE_FULL), after which nothing has changed
    as far as the store still lets us know. Deleting a version does not delete its pages: `expire`, on a thread of its
    own, does that, and begins with what an earlier process left behind.

    Several processes may use one URL. Each sees its own changes and, of names that it changes or is told to `look` at,
    the others'.
    """

    def __init__(
        self,
        objects: str | Objects | None,
        *,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        history: int | None = None,
    ) -> None:
        """Reads the names' records, nothing else. `objects`: a URL (see `open_objects`); None: no durable snapshots.

        `clock` tells unix seconds; `new_id` makes unpredictable ids of letters and digits. Of a name, `history`
        versions are kept (None: all): the oldest goes when one more is saved.
        """
        self._history = history
        self.durable = objects is not None
        if objects is None or isinstance(objects, str):
            objects = open_objects("memory://none" if objects is None else objects)
        self._objects = objects
        self._clock = clock
        self._catalogue = SnapshotIndex(self._objects, clock)
        self.look = self._catalogue.look
        self._pages = Pages(self._objects, self._catalogue, clock, new_id)

    def on_gone(self, tell: Callable[[Sequence[SnapshotVersion]], object]) -> None:
        """Call `tell` with versions that are gone from now on, for whatever reason; from any thread, with each once."""
        self._catalogue.on_gone = tell

    # What is there: answers at once. Raises NotFound (SNAPSHOT_NOT_FOUND), DataLoss for a damaged record.

    def get(self, tenant: str, name: str, version: int | None = None) -> SnapshotVersion:
        """One version; None: the latest."""
        return _pick(self._catalogue.entry(tenant, name), self._clock(), name, version)

    def history(self, tenant: str, name: str) -> Sequence[SnapshotVersion]:
        """All versions of a name that are kept, latest first."""
        entry, now = self._catalogue.entry(tenant, name), self._clock()
        _pick(entry, now, name, None)
        return entry.live(now)[::-1]

    def list(self, tenant: str, prefix: str = "", after: str = "", limit: int = 100) -> Sequence[SnapshotVersion]:
        """The latest version of each name that begins with `prefix`, in name order, starting after `after`."""
        names, now = self._catalogue.names(tenant), self._clock()
        chosen = sorted(name for name in names if name > after and name.startswith(prefix))
        return list(islice(chain.from_iterable(names[name].live(now)[-1:] for name in chosen), limit))

    def count(self) -> int:
        """Versions of all tenants, those that are over but not removed yet among them."""
        return sum(len(entry.versions) for _, _, entry in self._catalogue.all())

    def usage(self, tenant: str, saving: Iterable[SnapshotVersion] = ()) -> tuple[int, int]:
        """Versions of the tenant, and bytes of their pages; with those that are being saved, if they have `saving`."""
        now = self._clock()
        versions = [version for entry in self._catalogue.names(tenant).values() for version in entry.live(now)]
        there = {version.saving for version in versions}
        versions += [version for version in saving if version.tenant == tenant and version.saving not in there]
        return len(versions), sum(version.size_bytes for version in versions)

    # Changes: durable before they return, where they concern durable versions.

    def put(self, version: SnapshotVersion, overwrite: int | None = None) -> SnapshotVersion:
        """Give a snapshot in memory its name; the version as it is in the catalogue.

        Raises AlreadyExists if the name has a version, unless `overwrite` is its latest (else Aborted,
        VERSION_MISMATCH; or NotFound).
        """

        def edit(entry: Entry, now: float) -> Entry:
            kept = _check(entry, version.name, overwrite, now)
            number = entry.last_version + 1 if kept else 1
            new = replace(version, version=number, parent_version=overwrite or 0, created_at=now)
            return replace(entry.keep([*kept, new][-(self._history or 0) :]), last_version=number)

        return self._change(version.tenant, version.name, edit)[1].versions[-1]

    def check(self, tenant: str, name: str, overwrite: int | None = None) -> None:
        """Raise what `put` or `finish` would now, before the work is done; answers at once."""
        _check(self._catalogue.entry(tenant, name), name, overwrite, self._clock())

    def take(self, version: SnapshotVersion, *, latest: bool) -> Sequence[SnapshotVersion]:
        """Delete this very version, with `latest` its name too; what is gone. Of two takers one gets it, or NotFound.

        Open it first: its pages stay until the reader is closed. With `latest` and another latest version by now:
        Aborted (VERSION_MISMATCH).
        """

        def edit(entry: Entry, now: float) -> Entry:
            live = entry.live(now)
            if latest and live and _itself(live[-1]) != _itself(version):
                raise Aborted(f"snapshot {version.name!r} was saved anew meanwhile", reason="VERSION_MISMATCH")
            kept = [one for one in live if _itself(one) != _itself(version)]
            if len(kept) == len(live):
                raise damaged(version.name) if entry.damaged else missing(version.name)
            return entry.keep(() if latest else kept)

        return self._change(version.tenant, version.name, edit)[0]

    def remove(self, tenant: str, name: str, version: int | None = None) -> Sequence[SnapshotVersion]:
        """Delete one version, or with None the name, and even a damaged one; the versions that are gone."""

        def edit(entry: Entry, now: float) -> Entry:
            if entry.damaged and version is None:
                return replace(entry.keep(()), damaged=False)
            found = _pick(entry, now, name, version)
            return entry.keep(() if version is None else [one for one in entry.versions if one is not found])

        return self._change(tenant, name, edit)[0]

    def _change(self, tenant: str, name: str, edit: Edit) -> tuple[Sequence[SnapshotVersion], Entry]:
        """The versions that are gone, and the entry as it is now."""
        before, after = self._catalogue.change(tenant, name, edit)
        kept = {_itself(version) for version in after.versions}
        gone = [version for version in before.versions if _itself(version) not in kept]
        if before.damaged or any(version.durable for version in gone):
            self._pages.collect_at(self._clock())
        self._catalogue.on_gone(gone)
        return gone, after

    def update(
        self,
        tenant: str,
        name: str,
        version: int | None = None,
        lifetime: Lifetime | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SnapshotVersion:
        """Change what is given of a version, by default the latest."""
        given = {"lifetime": lifetime, "labels": labels}
        changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
        changed: list[SnapshotVersion] = []

        def edit(entry: Entry, now: float) -> Entry:
            found = _pick(entry, now, name, version)
            changed.append(replace(found, **changes))
            return entry.keep(changed[-1] if one is found else one for one in entry.versions)

        self._change(tenant, name, edit)
        return changed[-1]

    def touch(self, version: SnapshotVersion) -> None:
        """A use of this very version, if it is still there: a sliding lifetime begins again."""

        def used(one: SnapshotVersion, now: float) -> SnapshotVersion:
            return replace(one, lifetime=one.lifetime.used(now)) if _itself(one) == _itself(version) else one

        self._change(
            version.tenant, version.name, lambda entry, now: entry.keep(used(one, now) for one in entry.versions)
        )

    def expire(self) -> None:
        """Remove what is over, and pages that nobody needs any more; to be called now and then, in no hurry.

        What cannot be removed now is not readable either, and tried again later.
        """
        now = self._clock()
        for tenant, name in self._catalogue.take_endings(now):
            try:
                self._change(tenant, name, lambda entry, now: entry.keep(entry.live(now)))
            except JaxctxError:
                self._catalogue.remind(tenant, name, now + RETRY_S)
        if self._pages.next_collection is not None and self._pages.next_collection <= now:
            with suppress(JaxctxError):
                self.collect()

    def begin(self, lineage: ContextRecord) -> SnapshotWriter:
        """Save a snapshot durably. Raises FailedPrecondition (NO_STORE).

        The first call reads all manifests, to know which pages are stored. Two saves of equal pages at the same time
        may both store them.
        """
        if not self.durable:
            raise FailedPrecondition("this server has no store for durable snapshots", reason="NO_STORE")
        return SnapshotWriter(self._objects, self._pages, self.put, lineage)

    def open(self, version: SnapshotVersion) -> SnapshotReader:
        """Read a durable version. Raises NotFound if it is gone by now, DataLoss if its manifest is."""
        self._pages.pin([version.manifest])
        try:
            if self.get(version.tenant, version.name, version.version).manifest != version.manifest:
                raise missing(version.name)
            stored, _ = self._objects.read(f"manifests/{version.manifest}")()
            manifest = decode_manifest(stored, version.manifest) if stored is not None else None
            if manifest is None:
                raise damaged(version.name)
        except BaseException:
            self._pages.unpin([version.manifest], version.manifest)
            raise
        self._pages.pin(manifest.packs)
        return SnapshotReader(self._objects, self._pages, manifest)

    def collect(self) -> int:
        """Delete the objects that nobody needs; how many. `expire` does this when there may be some."""
        return self._pages.collect()

    def close(self) -> None:
        """Stop. Writers and readers are of no more use."""
        self._objects.close()


def _pick(entry: Entry, now: float, name: str, number: int | None) -> SnapshotVersion:
    """That version, the latest for None, of a name's. Raises NotFound, DataLoss."""
    for version in reversed(entry.live(now)):
        if number in (None, version.version):
            return version
    raise damaged(name) if entry.damaged else missing(name)


def _itself(version: SnapshotVersion) -> tuple[int, float, str, int]:
    """What stays the same of a version that is changed; a number alone may be given anew."""
    return version.version, version.created_at, version.manifest, id(version.held)


def _check(entry: Entry, name: str, overwrite: int | None, now: float) -> tuple[SnapshotVersion, ...]:
    """The live versions of a name that may get another one."""
    if entry.damaged:
        raise damaged(name)
    kept = entry.live(now)
    if overwrite is None and kept:
        raise AlreadyExists(f"snapshot {name!r} exists; its version is {kept[-1].version}")
    if overwrite is not None and not kept:
        raise missing(name)
    if overwrite is not None and kept[-1].version != overwrite:
        raise Aborted(f"the version is {kept[-1].version}, not {overwrite}", reason="VERSION_MISMATCH")
    return kept
