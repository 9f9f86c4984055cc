"""Saving a context as a snapshot, beside the steps.

The context is forked into a hidden context, so that it can be used again at once. The pages of a durable snapshot leave
the device in chunks between steps and are written by threads. Runs on the caller's event loop; everything slow runs on
threads.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxctx.cache.context_cache import Context
from jaxctx.engine.contexts.quotas import Quotas
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.engine.interface import Caller
from jaxctx.engine.snapshots.snapshot_contexts import SnapshotContexts
from jaxctx.engine.snapshots.store_calls import TenantRefresher, complete_or_undo, on_store_thread, refresh_name
from jaxctx.store import PagesGone, SnapshotStore, SnapshotVersion, SnapshotWriter
from jaxctx.types import SaveRequest

WRITE_AHEAD = 64  # pages that are requested at once; the step thread may give fewer


class SnapshotSaver:
    """The saves of one engine. `is_saving` while any is under way."""

    def __init__(
        self,
        core: EngineCore,
        loop: StepLoop,
        store: SnapshotStore,
        contexts: SnapshotContexts,
        tenants: TenantRefresher,
        quotas: Quotas,
    ) -> None:
        self._core = core
        self._loop = loop
        self._store = store
        self._tenants = tenants
        self._contexts = contexts
        self._quotas = quotas
        # By the id of the save; None: it is not known yet what it will store. Saves in progress count for quotas.
        self._under_way: dict[object, SnapshotVersion | None] = {}

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return bool(self._under_way)

    async def save(self, caller: Caller, request: SaveRequest) -> SnapshotVersion:
        """The new version, once it is there; see `Engine.save`."""
        saving = object()
        self._under_way[saving] = None
        hidden: list[Context] = []  # dropped at the end, unless the store holds it
        try:
            await self._loop.call(self._core.raise_if_draining)  # else a drain waits for it from now on
            await refresh_name(self._store, caller.tenant, request.name)
            await on_store_thread(self._store.check, caller.tenant, request.name, request.overwrite_version)
            counts = self._quotas.limits_snapshots and not request.for_move
            if counts:  # before the fork, which holds pages while others wait for some
                size_bytes = await self._loop.call(self._contexts.expected_bytes, caller, request)
                await self._check_room(caller.tenant, 1, size_bytes, request)
            return await self._save(caller, request, saving, hidden)
        finally:
            del self._under_way[saving]
            self._loop.post_if_running(partial(self._contexts.discard, hidden))

    async def _save(
        self, caller: Caller, request: SaveRequest, saving: object, hidden: list[Context]
    ) -> SnapshotVersion:
        """Fork, check quotas again, now that all is known, then store.

        `hidden` gets the fork, which the caller must drop in any case.
        """

        def fork() -> Context:  # on the step thread: even if the caller leaves now, the fork is not forgotten
            hidden.append(self._contexts.fork_hidden(caller, request.context_id))
            return hidden[0]

        fork_of_context = await self._loop.call(fork)
        if request.durable and fork_of_context.suspended:  # its pages are wanted
            await self._loop.submit_request(partial(self._core.resume, caller, fork_of_context))
        version = await self._loop.call(self._contexts.describe_version, caller, request, fork_of_context, saving)
        self._under_way[saving] = version
        if self._quotas.limits_snapshots and not request.for_move:
            self._quotas.check_snapshots(*await self._usage(caller.tenant, request))  # this save is under way
        if request.durable:
            return await self._write(fork_of_context, version, request)
        return await self._put(fork_of_context, version, request, hidden)

    async def check_room(self, caller: Caller, versions: int) -> None:
        """Raises ResourceExhausted (QUOTA) if the tenant has no place for so many more versions, of at least a byte."""
        await self._check_room(caller.tenant, versions, versions, None)

    async def _check_room(self, tenant: str, versions: int, size_bytes: int, request: SaveRequest | None) -> None:
        """Raises ResourceExhausted (QUOTA) if the tenant has no place for so many more versions, of so many bytes.

        Near the limit, what other servers made of its snapshots is read first, which takes seconds where there are
        thousands. Far from it nobody waits: that begins, so that it is known before the limit is near.
        """
        if not self._quotas.limits_snapshots:
            return
        count, used_bytes = await self._usage(tenant, request)
        if self._quotas.is_near_snapshot_limit(count + versions, used_bytes + size_bytes):
            await self._tenants.refresh(tenant)
            count, used_bytes = await self._usage(tenant, request)
        else:
            self._tenants.begin(tenant)
        self._quotas.check_snapshots(count + versions, used_bytes + size_bytes)

    async def _usage(self, tenant: str, request: SaveRequest | None) -> tuple[int, int]:
        """How many versions the tenant has as far as is known here, and their bytes.

        Its saves under way count, but not what `request` drops of its name.
        """
        known = [version for version in self._under_way.values() if version is not None]
        dropped: Sequence[SnapshotVersion] = ()
        if request is not None:
            dropped = self._store.dropped_by(tenant, request.name, request.max_versions or None)
        # A tenant may have thousands of versions, which takes too long for the event loop. Of two saves that reach a
        # limit together the first is accepted: what counts is what was under way when the call began.
        return await on_store_thread(self._store.usage, tenant, known, dropped)

    async def _put(
        self, fork: Context, version: SnapshotVersion, request: SaveRequest, hidden: list[Context]
    ) -> SnapshotVersion:
        """Keep a snapshot in memory: from then on the fork is the store's."""
        putting = on_store_thread(self._store.put, version, request.overwrite_version, request.max_versions or None)
        version = await complete_or_undo(putting, self._forget)
        self._loop.post_if_running(partial(self._contexts.allow_suspension, fork))
        hidden.clear()
        return version

    def _forget(self, version: SnapshotVersion) -> None:
        self._store.remove(version.tenant, version.name, version.version)

    async def _write(self, fork: Context, version: SnapshotVersion, request: SaveRequest) -> SnapshotVersion:
        """Store a durable snapshot; returns when it would survive a loss of power.

        Pages that another process deleted meanwhile are stored in a second try: now they are known to be missing.
        """
        try:
            return await self._try_to_write(fork, version, request)
        except PagesGone:
            return await self._try_to_write(fork, version, request)

    async def _try_to_write(self, fork: Context, version: SnapshotVersion, request: SaveRequest) -> SnapshotVersion:
        record = await self._loop.call(self._contexts.record, fork)
        writer = await complete_or_undo(on_store_thread(self._store.begin, record), SnapshotWriter.abort)
        try:
            await self._write_pages(fork, writer)
            return await on_store_thread(
                writer.finish,
                version,
                request.overwrite_version,
                attachment=request.attachment,
                max_versions=request.max_versions or None,
            )
        except BaseException:
            await asyncio.shield(on_store_thread(writer.abort))
            raise

    async def _write_pages(self, fork: Context, writer: SnapshotWriter) -> None:
        """Read the pages that the store does not have from the device, and hand them to the writer."""
        done = 0
        while done < len(writer.missing):
            wanted = writer.missing[done : done + WRITE_AHEAD]
            pages = await self._loop.call(self._contexts.read_pages, fork, wanted)
            await on_store_thread(_add_pages, writer, wanted[: len(pages)], pages)
            done += len(pages)


def _add_pages(writer: SnapshotWriter, numbers: Sequence[int], pages: Sequence[Any]) -> None:
    """Wait for the pages and give their bytes to the writer. On a thread of its own."""
    for number, page in zip(numbers, pages, strict=True):
        writer.add(number, memoryview(np.asarray(page).reshape(-1).view(np.uint8)))
