"""One run of a server: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import io
import re
import socket
import ssl
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import jaxctx
from jaxctx.errors import Unauthenticated, Unavailable
from jaxctx.programs.dispatcher import Policy
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import context_service_pb2_grpc
from jaxctx_server import addresses
from jaxctx_server import tls as tls_module
from jaxctx_server.auth import CERTIFIED
from jaxctx_server.cluster import ALONE, Cluster
from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import ADDRESS, CUT_OFF, DEFECT, INTERRUPTED, MODEL, OK, USAGE, StartError
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ProgramSettings
from jaxctx_server.server import http_access, program_settings, serve
from jaxctx_server.tls import TlsStore
from tests.certificates import Pair, browser, write_pair, write_root
from tests.server.collector import running_collector
from tests.server.http.client import HttpClient
from tests.server.key_files import key_line

CLUSTER_KEY = "a secret of the servers of a cluster, which nobody else knows"


def no_load(config: ServeConfig, progress: Any) -> Any:
    raise AssertionError("must not be called")


class RunningServer:
    """A server that is being run: set `stop` to end it."""

    def __init__(
        self,
        engine: Any,
        text: Any,
        config: ServeConfig,
        keys: Any = None,
        tls: TlsStore | None = None,
        cluster: Cluster = ALONE,
    ) -> None:
        self.engine = engine
        self.stopped = False
        self.loads = threading.Event()
        self.may_load = threading.Event()
        self.stop = asyncio.Event()
        self.out, self.err = io.StringIO(), io.StringIO()

        def load(config: ServeConfig, progress: Any) -> Any:
            self.loads.set()
            progress.weights(0, 10 << 20)
            assert self.may_load.wait(30)
            progress.weights(10 << 20, 10 << 20)
            progress.compiled("step of 4 rows", 1, 1)
            engine.stop = self._stop_engine
            return engine, text

        running = serve(config, keys, load, self.stop, tls=tls, cluster=cluster, out=self.out, err=self.err)
        self.task = asyncio.ensure_future(running)

    def _stop_engine(self) -> None:
        self.stopped = True

    async def ready(self) -> str:
        """Waits for the banner; returns the first address in it."""
        self.may_load.set()
        async with asyncio.timeout(120):
            while "ready in" not in self.out.getvalue():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.01)
        return next(line.split()[1] for line in self.out.getvalue().splitlines() if "gRPC" in line)


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine()


async def test_start_to_stop(engine: Any, text: Any, tmp_path: Path) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0, unix_socket=tmp_path / "s"))
    address = await life.ready()
    banner = life.out.getvalue()
    assert "fake (fake, 7 parameters, float32 with int8 weights)" in banner
    assert "400 tokens in 100 pages of 4, float32" in banner
    assert "cpu, tensor 1" in banner
    assert f"unix:{tmp_path}/s" in banner
    assert "whoever reaches these addresses" in banner
    assert not address.endswith(":0")
    assert "weights: 0.0/10.0 MiB" in life.err.getvalue()
    assert "compiling: 1/1 step of 4 rows" in life.err.getvalue()
    url = re.search(r"HTTP +http://127.0.0.1:(\d+) ", banner)
    assert url
    web = HttpClient(int(url[1]))
    assert (await web("GET", "/health")).json == {"status": "ready"}
    for target in (address, f"unix:{tmp_path}/s"):
        async with grpc.aio.insecure_channel(target) as channel:
            stub = context_service_pb2_grpc.ContextServiceStub(channel)
            await stub.ListContexts(pb.ListContextsRequest())
    life.stop.set()
    assert await life.task == OK
    with pytest.raises(ConnectionRefusedError):
        await web("GET", "/health")
    assert engine.draining
    assert life.stopped
    assert not (tmp_path / "s").exists()


async def test_the_banner_says_why_contexts_may_be_so_long(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    await life.ready()
    assert "up to 10,000 tokens each; 4 run at once" in life.out.getvalue()
    life.stop.set()
    assert await life.task == OK
    engine.context_reason = "as many as its attention window has"
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    await life.ready()
    assert "up to 10,000 tokens each (as many as its attention window has); 4 run at once" in life.out.getvalue()
    life.stop.set()
    assert await life.task == OK


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Policy)])
def test_each_policy_of_programs_is_a_setting(name: str) -> None:
    assert program_settings(ServeConfig()) == ProgramSettings()
    config = ServeConfig(**{f"dispatch_{name}": False}, prefix_timeout_s=7.0, heartbeat_s=0.5)
    programs = program_settings(config).programs(time.monotonic)
    assert programs.dispatcher.policy == Policy(**{name: False})
    assert programs.dispatcher.engines.silence_s == 1.5


async def test_a_setting_says_how_often_engines_are_asked(engine: Any, text: Any) -> None:
    asked: list[float] = []
    stats = engine.stats

    async def counted() -> Any:
        asked.append(time.monotonic())
        return await stats()

    engine.stats = counted
    often = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0, heartbeat_s=0.05))
    await often.ready()
    async with asyncio.timeout(30):
        while len(asked) < 5:
            await asyncio.sleep(0.01)
    often.stop.set()
    await often.task
    asked.clear()
    seldom = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0, heartbeat_s=60.0))
    await seldom.ready()
    await asyncio.sleep(1.5)  # longer than a heartbeat that is not set
    assert len(asked) == 1
    seldom.stop.set()
    await seldom.task


async def test_it_answers_probes_while_it_loads(engine: Any, text: Any, tmp_path: Path) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0, unix_socket=tmp_path / "s"))
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService")
        response = await health.Check(request, wait_for_ready=True)
        assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await life.ready()
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    life.stop.set()
    assert await life.task == OK


async def test_running_work_finishes_before_the_end(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    address = await life.ready()
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService")
        )
        await watch.read()
        engine.drained.clear()
        life.stop.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = context_service_pb2_grpc.ContextServiceStub(channel)
        await stub.ListContexts(pb.ListContextsRequest())  # reading goes on
        assert not life.task.done()
        engine.drained.set()
        assert await life.task == OK


async def test_a_drain_that_takes_too_long_is_cut_off(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0, drain_timeout_s=0.05))
    address = await life.ready()
    engine.hang = True
    async with grpc.aio.insecure_channel(address) as channel:
        stub = context_service_pb2_grpc.ContextServiceStub(channel)
        await stub.CreateContext(pb.CreateContextRequest(context_id="a"))
        stream = stub.Generate(pb.GenerateRequest(context_id="a"))
        await stream.read()
        engine.drained.clear()
        life.stop.set()
        assert await life.task == CUT_OFF
    assert engine.cancelled == ["generate"]
    assert life.stopped


async def test_an_engine_that_cannot_drain_ends_all_the_same(engine: Any, text: Any) -> None:
    async def broken() -> None:
        raise Unavailable("the engine stopped")

    engine.drain = broken
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    await life.ready()
    life.stop.set()
    assert await life.task == CUT_OFF
    assert life.stopped


async def test_a_failed_engine_ends_the_process_so_that_it_can_be_restarted(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    address = await life.ready()
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService"))
        await watch.read()
        engine.fails.set()
        assert await life.task == DEFECT
    assert life.stopped


async def test_stopped_while_loading(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    assert await asyncio.to_thread(life.loads.wait, 60)
    life.stop.set()
    assert await life.task == INTERRUPTED
    life.may_load.set()  # or the event loop waits for the thread


async def test_a_model_that_cannot_be_loaded(text: Any) -> None:
    def load(config: Any, progress: Any) -> Any:
        raise StartError("no such model", MODEL)

    with pytest.raises(StartError, match="no such model"):
        await serve(ServeConfig(grpc_port=0, http_port=0), None, load, asyncio.Event(), err=io.StringIO())


async def test_addresses_are_checked_before_anything_is_loaded(text: Any) -> None:
    def load(config: Any, progress: Any) -> Any:
        raise AssertionError("must not be called")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for config, status in [
            (ServeConfig(grpc_port=taken.getsockname()[1], http_port=0), ADDRESS),
            (ServeConfig(grpc_port=0, http_port=taken.getsockname()[1]), ADDRESS),
            (ServeConfig(host="0.0.0.0"), USAGE),
        ]:
            with pytest.raises(StartError) as raised:
                await serve(config, None, load, asyncio.Event())
            assert raised.value.exit_status == status


@pytest.mark.parametrize(
    ("settings", "keys", "hosts"),
    [
        ({}, False, ("localhost", "127.0.0.1", "[::1]", "127.0.0.1")),
        ({}, True, ("*",)),
        ({"tls_cert": Path("c"), "tls_key": Path("k")}, False, ("*",)),
        ({"allowed_hosts": ("a.example",)}, False, ("a.example",)),
        ({"allowed_hosts": ("a.example",)}, True, ("a.example",)),
    ],
)
def test_the_names_by_which_browsers_may_reach_it(settings: Any, keys: bool, hosts: tuple[str, ...]) -> None:
    assert http_access(ServeConfig(**settings), keys=keys).allowed_hosts == hosts


async def test_without_http(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http=False))
    await life.ready()
    assert "HTTP" not in life.out.getvalue()
    life.stop.set()
    assert await life.task == OK


async def test_traces_are_sent_before_the_server_has_ended(engine: Any, text: Any) -> None:
    with running_collector() as collector:
        life = RunningServer(engine, text, ServeConfig(grpc_port=0, http=False, otlp_endpoint=collector.url))
        async with grpc.aio.insecure_channel(await life.ready()) as channel:
            await context_service_pb2_grpc.ContextServiceStub(channel).CreateContext(pb.CreateContextRequest())
        life.stop.set()
        assert await life.task == OK
    assert collector.span_names == ["jaxctx.v1.ContextService/CreateContext"]


async def test_without_a_url_for_traces_nothing_is_begun(text: Any) -> None:
    def load(config: Any, progress: Any) -> Any:
        raise AssertionError("must not be called")

    with pytest.raises(StartError, match="--otlp-endpoint"):
        await serve(ServeConfig(grpc_port=0, otlp_endpoint="nowhere"), None, load, asyncio.Event())


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server_pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "server", "servers")


@pytest.fixture
def caller(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "caller", "callers")


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    return write_root(tmp_path / "ca.pem", "servers")


async def status_of_get(port: int, context: ssl.SSLContext, key: str = "") -> int:
    """Status of GET /v1/models over HTTPS."""

    def ask() -> int:
        connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=context)
        try:
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"} if key else {})
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def test_with_tls_and_keys_both_transports_want_both(
    engine: Any, text: Any, server_pair: Pair, trust: Path, tmp_path: Path
) -> None:
    config = ServeConfig(
        grpc_port=0, http_port=0, tls_cert=server_pair.cert, tls_key=server_pair.key, unix_socket=tmp_path / "s"
    )
    (tmp_path / "keys").write_text(key_line("alice"))
    life = RunningServer(engine, text, config, KeyStore(None, tmp_path / "keys"), TlsStore.of(config))
    address = await life.ready()
    banner = life.out.getvalue()
    found = re.search(r"HTTP +https://127.0.0.1:(\d+) \(OpenAI: https://127.0.0.1:\1/v1\) \(TLS\)", banner)
    assert found, banner
    assert f"gRPC      {address} (TLS)" in banner
    tls = jaxctx.Tls(ca_file=trust)
    async with jaxctx.aio.Client(address, tls=tls, api_key="alice-key") as client:
        await client.create()
    async with jaxctx.aio.Client(address, tls=tls) as client:
        with pytest.raises(Unauthenticated):
            await client.create()
    async with jaxctx.aio.Client(address, api_key="alice-key", timeout_s=20) as client:
        with pytest.raises(Unavailable):
            await client.create()
    async with jaxctx.aio.Client(f"unix:{tmp_path}/s", api_key="alice-key") as client:
        await client.create()  # on this machine, without TLS
    port = int(found[1])
    assert await status_of_get(port, browser("servers"), "alice-key") == 200
    assert await status_of_get(port, browser("servers")) == 401
    life.stop.set()
    assert await life.task == OK


async def test_with_certificates_of_callers_no_keys_are_needed_beyond_loopback(
    engine: Any, text: Any, server_pair: Pair, caller: Pair, trust: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Tests listen on loopback only: it is taken here for an address that others reach."""
    monkeypatch.setattr(addresses, "is_beyond_loopback", lambda host: True)
    config = ServeConfig(
        grpc_port=0,
        http_port=0,
        tls_cert=server_pair.cert,
        tls_key=server_pair.key,
        tls_client_ca=write_root(tmp_path / "callers.pem", "callers"),
    )
    with pytest.raises(StartError, match="without keys the server listens on loopback only"):
        await serve(ServeConfig(grpc_port=0, http_port=0), None, no_load, asyncio.Event())
    life = RunningServer(engine, text, config, KeyStore(None, without_keys=CERTIFIED), TlsStore.of(config))
    address = await life.ready()
    assert "whoever shows a certificate of --tls-client-ca may do everything" in life.out.getvalue()
    async with jaxctx.aio.Client(address, tls=jaxctx.Tls(trust, caller.cert, caller.key)) as client:
        await client.create()
        assert engine.calls[-1][1].tenant == ""
        assert (await client.engines())[0].info.model_id
    async with jaxctx.aio.Client(address, tls=jaxctx.Tls(trust), timeout_s=20) as client:
        with pytest.raises(Unavailable):
            await client.create()
    port = re.search(r"https://127.0.0.1:(\d+) ", life.out.getvalue())
    assert port
    assert await status_of_get(int(port[1]), browser("servers", caller)) == 200
    with pytest.raises(OSError, match=r"(?i)certificate|reset|closed"):
        await status_of_get(int(port[1]), browser("servers"))
    life.stop.set()
    assert await life.task == OK


