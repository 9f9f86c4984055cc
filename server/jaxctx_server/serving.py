"""Serving: whether the server loads, serves or drains, and what it serves. Every door asks here before it takes work.

loading ──opened──▶ ready ──drain──▶ draining ──stop──▶ stopped
"""

import asyncio
import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from jaxctx.apps.sessions import Programs
from jaxctx.engine.interface import Engine
from jaxctx.errors import NotFound, Unavailable
from jaxctx.model.text import ModelText
from jaxctx_server.content import Texts
from jaxctx_server.validate import Limits, TextContent

ENGINE_ID = "local"  # of the one in this process


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Served:
    """A model that is being served: its engine, its text and its limits, and the programs that run on it."""

    engine: Engine
    texts: Texts
    limits: Limits
    programs: Programs

    @classmethod
    def of(cls, engine: Engine, text: ModelText, limits: Limits, clock: Callable[[], float] = time.monotonic) -> Self:
        """One engine, with room for programs. `clock` is that of its deadlines."""
        return cls(engine, Texts(text, limits), limits, Programs(clock))

    async def attend(self) -> None:
        """Run the programs. Never returns."""
        engines = self.programs.dispatcher.engines
        await self.programs.attend(engines.attend(ENGINE_ID, self.engine, self._encode, patient=True))

    async def _encode(self, text: str, start: bool) -> Sequence[int]:
        async def is_empty() -> bool:
            return start

        return await self.texts.tokens(TextContent(text, None if start else False), is_empty)

    def check_model(self, model_id: str) -> None:
        """Raise NotFound unless `model_id` is "" (the default) or this model's."""
        if model_id not in ("", self.engine.info.model_id):
            raise NotFound("this server serves no such model", reason="MODEL_NOT_FOUND")


class Serving:
    """The one state of a server. Lives on the event loop."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.change = asyncio.Event()  # set when `state` changes; take it before reading that, so that none is missed
        self._served: Served | None = None
        self._drained: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None

    def served(self) -> Served:
        """What is served. While draining too: the engine refuses what is new and answers what is not."""
        if self._served is None:
            raise Unavailable("the server is loading", retry_after_s=1.0)
        if self.state is State.STOPPED:
            raise Unavailable("the server has stopped", retry_after_s=5.0)
        return self._served

    def opened(self, served: Served) -> None:
        """Loading is done."""
        self._served = served
        self._attending = asyncio.create_task(served.attend())
        self._enter(State.READY)

    async def drain(self) -> None:
        """Refuse new work, and return when running work is done. It goes on if the caller does not wait for it."""
        engine = self.served().engine
        if self._drained is None:
            self._enter(State.DRAINING)
            self._drained = asyncio.create_task(engine.drain())
        await asyncio.shield(self._drained)

    def stop(self) -> None:
        """Answer nothing more."""
        for task in (self._drained, self._attending):
            if task is not None:
                task.cancel()
        if self._served is not None:
            self._served.texts.close()
        self._enter(State.STOPPED)

    def _enter(self, state: State) -> None:
        self.state = state
        self.change.set()
        self.change = asyncio.Event()
