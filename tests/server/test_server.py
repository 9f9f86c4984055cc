"""One run of a server: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxctx.errors import Unavailable
from jaxctx.programs.dispatcher import Policy
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import context_service_pb2_grpc
from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import ADDRESS, CUT_OFF, DEFECT, INTERRUPTED, MODEL, OK, USAGE, StartError
from jaxctx_server.lifecycle import ProgramSettings
from jaxctx_server.server import http_access, program_settings, serve
from tests.server.collector import running_collector
from tests.server.http.client import HttpClient


class RunningServer:
    """A server that is being run: set `stop` to end it."""

    def __init__(self, engine: Any, text: Any, config: ServeConfig, keys: Any = None) -> None:
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

        self.task = asyncio.ensure_future(serve(config, keys, load, self.stop, out=self.out, err=self.err))

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
    assert "fake (fake, 7 parameters, float32)" in banner
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


async def test_the_banner_names_the_window_that_limits_a_context(engine: Any, text: Any) -> None:
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    await life.ready()
    assert "up to 10,000 tokens each; 4 run at once" in life.out.getvalue()
    life.stop.set()
    assert await life.task == OK
    engine.attention_window = 10_000
    life = RunningServer(engine, text, ServeConfig(grpc_port=0, http_port=0))
    await life.ready()
    assert "up to 10,000 tokens each (the model's attention window); 4 run at once" in life.out.getvalue()
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