async def test_certificates_and_keys_are_both_wanted(
    engine: Any, text: Any, server_pair: Pair, caller: Pair, trust: Path, tmp_path: Path
) -> None:
    roots = write_root(tmp_path / "callers.pem", "callers")
    config = ServeConfig(
        grpc_port=0, http_port=0, tls_cert=server_pair.cert, tls_key=server_pair.key, tls_client_ca=roots
    )
    (tmp_path / "keys").write_text(key_line("alice"))
    keys = KeyStore(None, tmp_path / "keys", without_keys=CERTIFIED)
    life = RunningServer(engine, text, config, keys, TlsStore.of(config))
    address = await life.ready()
    certified = jaxctx.Tls(trust, caller.cert, caller.key)
    for tls, key, error in [
        (certified, "alice-key", None),
        (certified, None, Unauthenticated),
        (jaxctx.Tls(trust), "alice-key", Unavailable),
    ]:
        async with jaxctx.aio.Client(address, tls=tls, api_key=key, timeout_s=20) as client:
            with nullcontext() if error is None else pytest.raises(error):
                await client.create()
    life.stop.set()
    assert await life.task == OK


async def test_a_new_certificate_is_taken_while_it_runs(
    engine: Any, text: Any, server_pair: Pair, tmp_path: Path, trust: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tls_module, "POLL_S", 0.01)
    config = ServeConfig(grpc_port=0, http_port=0, tls_cert=server_pair.cert, tls_key=server_pair.key)
    life = RunningServer(engine, text, config, None, TlsStore.of(config))
    address = await life.ready()
    write_pair(server_pair.cert.parent, "new servers")
    new_trust = jaxctx.Tls(write_root(tmp_path / "new.pem", "new servers"))
    async with asyncio.timeout(60):
        while True:
            async with jaxctx.aio.Client(address, tls=new_trust, timeout_s=20) as client:
                with suppress(Unavailable):
                    await client.create()
                    break
    life.stop.set()
    assert await life.task == OK


