"""The life of the server around a fake engine: start, banner, drain, stop; and the command line's mistakes."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxctx.errors import Unavailable
from jaxctx.programs.dispatcher import Policy
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import context_service_pb2_grpc
from jaxctx_server import logs
from jaxctx_server.banner import banner
from jaxctx_server.cli import MALLOC, SAME_SIGNAL_S, main, on_signals
from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import ADDRESS, CUT_OFF, DEFECT, INTERRUPTED, MODEL, OK, USAGE, StartError
from jaxctx_server.lifecycle import ProgramSettings
from jaxctx_server.progress import STILL_S, PlainLines, Progress, progress_shown
from jaxctx_server.server import program_settings, serve


class Life:
    """A server that is being run: set `stop` to end it."""

    def __init__(self, engine: Any, text: Any, config: ServeConfig, keys: Any = None) -> None:
        self.engine = engine
        self.stopped = False
        self.may_load = threading.Event()
        self.stop = asyncio.Event()
        self.out, self.err = io.StringIO(), io.StringIO()

        def load(config: ServeConfig, progress: Any) -> Any:
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


async def test_a_life(engine: Any, text: Any, tmp_path: Path) -> None:
    life = Life(engine, text, ServeConfig(grpc_port=0, unix_socket=tmp_path / "s"))
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
    for target in (address, f"unix:{tmp_path}/s"):
        async with grpc.aio.insecure_channel(target) as channel:
            stub = context_service_pb2_grpc.ContextServiceStub(channel)
            await stub.ListContexts(pb.ListContextsRequest())
    life.stop.set()
    assert await life.task == OK
    assert engine.draining
    assert life.stopped
    assert not (tmp_path / "s").exists()


async def test_the_banner_names_the_window_that_limits_a_context(engine: Any, text: Any) -> None:
    life = Life(engine, text, ServeConfig(grpc_port=0))
    await life.ready()
    assert "up to 10,000 tokens each; 4 run at once" in life.out.getvalue()
    life.stop.set()
    assert await life.task == OK
    engine.attention_window = 10_000
    life = Life(engine, text, ServeConfig(grpc_port=0))
    await life.ready()
    assert "up to 10,000 tokens each (the model's attention window); 4 run at once" in life.out.getvalue()
    life.stop.set()
    assert await life.task == OK


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Policy)])
def test_each_policy_of_programs_is_a_setting(name: str) -> None:
    assert program_settings(ServeConfig()) == ProgramSettings()
    config = ServeConfig(**{f"dispatch_{name}": False}, prefix_timeout_s=7.0, beat_s=0.5)
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
    often = Life(engine, text, ServeConfig(grpc_port=0, beat_s=0.05))
    await often.ready()
    async with asyncio.timeout(30):
        while len(asked) < 5:
            await asyncio.sleep(0.01)
    often.stop.set()
    await often.task
    asked.clear()
    seldom = Life(engine, text, ServeConfig(grpc_port=0, beat_s=60.0))
    await seldom.ready()
    await asyncio.sleep(2.5)  # in which it would have been asked three times every second
    assert len(asked) == 1
    seldom.stop.set()
    await seldom.task


async def test_it_answers_probes_while_it_loads(engine: Any, text: Any, tmp_path: Path) -> None:
    life = Life(engine, text, ServeConfig(grpc_port=0, unix_socket=tmp_path / "s"))
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
    life = Life(engine, text, ServeConfig(grpc_port=0))
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
    life = Life(engine, text, ServeConfig(grpc_port=0, drain_timeout_s=0.05))
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
    life = Life(engine, text, ServeConfig(grpc_port=0))
    await life.ready()
    life.stop.set()
    assert await life.task == CUT_OFF
    assert life.stopped


async def test_a_failed_engine_ends_the_process_so_that_it_can_be_restarted(engine: Any, text: Any) -> None:
    life = Life(engine, text, ServeConfig(grpc_port=0))
    address = await life.ready()
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService"))
        await watch.read()
        engine.fails.set()
        assert await life.task == DEFECT
    assert life.stopped


async def test_stopped_while_loading(engine: Any, text: Any) -> None:
    life = Life(engine, text, ServeConfig(grpc_port=0))
    await asyncio.sleep(0.05)
    life.stop.set()
    assert await life.task == INTERRUPTED
    life.may_load.set()  # or the event loop waits for the thread


async def test_a_model_that_cannot_be_loaded(text: Any) -> None:
    def load(config: Any, progress: Any) -> Any:
        raise StartError("no such model", MODEL)

    with pytest.raises(StartError, match="no such model"):
        await serve(ServeConfig(grpc_port=0), None, load, asyncio.Event(), err=io.StringIO())


async def test_addresses_are_checked_before_anything_is_loaded(text: Any) -> None:
    def load(config: Any, progress: Any) -> Any:
        raise AssertionError("must not be called")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for config, status in [
            (ServeConfig(grpc_port=taken.getsockname()[1]), ADDRESS),
            (ServeConfig(host="0.0.0.0"), USAGE),
        ]:
            with pytest.raises(StartError) as raised:
                await serve(config, None, load, asyncio.Event())
            assert raised.value.exit_status == status


class Loop:
    """What `on_signals` needs of an event loop, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handlers: dict[int, Any] = {}
        self.add_signal_handler = self.handlers.__setitem__

    def time(self) -> float:
        return self.now


