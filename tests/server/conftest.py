"""A gRPC server on a loopback port, in front of a fake engine: contexts of plain token lists, scripted outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from jaxctx.engine.interface import Caller
from jaxctx.model.text import ModelText
from jaxctx.v1 import (
    admin_service_pb2_grpc,
    context_service_pb2_grpc,
    engine_service_pb2_grpc,
    model_service_pb2_grpc,
    session_service_pb2_grpc,
    snapshot_service_pb2_grpc,
)
from jaxctx_server.auth import Key
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.echo import echo_text
from tests.server.fake_engine import INFO, FakeEngine


@dataclass
class GrpcServer:
    """A running server and stubs of a client of it."""

    server: grpc.aio.Server
    lifecycle: ServerLifecycle
    engine: FakeEngine
    target: str
    channel: grpc.aio.Channel
    state: ServingState  # what it serves once it is ready

    @property
    def contexts(self) -> Any:
        return context_service_pb2_grpc.ContextServiceStub(self.channel)

    @property
    def snapshots(self) -> Any:
        return snapshot_service_pb2_grpc.SnapshotServiceStub(self.channel)

    @property
    def models(self) -> Any:
        return model_service_pb2_grpc.ModelServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_service_pb2_grpc.AdminServiceStub(self.channel)

    def stub(self, service: str) -> Any:
        return {
            "ContextService": self.contexts,
            "SnapshotService": self.snapshots,
            "SessionService": session_service_pb2_grpc.SessionServiceStub(self.channel),
            "ModelService": self.models,
            "AdminService": self.admin,
            "EngineService": engine_service_pb2_grpc.EngineServiceStub(self.channel),
        }[service]

    def last(self, name: str) -> tuple[Caller, Any]:
        """Caller and argument of the engine's latest call of a method."""
        return next((caller, argument) for called, caller, argument in reversed(self.engine.calls) if called == name)


@pytest.fixture
def text() -> ModelText:
    return echo_text()


@pytest.fixture
def make_engine() -> Callable[[], FakeEngine]:
    return FakeEngine


@pytest.fixture
def limits() -> Limits:
    return Limits.of(INFO, queue_limit=64)


@pytest.fixture
def open_grpc_server(text: ModelText) -> Callable[..., Any]:
    """`async with open_grpc_server(…) as grpc_server`: one that is ready, unless told otherwise."""

    @asynccontextmanager
    async def opened(
        *,
        keys: Sequence[Key] | None = None,
        ready: bool = True,
        address: str = "127.0.0.1:0",
        max_calls: int = 100,
        text: ModelText = text,
    ) -> AsyncIterator[GrpcServer]:
        lifecycle, engine = ServerLifecycle(), FakeEngine()
        limits = Limits.of(INFO, queue_limit=64)
        state = ServingState.of(engine, text, limits)
        backend = Backend.make(lifecycle, keys, max_calls=max_calls, clock=lambda: 1000.0)
        server = make_server(backend)
        port = server.add_insecure_port(address)
        target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        await server.start()
        if ready:
            lifecycle.set_ready(state)
        try:
            async with grpc.aio.insecure_channel(target) as channel:
                yield GrpcServer(server, lifecycle, engine, target, channel, state)
        finally:  # a server that is left to itself holds up the end of the tests
            lifecycle.stop()
            await server.stop(0)

    return opened


@pytest.fixture
async def grpc_server(open_grpc_server: Callable[..., Any]) -> AsyncIterator[GrpcServer]:
    async with open_grpc_server() as grpc_server:
        yield grpc_server


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `build_engine` serve the echo model, whatever directory it is given."""
    from jaxctx_server.engine_builder import build  # which imports JAX, for these tests alone
    from tests.serve_echo import put_echo_in_place

    monkeypatch.setattr(build, "load_served_model", build.load_served_model)  # and back afterwards
    put_echo_in_place()
