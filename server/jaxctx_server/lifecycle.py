"""The state of the server: whether it loads, serves or drains, and what it serves. Every call asks here first.

loading ──set_ready──▶ ready ──drain──▶ draining ──stop──▶ stopped
"""

import asyncio
import enum
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from jaxctx.engine.interface import LOCAL_ENGINE, Caller, Engine
from jaxctx.errors import FailedPrecondition, NotFound, Unavailable
from jaxctx.model.text import ModelText
from jaxctx.programs.dispatcher import Policy
from jaxctx.programs.engine_registry import HEARTBEAT_S, EngineHandle, EngineRegistry
from jaxctx.programs.executor import PREFIX_TIMEOUT_S
from jaxctx.programs.native_functions import load_functions
from jaxctx.programs.sessions import Programs
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx_server.tokenizer_pool import EmptyContext, MiddleOfSequence, TokenizerPool
from jaxctx_server.validate import Limits


class State(enum.Enum):
    """What the server is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The engine of this process, and the tokenizer of its model."""

    engine: Engine
    texts: TokenizerPool

    async def encode(self, caller: Caller, text: str, start: bool) -> Sequence[int]:
        """Tokens of a text; with special ones, if it is at the start of a sequence. All callers share the threads."""
        position = EmptyContext() if start else MiddleOfSequence()
        return await self.texts.tokens(FillRequest(text=text, add_special_tokens=start), position)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """The settings of programs, with the names that they have in `jaxctx_server.config`."""

    policy: Policy = field(default_factory=Policy)
    prefix_timeout_s: float = PREFIX_TIMEOUT_S
    heartbeat_s: float = HEARTBEAT_S

    def programs(self, clock: Callable[[], float]) -> Programs:
        """Programs with these settings and the native functions of this server."""
        return Programs(
            clock,
            load_functions(),
            policy=self.policy,
            prefix_timeout_s=self.prefix_timeout_s,
            heartbeat_s=self.heartbeat_s,
        )


DEFAULT_PROGRAM_SETTINGS = ProgramSettings()


@dataclass(frozen=True, slots=True)
class ServingState:
    """The objects of a server that serves: programs, and its own model. A router has no model (None)."""

    limits: Limits
    programs: Programs
    model: LocalModel | None
    drain: Callable[[], Coroutine[Any, Any, None]]  # refuse new work, and return when running work is done

    @classmethod
    def of(
        cls,
        engine: Engine,
        text: ModelText,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        settings: ProgramSettings = DEFAULT_PROGRAM_SETTINGS,
    ) -> Self:
        """A server of one engine, and of programs on it. `clock` is that of the engine's deadlines."""
        model = LocalModel(engine, TokenizerPool(text, limits))
        return cls(limits, settings.programs(clock), model, engine.drain)

    @classmethod
    def router(
        cls,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        settings: ProgramSettings = DEFAULT_PROGRAM_SETTINGS,
    ) -> Self:
        """A router of engines that register, and programs on them."""
        programs = settings.programs(clock)
        return cls(limits, programs, None, programs.drain)

    @property
    def engines(self) -> EngineRegistry:
        """The engines that answer now."""
        return self.programs.dispatcher.engines

    def engine_handles(self) -> list[EngineHandle]:
        """A handle of each engine that answers now: of the one of this process, or of those of a router."""
        return list(self.engines.handles.values())

    async def run_programs(self) -> None:
        """Run the programs. Never returns."""
        if self.model is None:
            await self.programs.watch()
        else:
            watch = self.engines.watch(LOCAL_ENGINE, self.model.engine, self.model.encode, patient=True)
            await self.programs.watch(watch)


class LongWork(Protocol):
    """Work of a transport that goes on when the call that began it has ended."""

    @property
    def is_unfinished(self) -> bool:
        """Whether any of it runs."""

    async def finish(self) -> None:
        """Return when all of it has ended by itself."""

    async def end(self) -> None:
        """End what still runs, note that where it is kept, and tidy up. Takes a few seconds at most."""


class ServerLifecycle:
    """The one state of a server. Used on the event loop.

    A drain first waits for long work, whose last steps an engine that drains would refuse. Meanwhile the pipeline
    refuses new work, as the engine does then.
    """

    def __init__(self) -> None:
        self.state = State.LOADING
        self.finishes_long_work = False  # a drain waits for it
        self.long_work: list[LongWork] = []
        self.changed = (
            asyncio.Event()
        )  # set when `state` changes; take it before reading `state`, so as to miss no change
        self._serving: ServingState | None = None
        self._draining: asyncio.Task[None] | None = None
        self._programs: asyncio.Task[None] | None = None

    def served(self) -> ServingState:
        """What is served; also while draining, when the engine refuses new work and answers all else.

        Raises Unavailable (NOT_SERVING) while the server loads, and once it has stopped.
        """
        if self._serving is None:
            raise Unavailable("the server is loading", reason="NOT_SERVING", retry_after_s=1.0)
        if self.state is State.STOPPED:
            raise Unavailable("the server has stopped", reason="NOT_SERVING", retry_after_s=5.0)
        return self._serving

    def model(self, model_id: str = "") -> LocalModel:
        """The model of this server, by its name ("": any), or that of an adapter. Raises NotFound (MODEL_NOT_FOUND),
        FailedPrecondition (WRONG_ROLE) on a router.
        """
        if (model := self.served().model) is None:
            raise FailedPrecondition("a router has no model: its engines do", reason="WRONG_ROLE")
        if model_id not in ("", model.engine.info.model_id) and model_id not in model.engine.adapter_revisions:
            raise NotFound("this server serves no such model", reason="MODEL_NOT_FOUND")
        return model

    def set_ready(self, serving: ServingState) -> None:
        """Loading is done: serve this from now on."""
        self._serving = serving
        self._programs = asyncio.create_task(serving.run_programs())
        self._enter(State.READY)

    async def drain(self) -> None:
        """Refuse new work, and return when running work is done. It goes on if the caller does not wait for it."""
        serving = self.served()
        if self._draining is None:
            self._enter(State.DRAINING)
            self._draining = asyncio.create_task(self._drain(serving))
        await asyncio.shield(self._draining)

    async def _drain(self, serving: ServingState) -> None:
        self.finishes_long_work = True
        while any(each.is_unfinished for each in self.long_work):  # one may begin while others finish
            await asyncio.gather(*(each.finish() for each in self.long_work))
        self.finishes_long_work = False  # from here on the engine refuses new work itself
        await serving.drain()

    async def end_long_work(self) -> None:
        """End what the drain's time was not enough for, so that it can be noted how it ended. Takes a few seconds."""
        if self._draining is not None:
            self._draining.cancel()
        await asyncio.gather(*(each.end() for each in self.long_work))

    def stop(self) -> None:
        """Answer nothing more."""
        for task in (self._draining, self._programs):
            if task is not None:
                task.cancel()
        if self._serving is not None and self._serving.model is not None:
            self._serving.model.texts.close()
        self._enter(State.STOPPED)

    def _enter(self, state: State) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()
