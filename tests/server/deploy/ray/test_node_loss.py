"""A node of a Ray cluster that goes away under its engines, while they work."""

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
from tests.e2e.expected_texts import expected_text
from tests.e2e.program_callers import ProgramCaller, output_of
from tests.e2e.server_processes import COMMAND, PAIRS, SMALL, Server, environment
from tests.readme import ROOT

ENGINES = 3
STORY = 800
SLOW_S = 300.0  # for what takes seconds on a machine with nothing else to do


class Supervisor:
    """`jaxctx-serve ray` as a process, and the lines that it has logged."""

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

    def logged(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in tuple(self.lines) if (found := re.search(pattern, line))]


async def wait_until(holds: Callable[[], Any], what: str) -> float:
    """Wait until a condition holds. Returns how many seconds that took."""
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
    with (tmp_path / "router").open("w") as router_log:
        router = Server("--role", "router", cache=tmp_path, command=(COMMAND,), stderr=router_log)
        supervisor = Supervisor(router.address, ray_cluster.address, tmp_path / "compiled")
        try:
            await remove_node_under_load(ray_cluster, router.address, supervisor)
            supervisor.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: supervisor.process.poll() is not None, "the supervisor ends")
            assert supervisor.process.returncode == 0
            assert len(supervisor.logged("drains")) == ENGINES
            with jaxctx.Client(router.address) as client:
                assert client.engines() == []
        finally:
            supervisor.process.kill()
            supervisor.process.wait()
            router.kill()


async def remove_node_under_load(ray_cluster: Any, router: str, supervisor: Supervisor) -> None:
    def registered() -> set[str]:
        with jaxctx.Client(router, timeout_s=10) as client:
            return {each.address for each in client.engines()}

    ready = r"ready at (\S+), on node (\w+)"
    started = await wait_until(
        lambda: len(registered()) == len(supervisor.logged(ready)) == ENGINES, "there are engines"
    )
    node_of_engine = {found[1]: found[2] for found in supervisor.logged(ready)}
    assert registered() == node_of_engine.keys()
    assert len(set(node_of_engine.values())) > 1  # they are spread
    node = next(each for each in ray_cluster.worker_nodes if each.node_id in node_of_engine.values())
    addresses_on_node = {address for address, node_id in node_of_engine.items() if node_id == node.node_id}

    async with grpc.aio.insecure_channel(router) as channel:
        caller = await ProgramCaller(SessionServiceStub(channel)).begin()

        async def finished_story(number: int) -> str:
            ids = await caller.call(f"Tell {number}: {{{{story}}}}", story=output_of(STORY))
            async with asyncio.timeout(SLOW_S):
                while True:
                    try:
                        return await caller.get(ids["story"])
                    except errors.DeadlineExceeded:  # of the call; the story goes on
                        pass

        stories = [asyncio.create_task(finished_story(number)) for number in range(4 * ENGINES)]
        async with asyncio.timeout(SLOW_S):
            while not {task.engine_id for task in (await caller("GetGraph")).tasks} & addresses_on_node:
                await asyncio.sleep(0.02)
        assert not any(story.done() for story in stories)
        began = time.monotonic()
        await asyncio.to_thread(ray_cluster.remove_node, node, allow_graceful=False)
        lost = await wait_until(lambda: not registered() & addresses_on_node, "the router notices")
        assert [await story for story in stories] == [
            expected_text(f"Tell {number}: ", STORY) for number in range(4 * ENGINES)
        ]
        finished = time.monotonic() - began
        await wait_until(lambda: len(registered()) == ENGINES, "there are as many again")
        again = time.monotonic() - began
        print(
            f"{ENGINES} engines after {started:.1f} s; {len(addresses_on_node)} lost with their node,",
            "which the router knew after",
        )
        print(f"{lost:.1f} s; all texts after {finished:.1f} s, as many engines again after {again:.1f} s", flush=True)
    assert len(supervisor.logged("its node is gone|its actor is gone")) == len(addresses_on_node)
