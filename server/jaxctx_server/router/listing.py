"""Lists of a router: a page of what all its engines have."""

from __future__ import annotations

from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import RequestT, ResponseT, StubMethod
from jaxctx.errors import NotFound
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx_server.router.engines import RouterEngines
from jaxctx_server.router.forwarding import ForwardedCall, Forwarder
from jaxctx_server.service.paging import entries_to_find

MAX_LISTED = 1000  # entries that an engine returns at once at most


def entries_to_ask_for(limit: int) -> int:
    """How many entries to ask each engine for, given the `limit` of a request: see `entries_to_find`."""
    return min(entries_to_find(limit), MAX_LISTED)


class Lister:
    """Asks all engines for their page of a list."""

    def __init__(self, engines: RouterEngines, forwarder: Forwarder) -> None:
        self._engines = engines
        self._forwarder = forwarder

    async def pages(
        self, method: StubMethod[RequestT, ResponseT], caller: Caller, request: RequestT
    ) -> list[tuple[EngineHandle, ResponseT]]:
        """The response of each engine to a list request, but of those that know nothing of what it is about.

        Raises the error that says why there is none, if there is none.
        """
        handles = self._engines.by_load()
        pages = await self._engines.ask_each(method, caller, request, handles, ignore=NotFound)
        if pages:
            return list(pages.items())
        return [await self._forwarder.ask(ForwardedCall(caller=caller, request=request), method)]