def test_the_first_signal_stops_and_the_second_ends() -> None:
    loop, stop, ended = Loop(), asyncio.Event(), []
    on_signals(loop, stop, lambda: ended.append(True))  # type: ignore[arg-type]
    loop.now = 100.0
    loop.handlers[signal.SIGTERM]()
    assert stop.is_set()
    loop.now += SAME_SIGNAL_S / 2
    loop.handlers[signal.SIGTERM]()  # the same one, to the whole group
    assert ended == []
    loop.now += SAME_SIGNAL_S
    loop.handlers[signal.SIGINT]()
    assert ended == [True]


def test_ending_at_once_removes_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        program = "import sys, pathlib; from jaxctx_server.cli import end_now; end_now(pathlib.Path(sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=600, check=False)
    assert done.returncode == INTERRUPTED
    assert not path.exists()


# --- the command line -------------------------------------------------------------------------------------------------


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(argv, {})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return status, captured.err


class Begun(Exception):
    """The process would begin once more."""


@pytest.mark.parametrize("tuned", [None, "glibc.malloc.check=0"])
def test_the_command_begins_once_more_to_set_up_memory(monkeypatch: pytest.MonkeyPatch, tuned: str | None) -> None:
    def execve(path: str, argv: list[str], environ: dict[str, str]) -> None:
        raise Begun(path, argv[0], environ)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["jaxctx-serve", "--nothing-of-this-name"])
    environ = {"HOME": "/"} if tuned is None else {"GLIBC_TUNABLES": tuned}
    if tuned:
        assert main(None, environ) == USAGE
    else:
        with pytest.raises(Begun) as raised:
            main(None, environ)
        assert raised.value.args == (sys.executable, sys.executable, environ | {"GLIBC_TUNABLES": MALLOC})


@pytest.fixture
def _quiet() -> Any:
    """`main` configures logging for a process of its own."""
    root, level = logging.getLogger(), logging.getLogger("jaxctx").level
    handlers = root.handlers[:]
    yield
    root.handlers[:] = handlers
    logging.getLogger("jaxctx").setLevel(level)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--page-size", "0"], USAGE, 'Invalid value "0" for --page-size. Must be >= 1.'),
        (["--kv-tokens", "9", "--memory-fraction", "0.5"], USAGE, "only one of them may be set"),
        (["--max-batch", "64", "--max-batch-tokens", "8"], USAGE, "--max-batch-tokens: must be at least --max-batch"),
        (["--keys", "/no/such/keys"], USAGE, "--keys: /no/such/keys: No such file"),
        (["--host", "0.0.0.0"], USAGE, "without keys the server listens on loopback only"),
        (["convert", "/no/such/model", "/no/such/target"], MODEL, "/no/such/model: does not exist"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = fails(capsys, *argv)
    assert found == status
    assert text.startswith("jaxctx-serve: ")
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.usefixtures("_quiet")
def test_convert_writes_a_directory_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jaxctx.model.config import ModelConfig
    from jaxctx.model.weights import read_config
    from scripts.checkpoints import write_random

    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=64,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        max_positions=32,
        qk_norm=True,
        tied=True,
    )
    write_random(tmp_path / "src", config, seed=0)
    command = ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--dtype", "bfloat16"]
    assert main(command, {}) == OK
    captured = capsys.readouterr()
    assert captured.out == f"wrote {tmp_path}/dst\n"
    assert "weights: " in captured.err
    assert read_config(tmp_path / "dst").layers == 1
    status, text = fails(capsys, *command)
    assert status == USAGE
    assert "exists" in text


