"""`jaxctx-serve` as a process: banner, README's example, drain on a signal, mistakes."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import jaxctx
from jaxctx import Output
from jaxctx_server.cli import MALLOC
from tests.e2e.server_processes import COMMAND, ECHO, SMALL, Server, environment
from tests.readme import ROOT, example

SYSTEM = "You are a careful assistant who answers in one short sentence, and never guesses. "


def compiled(cache: Path) -> set[str]:
    return {file.name for file in cache.iterdir() if file.name.endswith("-cache")}


@pytest.fixture(scope="module")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compile cache into which no other test's server compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled_ahead(cache_of_its_own: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What the command compiles, before any server."""
    store = tmp_path_factory.mktemp("ahead") / "store"
    command = [COMMAND, "compile", *SMALL, "--compile-cache", str(cache_of_its_own), "--store", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"compiled into {cache_of_its_own}\n"), done.stderr
    assert not store.exists()  # which is a server's
    return compiled(cache_of_its_own)


@pytest.fixture(scope="module")
def bundled(cache_of_its_own: Path, compiled_ahead: set[str]) -> Iterator[Server]:
    server = Server(*SMALL, "--compile-all", cache=cache_of_its_own)
    yield server
    server.kill()


@pytest.fixture
def echo(compile_cache: Path) -> Iterator[Server]:
    server = Server(*SMALL, cache=compile_cache, command=ECHO)
    yield server
    server.kill()


def test_after_compiling_ahead_a_start_compiles_nothing(
    compiled_ahead: set[str], bundled: Server, cache_of_its_own: Path
) -> None:
    assert any(name.startswith("jit_step") for name in compiled_ahead)
    assert compiled(cache_of_its_own) == compiled_ahead


def test_the_banner_says_what_is_served(bundled: Server) -> None:
    for part in ("bundled", " parameters", "4,096 tokens", "keys"):
        assert part in bundled.banner
    assert re.search(r"\b3,\d{3},\d{3} parameters", bundled.banner)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads another process's environment on Linux")
def test_freed_memory_is_kept(bundled: Server) -> None:
    """The C library is told when the process begins, which therefore begins once more."""
    environ = Path(f"/proc/{bundled.process.pid}/environ").read_bytes()  # the library ends each setting where it lies
    assert f"GLIBC_TUNABLES={MALLOC}".encode() in environ.replace(b"\0", b":")


def test_the_readmes_first_example_runs_as_pasted(bundled: Server, first_example: str) -> None:
    code = first_example.replace("127.0.0.1:50051", bundled.address)
    assert code != first_example
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    prompt, *branches, again = re.split(r"--- branch \d|\nthe same prompt again", done.stdout)
    computed = int(re.search(r"(\d+) computed", prompt)[1])
    assert computed > 20
    assert len({branch.strip() for branch in branches}) == 3  # three different continuations
    for branch in branches:
        assert int(re.search(r"(\d+) computed", branch)[1]) <= 16  # what fits in one page at most
    assert int(re.search(r"(\d+) tokens cached", again)[1]) >= computed // 16 * 16 - 16


@pytest.mark.slow
def test_the_readmes_program_runs_as_pasted(bundled: Server) -> None:
    code = example("program").replace("127.0.0.1:50051", bundled.address)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done on local: ") == 3
    assert len(done.stdout.partition("done on local")[0].split()) > 3  # the test that it wrote


def test_completing_def_looks_like_python(bundled: Server) -> None:
    with jaxctx.Client(bundled.address) as client, client.create("def ") as context:
        text = context.complete(max_tokens=48, temperature=0.0).text
    assert re.match(r"\w+\(.*\):", text), text


@pytest.mark.slow
def test_settings_of_programs_reach_them(compile_cache: Path) -> None:
    chosen = ("--no-dispatch-least-impact", "--no-dispatch-cached-prefix", "--prefix-timeout-s", "77")
    server = Server(*SMALL, *chosen, cache=compile_cache, command=ECHO)
    try:
        with jaxctx.Client(server.address) as client, client.create_session() as session:
            for _ in range(2):  # with the settings' defaults the second one is said to hold so many characters
                session.call(SYSTEM + "{{o}}", o=Output(max_tokens=3)).output.get()
            assert [task.why for task in session.graph()] == ["first with capacity"] * 2
            kept: list[jaxctx.Context] = []
            while [each.info.expiry and each.info.expiry.seconds for each in kept] != [77.0]:  # in the background
                kept = list(client.contexts(include_program_contexts=True))
    finally:
        server.kill()


def test_a_signal_drains_and_running_work_finishes(echo: Server) -> None:
    channel = grpc.insecure_channel(echo.address)
    health = health_pb2_grpc.HealthStub(channel)
    states = health.Watch(health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService"))
    serving = health_pb2.HealthCheckResponse.ServingStatus
    assert next(states).status == serving.SERVING
    with jaxctx.Client(echo.address) as client:
        context = client.create("hello")
        stream = context.generate(max_tokens=600, temperature=0)
        tokens = list(next(iter(stream)).token_ids)
        echo.process.send_signal(signal.SIGINT)
        assert next(states).status == serving.NOT_SERVING
        with pytest.raises(jaxctx.errors.Unavailable):
            jaxctx.Client(echo.address, timeout_s=2).create()
        tokens += [token for piece in stream for token in piece.token_ids]
        assert len(tokens) == 600
    states.cancel()
    channel.close()
    assert echo.end()[0] == 0


def test_a_second_signal_stops_at_once(echo: Server) -> None:
    async def cut_off() -> None:
        async with jaxctx.aio.Client(echo.address) as client:
            context = await client.create("hello")
            stream = context.generate(max_tokens=1000, temperature=0)
            await anext(aiter(stream))
            echo.process.send_signal(signal.SIGTERM)
            with pytest.raises(jaxctx.errors.Unavailable):  # once it has heard the first
                while True:
                    await client.create()
            await asyncio.sleep(0.5)  # what comes sooner counts as the same signal
            echo.process.send_signal(signal.SIGTERM)
            with pytest.raises(jaxctx.errors.JaxctxError):
                async for _ in stream:
                    pass

    asyncio.run(cut_off())
    assert echo.end()[0] != 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("/nonexistent",), 3, "/nonexistent"),
        pytest.param(("--page-size", "0"), 2, "page-size", marks=pytest.mark.slow),
        pytest.param(("--no-such-flag",), 2, "no-such-flag", marks=pytest.mark.slow),
        (("--host", "0.0.0.0"), 2, "keys"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: tuple[str, ...], status: int, says: str) -> None:
    command = [COMMAND, *arguments, "--grpc-port", "0", "--http-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr
