"""A whole server in the test's event loop: engine on the echo model, gRPC on a free port, the Python client."""

import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx_server.auth import Key, Role
from jaxctx_server.cluster import ALONE, Cluster
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.e2e.long_model import long_server
from tests.e2e.server_processes import OBEDIENT, Server
from tests.echo import echo_text
from tests.engines import Clock

CONFIG = EngineConfig(pages=256, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)


@pytest.fixture
def engine_config() -> EngineConfig:
    return CONFIG


@pytest.fixture
def engine(make_engine, engine_config) -> LocalEngine:
    return make_engine(engine_config)


@pytest.fixture(scope="session")
def compile_cache() -> Path:
    """Where servers that are processes keep compiled steps: each size compiles once a session, of all its workers."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "servers"


@pytest.fixture(scope="session")
def long_model(compile_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server process of the model "long", see `long_model.py`: one for all tests of clients that a worker runs."""
    server = long_server(compile_cache, tmp_path_factory.mktemp("long"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def obedient(compile_cache: Path) -> Iterator[Server]:
    """A server process of a model that does what it is asked, see `tests.obedient`."""
    sizes = ("--max-batch", "4", "--max-batch-tokens", "256", "--kv-tokens", "65536")
    server = Server(*sizes, cache=compile_cache, command=OBEDIENT)
    yield server
    server.kill()


TENANTS = ("alice", "bob")


@pytest.fixture
def keys() -> list[Key] | None:
    """Keys of the server, each its tenant's name; none: whoever reaches it."""
    return None


@asynccontextmanager
async def backend_of(
    engine: LocalEngine,
    config: EngineConfig,
    clock: Clock,
    keys: list[Key] | None = None,
    cluster: Cluster = ALONE,
    max_calls: int = 1024,
) -> AsyncIterator[Backend]:
    """What all transports of a server of this engine share; it is ready."""
    lifecycle = ServerLifecycle()
    backend = Backend.make(lifecycle, keys, max_calls=max_calls, clock=clock, cluster=cluster)
    limits = Limits.of(engine.info, queue_limit=config.queue_limit)
    lifecycle.set_ready(ServingState.of(engine, echo_text(), limits, clock))
    yield backend
    lifecycle.stop()


@asynccontextmanager
async def grpc_address(backend: Backend) -> AsyncIterator[str]:
    """Where a gRPC server of a backend listens."""
    server = make_server(backend)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    backend.lifecycle.stop()
    await server.stop(None)


@asynccontextmanager
async def served(
    engine: LocalEngine,
    config: EngineConfig,
    clock: Clock,
    keys: list[Key] | None = None,
    cluster: Cluster = ALONE,
    max_calls: int = 1024,
) -> AsyncIterator[str]:
    """Where a gRPC server of this engine listens."""
    async with (
        backend_of(engine, config, clock, keys, cluster, max_calls) as backend,
        grpc_address(backend) as address,
    ):
        yield address


@pytest.fixture
async def backend(
    engine: LocalEngine, engine_config: EngineConfig, keys: list[Key] | None, clock: Clock
) -> AsyncIterator[Backend]:
    async with backend_of(engine, engine_config, clock, keys) as backend:
        yield backend


@pytest.fixture
async def address(backend: Backend) -> AsyncIterator[str]:
    async with grpc_address(backend) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[jaxctx.aio.Client]:
    async with jaxctx.aio.Client(address, timeout_s=60) as client:
        yield client


@pytest.fixture
def two_tenants() -> list[Key]:
    return [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in TENANTS]
