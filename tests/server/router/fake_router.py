"""A router of fake engines, without connections: an engine's methods are those of the services on a `FakeEngine`."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import RemoteEngine
from jaxctx.errors import JaxctxError
from jaxctx.model.text import ModelText
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.types import EngineInfo, EngineStats
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceStub
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.router.context_service import RouterContextService
from jaxctx_server.router.engines import RouterEngines
from jaxctx_server.router.forwarding import Forwarder
from jaxctx_server.router.leftovers import LeftoverContexts
from jaxctx_server.router.listing import Lister
from jaxctx_server.router.migration import Migrator
from jaxctx_server.router.model_service import RouterModelService
from jaxctx_server.router.placement import PlacementTable
from jaxctx_server.router.planning import Planner
from jaxctx_server.router.snapshot_service import RouterSnapshotService
from jaxctx_server.router.watch import Watcher
from jaxctx_server.service.admin import LocalAdminService
from jaxctx_server.service.contexts import LocalContextService
from jaxctx_server.service.models import LocalModelService
from jaxctx_server.service.snapshots import LocalSnapshotService
from jaxctx_server.validate import Limits
from tests.server.fake_engine import INFO, STATS, FakeEngine

NOW = 1000.0  # of the clock


class NameChannel:
    """A channel for stubs whose methods are their own names."""

    def unary_unary(self, path: str, **_: Any) -> str:
        return path.rpartition("/")[2]

    unary_stream = unary_unary


class FakeRemoteEngine(RemoteEngine):
    """The connection of a router to a fake engine. Calls are recorded, and answered by the services of one server."""

    attention_status = FakeEngine.attention_status
    _processes = itertools.count(1)

    def __init__(self, text: ModelText, info: EngineInfo) -> None:
        channel: Any = NameChannel()
        self.contexts = ContextServiceStub(channel)
        self.snapshots = SnapshotServiceStub(channel)
        self.models = ModelServiceStub(channel)
        self.admin = AdminServiceStub(channel)
        self.info = info
        self._adapter_revisions = {}
        self.fake = FakeEngine()  # what the engine has
        self.fake.info = info
        self.requests: list[tuple[str, Caller, Any]] = []  # name of the RPC, caller and message
        self.errors: dict[str, list[JaxctxError]] = defaultdict(list)  # that the next calls of an RPC raise
        self.responses: dict[str, Message] = {}  # that an RPC returns instead of what the engine has
        self.gates: dict[str, asyncio.Event] = {}  # that calls of an RPC wait for
        self.streams: dict[str, asyncio.Queue[Message | None]] = {}  # that an RPC streams from; None ends the stream
        self.times_calls_ended = 0
        self.incarnation = f"process {next(self._processes)}"
        self._lifecycle = ServerLifecycle()
        self._lifecycle.set_ready(ServingState.of(self.fake, text, Limits.of(info, queue_limit=64), lambda: NOW))
        self._services: list[Any] = [
            LocalContextService(self._lifecycle),
            LocalSnapshotService(self._lifecycle),
            LocalModelService(self._lifecycle),
            LocalAdminService(self._lifecycle),
        ]

    def requests_of(self, rpc: str) -> list[Any]:
        """The messages of all calls of an RPC."""
        return [request for name, _, request in self.requests if name == rpc]

    async def until_asked(self, rpc: str, times: int = 1) -> None:
        """Wait until an RPC was asked for so many times."""
        async with asyncio.timeout(10):
            while len(self.requests_of(rpc)) < times:
                await asyncio.sleep(0)

    async def stats(self) -> EngineStats:
        self._adapter_revisions = dict(self.fake.adapter_revisions)
        return STATS

    def end_calls(self) -> None:
        self.times_calls_ended += 1

    async def encode(self, caller: Caller, text: str, start: bool) -> Sequence[int]:
        return [ord(character) for character in text]

    async def call(self, method: Any, caller: Caller, request: Any) -> Any:
        async with self.started(method, caller, request) as response:
            return await response

    @asynccontextmanager
    async def started(self, method: Any, caller: Caller, request: Message) -> AsyncIterator[Any]:
        sent = type(request)()
        sent.CopyFrom(request)
        self.requests.append((method, caller, sent))
        if method in self.gates:
            await self.gates[method].wait()
        if self.errors[method]:
            raise self.errors[method].pop(0)
        response = self._respond(method, caller, sent)
        try:
            yield response
        finally:
            await close(response)

    def _respond(self, rpc: str, caller: Caller, request: Message) -> Any:
        if rpc in self.responses:
            return returned(self.responses[rpc])
        if rpc in self.streams:
            return queued(self.streams[rpc])
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()
        service = next(service for service in self._services if hasattr(service, name))
        return getattr(service, name)(replace(caller, of_cluster=True), request)

    async def aclose(self) -> None:
        self._lifecycle.stop()


async def returned(response: Message) -> Message:
    return response


async def queued(messages: asyncio.Queue[Message | None]) -> AsyncIterator[Message]:
    while (message := await messages.get()) is not None:
        yield message


async def close(response: Any) -> None:
    """End a stream that was not read to its end."""
    if hasattr(response, "aclose"):
        await response.aclose()


class FakeRouter:
    """All parts of a router, and its engines by address."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self.lifecycle = ServerLifecycle()
        self.state = ServingState.router(Limits(queue_limit=64), lambda: NOW)
        self.lifecycle.set_ready(self.state)
        self.connections: dict[str, FakeRemoteEngine] = {}
        self.engines = RouterEngines(self.lifecycle)
        self.placements = PlacementTable()
        self.leftovers = LeftoverContexts(self.engines, self.placements, lambda: NOW)
        self.planner = Planner(self.engines, self.leftovers, lambda: NOW)
        self.forwarder = Forwarder(self.lifecycle, self.engines, self.placements, self.planner, self.leftovers)
        self.lister = Lister(self.engines, self.forwarder)
        self.watcher = Watcher(self.lifecycle, self.engines, self.placements)
        self.migrator = Migrator(self.engines, self.placements, self.leftovers, lambda: NOW)
        self.contexts = RouterContextService(
            self.forwarder, self.lister, self.planner, self.watcher, self.placements, self.migrator
        )
        self.snapshots = RouterSnapshotService(self.forwarder, self.lister, self.placements)
        self.models = RouterModelService(self.forwarder, self.lister)

    def add_engine(self, address: str, **info: Any) -> EngineHandle:
        """Register an engine that differs from `INFO` in these fields."""
        connection = FakeRemoteEngine(self._text, replace(INFO, **info))
        self.connections[address] = connection
        return self.state.engines.register(address, connection, connection.encode)

    def handle(self, address: str) -> EngineHandle:
        return self.state.engines.handles[address]

    def lose(self, address: str, *, may_come_back: bool = False) -> None:
        """Lose an engine; one that may come back is still watched."""
        self.state.engines.lose(self.handle(address))
        if may_come_back:
            self.watch = asyncio.create_task(asyncio.Event().wait())  # kept, as the router keeps it weakly
            watching: Any = self.state.programs.watching
            watching[address] = self.watch

    async def stop(self) -> None:
        for connection in self.connections.values():
            await connection.aclose()
        self.lifecycle.stop()
