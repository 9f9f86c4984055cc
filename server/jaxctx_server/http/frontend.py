"""What all HTTP requests of one server share."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import Scope

from jaxctx_server.http.contextcache.registry import ContextRegistry
from jaxctx_server.http.openai.responses.registry import BackgroundRegistry
from jaxctx_server.http.pieces import PieceCache
from jaxctx_server.http.prompt_memory import PromptMemory
from jaxctx_server.services import Backend

END_TIMEOUT_S = 5.0  # for what the server still has to do for requests that have ended, when it stops
MAX_LOGGED_FIELDS = 1000
MAX_LOGGED_NAME = 64  # characters of a name that are kept: clients choose the names
log = logging.getLogger("jaxctx.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The services that requests become calls of, and what outlasts a single request."""

    backend: Backend
    response_ttl_s: float | None = None  # how long responses are kept; None: for ever
    conversation_ttl_s: float | None = None  # how long conversations are kept after their last use; None: for ever
    wall_time: Callable[[], float] = time.time  # seconds since 1970
    kept_contexts: ContextRegistry = field(default_factory=ContextRegistry)
    pieces: PieceCache = field(default_factory=PieceCache)
    prompts: PromptMemory = field(default_factory=PromptMemory)
    background_responses: BackgroundRegistry = field(default_factory=BackgroundRegistry)
    background_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    saving: set[asyncio.Event] = field(default_factory=set)
    """Requests that will save a context, each by what is set when it has ended."""
    websockets: set[str] = field(default_factory=set)
    """Peers of the WebSockets that are open."""
    logged_fields: set[str] = field(default_factory=set)
    """Names of unknown fields that were logged, or how they begin; each is logged once."""

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that must be done also when the request that began it is cancelled."""
        task = asyncio.create_task(work)
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)
        return task

    @contextmanager
    def will_save(self) -> Iterator[None]:
        """While entered, a drain waits: the request saves a context at its end, which an engine that drains refuses."""
        ended = asyncio.Event()
        self.saving.add(ended)
        try:
            yield
        finally:
            self.saving.discard(ended)
            ended.set()

    @property
    def is_unfinished(self) -> bool:
        """Whether a drain has to wait for `finish`: for a response in the background, or a context to be saved."""
        return bool(self.background_responses.running or self.saving)

    async def finish(self) -> None:
        """Return when no response runs in the background any more, and no request has a context to save."""
        await self.background_responses.wait_until_ended()
        while self.saving:
            await asyncio.gather(*(ended.wait() for ended in self.saving))

    async def end(self) -> None:
        """End the responses that run in the background, and close the contexts of requests that have ended.

        Takes up to `END_TIMEOUT_S`; what is not done by then is left undone, and the log says so.
        """
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.background_responses.interrupt()
                while self.background_tasks:
                    await asyncio.wait(list(self.background_tasks))
        except TimeoutError:
            left = len(self.background_responses.running) + len(self.background_tasks)
            log.warning("the server stops before it could tidy up after %d requests", left)

    def log_unknown_fields(self, names: Sequence[str]) -> None:
        """Log the name of each field that is left unread, once."""
        for each in names:
            name = each[:MAX_LOGGED_NAME]
            if name not in self.logged_fields and len(self.logged_fields) < MAX_LOGGED_FIELDS:
                self.logged_fields.add(name)
                log.warning("a field that is not known is left unread: %.64r", name)


def frontend_of(scope: Scope) -> Frontend:
    """The frontend of the application that serves a request."""
    return cast(Frontend, scope["app"].state.frontend)