@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mTLS"])
async def test_a_router_and_its_engine_use_tls_between_them(
    engine: Any, text: Any, server_pair: Pair, tmp_path: Path, trust: Path, mutual: bool, caplog: Any
) -> None:
    """Each has the certificate and shows it to the other."""
    settings: dict[str, Any] = {"tls_cert": server_pair.cert, "tls_key": server_pair.key, "cluster_ca": trust}
    if mutual:
        settings |= {"tls_client_ca": trust, "cluster_key": Path("set")}
    config = ServeConfig(role="router", grpc_port=0, http_port=0, heartbeat_s=0.05, **settings)
    router = cluster_member(None, text, config)
    address = await router.ready()
    engine_config = ServeConfig(role="engine", router=address, grpc_port=0, **settings)
    member = cluster_member(engine, text, engine_config)
    await member.ready()
    caller = jaxctx.Tls(trust, server_pair.cert, server_pair.key) if mutual else jaxctx.Tls(trust)
    async with jaxctx.aio.Client(address, tls=caller, api_key=CLUSTER_KEY) as client, asyncio.timeout(60):
        while not await client.engines():
            await asyncio.sleep(0.02)
        await client.create(context_id="a")
    assert ("create", "a") in [(name, getattr(request, "context_id", None)) for name, _, request in engine.calls]
    for server in (member, router):
        server.stop.set()
        await server.task


def cluster_member(engine: Any, text: Any, config: ServeConfig) -> RunningServer:
    """A router (engine None) or an engine of it, as the command makes it."""
    tls = TlsStore.of(config)
    assert tls is not None
    cluster = Cluster(CLUSTER_KEY, credentials=tls.cluster_credentials)
    return RunningServer(engine, text, config, [cluster.accepted], tls, cluster)
