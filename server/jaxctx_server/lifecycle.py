"""Serving: whether the server loads, serves or drains, and what it serves. Every door asks here before it takes work.

loading ──opened──▶ ready ──drain──▶ draining ──stop──▶ stopped
"""

import asyncio
import enum
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jaxctx.engine.interface import LOCAL_ENGINE, Engine
from jaxctx.errors import FailedPrecondition, NotFound, Unavailable
from jaxctx.model.text import ModelText
from jaxctx.programs.dispatcher import Policy
from jaxctx.programs.engine_registry import HEARTBEAT_S
from jaxctx.programs.executor import PREFIX_TIMEOUT_S
from jaxctx.programs.native_functions import load_functions
from jaxctx.programs.sessions import Programs
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx_server.tokenizer_pool import Nothing, Something, TokenizerPool
from jaxctx_server.validate import Limits


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The engine of this process, and the text of its model."""

    engine: Engine
    texts: TokenizerPool

    async def encode(self, text: str, start: bool) -> Sequence[int]:
        """Tokens of a text; with special ones, if it stands at the start of a sequence."""
        before = Nothing() if start else Something()
        return await self.texts.tokens(FillRequest(text=text, add_special_tokens=start), before)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """What can be set of programs; see the settings of these names."""

    policy: Policy = field(default_factory=Policy)
    prefix_timeout_s: float = PREFIX_TIMEOUT_S
    heartbeat_s: float = HEARTBEAT_S

    def programs(self, clock: Callable[[], float]) -> Programs:
        """With the steps that this server has."""
        return Programs(
            clock,
            load_functions(),
            policy=self.policy,
            prefix_timeout_s=self.prefix_timeout_s,
            heartbeat_s=self.heartbeat_s,
        )


DEFAULT = ProgramSettings()


@dataclass(frozen=True, slots=True)
class ServingState:
    """What a server serves: programs, on its own model or, in a router (None), on other processes' engines."""

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
        settings: ProgramSettings = DEFAULT,
    ) -> Self:
        """One engine, with room for programs. `clock` is that of its deadlines."""
        return cls(limits, settings.programs(clock), LocalModel(engine, TokenizerPool(text, limits)), engine.drain)

    @classmethod
    def router(
        cls, limits: Limits, clock: Callable[[], float] = time.monotonic, settings: ProgramSettings = DEFAULT
    ) -> Self:
        """Programs, on engines that register."""
        programs = settings.programs(clock)
        return cls(limits, programs, None, programs.drain)

    async def attend(self) -> None:
        """Run the programs. Never returns."""
        watched, engines = [], self.programs.dispatcher.engines
        if self.model is not None:
            watched.append(engines.watch(LOCAL_ENGINE, self.model.engine, self.model.encode, patient=True))
        await self.programs.watch(*watched)


class ServerLifecycle:
    """The one state of a server. Lives on the event loop."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.change = asyncio.Event()  # set when `state` changes; take it before reading that, so that none is missed
        self._served: ServingState | None = None
        self._drained: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None

    def served(self) -> ServingState:
        """What is served. While draining too: the engine refuses what is new and answers what is not."""
        if self._served is None:
            raise Unavailable("the server is loading", reason="NOT_SERVING", retry_after_s=1.0)
        if self.state is State.STOPPED:
            raise Unavailable("the server has stopped", reason="NOT_SERVING", retry_after_s=5.0)
        return self._served

    def model(self, model_id: str = "") -> LocalModel:
        """The model of this server. NotFound if it does not have this name, "" for any."""
        if (model := self.served().model) is None:
            raise FailedPrecondition("a router has no model: its engines do", reason="WRONG_ROLE")
        if model_id not in ("", model.engine.info.model_id):
            raise NotFound("this server serves no such model", reason="MODEL_NOT_FOUND")
        return model

    def opened(self, served: ServingState) -> None:
        """Loading is done."""
        self._served = served
        self._attending = asyncio.create_task(served.attend())
        self._enter(State.READY)

    async def drain(self) -> None:
        """Refuse new work, and return when running work is done. It goes on if the caller does not wait for it."""
        served = self.served()
        if self._drained is None:
            self._enter(State.DRAINING)
            self._drained = asyncio.create_task(served.drain())
        await asyncio.shield(self._drained)

    def stop(self) -> None:
        """Answer nothing more."""
        for task in (self._drained, self._attending):
            if task is not None:
                task.cancel()
        if self._served is not None and self._served.model is not None:
            self._served.model.texts.close()
        self._enter(State.STOPPED)

    def _enter(self, state: State) -> None:
        self.state = state
        self.change.set()
        self.change = asyncio.Event()
