"""The process of an engine on its node: what its actor says of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from jaxctx_server.deploy.ray.actor import LAST_LINE_CHARACTERS, EngineActor, EngineState
from tests.server.deploy.ray.fake_ray import FakeRay


class Actors:
    """Starts actors whose engine is a script, and ends them."""

    def __init__(self) -> None:
        self._actors: list[EngineActor] = []

    def start(self, script: str, *arguments: str, is_loopback: bool = True) -> EngineActor:
        self._actors.append(EngineActor([sys.executable, "-c", script], arguments, is_loopback))
        return self._actors[-1]

    def end(self) -> None:
        for actor in self._actors:
            actor._process.kill()
            actor._process.wait()


@pytest.fixture
def actors(ray: FakeRay) -> Iterator[Actors]:
    actors = Actors()
    yield actors
    actors.end()


def ended(actor: EngineActor) -> EngineState:
    actor._process.wait(60)
    return actor.state()


def until_ready(actor: EngineActor) -> EngineState:
    deadline = time.monotonic() + 60
    while not actor.state().address:
        assert time.monotonic() < deadline
        assert actor.state().exit_status is None
        time.sleep(0.005)
    return actor.state()


READY = "print('gRPC   127.0.0.1:7001'); print('ready in 1 s', flush=True); import sys; sys.stdin.read(); "


def test_an_engine_is_ready_with_the_address_of_its_banner(actors: Actors) -> None:
    actor = actors.start(READY + "import time; time.sleep(60)")
    assert until_ready(actor) == EngineState("node", "127.0.0.1:7001", None, "ready in 1 s")


def test_an_address_counts_only_once_the_engine_is_ready(actors: Actors) -> None:
    actor = actors.start("print('gRPC 127.0.0.1:7001'); print('it fails'); raise SystemExit(3)")
    assert ended(actor) == EngineState("node", "", 3, "it fails")


@pytest.mark.parametrize(("is_loopback", "host"), [(True, "127.0.0.1"), (False, "10.0.0.5")])
def test_an_engine_listens_where_the_router_can_reach_it(actors: Actors, is_loopback: bool, host: str) -> None:
    script = "import sys; print(' '.join(sys.argv[1:]))"
    actor = actors.start(script, "--max-batch", "4", is_loopback=is_loopback)
    assert ended(actor).last_line == f"--max-batch 4 --host {host} --grpc-port 0"


def test_an_engine_that_drains_gets_a_signal(actors: Actors) -> None:
    script = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    actor = actors.start(script + READY + "signal.pause()")
    until_ready(actor)
    actor.drain()
    assert ended(actor).exit_status == 0


def test_the_last_line_is_that_of_an_error_and_not_empty_or_long(actors: Actors) -> None:
    actor = actors.start("import sys; sys.stderr.write('x' * 1000 + '\\n\\n  \\n'); sys.exit(2)")
    assert ended(actor) == EngineState("node", "", 2, "x" * LAST_LINE_CHARACTERS)


def test_output_that_is_no_text_does_not_stop_the_actor(actors: Actors) -> None:
    actor = actors.start("import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n'); print('end')")
    assert ended(actor).last_line == "end"


def test_without_a_command_the_engine_is_that_of_this_python(ray: FakeRay, actors: Actors) -> None:
    actor = EngineActor([], ["--no-such-flag"], True)
    assert ended(actor).exit_status == 2
