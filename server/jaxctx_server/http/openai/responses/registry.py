"""The responses that this server makes in the background now, of all tenants.

    add ──▶ running ──▶ discard

How many there may be is bounded, because each of them holds a context and its latest events.
"""

import asyncio
import secrets
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from jaxctx.errors import ResourceExhausted
from jaxctx_server.http.openai.responses.event_log import EventLog

Json = dict[str, Any]
MAX_OF_TENANT = 16
MAX_OF_ALL = 128


class RunningResponse(Protocol):
    """A response that is made in the background (`background.BackgroundResponse`)."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def response_id(self) -> str:
        """Its id; empty until it has begun."""

    @property
    def log(self) -> EventLog:
        """Its events."""

    def resource(self) -> Json:
        """It as the API returns it, as far as it has come."""

    async def wait_until_ended(self) -> None:
        """Return when it has ended and is stored."""

    async def cancel(self) -> None:
        """End it, and return when that is stored. One that is being stored already ends as it is."""

    async def interrupt(self) -> None:
        """As `cancel`, because the server stops."""


class BackgroundRegistry:
    """The responses of one server. Used on the event loop."""

    def __init__(self) -> None:
        self.server_id = secrets.token_hex(8)
        """Names this run of the server in what is stored."""
        self._running: set[RunningResponse] = set()

    @property
    def running(self) -> AbstractSet[RunningResponse]:
        """All that run."""
        return self._running

    def add(self, response: RunningResponse) -> None:
        """Take a place for a response. Raises ResourceExhausted (QUEUE_FULL) if there is none."""
        of_tenant = sum(each.tenant == response.tenant for each in self._running)
        if of_tenant >= MAX_OF_TENANT or len(self._running) >= MAX_OF_ALL:
            count = MAX_OF_TENANT if of_tenant >= MAX_OF_TENANT else MAX_OF_ALL
            message = f"{count} responses are being made in the background already"
            raise ResourceExhausted(message, reason="QUEUE_FULL", retry_after_s=5.0)
        self._running.add(response)

    def discard(self, response: RunningResponse) -> None:
        """The response has ended."""
        self._running.discard(response)

    def find(self, tenant: str, response_id: str) -> RunningResponse | None:
        """The response of this id, if it has begun and runs."""
        for each in self._running:
            if each.tenant == tenant and each.response_id == response_id:
                return each
        return None

    async def wait_until_ended(self) -> None:
        """Return when none runs."""
        while self._running:
            await asyncio.gather(*(each.wait_until_ended() for each in self._running))

    async def interrupt(self) -> None:
        """End all of them, and return when that is stored."""
        await asyncio.gather(*(each.interrupt() for each in self._running))
