"""LocalEngine: the Engine interface in process, most of its methods a command to the step thread."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from jaxctx import types
from jaxctx.cache.context_cache import Context
from jaxctx.engine.contexts.watch import Watch
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.forward_pass import ForwardAnswer
from jaxctx.engine.core.output import OutputText
from jaxctx.engine.core.output_stream import OutputStream
from jaxctx.engine.core.request import Request
from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.engine.interface import Caller, Engine
from jaxctx.engine.snapshots.service import SnapshotService
from jaxctx.engine.snapshots.store_calls import complete_or_undo
from jaxctx.errors import InvalidArgument, ResourceExhausted
from jaxctx.store import SnapshotStore
from jaxctx.types import (
    CreateContextRequest,
    ForwardRequest,
    GenerateRequest,
    OpenRequest,
    RetentionUpdate,
    SaveRequest,
)

BUSY_S = 1.0
RETRY_S = 0.01  # how often a waiting reserve_pages asks again, and a drain looks

P = ParamSpec("P")
R = TypeVar("R")


def command(
    operation: Callable[[EngineCore], Callable[P, R]],
) -> Callable[Concatenate["LocalEngine", P], Coroutine[Any, Any, R]]:
    """A method that runs an operation of the core on the step thread."""

    async def method(self: "LocalEngine", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.loop.call(operation(self.core), *args, **kwargs)

    return method


class LocalEngine(Engine):
    """The Engine interface over a step thread of this process. `start` before use, `stop` at the end."""

    def __init__(self, core: EngineCore, info: types.EngineInfo, store: SnapshotStore) -> None:
        self.core = core
        self.info = info
        self.loop = StepLoop(core)
        self.store = store
        self.snapshot_service = SnapshotService(core, self.loop, store)
        self._stats: types.EngineStats | None = None  # the last that were told

    @property
    def attention_window(self) -> int | None:
        """What limits the length of a context, in tokens, if neither a setting nor the model's positions do."""
        config = self.core.config
        return config.attention_window if config.attention_window == config.max_context_tokens else None

    def start(self) -> None:
        self.loop.start()
        self.snapshot_service.start()

    def stop(self) -> None:
        """End running work with Unavailable and join the threads. For an orderly end, `drain` first."""
        self.snapshot_service.stop()
        self.loop.stop()

    truncate = command(lambda core: core.contexts.truncate)
    rewind = command(lambda core: core.contexts.rewind)
    commit_pages = command(lambda core: core.contexts.commit_pages)
    release_pages = command(lambda core: core.contexts.release_pages)
    update = command(lambda core: core.contexts.update)
    close = command(lambda core: core.contexts.close)
    inspect = command(lambda core: core.contexts.inspect)
    list = command(lambda core: core.contexts.list)
    compare = command(lambda core: core.contexts.compare)
    clear_cache = command(lambda core: lambda caller: core.cache.clear_cached())

    async def create(self, caller: Caller, request: CreateContextRequest) -> types.ContextInfo:
        return (await self._make(lambda: [self.core.contexts.create(caller, request)]))[0]

    async def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[types.ContextInfo]:
        return await self._make(lambda: self.core.contexts.fork(caller, context_id, child_ids, n))

    async def _make(self, make: Callable[[], Sequence[Context]]) -> Sequence[types.ContextInfo]:
        """Contexts that `make` makes; closed again if the caller is gone before it could learn their ids."""
        made: list[Context] = []

        def run() -> Sequence[types.ContextInfo]:
            self.core.raise_if_draining()
            made.extend(make())
            return [self.core.contexts.describe(context) for context in made]

        return await complete_or_undo(
            self.loop.call(run), lambda _: self.loop.tell(partial(self.core.contexts.discard, made))
        )

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> types.ContextInfo:
        """Asks again until shortly before the caller's deadline."""
        while True:
            info = await self.loop.call(self.core.contexts.reserve_pages, caller, context_id, pages)
            if info is not None:
                return info
            if caller.deadline is None or self.core.deps.clock() > caller.deadline - 0.05:  # s, for the answer
                raise ResourceExhausted(
                    f"{pages} pages are not to be had now; none was taken", reason="OUT_OF_PAGES", retry_after_s=1.0
                )
            await asyncio.sleep(RETRY_S)

    async def plan(
        self, caller: Caller, tokens: Sequence[int], *, context_id: str | None = None, salt: str = ""
    ) -> types.PlanResult:
        return await self.loop.call(self.core.contexts.plan, caller, self._ids(tokens), context_id, salt)

    async def watch(self, caller: Caller, include_program_contexts: bool = False) -> AsyncIterator[types.ContextEvent]:
        arrived = asyncio.Event()
        wake = partial(self.loop.outbox.post, asyncio.get_running_loop(), arrived.set)
        clock = self.core.deps.wall_clock
        watch = Watch(caller.tenant, self.core.cache, clock, wake, with_programs=include_program_contexts)

        def read() -> Sequence[types.ContextEvent]:
            self.core.raise_if_draining()  # or a reader would hold up the end for as long as it likes
            return watch.read(self.core.contexts.describe)

        try:
            await self.loop.call(self.core.lifecycle.add_watch, watch)
            while True:
                arrived.clear()
                events = await self.loop.call(read)
                for event in events:
                    yield event
                if not events:
                    await arrived.wait()
        finally:
            self.loop.tell(partial(self.core.lifecycle.remove_watch, watch))

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> types.FillResult:
        return await self.loop.work(partial(self.core.fill, caller, context_id, self._ids(tokens), defer))

    async def forward(self, caller: Caller, request: ForwardRequest) -> types.ForwardResult:
        work = partial(self.core.forward, caller, request, self._ids(request.tokens))
        told: tuple[Sequence[ForwardAnswer], types.ContextInfo] = await self.loop.work(work)
        rows, context = told
        # A distribution over a whole vocabulary takes longer than the step thread and the event loop have.
        outputs = await asyncio.to_thread(lambda: [row() for row in rows])
        return types.ForwardResult(outputs=outputs, context=context)

    def _ids(self, tokens: Sequence[int]) -> np.ndarray:
        """As int32; JAX does not check indices: an id beyond the vocabulary would silently be another token."""
        ids, size = np.asarray(tokens, np.int64).reshape(-1), self.info.vocab_size
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            raise InvalidArgument.field("tokens", f"ids must be 0 to {size - 1}")
        return ids.astype(np.int32)

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[types.GeneratePiece]:
        forks: Sequence[Context] = ()
        running: list[Request] = []
        stream = OutputStream(
            asyncio.get_running_loop(),
            self.loop.outbox,
            outputs=request.n,
            limit=self.core.config.stream_buffer,
            wake=self.loop.wake,
        )

        def start() -> None:  # one command: nothing can come between the forks and their registration
            nonlocal forks
            if request.n == 1:
                self.core.raise_if_draining()
            else:  # accepted when it was flushed
                forks = self.core.contexts.fork(caller, request.context_id, n=request.n)
            for index, context_id in enumerate([fork.id for fork in forks] or [request.context_id]):
                running.append(self.core.generate(caller, request, context_id, index, stream, resumed))

        def abandon() -> None:  # the reader left or one output failed; nobody may know the ids of the forks
            for sequence in running:
                self.core.end(sequence)
            self.core.contexts.discard(forks)

        resumed: OutputText | None = None
        try:
            if request.n > 1:
                await self.fill(caller, request.context_id)
            if request.resume_tokens > 0:
                so_far = await self.loop.call(self.core.output_so_far, caller, request)
                resumed = await asyncio.to_thread(OutputText, request, self.core.text, *so_far)
            await self.loop.call(start)
            async for piece in stream.pieces():
                yield piece
        except BaseException:
            self.loop.tell(abandon)
            raise

    async def stats(self) -> types.EngineStats:
        """As they are; or as they were, while a step takes longer than BUSY_S: a busy engine is no silent one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BUSY_S if self._stats else None):
                self._stats = await self.loop.call(self.core.stats)
        return replace(cast(types.EngineStats, self._stats), snapshots=self.snapshot_service.count())

    async def drain(self) -> None:
        def begin() -> bool:
            self.core.draining = True
            self.core.lifecycle.wake_watches()
            return not self.core.scheduler.writers  # no request is under way

        while not await self.loop.call(begin) or self.snapshot_service.is_saving:
            await asyncio.sleep(RETRY_S)

    async def failure(self) -> str:
        return await asyncio.shield(asyncio.wrap_future(self.loop.failure))

    async def save(self, caller: Caller, request: SaveRequest) -> types.Snapshot:
        return await self.snapshot_service.save(caller, request)

    async def open(self, caller: Caller, request: OpenRequest) -> types.FillResult:
        return await self.snapshot_service.open(caller, request)

    async def take(self, caller: Caller, request: OpenRequest) -> types.FillResult:
        return await self.snapshot_service.take(caller, request)

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> types.Snapshot:
        return await self.snapshot_service.snapshot(caller, name, version)

    async def snapshots(self, caller: Caller, prefix: str, page_token: str, limit: int) -> Sequence[types.Snapshot]:
        return await self.snapshot_service.snapshots(caller, prefix, page_token, limit)

    async def history(self, caller: Caller, name: str) -> Sequence[types.Snapshot]:
        return await self.snapshot_service.history(caller, name)

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, changes: RetentionUpdate
    ) -> types.Snapshot:
        return await self.snapshot_service.update_snapshot(caller, name, version, changes)

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        return await self.snapshot_service.delete_snapshot(caller, name, version)

    async def publish(self, caller: Caller, context_id: str, settings: RetentionUpdate) -> types.Publication:
        return await self.snapshot_service.publish(caller, context_id, settings)

    async def update_publication(
        self, caller: Caller, publication_id: str, request: RetentionUpdate
    ) -> types.Publication:
        return await self.snapshot_service.update_publication(caller, publication_id, request)

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        await self.snapshot_service.unpublish(caller, publication_id)

    async def publications(self, caller: Caller) -> Sequence[types.Publication]:
        return await self.snapshot_service.publications(caller)
