"""A router and its engines, each a server of its own, over gRPC in one process: what tests of a router share."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx import types as requests
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import authorization_metadata
from jaxctx.rpc import from_rpc_error
from jaxctx.types import ContextEvent
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceStub
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from jaxctx_server.auth import Key, Role
from jaxctx_server.cluster import Cluster, register_with_router
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.e2e.program_callers import ProgramCaller
from tests.engines import Clock

LONG_TEXT = "You are a careful assistant who answers in one short sentence, and never guesses. " * 2
CLUSTER_KEY = "the cluster's key, of which nobody knows" * 2
USERS = [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in ("alice", "bob")]


class WithKeys:
    """Base of test classes whose router and engines have keys: two users' and the cluster's own."""

    @pytest.fixture
    def keys(self) -> list[Key]:
        return USERS

    @pytest.fixture
    def cluster(self) -> Cluster:
        return Cluster(CLUSTER_KEY)


@dataclass
class RouterCluster:
    """A router, and servers of engines that may join it."""

    clock: Clock
    keys: list[Key] | None
    cluster: Cluster
    router: str = ""
    programs: Any = None
    lifecycle: Any = None
    server: Any = None
    backend: Any = None
    engines: dict[str, LocalEngine] = field(default_factory=dict)  # by address
    registrations: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    engine_clusters: dict[str, Cluster] = field(default_factory=dict)  # the incarnation of each engine, by address

    @property
    def handles(self) -> dict[str, Any]:
        """The engines that the router knows, by address."""
        return dict(self.programs.dispatcher.engines.handles)

    async def register(self, address: str, cluster: Cluster | None = None) -> None:
        """Register an engine, as a process of this cluster, or again as the process that it was."""
        port, own = int(address.rpartition(":")[2]), self.engine_clusters.setdefault(address, cluster or self.cluster)
        self.registrations[address] = asyncio.create_task(register_with_router(self.router, own, port))
        await wait_until(lambda: address in self.handles)

    def leave(self, address: str) -> None:
        """Have an engine end its registration."""
        self.registrations.pop(address).cancel()


async def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def router_of(router_cluster: RouterCluster, port: int = 0) -> AsyncIterator[None]:
    """Run the router of a cluster, on this port (0: a free one)."""
    lifecycle = ServerLifecycle()
    backend = Backend.make(
        lifecycle,
        router_cluster.keys,
        max_calls=1024,
        clock=router_cluster.clock,
        cluster=router_cluster.cluster,
        is_router=True,
    )
    server = make_server(backend)
    router_cluster.backend = backend
    router_cluster.router = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    router = ServingState.router(Limits(queue_limit=64), router_cluster.clock)
    lifecycle.set_ready(router)
    router_cluster.programs, router_cluster.lifecycle, router_cluster.server = router.programs, lifecycle, server
    yield
    lifecycle.stop()
    await server.stop(None)


@asynccontextmanager
async def program_caller(router_cluster: RouterCluster, key: str | None = None) -> AsyncIterator[ProgramCaller]:
    """A caller of the router's session service, in a session of its own."""
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        yield await ProgramCaller(SessionServiceStub(channel), key).begin()


async def complete_alone(address: str, prompt: str, tokens: int) -> str:
    """What the server at an address completes a prompt with, in a context of its own."""
    async with (
        jaxctx.aio.Client(address, timeout_s=60) as client,
        await client.create(prompt, salt="alone") as context,
    ):
        return str(await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True))


async def wait_until_nothing_is_held(router_cluster: RouterCluster) -> None:
    """Wait until no engine has a context or runs anything."""
    async with asyncio.timeout(120):
        while any(
            [
                len(await engine.list(Caller(), include_program_contexts=True))
                for engine in router_cluster.engines.values()
            ]
        ):
            await asyncio.sleep(0.01)
    assert [(await engine.stats()).running for engine in router_cluster.engines.values()] == [0, 0]


async def error_of(call: Any) -> errors.JaxctxError:
    """The error that a call ends with, of one response or of a stream."""
    with pytest.raises(grpc.RpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return from_rpc_error(raised.value)


def register_engine(channel: Any, key: str = "", **fields: Any) -> Any:
    """A call of Register with these fields and this key."""
    request = RegisterRequest(**{"port": 1, "incarnation": "l", **fields})
    return EngineServiceStub(channel).Register(request, metadata=authorization_metadata(key), timeout=20)


async def address_of(router_cluster: RouterCluster, context_id: str, tenant: str = "") -> str:
    """The address of the one engine that has a context."""
    found = []
    for address, engine in router_cluster.engines.items():
        with suppress(errors.NotFound):
            await engine.inspect(Caller(tenant), context_id)
            found.append(address)
    (address,) = found
    return address


def record_watches(engine: LocalEngine) -> list[str]:
    """A list that gets the tenant of each watch of an engine's contexts that begins."""
    begun: list[str] = []
    watch = engine.watch

    async def recorded(caller: Caller, include_program_contexts: bool = False) -> AsyncIterator[ContextEvent]:
        begun.append(caller.tenant)
        async with aclosing(watch(caller, include_program_contexts)) as events:
            async for event in events:
                yield event

    engine.watch = recorded
    return begun


async def create_on(router_cluster: RouterCluster, address: str, **chosen: Any) -> str:
    """Create a context on an engine, without the router. Returns its id."""
    info = await router_cluster.engines[address].create(Caller(), requests.CreateContextRequest(**chosen))
    return str(info.context_id)


async def add_load(router_cluster: RouterCluster, address: str) -> None:
    """Have an engine look loaded, so that new contexts come to the other."""
    router_cluster.handles[address].forwarded += 4
