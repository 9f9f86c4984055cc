"""Snapshots: saves and opens, between the step thread, which has the contexts, and the store, which has the rest.

A save forks the context into one that nobody else sees, so that the context itself goes on at once; its pages leave the
device in chunks between steps and are written by threads. An open makes a context of the lineage, takes pages as they
are read, and computes what no tier has. Runs on the door's event loop; everything slow runs elsewhere.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from jaxctx.cache.context_cache import Context
from jaxctx.engine.contexts.lifecycle import told
from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.kv_transfer import PageData
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import DataLoss
from jaxctx.store import SnapshotReader, SnapshotStore, SnapshotVersion, SnapshotWriter
from jaxctx.types import FillResult, OpenRequest, Publication, RetentionUpdate, SaveRequest, Snapshot

T = TypeVar("T")
log = logging.getLogger("jaxctx.engine")
READ_AHEAD = 64  # pages that were read and are not on the device yet


class SnapshotOperations:
    """The part of a local engine that keeps contexts; its methods are those of `Engine`.

    NotFound (SNAPSHOT_NOT_FOUND) for a name or version that the tenant does not have.
    """

    def __init__(self, loop: StepLoop, store: SnapshotStore) -> None:
        self.loop = loop
        self.store = store
        store.on_gone(self._release)
        self._snapshot_contexts = loop.core.snapshot_contexts
        self._saves: dict[
            object, SnapshotVersion | None
        ] = {}  # under way, by their `saving`; None: it is not known yet
        self._stopped = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="jaxctx-reaper", daemon=True)

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        overwrite = request.overwrite_version
        hidden: list[Context] = []  # dropped at the end
        saving = object()
        self._saves[saving] = None
        try:
            await self.loop.call(self.loop.core.raise_if_draining)  # else a drain waits for it from now on
            store = await self._looked(caller, request.name)
            await asyncio.to_thread(store.check, caller.tenant, request.name, overwrite)
            await self.loop.call(lambda: hidden.append(self._snapshot_contexts.freeze(caller, request.context_id)))
            frozen = hidden[0]
            if request.durable and frozen.suspended:  # its pages are wanted
                await self._resume(caller, frozen)
            version = await self.loop.call(self._snapshot_contexts.version, caller, request, frozen, saving)
            self._saves[saving] = version
            count, size = self.store.usage(caller.tenant, filter(None, self._saves.values()))
            self.loop.core.lifecycle.quotas.check(max_snapshots_per_tenant=count, max_snapshot_bytes_per_tenant=size)
            if request.durable:
                version = await self._write(frozen, version, overwrite)
            else:
                forget = lambda made: self.store.remove(made.tenant, made.name, made.version)  # noqa: E731
                version = await delivered(asyncio.to_thread(self.store.put, version, overwrite), forget)
                self.loop.tell(partial(setattr, frozen, "pinned", False))  # it may be suspended, and is the store's
                hidden.clear()
        finally:
            del self._saves[saving]
            self.loop.tell(partial(self._snapshot_contexts.drop, hidden))
        return told(Snapshot, version, latest=True)

    async def _write(self, frozen: Context, version: SnapshotVersion, overwrite: int | None) -> SnapshotVersion:
        lineage = await self.loop.call(self._snapshot_contexts.lineage, frozen)
        writer = await delivered(asyncio.to_thread(self.store.begin, lineage), SnapshotWriter.abort)
        try:
            done = 0
            while done < len(writer.missing):
                pages = await self.loop.call(
                    self._snapshot_contexts.read, frozen, writer.missing[done : done + READ_AHEAD]
                )
                await asyncio.to_thread(_add, writer, writer.missing[done : done + len(pages)], pages)
                done += len(pages)
            return await asyncio.to_thread(writer.finish, version, overwrite)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(writer.abort))
            raise

    async def take(self, caller: Caller, request: OpenRequest) -> FillResult:
        return await self.open(caller, request, take=True)

    async def open(self, caller: Caller, request: OpenRequest, *, take: bool = False) -> FillResult:
        """Raises FailedPrecondition (MODEL_MISMATCH), DataLoss."""
        await self.loop.call(self.loop.core.raise_if_draining)
        version = (await self._looked(caller, request.name)).get(caller.tenant, request.name, request.version)
        made: list[Context] = []
        try:
            if version.durable:
                result = await self._revive(caller, request, version, made)
            else:
                await self.loop.call(lambda: made.append(self._snapshot_contexts.thaw(caller, request, version)))
                result = await self._resume(caller, made[0])
            if take:
                taking = asyncio.to_thread(self.store.take, version, latest=request.version is None)
                await delivered(taking, lambda _: made.clear())  # kept if its caller leaves now: it is nowhere else
            elif version.lifetime.sliding:
                await asyncio.to_thread(self.store.touch, version)
        except BaseException:
            self.loop.tell(partial(self._snapshot_contexts.drop, made))
            raise
        return result

    async def _revive(
        self, caller: Caller, request: OpenRequest, version: SnapshotVersion, made: list[Context]
    ) -> FillResult:
        """A thread reads what the context needs, a bounded number of pages ahead of what was loaded."""
        reader = await delivered(asyncio.to_thread(self.store.open, version), SnapshotReader.close)
        core, thread, room = self.loop.core, ThreadPoolExecutor(1, "jaxctx-read"), threading.Semaphore(READ_AHEAD)

        def make() -> None:
            context, missing = self._snapshot_contexts.revive(caller, request, version, reader.lineage)
            made.append(context)
            pages = reader.read([number for number, _ in missing])
            for _, slot in missing:  # the host slot alone has the page: its memory goes when that was loaded
                core.transfers.stage(slot, thread.submit(_next_page, core.runner, pages, room), room.release)

        try:
            await self.loop.call(make)
            return await self._resume(caller, made[0])
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
            room.release()  # for the one that waits
            await asyncio.to_thread(reader.close)

    async def _resume(self, caller: Caller, context: Context) -> FillResult:
        """Bring back, or compute, all tokens that had KV."""
        return await self.loop.work(partial(self.loop.core.resume, caller, context))

    async def publish(self, caller: Caller, context_id: str, settings: RetentionUpdate) -> Publication:
        context = await self.loop.call(self.loop.core.cache.get, caller.tenant, context_id)
        if context.suspended:
            await self._resume(caller, context)
        return await self.loop.call(self._snapshot_contexts.publish, caller, context_id, settings)

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> Snapshot:
        found = (await self._looked(caller, name)).get(caller.tenant, name, version)
        return told(Snapshot, found, latest=self.store.get(caller.tenant, name).version == found.version)

    async def snapshots(self, caller: Caller, prefix: str, page_token: str, limit: int) -> Sequence[Snapshot]:
        found = self.store.list(caller.tenant, prefix, page_token, limit)
        return [told(Snapshot, each, latest=True) for each in found]

    async def history(self, caller: Caller, name: str) -> Sequence[Snapshot]:
        versions = (await self._looked(caller, name)).history(caller.tenant, name)
        return [told(Snapshot, version, latest=version is versions[0]) for version in versions]

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, changes: RetentionUpdate
    ) -> Snapshot:
        lifetime = None if changes.ttl is None else self._snapshot_contexts.lifetime(changes.ttl)
        store = await self._looked(caller, name)
        found = await asyncio.to_thread(store.update, caller.tenant, name, version, lifetime, changes.labels)
        return await self.snapshot(caller, name, found.version)

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        store = await self._looked(caller, name)
        return len(await asyncio.to_thread(store.remove, caller.tenant, name, version))

    async def _looked(self, caller: Caller, name: str) -> SnapshotStore:
        """The store, once it knows what other processes made of a name until now."""
        if self.store.durable:
            await asyncio.to_thread(self.store.refresh_name, caller.tenant, name)
        return self.store

    def _release(self, versions: Sequence[SnapshotVersion]) -> None:
        """Drop what versions that are gone held in memory."""
        held = [version.held for version in versions if isinstance(version.held, Context)]
        if held:
            self.loop.tell(partial(self._snapshot_contexts.drop, held))

    def _reap(self) -> None:
        while not self._stopped.wait(1.0):  # seconds
            try:
                self.store.expire()
            except Exception:  # whatever it was, what is over next has to go too
                log.exception("what is over could not be removed")


async def delivered(make: Coroutine[Any, Any, T], undo: Callable[[T], object]) -> T:
    """What `make` makes. If its caller is cancelled it goes on to its end, and what is then nobody's is undone."""

    async def abandon() -> None:
        await asyncio.wait([making])
        if making.exception() is None:
            await asyncio.to_thread(undo, making.result())

    making = asyncio.ensure_future(make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.shield(abandon())
        raise


def _next_page(
    device: ModelRunner, pages: Iterator[tuple[int, memoryview | None]], room: threading.Semaphore
) -> PageData:
    """What the store tells of the next page, once there is room for it. Raises DataLoss."""
    room.acquire()
    try:
        _, data = next(pages)
        if data is not None:
            return device.page(data)
    except Exception as error:  # among others: that the reading has ended, with such an error before
        raise DataLoss(f"a page could not be read: {error!r}") from error
    raise DataLoss("a page failed its checksum")


def _add(writer: SnapshotWriter, numbers: Sequence[int], pages: Sequence[Any]) -> None:
    for number, page in zip(numbers, pages, strict=True):
        writer.add(number, memoryview(np.asarray(page).reshape(-1).view(np.uint8)))
