"""Snapshot store: names and versions of all snapshots, and the pages of durable ones. Layout: see the package."""

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from jaxctx.errors import FailedPrecondition, JaxctxError
from jaxctx.lifetime import Lifetime
from jaxctx.store import edits
from jaxctx.store.objects import Objects, open_objects
from jaxctx.store.pages import RETRY_S, Pages
from jaxctx.store.records import ContextRecord, SnapshotVersion, decode_manifest
from jaxctx.store.snapshot_index import Edit, Entry, SnapshotIndex, data_loss, not_found
from jaxctx.store.transfer import SnapshotReader, SnapshotWriter


class SnapshotStore:
    """Named versions of contexts. Thread-safe. Methods block for I/O unless they say that they return at once.

    Any method may raise Unavailable (STORE_FAILED) or ResourceExhausted (STORE_FULL). Then nothing has changed, as far
    as the store still lets us know. Deleting a version does not delete its pages: `expire`, called on a thread of its
    own, does that, and also collects what an earlier process left behind.

    Several processes may use one URL. Each sees its own changes, and those of others for the names that it changes or
    reads again with `refresh_name` or `refresh_tenant`.
    """

    def __init__(
        self,
        objects: str | Objects | None,
        *,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        history: int | None = None,
    ) -> None:
        """Reads the records of all names, nothing else. `objects`: a URL (see `open_objects`); None: none are durable.

        `clock` returns unix seconds; `new_id` makes unpredictable ids of letters and digits. Of each name, `history`
        versions are kept (None: all): the oldest is removed when one more is saved.
        """
        self._history = history
        self.durable = objects is not None
        if objects is None or isinstance(objects, str):
            objects = open_objects("memory://none" if objects is None else objects)
        self._objects = objects
        self._clock = clock
        self._index = SnapshotIndex(self._objects, clock, new_id)
        self._pages = Pages(self._objects, self._index, clock, new_id)

    def on_gone(self, callback: Callable[[Sequence[SnapshotVersion]], object]) -> None:
        """Call `callback` with versions that are removed from now on, for any reason: once for each, on any thread."""
        self._index.on_gone = callback

    def refresh_name(self, tenant: str, name: str) -> None:
        """Read what other processes made of a name, see `SnapshotIndex.refresh_name`."""
        self._index.refresh_name(tenant, name)

    def refresh_tenant(self, tenant: str) -> None:
        """Read what other processes made of a tenant's names, see `SnapshotIndex.refresh_tenant`.

        Without it `list` and `usage` know nothing of names that only other processes have changed.
        """
        self._index.refresh_tenant(tenant)

    # Reads: return at once. Raise NotFound (SNAPSHOT_NOT_FOUND), DataLoss for a damaged record.

    def get(self, tenant: str, name: str, version: int | None = None) -> SnapshotVersion:
        """One version; None: the latest."""
        return edits.find_version(self._index.entry(tenant, name), self._clock(), name, version)

    def history(self, tenant: str, name: str) -> Sequence[SnapshotVersion]:
        """All versions of a name that are kept, latest first."""
        entry = self._index.entry(tenant, name)
        now = self._clock()
        edits.find_version(entry, now, name, None)
        return entry.live(now)[::-1]

    def list(self, tenant: str, prefix: str = "", after: str = "", limit: int = 100) -> Sequence[SnapshotVersion]:
        """The latest version of each name that begins with `prefix`, in name order, starting after `after`."""
        entries = self._index.names(tenant)
        now = self._clock()
        listed: builtins.list[SnapshotVersion] = []
        for name in sorted(name for name in entries if name > after and name.startswith(prefix)):
            if len(listed) >= limit:
                break
            listed += entries[name].live(now)[-1:]
        return listed

    def count(self) -> int:
        """How many versions there are, of all tenants, expired ones that are not removed yet included."""
        return sum(len(entry.versions) for _, _, entry in self._index.all())

    def usage(
        self, tenant: str, saving: Iterable[SnapshotVersion] = (), dropped: Iterable[SnapshotVersion] = ()
    ) -> tuple[int, int]:
        """How many versions the tenant has, and the bytes of their pages and attachments.

        `saving` are versions that are being saved; they count unless they are there already, by their `saving` field.
        `dropped` are those that a save drops (`dropped_by`); they do not count.
        """
        now = self._clock()
        gone = {edits.key_of(version) for version in dropped}
        versions: builtins.list[SnapshotVersion] = []
        for entry in self._index.names(tenant).values():
            versions += entry.live(now)
        if gone:
            versions = [version for version in versions if edits.key_of(version) not in gone]
        known = {version.saving for version in versions}
        versions += [version for version in saving if version.tenant == tenant and version.saving not in known]
        return len(versions), sum(version.size_bytes + version.attachment_bytes for version in versions)

    # Changes: durable before they return, where they concern durable versions.

    def put(
        self, version: SnapshotVersion, overwrite: int | None = None, max_versions: int | None = None
    ) -> SnapshotVersion:
        """Give a snapshot in memory its name; returns the version with its number.

        At most `max_versions` versions of the name are kept, if the store's own limit (`history`) is not lower.
        Raises AlreadyExists if the name has a version, unless `overwrite` is its latest (else Aborted,
        VERSION_MISMATCH; or NotFound).
        """
        limits = [limit for limit in (self._history, max_versions) if limit is not None]
        history = min(limits, default=None)
        edit = partial(edits.add_version, version=version, overwrite=overwrite, history=history)
        _, entry = self._change(version.tenant, version.name, edit)
        return edits.find_added(entry, version) or entry.versions[-1]

    def dropped_by(self, tenant: str, name: str, max_versions: int | None = None) -> Sequence[SnapshotVersion]:
        """The versions that are dropped if one more of this name is saved now, with `max_versions` as in `put`; returns
        at once.
        """
        limits = [limit for limit in (self._history, max_versions) if limit is not None]
        live = self._index.entry(tenant, name).live(self._clock())
        return live[: max(len(live) + 1 - min(limits), 0)] if limits else ()

    def check(self, tenant: str, name: str, overwrite: int | None = None) -> None:
        """Raise what `put` or `SnapshotWriter.finish` would raise now, before the work is done; returns at once."""
        edits.check_overwrite(self._index.entry(tenant, name), name, overwrite, self._clock())

    def take(self, version: SnapshotVersion, *, latest: bool) -> Sequence[SnapshotVersion]:
        """Delete exactly this version, with `latest` its whole name; returns the removed versions.

        Of two callers one gets it, the other NotFound. Open it before: its pages stay until the reader is closed.
        Raises Aborted (VERSION_MISMATCH) with `latest` if the name has another latest version by now.
        """
        edit = partial(edits.take_version, version=version, latest=latest)
        gone, _ = self._change(version.tenant, version.name, edit)
        return gone

    def remove(self, tenant: str, name: str, version: int | None = None) -> Sequence[SnapshotVersion]:
        """Delete one version, or with None the name, even a damaged one; returns the removed versions."""
        edit = partial(edits.remove_version, name=name, number=version)
        gone, _ = self._change(tenant, name, edit)
        return gone

    def _change(self, tenant: str, name: str, edit: Edit) -> tuple[Sequence[SnapshotVersion], Entry]:
        """Change a name, and report removed versions; returns those and the entry as it is now."""
        before, after = self._index.change(tenant, name, edit)
        kept = {edits.key_of(version) for version in after.versions}
        gone = [version for version in before.versions if edits.key_of(version) not in kept]
        if before.damaged or any(version.durable for version in gone):
            self._pages.collect_at(self._clock())
        self._index.on_gone(gone)
        return gone, after

    def update(
        self,
        tenant: str,
        name: str,
        version: int | None = None,
        lifetime: Lifetime | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SnapshotVersion:
        """Change lifetime and labels of a version, by default the latest; None leaves either. Returns the version."""
        update = edits.VersionUpdate(name, version, lifetime, labels)
        self._change(tenant, name, update)
        assert update.changed is not None
        return update.changed

    def touch(self, version: SnapshotVersion) -> None:
        """Note a use of exactly this version: if it still exists, a sliding lifetime starts again."""
        self._change(version.tenant, version.name, partial(edits.use_version, version=version))

    def expire(self) -> None:
        """Remove expired versions, and pages that are not needed any more. To be called from time to time.

        A version that cannot be removed now is not readable either; its removal is tried again later.
        """
        now = self._clock()
        for tenant, name in self._index.pop_expired(now):
            try:
                self._change(tenant, name, edits.keep_live)
            except JaxctxError:
                self._index.retry_expiry(tenant, name, now + RETRY_S)
        next_collection = self._pages.next_collection
        if next_collection is not None and next_collection <= now:
            with suppress(JaxctxError):
                self.collect()

    def begin(self, lineage: ContextRecord) -> SnapshotWriter:
        """Begin to save a snapshot durably. Raises FailedPrecondition (NO_STORE).

        The first call reads all manifests, to know which pages are stored. Two saves of equal pages at the same time
        may both store them.
        """
        if not self.durable:
            raise FailedPrecondition("this server has no store for durable snapshots", reason="NO_STORE")
        return SnapshotWriter(self._objects, self._pages, self.put, lineage)

    def open(self, version: SnapshotVersion) -> SnapshotReader:
        """Read a durable version. Raises NotFound if it is removed by now, DataLoss if its manifest is damaged."""
        self._pages.pin([version.manifest])
        try:
            if self.get(version.tenant, version.name, version.version).manifest != version.manifest:
                raise not_found(version.name)
            stored, _ = self._objects.read(f"manifests/{version.manifest}")()
            manifest = decode_manifest(stored, version.manifest) if stored is not None else None
            if manifest is None:
                raise data_loss(version.name)
        except BaseException:
            self._pages.unpin([version.manifest], version.manifest)
            raise
        self._pages.pin(manifest.packs)
        return SnapshotReader(self._objects, self._pages, manifest)

    def collect(self) -> int:
        """Delete the objects that are not needed; returns how many. `expire` calls this when there may be some."""
        return self._pages.collect()

    def close(self) -> None:
        """Stop. Writers and readers must not be used afterwards."""
        self._objects.close()
