"""LocalEngine: the Engine interface in process. Its methods are short calls on the step thread, or follow a request."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from jaxctx import types
from jaxctx.cache.context_cache import Context
from jaxctx.engine.adapters.loading import AdapterLoader
from jaxctx.engine.adapters.sources import LocalAdapters
from jaxctx.engine.attention import AttentionChoice
from jaxctx.engine.contexts.watch import Watch
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.core.forward_pass import ForwardAnswer
from jaxctx.engine.core.output import OutputText
from jaxctx.engine.core.output_stream import OutputStream, ResultFuture
from jaxctx.engine.core.request import Request
from jaxctx.engine.core.step_loop import StepLoop
from jaxctx.engine.grammar.compiler import GrammarCompiler, PreparedMatcher
from jaxctx.engine.grammar.token_rules import has_token_rules
from jaxctx.engine.interface import Caller, Engine
from jaxctx.engine.page_waits import PageWaits, timed
from jaxctx.engine.runner.background_startup import BackgroundStartup
from jaxctx.engine.snapshots.service import SnapshotService
from jaxctx.engine.snapshots.store_calls import complete_or_undo
from jaxctx.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from jaxctx.store import SnapshotStore
from jaxctx.types import (
    CreateContextRequest,
    ForwardRequest,
    GenerateRequest,
    OpenRequest,
    RetentionUpdate,
    SaveRequest,
    UpdateContextRequest,
)

STATS_TIMEOUT_S = 1.0  # after which `stats` answers with what it knew last
DRAIN_LOOK_S = 0.01  # how often a drain looks
FORK_WAIT_S = 10.0  # for pages of forks
ANSWER_S = 0.05  # before a deadline, for the answer


class LocalEngine(Engine):
    """The Engine interface over a step thread of this process. `start` before use, `stop` at the end."""

    def __init__(
        self,
        core: EngineCore,
        info: types.EngineInfo,
        store: SnapshotStore,
        adapters: LocalAdapters | None = None,
        *,
        weights_in_words: str = "",
        draft_in_words: str = "",
    ) -> None:
        """`adapters`: the model that adapters are loaded for, and from where; None: there are none.

        `weights_in_words`: see `ServedModel.widened`. `draft_in_words`: see `ServedDraft.in_words`; empty: there is no
        draft model.
        """
        self.core = core
        self.info = info
        self.weights_in_words = weights_in_words
        self.draft_in_words = draft_in_words
        self.loop = StepLoop(core)
        self.store = store
        self.snapshot_service = SnapshotService(core, self.loop, store)
        self.grammars = GrammarCompiler(core.text, info.vocab_size)
        self._adapters = adapters
        self._adapter_loader = None
        if adapters is not None:
            self._adapter_loader = AdapterLoader(adapters.model, adapters.mesh, core.runner, core.adapters, self.loop)
        self._page_waits = PageWaits(core.deps.clock)
        self._background_startup = BackgroundStartup(core.runner)
        self._contexts = core.contexts
        self._lifecycle = core.lifecycle
        self._cache = core.cache
        self._config = core.config
        self._deps = core.deps
        self._last_stats: types.EngineStats | None = None

    @property
    def context_reason(self) -> str:
        """Why a context may have so many tokens, where neither a setting nor the model's positions say it; or empty."""
        return self._config.context_reason

    @property
    def sizes_in_words(self) -> str:
        """Page size, requests at once and rows of a step, and where they come from."""
        return self._config.sizes_in_words

    @property
    def host_tier_in_words(self) -> str:
        """The size of the host tier, and where it comes from; empty where there is none."""
        return self._config.host_tier_in_words

    @property
    def adapters_in_words(self) -> str:
        """The loaded adapters and the slots; empty where there are no slots."""
        if not self.info.adapter_slots:
            return ""
        names = ", ".join(sorted(self.adapter_revisions)) or "none"
        return f"{names} ({self.core.adapters.count} of {self.info.adapter_slots} slots, rank {self.info.adapter_rank})"

    @property
    def attention(self) -> AttentionChoice:
        """What computes attention on the engine's device, and why."""
        return self.core.runner.attention

    @property
    def attention_status(self) -> types.Attention | None:  # type: ignore[override]
        """The same for those who ask the engine."""
        return self.attention.as_status()

    def start(self) -> None:
        """Start the threads."""
        self._background_startup.start()
        self.loop.start()
        self.snapshot_service.start()

    def stop(self) -> None:
        """End running work with Unavailable and join the threads. For an orderly end, `drain` first."""
        self._background_startup.stop()
        if self._adapter_loader is not None:
            self._adapter_loader.stop()
        self.snapshot_service.stop()
        self.grammars.close()
        self.loop.stop()

    # Contexts.

    async def create(self, caller: Caller, request: CreateContextRequest) -> types.ContextInfo:
        def create() -> Sequence[Context]:
            return [self._contexts.create(caller, request)]

        return (await self._make_contexts(create))[0]

    async def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[types.ContextInfo]:
        return await self._make_contexts(partial(self._contexts.fork, caller, context_id, child_ids, n))

    async def _make_contexts(self, make: Callable[[], Sequence[Context]]) -> Sequence[types.ContextInfo]:
        """The contexts that `make` makes; closed again if the caller is gone before it could learn their ids."""
        made: list[Context] = []

        def run() -> Sequence[types.ContextInfo]:
            self.core.raise_if_draining()
            made.extend(make())
            return [self._contexts.describe(context) for context in made]

        def undo(_: object) -> None:
            self.loop.post_if_running(partial(self._contexts.discard, made))

        return await complete_or_undo(self.loop.call(run), undo)

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> types.ContextInfo:
        return await self.loop.call(self._contexts.truncate, caller, context_id, tokens)

    async def rewind(self, caller: Caller, context_id: str, to: int) -> types.ContextInfo:
        return await self.loop.call(self._contexts.rewind, caller, context_id, to)

    async def switch_adapter(self, caller: Caller, context_id: str, adapter: str) -> types.ContextInfo:
        return await self.loop.call(self._contexts.switch_adapter, caller, context_id, adapter)

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> types.ContextInfo:
        return await self.loop.call(self._contexts.commit_pages, caller, context_id, pages)

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> types.ContextInfo:
        return await self.loop.call(self._contexts.release_pages, caller, context_id, pages)

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> types.ContextInfo:
        """Asks again until shortly before the caller's deadline."""

        async def reserve() -> tuple[types.ContextInfo | None, float]:
            return await self.loop.call(timed, self._contexts.reserve_pages, caller, context_id, pages)

        give_up_at = None if caller.deadline is None else caller.deadline - ANSWER_S
        info = await self._page_waits.ask(caller.tenant, reserve, give_up_at)
        if info is None:
            message = f"{pages} pages are not available now; none was taken"
            raise ResourceExhausted(message, reason="OUT_OF_PAGES", retry_after_s=1.0)
        return info

    async def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> types.ContextInfo:
        return await self.loop.call(self._contexts.update, caller, context_id, request)

    async def close(self, caller: Caller, context_id: str) -> None:
        await self.loop.call(self._contexts.close, caller, context_id)

    async def inspect(
        self,
        caller: Caller,
        context_id: str,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> types.GetContextResult:
        return await self.loop.call(
            self._contexts.inspect, caller, context_id, include_pages, include_tokens, include_ancestors
        )

    async def list(
        self, caller: Caller, page_token: str = "", limit: int = 100, include_program_contexts: bool = False
    ) -> Sequence[types.ContextInfo]:
        return await self.loop.call(self._contexts.list, caller, page_token, limit, include_program_contexts)

    async def tenants(self, after: str, limit: int) -> Sequence[str]:
        return await self.loop.call(self._contexts.tenants, after, limit)

    async def compare(self, caller: Caller, a: str, b: str) -> types.Comparison:
        return await self.loop.call(self._contexts.compare, caller, a, b)

    async def plan(
        self,
        caller: Caller,
        tokens: Sequence[int],
        *,
        context_id: str | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> types.PlanResult:
        return await self.loop.call(self._contexts.plan, caller, self._token_ids(tokens), context_id, salt, adapter)

    async def clear_cache(self, caller: Caller) -> int:
        return await self.loop.call(self._cache.clear_cached)

    # Adapters.

    @property
    def adapter_revisions(self) -> Mapping[str, str]:
        """See `ProgramEngine`."""
        return self.core.adapters.revisions

    async def load_adapter(self, caller: Caller, name: str, directory: str) -> types.AdapterInfo:
        if self._adapters is None:
            raise FailedPrecondition("this server has no slots for adapters: see --adapter-slots", reason="NO_ADAPTERS")
        path = await asyncio.to_thread(self._adapters.find, directory)
        cancelled = threading.Event()
        loading = asyncio.wrap_future(self._submit_load(name, path, cancelled))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            cancelled.set()
            loading.add_done_callback(_forget_result)
            raise

    def load_adapter_now(self, name: str, path: Path) -> types.AdapterInfo:
        """Load the PEFT directory at `path`, which whoever runs the server chose; returns when it is loaded.

        Not on an event loop. Raises as `load_adapter`.
        """
        return self._submit_load(name, path, threading.Event()).result()

    def _submit_load(self, name: str, path: Path, cancelled: threading.Event) -> "Future[types.AdapterInfo]":
        assert self._adapter_loader is not None
        if name == self.info.model_id:
            raise InvalidArgument.field("name", "must not be the model's")
        return self._adapter_loader.submit(name, path, cancelled)

    async def unload_adapter(self, caller: Caller, name: str) -> types.AdapterInfo:
        return await self.loop.call(self.core.adapters.unload, name)

    async def adapters(self, caller: Caller) -> Sequence[types.AdapterInfo]:
        return await self.loop.call(self.core.adapters.infos)

    async def watch(self, caller: Caller, include_program_contexts: bool = False) -> AsyncIterator[types.ContextEvent]:
        arrived = asyncio.Event()
        wake = partial(self.loop.callbacks.post, asyncio.get_running_loop(), arrived.set)
        watch = Watch(caller.tenant, self._cache, self._deps.wall_clock, wake, with_programs=include_program_contexts)

        def read() -> Sequence[types.ContextEvent]:
            self.core.raise_if_draining()  # or a reader would hold up the end for as long as it likes
            return watch.read(self._contexts.describe)

        try:
            await self.loop.call(self._lifecycle.add_watch, watch)
            while True:
                arrived.clear()
                events = await self.loop.call(read)
                for event in events:
                    yield event
                if not events:
                    await arrived.wait()
        finally:
            self.loop.post_if_running(partial(self._lifecycle.remove_watch, watch))

    # Requests.

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> types.FillResult:
        submit = partial(self.core.fill, caller, context_id, self._token_ids(tokens), defer)
        return await self.loop.submit_request(submit)

    async def forward(self, caller: Caller, request: ForwardRequest) -> types.ForwardResult:
        submit = partial(self.core.forward, caller, request, self._token_ids(request.tokens))
        result: tuple[Sequence[ForwardAnswer], types.ContextInfo] = await self.loop.submit_request(submit)
        answers, context = result
        # A distribution over a whole vocabulary takes longer than the step thread and the event loop have.
        outputs = await asyncio.to_thread(_make_answers, answers)
        return types.ForwardResult(outputs=outputs, context=context)

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[types.GeneratePiece]:
        generation = _Generation(self.core, self.loop, caller, request)
        grammar = None
        if request.output_format is not None:
            grammar = await self.grammars.compile(caller.tenant, request.output_format)
        try:
            if request.n > 1:
                await self.loop.submit_request(generation.hold_and_flush)
            if request.resume_tokens > 0:
                await generation.read_resumed_output()
            if grammar is not None or has_token_rules(request):
                resumed = generation.resumed_tokens
                generation.prepared = await self.grammars.prepare(caller.tenant, grammar, request, resumed)
            await self._start(caller, generation)
            async for piece in generation.stream.pieces():
                generation.note_read(piece)
                yield piece
        except BaseException:
            self.loop.post_if_running(generation.abandon)
            raise

    async def _start(self, caller: Caller, generation: "_Generation") -> None:
        """Begin the outputs.

        Forks need a page each at once, for the part of a page that their prompt ends with. Where other requests run,
        which free pages when they end, this asks again, for up to FORK_WAIT_S.
        """
        give_up_at = self._deps.clock() + FORK_WAIT_S
        if caller.deadline is not None:
            give_up_at = min(give_up_at, caller.deadline - ANSWER_S)
        refusal: ResourceExhausted | None = None

        async def start() -> tuple[bool | None, float]:
            nonlocal refusal
            others_run = generation.needs_forks and await self.loop.call(self.core.has_requests)
            refusal, took_s = await self.loop.call(timed, generation.start_if_possible)
            if refusal is None:
                return True, took_s
            if others_run and generation.needs_forks and refusal.reason == "OUT_OF_PAGES":
                return None, took_s
            raise refusal

        if await self._page_waits.ask(caller.tenant, start, give_up_at) is None and refusal is not None:
            raise refusal

    def _token_ids(self, tokens: Sequence[int]) -> np.ndarray:
        """As int32. Raises InvalidArgument for an id beyond the vocabulary: JAX would take it for another token."""
        ids, size = np.asarray(tokens, np.int64).reshape(-1), self.info.vocab_size
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            raise InvalidArgument.field("tokens", f"ids must be 0 to {size - 1}")
        return ids.astype(np.int32)

    # The engine.

    async def stats(self) -> types.EngineStats:
        """As they are; or, while a step takes longer than STATS_TIMEOUT_S, as they were: a busy engine is not lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATS_TIMEOUT_S if self._last_stats else None):
                self._last_stats = await self.loop.call(self.core.stats)
        return replace(cast(types.EngineStats, self._last_stats), snapshots=self.snapshot_service.count())

    async def drain(self) -> None:
        await self.loop.call(self.core.begin_draining)
        while await self.loop.call(self.core.has_work) or self.snapshot_service.is_saving:
            await asyncio.sleep(DRAIN_LOOK_S)

    async def failure(self) -> str:
        return await asyncio.shield(asyncio.wrap_future(self.loop.failure))

    # Snapshots and publications.

    async def save(self, caller: Caller, request: SaveRequest) -> types.Snapshot:
        return await self.snapshot_service.save(caller, request)

    async def check_snapshot_quota(self, caller: Caller, versions: int) -> None:
        await self.snapshot_service.check_room(caller, versions)

    async def open(self, caller: Caller, request: OpenRequest) -> types.FillResult:
        return await self.snapshot_service.open(caller, request)

    async def take(self, caller: Caller, request: OpenRequest) -> types.FillResult:
        return await self.snapshot_service.take(caller, request)

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> types.Snapshot:
        return await self.snapshot_service.snapshot(caller, name, version)

    async def inspect_snapshot(
        self,
        caller: Caller,
        name: str,
        version: int | None = None,
        include_attachment: bool = False,
        include_tokens: bool = False,
    ) -> types.GetSnapshotResult:
        return await self.snapshot_service.inspect_snapshot(caller, name, version, include_attachment, include_tokens)

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


def _forget_result(loading: "asyncio.Future[types.AdapterInfo]") -> None:
    """Nobody waits for the result of a cancelled load; its error is no surprise either."""
    if not loading.cancelled():
        loading.exception()


class _Generation:
    """The outputs of one `generate` call: one per fork of the context, or one in the context itself if n is 1."""

    def __init__(self, core: EngineCore, loop: StepLoop, caller: Caller, request: GenerateRequest) -> None:
        self.stream = OutputStream(
            asyncio.get_running_loop(),
            loop.callbacks,
            outputs=request.n,
            limit=core.config.stream_buffer,
            wake=loop.wake,
        )
        self._core = core
        self._contexts = core.contexts
        self._loop = loop
        self._caller = caller
        self._request = request
        self.prepared: Sequence[PreparedMatcher] = ()  # one for each output, if not all tokens may come
        self._resumed: OutputText | None = None
        self._held: Context | None = None  # the context, until its forks are made
        self._forks: Sequence[Context] = ()
        self._ended_forks: set[str] = set()  # ids of those whose last piece the reader has
        self._running: list[Request] = []

    @property
    def needs_forks(self) -> bool:
        """Whether the outputs need forks that are not made yet."""
        return self._request.n > 1 and not self._forks

    @property
    def resumed_tokens(self) -> Sequence[int]:
        """The tokens that an output to be resumed has already."""
        return () if self._resumed is None else self._resumed.resumed

    async def read_resumed_output(self) -> None:
        """Decode the tokens that an output to be resumed has already."""
        before, tokens = await self._loop.call(self._core.output_so_far, self._caller, self._request)
        self._resumed = await asyncio.to_thread(OutputText, self._request, self._core.text, before, tokens)

    def hold_and_flush(self, reply: ResultFuture) -> Request | None:
        """On the step thread: flush the context to be forked, to which nobody else may write until it is forked."""
        self._held = self._core.hold(self._caller, self._request.context_id)
        return self._core.flush_held(self._caller, self._held, reply)

    def start(self) -> None:
        """On the step thread, as one command: nothing can come between the forks and their requests."""
        context_ids: Sequence[str] = [self._request.context_id]
        if self._request.n == 1:
            self._core.raise_if_draining()
        else:  # a drain was checked when the context was held
            self._forks = self._fork_held()
            context_ids = [fork.id for fork in self._forks]
        for index, context_id in enumerate(context_ids):
            prepared = self.prepared[index] if self.prepared else None
            request = self._core.generate(
                self._caller, self._request, context_id, index, self.stream, self._resumed, prepared
            )
            self._running.append(request)

    def _fork_held(self) -> Sequence[Context]:
        """The forks, after which others may write to the context again. Raises NotFound if it was closed meanwhile."""
        assert self._held is not None
        self._held.raise_if_closed()  # another context may have its id by now
        forks = self._contexts.fork(self._caller, self._held.id, n=self._request.n)
        self._release()
        return forks

    def _release(self) -> None:
        if self._held is not None:
            self._core.lifecycle.release(self._held)
            self._held = None

    def start_if_possible(self) -> ResourceExhausted | None:
        """The same, but returns the error where something is short."""
        try:
            self.start()
        except ResourceExhausted as error:
            return error
        return None

    def note_read(self, piece: types.GeneratePiece) -> None:
        """Before the reader gets a piece: a fork whose last piece it has is the reader's from then on."""
        if piece.finish is not None:
            self._ended_forks.add(piece.context_id)

    def abandon(self) -> None:
        """On the step thread: the reader left or an output failed. Close the forks but those that are the reader's."""
        self._release()
        for request in self._running:
            self._core.end(request)
        self._contexts.discard([fork for fork in self._forks if fork.id not in self._ended_forks])


def _make_answers(answers: Sequence[ForwardAnswer]) -> list[types.ForwardOutputResult]:
    return [make() for make in answers]
