"""`jaxctx-serve ray`: when engines are added and removed, and a node of a cluster that goes away under them."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from jaxctx_server.config import RayConfig, read_config
from jaxctx_server.deploy.ray.autoscaling import (
    ADD_AFTER_S,
    REMOVE_AFTER_S,
    EngineLoad,
    LoadTrend,
    decide_engine_count,
    retry_pause_s,
)
from jaxctx_server.deploy.ray.supervisor import check_router, engine_arguments
from jaxctx_server.engine_bounds import EngineBounds
from jaxctx_server.errors import StartError
from tests.e2e.expected_texts import expected_text
from tests.e2e.program_callers import ProgramCaller, output_of
from tests.e2e.server_processes import COMMAND, PAIRS, SMALL, Server, environment
from tests.readme import ROOT

ENGINES = 3
STORY = 800
SLOW_S = 300.0  # for what takes seconds on a machine with nothing else to do


class Deciding:
    """What is decided, look by look. Engines serve four requests at once."""

    def __init__(self, wanted: int, bounds: str = "1:4") -> None:
        self._bounds = EngineBounds.parse(bounds)
        self._trend, self._now = LoadTrend(), 100.0
        self.wanted = wanted

    def after(self, seconds: float, *loads: tuple[int, int], starting: int = 0) -> int:
        """How many are wanted after seconds of such loads: (running, waiting) of each engine."""
        seen = [EngineLoad(running, waiting, 4) for running, waiting in loads]
        for _ in range(int(seconds) + 1):
            self.wanted, self._trend = decide_engine_count(
                seen, starting, self.wanted, self._bounds, self._trend, self._now
            )
            self._now += 1.0
        return self.wanted


def test_one_is_added_when_all_have_been_full_for_some_seconds() -> None:
    deciding = Deciding(2)
    assert deciding.after(ADD_AFTER_S - 1, (4, 0), (2, 1)) == 2
    assert deciding.after(0, (4, 0), (3, 0)) == 2  # the time begins anew
    assert deciding.after(ADD_AFTER_S - 1, (4, 0), (4, 3)) == 2
    assert deciding.after(0, (4, 0), (4, 3)) == 3


def test_none_is_added_while_one_is_on_its_way() -> None:
    deciding = Deciding(2)
    assert deciding.after(60, (4, 9), starting=1) == 2
    assert deciding.after(ADD_AFTER_S, (4, 9), (4, 9)) == 3
    assert deciding.after(0, (4, 9), (4, 9)) == 3  # nor at once when one has been


def test_there_are_never_more_than_most_or_fewer_than_least() -> None:
    assert Deciding(3, "2:3").after(1000, *[(4, 9)] * 3) == 3
    assert Deciding(2, "2:3").after(1000, (0, 0), (0, 0)) == 2
    assert Deciding(1, "1").after(1000, (0, 0)) == 1


def test_one_is_removed_when_long_fewer_would_do() -> None:
    deciding = Deciding(3)
    assert deciding.after(REMOVE_AFTER_S - 1, (2, 0), (2, 0), (2, 0)) == 3
    assert deciding.after(0, (2, 0), (2, 0), (2, 0)) == 2
    assert deciding.after(REMOVE_AFTER_S - 1, (2, 0), (0, 0)) == 2
    assert deciding.after(0, (2, 0), (0, 0)) == 1


def test_a_removal_would_not_make_the_others_full() -> None:
    assert Deciding(2).after(1000, (4, 0), (0, 0)) == 2
    assert Deciding(2).after(1000, (3, 0), (0, 0)) == 1


def test_one_that_is_not_needed_any_more_need_not_come() -> None:
    """As when the cluster has no room for it."""
    deciding = Deciding(2)
    assert deciding.after(REMOVE_AFTER_S, (1, 0), starting=1) == 1


def test_without_engines_at_the_router_nothing_is_decided() -> None:
    assert Deciding(2).after(1000, starting=2) == 2


def test_pauses_grow_to_a_minute() -> None:
    pauses = [retry_pause_s(failures) for failures in range(100)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == max(pauses) == 60.0


@pytest.mark.parametrize("text", ["", "0", "0:2", "3:2", "two", "1:2:3"])
def test_numbers_of_engines_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|^\d:\d$|^0$"):
        EngineBounds.parse(text)


def ray_config(*argv: str) -> RayConfig:
    config = read_config(["ray", *argv], {}, "jaxctx-serve")
    assert isinstance(config, RayConfig)
    return config


def test_arguments() -> None:
    command = ("--engine-command", "python -m that")
    config = ray_config("--router", "127.0.0.1:1", "--engines", "2:5", *command, "--", "model", "--max-batch", "4")
    assert EngineBounds.parse(config.engines) == EngineBounds(2, 5)
    assert check_router(config)
    assert config.engine_command_words() == ["python", "-m", "that"]
    assert engine_arguments(config) == [
        *("model", "--max-batch", "4"),
        *("--role", "engine", "--router", "127.0.0.1:1"),
    ]


def test_a_router_elsewhere_needs_a_key() -> None:
    with pytest.raises(StartError, match="--cluster-key"):
        check_router(ray_config("--router", "192.0.2.1:1", "--engines", "1"))
    assert not check_router(ray_config("--router", "192.0.2.1:1", "--engines", "1", "--cluster-key", "secret"))


def test_an_argument_that_makes_no_sense() -> None:
    with pytest.raises(StartError, match="--engines: must be LEAST or LEAST:MOST"):
        ray_config("--router", "127.0.0.1:1", "--engines", "0:2")


class Supervisor:
    """`jaxctx-serve ray` as a process, and what it has said."""

    def __init__(self, router: str, ray_address: str, cache: Path) -> None:
        arguments = ["--router", router, "--ray-address", ray_address, "--engines", str(ENGINES)]
        arguments += ["--engine-command", shlex.join(PAIRS), "--", *SMALL, "--compile-cache", str(cache)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxctx_server.cli", "ray", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            print(line, end="", flush=True)
            self.lines.append(line.strip())

    def expected_text(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in tuple(self.lines) if (found := re.search(pattern, line))]


async def until(holds: Callable[[], Any], what: str) -> float:
    """Wait until it does; how long that took."""
    began = time.monotonic()
    while not await asyncio.to_thread(holds):
        assert time.monotonic() - began < SLOW_S, what
        await asyncio.sleep(0.1)
    return time.monotonic() - began


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes, of which two have room for three engines; the first is the head."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    node = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(2):
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.campaign
@pytest.mark.timeout(6 * SLOW_S)
async def test_a_node_is_removed_under_load(ray_cluster: Any, tmp_path: Path) -> None:
    """All texts come whole, character for character, and soon there are as many engines as before; then all drain."""
    with (tmp_path / "router").open("w") as core_log:
        router = Server("--role", "router", cache=tmp_path, command=(COMMAND,), stderr=core_log)
        supervisor = Supervisor(router.address, ray_cluster.address, tmp_path / "compiled")
        try:
            await losing_a_node(ray_cluster, router.address, supervisor)
            supervisor.process.send_signal(signal.SIGTERM)
            await until(lambda: supervisor.process.poll() is not None, "the supervisor ends")
            assert supervisor.process.returncode == 0
            assert len(supervisor.expected_text("drains")) == ENGINES
            with jaxctx.Client(router.address) as client:
                assert client.engines() == []
        finally:
            supervisor.process.kill()
            supervisor.process.wait()
            router.kill()


async def losing_a_node(ray_cluster: Any, router: str, supervisor: Supervisor) -> None:
    def there() -> set[str]:
        with jaxctx.Client(router, timeout_s=10) as client:
            return {each.address for each in client.engines()}

    ready = r"ready at (\S+), on node (\w+)"
    started = await until(lambda: len(there()) == len(supervisor.expected_text(ready)) == ENGINES, "there are engines")
    homes = {found[1]: found[2] for found in supervisor.expected_text(ready)}
    assert there() == homes.keys()
    assert len(set(homes.values())) > 1  # they are spread
    node = next(each for each in ray_cluster.worker_nodes if each.node_id in homes.values())
    doomed = {address for address, home in homes.items() if home == node.node_id}

    async with grpc.aio.insecure_channel(router) as channel:
        caller = await ProgramCaller(SessionServiceStub(channel)).begin()

        async def told(number: int) -> str:
            ids = await caller.call(f"Tell {number}: {{{{story}}}}", story=output_of(STORY))
            async with asyncio.timeout(SLOW_S):
                while True:
                    try:
                        return await caller.get(ids["story"])
                    except errors.DeadlineExceeded:  # of the call; the story goes on
                        pass

        stories = [asyncio.create_task(told(number)) for number in range(4 * ENGINES)]
        async with asyncio.timeout(SLOW_S):
            while not {task.engine_id for task in (await caller("GetGraph")).tasks} & doomed:
                await asyncio.sleep(0.02)
        assert not any(story.done() for story in stories)
        began = time.monotonic()
        await asyncio.to_thread(ray_cluster.remove_node, node, allow_graceful=False)
        lost = await until(lambda: not there() & doomed, "the router notices")
        assert [await story for story in stories] == [
            expected_text(f"Tell {number}: ", STORY) for number in range(4 * ENGINES)
        ]
        finished = time.monotonic() - began
        await until(lambda: len(there()) == ENGINES, "there are as many again")
        again = time.monotonic() - began
        print(
            f"{ENGINES} engines after {started:.1f} s; {len(doomed)} lost with their node, which the router knew after"
        )
        print(f"{lost:.1f} s; all texts after {finished:.1f} s, as many engines again after {again:.1f} s", flush=True)
    assert len(supervisor.expected_text("its node is gone|its actor is gone")) == len(doomed)
