"""Opening a snapshot: a context is made of what it holds, beside the steps.

A snapshot in memory is forked. Of a durable one, a context is made of the stored record; it takes pages as they are
read, and computes what no tier has. Runs on the caller's event loop; everything slow runs elsewhere.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.kv_transfer import PageData
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.snapshots.snapshot_contexts import SnapshotContexts
from jaxctx.engine.snapshots.store_calls import complete_or_undo, on_store_thread, refresh_name
from jaxctx.errors import DataLoss
from jaxctx.store import SnapshotReader, SnapshotStore, SnapshotVersion
from jaxctx.types import FillResult, OpenRequest

READ_AHEAD = 64  # pages that were read and are not on the device yet


class SnapshotOpener:
    """Opens and takes the snapshots of one engine."""

    def __init__(
        self,
        core: EngineCore,
        loop: StepLoop,
        store: SnapshotStore,
        contexts: SnapshotContexts,
        runner: ModelRunner,
    ) -> None:
        self._core = core
        self._loop = loop
        self._store = store
        self._contexts = contexts
        self._runner = runner

    async def open(self, caller: Caller, request: OpenRequest, *, take: bool) -> FillResult:
        """A new context; with `take` the snapshot is deleted too, and of two takers one gets it. See `Engine.open`.

        Raises FailedPrecondition (MODEL_MISMATCH), DataLoss, NotFound (SNAPSHOT_NOT_FOUND).
        """
        await self._loop.call(self._core.raise_if_draining)
        await refresh_name(self._store, caller.tenant, request.name)
        version = self._store.get(caller.tenant, request.name, request.version)
        made: list[Context] = []  # closed again if it comes to nothing
        try:
            if version.durable:
                result = await self._open_stored(caller, request, version, made)
            else:
                result = await self._open_held(caller, request, version, made)
            if take:
                taking = on_store_thread(self._store.take, version, latest=request.version is None)
                # Kept if its caller leaves now: it is nowhere else.
                await complete_or_undo(taking, lambda _: made.clear())
            elif version.lifetime.sliding:
                await on_store_thread(self._store.touch, version)
        except BaseException:
            self._loop.post_if_running(partial(self._contexts.discard, made))
            raise
        return result

    async def _open_held(
        self, caller: Caller, request: OpenRequest, version: SnapshotVersion, made: list[Context]
    ) -> FillResult:
        """Fork what a snapshot in memory holds; `made` gets the context."""

        def fork() -> Context:
            made.append(self._contexts.open_held(caller, request, version))
            return made[0]

        return await self.resume(caller, await self._loop.call(fork))

    async def _open_stored(
        self, caller: Caller, request: OpenRequest, version: SnapshotVersion, made: list[Context]
    ) -> FillResult:
        """Restore a durable snapshot; `made` gets the context.

        A thread reads what the context needs, at most READ_AHEAD pages ahead of what was loaded.
        """
        reader = await complete_or_undo(on_store_thread(self._store.open, version), SnapshotReader.close)
        thread = ThreadPoolExecutor(1, "jaxctx-read")
        free_pages = threading.Semaphore(READ_AHEAD)
        try:
            context = await self._loop.call(
                self._restore_stored, caller, request, version, reader, thread, free_pages, made
            )
            return await self.resume(caller, context)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
            free_pages.release()  # for the one read that waits
            await on_store_thread(reader.close)

    def _restore_stored(
        self,
        caller: Caller,
        request: OpenRequest,
        version: SnapshotVersion,
        reader: SnapshotReader,
        thread: ThreadPoolExecutor,
        free_pages: threading.Semaphore,
        made: list[Context],
    ) -> Context:
        """On the step thread: make the context, and have `thread` read the pages that no tier has."""
        restored = self._contexts.restore(caller, request, version, reader.lineage)
        made.append(restored.context)
        pages = reader.read([page.number for page in restored.missing])
        for page in restored.missing:  # only the host slot has the page: its memory is freed when the page is loaded
            data = thread.submit(_read_next, pages, self._runner, free_pages)
            self._contexts.stage_page(page, data, on_drop=free_pages.release)
        return restored.context

    async def resume(self, caller: Caller, context: Context) -> FillResult:
        """Bring back, or compute, all tokens of a context that had KV."""
        return await self._loop.submit_request(partial(self._core.resume, caller, context))


def _read_next(
    pages: Iterator[tuple[int, memoryview | None]], runner: ModelRunner, free_pages: threading.Semaphore
) -> PageData:
    """The next page that the reader has, once few enough wait to be loaded. Raises DataLoss."""
    free_pages.acquire()
    try:
        _, data = next(pages)
        if data is not None:
            return runner.make_page(data)
    except Exception as error:  # among others: that the reading has ended, with such an error before
        raise DataLoss(f"a page could not be read: {error!r}") from error
    raise DataLoss("a page failed its checksum")
