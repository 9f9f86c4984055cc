"""`SnapshotService`: snapshots and publications of one engine, as the Engine interface has them.

It stands between the step thread, which has the contexts, and the store, which has the snapshots. Runs on the caller's
event loop; what blocks runs on threads. A thread of its own removes what is over.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.engine.interface import Caller
from jaxctx.engine.snapshots.info import snapshot_info
from jaxctx.engine.snapshots.open import SnapshotOpener
from jaxctx.engine.snapshots.publications import Publications
from jaxctx.engine.snapshots.save import SnapshotSaver
from jaxctx.engine.snapshots.snapshot_contexts import SnapshotContexts
from jaxctx.engine.snapshots.store_calls import TenantRefresher, complete_or_undo, on_store_thread, refresh_name
from jaxctx.errors import NotFound
from jaxctx.store import SnapshotStore, SnapshotVersion
from jaxctx.types import (
    FillResult,
    GetSnapshotResult,
    OpenRequest,
    Publication,
    RetentionUpdate,
    SaveRequest,
    Snapshot,
    TokenIds,
)

log = logging.getLogger("jaxctx.engine")
EXPIRY_INTERVAL_S = 1.0


class SnapshotService:
    """Snapshots and publications of one engine. `start` before use, `stop` at the end.

    NotFound (SNAPSHOT_NOT_FOUND) for a name or version that the tenant does not have.
    """

    def __init__(self, core: EngineCore, loop: StepLoop, store: SnapshotStore) -> None:
        self._core = core
        self._loop = loop
        self._store = store
        self._lifecycle = core.lifecycle
        self._contexts = SnapshotContexts(
            core.config, core.cache, core.contexts, core.lifecycle, core.runner, core.transfers
        )
        self._publications = Publications(core.cache, core.contexts, core.lifecycle, core.quotas, core.deps.new_id)
        self._tenants = TenantRefresher(store)
        self._saver = SnapshotSaver(core, loop, store, self._contexts, self._tenants, core.quotas)
        self._opener = SnapshotOpener(core, loop, store, self._contexts, core.runner)
        self._stopped = threading.Event()
        self._expiry_thread = threading.Thread(target=self._expire, name="jaxctx-expiry", daemon=True)
        store.on_gone(self._release)

    def start(self) -> None:
        """Begin to remove what is over."""
        self._expiry_thread.start()

    def stop(self) -> None:
        """End the thread and close the store."""
        self._stopped.set()
        if self._expiry_thread.is_alive():
            self._expiry_thread.join()
        self._store.close()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, which a drain waits for."""
        return self._saver.is_saving

    def count(self) -> int:
        """Versions of all tenants."""
        return self._store.count()

    # Snapshots.

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        return snapshot_info(await self._saver.save(caller, request), latest=True)

    async def check_room(self, caller: Caller, versions: int) -> None:
        await self._saver.check_room(caller, versions)

    async def open(self, caller: Caller, request: OpenRequest) -> FillResult:
        return await self._opener.open(caller, request, take=False)

    async def take(self, caller: Caller, request: OpenRequest) -> FillResult:
        return await self._opener.open(caller, request, take=True)

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> Snapshot:
        result = await self.inspect_snapshot(caller, name, version, include_attachment=False, include_tokens=False)
        return result.snapshot

    async def inspect_snapshot(
        self, caller: Caller, name: str, version: int | None, include_attachment: bool, include_tokens: bool
    ) -> GetSnapshotResult:
        await refresh_name(self._store, caller.tenant, name)
        found = self._store.get(caller.tenant, name, version)
        latest = self._store.get(caller.tenant, name)
        snapshot = snapshot_info(found, latest=found.version == latest.version)
        if not include_attachment and not include_tokens:
            return GetSnapshotResult(snapshot=snapshot)
        if found.durable:
            return await on_store_thread(self._read_stored, found, snapshot, include_attachment, include_tokens)
        tokens = None
        if include_tokens:
            tokens = TokenIds(ids=await self._loop.call(self._contexts.held_tokens, found))
        return GetSnapshotResult(
            snapshot=snapshot, attachment=found.attachment if include_attachment else b"", tokens=tokens
        )

    def _read_stored(
        self, version: SnapshotVersion, snapshot: Snapshot, include_attachment: bool, include_tokens: bool
    ) -> GetSnapshotResult:
        """A durable version with its attachment or its tokens. Blocks."""
        reader = self._store.open(version)
        try:
            return GetSnapshotResult(
                snapshot=snapshot,
                attachment=reader.attachment() if include_attachment else b"",
                tokens=TokenIds(ids=reader.lineage.tokens.tolist()) if include_tokens else None,
            )
        finally:
            reader.close()

    async def snapshots(self, caller: Caller, prefix: str, page_token: str, limit: int) -> Sequence[Snapshot]:
        await self._tenants.refresh(caller.tenant)
        # A tenant may have thousands of names, which takes too long for the event loop.
        found = await on_store_thread(self._store.list, caller.tenant, prefix, page_token, limit)
        return [snapshot_info(version, latest=True) for version in found]

    async def history(self, caller: Caller, name: str) -> Sequence[Snapshot]:
        await refresh_name(self._store, caller.tenant, name)
        versions = self._store.history(caller.tenant, name)
        return [snapshot_info(version, latest=version is versions[0]) for version in versions]

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, changes: RetentionUpdate
    ) -> Snapshot:
        lifetime = None if changes.ttl is None else self._lifecycle.new_lifetime(changes.ttl)
        await refresh_name(self._store, caller.tenant, name)
        found = await on_store_thread(self._store.update, caller.tenant, name, version, lifetime, changes.labels)
        return await self.snapshot(caller, name, found.version)

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        await refresh_name(self._store, caller.tenant, name)
        return len(await on_store_thread(self._store.remove, caller.tenant, name, version))

    # Publications.

    async def publish(self, caller: Caller, context_id: str, settings: RetentionUpdate) -> Publication:
        undo = partial(self._unpublish, caller)
        hidden: list[Context] = []

        def publish_or_fork() -> Publication | None:
            """On the step thread. A suspended context gives None; `hidden` gets a fork of it.

            The context itself could be suspended again between its return and the next command; the fork cannot.
            """
            context = self._core.cache.get(caller.tenant, context_id)
            if context.suspended:
                hidden.append(self._contexts.fork_hidden(caller, context_id))
                return None
            return self._publications.publish(caller, context, settings)

        try:
            published = await complete_or_undo(self._loop.call(publish_or_fork), undo)
            if published is None:
                await self._opener.resume(caller, hidden[0])
                publishing = self._loop.call(self._publications.publish, caller, hidden[0], settings)
                published = await complete_or_undo(publishing, undo)
            return published
        finally:
            self._loop.post_if_running(partial(self._contexts.discard, hidden))

    def _unpublish(self, caller: Caller, made: Publication | None) -> None:
        """End a publication, if it was made, whose caller has gone without hearing of it."""
        if made is None:
            return

        def end() -> None:
            with suppress(NotFound):  # it may be over
                self._publications.unpublish(caller, made.publication_id)

        self._loop.post_if_running(end)

    async def update_publication(self, caller: Caller, publication_id: str, settings: RetentionUpdate) -> Publication:
        return await self._loop.call(self._publications.update, caller, publication_id, settings)

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        await self._loop.call(self._publications.unpublish, caller, publication_id)

    async def publications(self, caller: Caller) -> Sequence[Publication]:
        return await self._loop.call(self._publications.list, caller)

    # What ends.

    def _release(self, versions: Sequence[SnapshotVersion]) -> None:
        """Drop what versions that are gone held in memory. Called by the store, from any thread."""
        held = [version.held for version in versions if isinstance(version.held, Context)]
        if held:
            self._loop.post_if_running(partial(self._contexts.discard, held))

    def _expire(self) -> None:
        """Remove what is over, again and again. On the expiry thread."""
        while not self._stopped.wait(EXPIRY_INTERVAL_S):
            try:
                self._store.expire()
            except Exception:  # whatever it was, what is over next has to go too
                log.exception("what is over could not be removed")
