"""What all HTTP requests of one server share."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import Scope

from jaxctx_server.http.contextcache.registry import ContextRegistry
from jaxctx_server.http.pieces import PieceCache
from jaxctx_server.http.prompt_memory import PromptMemory
from jaxctx_server.services import Backend

MAX_LOGGED_FIELDS = 1000
MAX_LOGGED_NAME = 64  # characters of a name that are kept: clients choose the names
log = logging.getLogger("jaxctx.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The services that requests become calls of, and what outlasts a single request."""

    backend: Backend
    response_ttl_s: float | None = None  # how long responses and conversations are kept; None: for ever
    wall_time: Callable[[], float] = time.time  # seconds since 1970
    kept_contexts: ContextRegistry = field(default_factory=ContextRegistry)
    pieces: PieceCache = field(default_factory=PieceCache)
    prompts: PromptMemory = field(default_factory=PromptMemory)
    background_tasks: set[asyncio.Task[None]] = field(default_factory=set)
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
