"""Places for responses in the background, and how all of them end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxctx.errors import ResourceExhausted
from jaxctx_server.http.openai.responses.event_log import EventLog
from jaxctx_server.http.openai.responses.registry import MAX_OF_ALL, MAX_OF_TENANT, BackgroundRegistry


class Running:
    def __init__(self, registry: BackgroundRegistry, tenant: str = "red", response_id: str = "") -> None:
        self.registry, self.tenant, self.response_id, self.log = registry, tenant, response_id, EventLog()
        self.interrupted = False
        self._ended = asyncio.Event()
        registry.add(self)

    def resource(self) -> dict[str, Any]:
        return {}

    async def wait_until_ended(self) -> None:
        await self._ended.wait()

    async def cancel(self) -> None:
        self.registry.discard(self)
        self._ended.set()

    async def interrupt(self) -> None:
        self.interrupted = True
        await self.cancel()


async def test_places_are_bounded_for_each_tenant_and_for_all() -> None:
    registry = BackgroundRegistry()
    running = [Running(registry) for _ in range(MAX_OF_TENANT)]
    with pytest.raises(ResourceExhausted, match=f"^{MAX_OF_TENANT} "):
        Running(registry)
    tenants = range(MAX_OF_ALL - MAX_OF_TENANT)
    others = [Running(registry, f"tenant {number}") for number in tenants]
    with pytest.raises(ResourceExhausted, match=f"^{MAX_OF_ALL} ") as raised:
        Running(registry, "one more")
    assert (raised.value.reason, raised.value.retry_after_s) == ("QUEUE_FULL", 5.0)
    assert len(registry.running) == len(running) + len(others) == MAX_OF_ALL
    await running[0].cancel()
    Running(registry)


async def test_it_is_found_by_its_owner_once_it_has_begun() -> None:
    registry = BackgroundRegistry()
    found, _starting = Running(registry, "red", "resp_1"), Running(registry, "red")
    assert registry.find("red", "resp_1") is found
    assert registry.find("blue", "resp_1") is None
    await found.cancel()
    assert registry.find("red", "resp_1") is None


async def test_all_of_them_are_waited_for_or_interrupted() -> None:
    registry = BackgroundRegistry()
    first, second = Running(registry), Running(registry)
    waiting = asyncio.create_task(registry.wait_until_ended())
    await first.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    await registry.interrupt()
    assert (first.interrupted, second.interrupted) == (False, True)
    async with asyncio.timeout(10):
        await waiting
