"""LocalEngine: the Engine interface in process, each method a command to the step thread."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from jaxctx.engine.answers import (
    Comparison,
    ContextEvent,
    ContextInfo,
    ContextPages,
    EngineInfo,
    EngineStats,
    FillResult,
    ForwardResult,
    GeneratePiece,
    PlanResult,
    Publication,
    SnapshotInfo,
)
from jaxctx.engine.forward import results
from jaxctx.engine.loop import StepLoop
from jaxctx.engine.mail import Stream
from jaxctx.engine.requests import (
    Caller,
    CreateRequest,
    ForwardRequest,
    GenerateRequest,
    OpenRequest,
    SaveRequest,
    Ttl,
)
from jaxctx.engine.sequence import Sequence as Running
from jaxctx.engine.snapshots import Snapshots
from jaxctx.engine.watch import Watch
from jaxctx.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from jaxctx.store import SnapshotStore

RETRY_S = 0.01  # how often a waiting reserve_pages asks again, and a drain looks
ANSWER_MARGIN_S = 0.05  # before a deadline: the answer must still reach the caller


class LocalEngine:
    """The Engine interface over a `StepLoop` of this process. `start` before use, `stop` at the end."""

    def __init__(self, loop: StepLoop, info: EngineInfo, store: SnapshotStore, *, stream_buffer: int) -> None:
        self.loop = loop
        self.core = loop.core
        self._snapshots = Snapshots(loop, store)
        self._info = info
        self._stream_buffer = stream_buffer

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine lives."""
        return self._info

    def start(self) -> None:
        """Begin to take work."""
        self.loop.start()
        self._snapshots.start()

    def stop(self) -> None:
        """End running work with Unavailable and join the threads. For an orderly end, `drain` first."""
        self._snapshots.stop()
        self.loop.stop()

    async def create(self, caller: Caller, request: CreateRequest) -> ContextInfo:
        """See `Engine.create`."""

        def create() -> list[ContextInfo]:
            self.core.raise_if_draining()
            return [self.core.contexts.create(caller, request)]

        return (await self._make(caller, create))[0]

    async def _make(self, caller: Caller, make: Callable[[], list[ContextInfo]]) -> list[ContextInfo]:
        """Contexts that `make` makes; closed again if the caller is gone before it could learn their ids."""
        made: list[ContextInfo] = []

        def command() -> None:
            made.extend(make())

        try:
            await self.loop.call(command)
        except asyncio.CancelledError:
            self._post(partial(self._close_all, caller, made))
            raise
        return made

    def _close_all(self, caller: Caller, contexts: Sequence[ContextInfo]) -> None:
        for info in contexts:
            with suppress(NotFound):  # closed by its client already
                self.core.close(caller, info.context_id)

    def _post(self, command: Callable[[], None]) -> None:
        """To the step thread, if there still is one."""
        with suppress(Unavailable):
            self.loop.post(command)

    async def fill(self, caller: Caller, context_id: str, tokens: Sequence[int], *, defer: bool = False) -> FillResult:
        """See `Engine.fill`."""
        return await self._fill(caller, context_id, as_ids(tokens), defer)

    async def flush(self, caller: Caller, context_id: str) -> FillResult:
        """See `Engine.flush`."""
        return await self._fill(caller, context_id, as_ids(()), False)

    async def _fill(self, caller: Caller, context_id: str, tokens: np.ndarray, defer: bool) -> FillResult:
        result: FillResult = await self.loop.work(partial(self.core.fill, caller, context_id, tokens, defer))
        return result

    async def forward(self, caller: Caller, request: ForwardRequest) -> ForwardResult:
        """See `Engine.forward`."""
        done = await self.loop.work(partial(self.core.forward, caller, request))
        return await asyncio.to_thread(results, done)

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        """See `Engine.generate`."""
        forks: list[ContextInfo] = []
        running: list[Running] = []
        stream = Stream(
            asyncio.get_running_loop(),
            self.loop.outbox,
            outputs=request.n,
            limit=self._stream_buffer,
            wake=lambda: self._post(lambda: None),
        )

        def start() -> None:  # one command: nothing can come between the forks and their registration
            ids = [request.context_id]
            if request.n == 1:
                self.core.raise_if_draining()
            else:  # accepted when it was flushed
                forks.extend(self.core.fork(caller, request.context_id, [None] * request.n))
                ids = [fork.context_id for fork in forks]
            for index, context_id in enumerate(ids):
                running.append(self.core.generate(caller, request, context_id, index, stream))

        complete = False
        try:
            if request.n > 1:
                await self.flush(caller, request.context_id)
            await self.loop.call(start)
            async for piece in stream.pieces():
                yield piece
            complete = True
        finally:
            if not complete:
                self._post(partial(self._abandon, caller, running, forks))

    def _abandon(self, caller: Caller, running: list[Running], forks: list[ContextInfo]) -> None:
        """The reader left or one output failed: stop all, and close the forks, whose ids nobody may know."""
        for sequence in running:
            self.core.end(sequence)
        self._close_all(caller, forks)

    async def fork(self, caller: Caller, context_id: str, ids: Sequence[str | None]) -> list[ContextInfo]:
        """See `Engine.fork`."""

        def fork() -> list[ContextInfo]:
            self.core.raise_if_draining()
            return self.core.fork(caller, context_id, ids)

        return await self._make(caller, fork)

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        """See `Engine.truncate`."""
        return await self.loop.call(self.core.contexts.truncate, caller, context_id, tokens)

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        """See `Engine.rewind`."""
        return await self.loop.call(self.core.contexts.rewind, caller, context_id, to)

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """See `Engine.reserve_pages`; asks again until shortly before the caller's deadline."""
        while True:
            info = await self.loop.call(self.core.contexts.reserve_pages, caller, context_id, pages)
            if info is not None:
                return info
            if caller.deadline is None or self.core.now() > caller.deadline - ANSWER_MARGIN_S:
                raise ResourceExhausted(f"{pages} pages are not to be had now; none was taken", retry_after_s=1.0)
            await asyncio.sleep(RETRY_S)

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """See `Engine.commit_pages`."""
        return await self.loop.call(self.core.contexts.commit_pages, caller, context_id, pages)

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        """See `Engine.release_pages`."""
        return await self.loop.call(self.core.contexts.release_pages, caller, context_id, pages)

    async def update(
        self,
        caller: Caller,
        context_id: str,
        *,
        priority: int | None = None,
        pinned: bool | None = None,
        pin_s: float | None = None,
        ttl: Ttl | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> ContextInfo:
        """See `Engine.update`."""
        return await self.loop.call(self.core.update, caller, context_id, priority, pinned, pin_s, ttl, labels)

    async def close(self, caller: Caller, context_id: str) -> None:
        """See `Engine.close`."""
        await self.loop.call(self.core.close, caller, context_id)

    async def get(self, caller: Caller, context_id: str) -> ContextInfo:
        """See `Engine.get`."""
        return await self.loop.call(self.core.contexts.get, caller, context_id)

    async def pages(self, caller: Caller, context_id: str) -> ContextPages:
        """See `Engine.pages`."""
        return await self.loop.call(self.core.contexts.pages, caller, context_id)

    async def list(self, caller: Caller, *, after: str = "", limit: int = 100) -> list[ContextInfo]:
        """See `Engine.list`."""
        return await self.loop.call(self.core.contexts.list, caller, after, limit)

    async def plan(
        self, caller: Caller, tokens: Sequence[int], *, context_id: str | None = None, salt: str = ""
    ) -> PlanResult:
        """See `Engine.plan`."""
        return await self.loop.call(self.core.plan, caller, as_ids(tokens), context_id, salt)

    async def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        """See `Engine.compare`."""
        return await self.loop.call(self.core.contexts.compare, caller, a, b)

    async def watch(self, caller: Caller) -> AsyncIterator[ContextEvent]:
        """See `Engine.watch`."""
        arrived, watchers = asyncio.Event(), self.core.lives.watchers
        watch = Watch(caller.tenant, partial(self.loop.outbox.post, asyncio.get_running_loop(), arrived.set))
        try:
            await self.loop.call(watchers.join, watch)
            while True:
                arrived.clear()
                events = await self.loop.call(watchers.read, watch, self.core.contexts.describe)
                for event in events:
                    yield event
                if not events:
                    await arrived.wait()
        finally:
            self._post(partial(watchers.leave, watch))

    # --- snapshots -----------------------------------------------------------------------------------------------

    async def save(self, caller: Caller, request: SaveRequest) -> SnapshotInfo:
        """See `Engine.save`."""
        return await self._snapshots.save(caller, request)

    async def open(self, caller: Caller, request: OpenRequest) -> FillResult:
        """See `Engine.open`."""
        return await self._snapshots.open(caller, request)

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> SnapshotInfo:
        """See `Engine.snapshot`."""
        return self._snapshots.info(caller, name, version)

    async def snapshots(
        self, caller: Caller, *, prefix: str = "", after: str = "", limit: int = 100
    ) -> builtins.list[SnapshotInfo]:
        """See `Engine.snapshots`."""
        return self._snapshots.list(caller, prefix, after, limit)

    async def history(self, caller: Caller, name: str) -> builtins.list[SnapshotInfo]:
        """See `Engine.history`."""
        return self._snapshots.history(caller, name)

    async def update_snapshot(
        self, caller: Caller, name: str, *, ttl: Ttl | None = None, labels: Mapping[str, str] | None = None
    ) -> SnapshotInfo:
        """See `Engine.update_snapshot`."""
        return await self._snapshots.update(caller, name, ttl, labels)

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        """See `Engine.delete_snapshot`."""
        return await self._snapshots.delete(caller, name, version)

    async def publish(
        self, caller: Caller, context_id: str, *, ttl: Ttl | None = None, labels: Mapping[str, str] | None = None
    ) -> Publication:
        """See `Engine.publish`."""
        context = await self.loop.call(self.core.cache.get, caller.tenant, context_id)
        if context.suspended:
            await self._snapshots.resume(caller, context)
        return await self.loop.call(self.core.archive.publish, caller, context_id, ttl, labels)

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        """See `Engine.unpublish`."""
        await self.loop.call(self.core.archive.unpublish, caller, publication_id)

    async def publications(self, caller: Caller) -> builtins.list[Publication]:
        """See `Engine.publications`."""
        return await self.loop.call(self.core.archive.publications, caller)

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        stats = await self.loop.call(self.core.stats)
        return replace(stats, snapshots=self._snapshots.store.count())

    async def drain(self) -> None:
        """See `Engine.drain`."""

        def begin() -> bool:
            self.core.draining = True
            return self.core.idle

        while not await self.loop.call(begin):
            await asyncio.sleep(RETRY_S)

    async def failure(self) -> str:
        """See `Engine.failure`."""
        return await asyncio.shield(asyncio.wrap_future(self.loop.failure))

    async def clear_cache(self) -> int:
        """See `Engine.clear_cache`."""
        return await self.loop.call(self.core.cache.clear_cached)


def as_ids(tokens: Sequence[int]) -> np.ndarray:
    """Token ids as int32; ids that do not fit are refused before anything is allocated for them."""
    ids = np.asarray(tokens, np.int64).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise InvalidArgument.field("tokens", "ids must not be negative or beyond the vocabulary")
    return ids.astype(np.int32)