@pytest.mark.parametrize("model", ["/no/such/model", __file__])
def test_a_bad_path_ends_the_process_with_its_status(model: str) -> None:
    command = [sys.executable, "-m", "jaxctx_server.cli", model, "--grpc-port", "0", "--compile-cache", "None"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == MODEL
    assert done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert last.startswith(f"jaxctx-serve: {model}: ")
    assert all(re.fullmatch(r"loading, \d+ s", line) for line in before), "which a busy machine may have time for"


def test_help_needs_neither_jax_nor_grpc() -> None:
    code = "import sys; from jaxctx_server import command; sys.exit(len({'jax', 'grpc'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


# --- what is printed --------------------------------------------------------------------------------------------------


def test_plain_progress_prints_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(PlainLines(stream, lambda: now[0]).show)
    for done in range(0, 101):
        progress.weights(done << 20, 100 << 20)
        now[0] += 0.1
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["weights: 0.0/100.0 MiB, 0 s", "weights: 20.0/100.0 MiB, 2 s"]
    assert lines[-1] == "weights: 100.0/100.0 MiB, 10 s"
    assert len(lines) == 6


def test_plain_progress_says_so_when_nothing_else_is_said_for_long() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = PlainLines(stream, lambda: now[0])
    progress = Progress(lines.show)

    def passes(seconds: int) -> list[str]:
        """Each second somebody asks; what is said."""
        said = len(stream.getvalue())
        for _ in range(seconds):
            now[0] += 1
            lines.still()
        return stream.getvalue()[said:].splitlines()

    assert passes(11) == ["loading, 5 s", "loading, 10 s"]
    assert lines.quiet_s() == STILL_S - 1
    progress.weights(1 << 20, 2 << 20)
    assert passes(4) == []
    progress.weights(2 << 20, 2 << 20)  # and then what is no weights
    assert passes(6) == ["starting, 20 s"]
    progress.compiled("step of 4 rows", 1, 14)
    assert passes(6) == ["compiling: 1/14 step of 4 rows, 26 s"]


def test_under_a_pipe_a_start_that_reports_nothing_is_not_silent() -> None:
    program = """
import sys, time
from jaxctx_server import progress
from jaxctx_server import engine_builder
from jaxctx_server import cli
from jaxctx_server.errors import StartError
progress.STILL_S = 0.05
def load(config, progress):
    time.sleep(1)
    progress.compiled("step of 4 rows", 1, 2)
    time.sleep(1)
    raise StartError("at the end")
engine_builder.load = load
sys.exit(cli.main(["--grpc-port", "0"], {}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == USAGE
    *lines, last = done.stderr.splitlines()
    assert last == "jaxctx-serve: at the end"
    assert re.fullmatch(r"loading, \d+ s", lines[0])
    assert re.fullmatch(r"compiling: 1/2 step of 4 rows, \d+ s", lines[-1])
    assert lines.count(lines[-1]) > 1


def test_bars_on_a_terminal() -> None:
    stream = Terminal()
    with progress_shown(stream) as progress:
        progress.weights(0, 0)
        progress.weights(5 << 20, 10 << 20)
        progress.weights(10 << 20, 10 << 20)
        progress.compiled("step of 4 rows", 1, 2)
    assert "10.0/10.0 MiB" in stream.getvalue()
    assert "1/2 step of 4 rows" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(stream: io.StringIO) -> list[str]:
    """Lines of a message with a field, and of an exception in a function that knows a secret."""
    logs.configure("info", stream)
    log = logging.getLogger("jaxctx.server")
    log.debug("too much")
    log.info("hi %s", "you", extra={"method": "/a/b", "where": ["x", "y"]})
    secret = "a prompt"
    try:
        raise ValueError(len(secret))
    except ValueError:
        log.exception("a defect")
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("_quiet")
def test_logs_are_json_lines_with_fields() -> None:
    first, second = map(json.loads, logged(io.StringIO()))
    assert first.pop("time").endswith("Z")
    fields = {"method": "/a/b", "where": ["x", "y"]}
    assert first == {"level": "info", "logger": "jaxctx.server", "message": "hi you", **fields}
    assert second["exception"].splitlines()[-1] == "ValueError: 8"
    assert "a prompt" not in second["exception"]


@pytest.mark.usefixtures("_quiet")
def test_on_a_terminal_logs_are_for_reading_along() -> None:
    first, *rest = (re.sub(r"\x1b\[[0-9;]*m", "", line) for line in logged(Terminal()))
    assert re.search(r"\[info +\] hi you +\[jaxctx\.server\] method=/a/b where=\['x', 'y'\]$", first)
    assert rest[-1] == "ValueError: 8"
    assert "a prompt" not in "".join(rest)


@pytest.mark.parametrize("missing", ["cyclopts", "rich", "grpc_health", "jax"])
def test_without_the_server_extra_one_line_says_what_to_install(missing: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from jaxctx_server.cli import main\n"
        "sys.exit(main(['--grpc-port', '0', '--compile-cache', 'None'], {}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert done.stderr.splitlines() == [f"jaxctx-serve: {missing} is not installed: pip install 'jaxctx[server]'"]


@pytest.mark.parametrize(("kv_dtype", "warns"), [("float8_e4m3fn", True), ("int8", False), ("bfloat16", False)])
def test_the_banner_warns_of_keys_and_values_that_are_coarse_for_nothing(
    make_engine: Any, kv_dtype: str, warns: bool
) -> None:
    told = banner(replace(make_engine().info, kv_dtype=kv_dtype), ["127.0.0.1:1"], None, 1.0)
    assert ("WARNING" in told and "--kv-dtype int8" in told) == warns
