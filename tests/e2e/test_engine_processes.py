"""Engines that are real processes die, freeze and come back, and the router goes on.

An output that went on elsewhere must say, character for character, what the echo model would have said without: any
token that was lost, came twice or was cut otherwise changes all that follow. Its tokens are a character or a pair of
them, which a text that is tokenised again has elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from tests.e2e.expected_texts import Story, expected_text
from tests.e2e.program_callers import SYSTEM, ProgramCaller, output_of
from tests.e2e.server_processes import COMMAND, PAIRS, SMALL, Server
from tests.echo import pairs_text

KILLS = int(os.environ.get("JAXCTX_KILLS", "1000"))


class Cluster:
    """A router and engines, each a process."""

    def __init__(self, cache: Path, log: Path) -> None:
        self._cache = cache
        self._log = log.open("w")  # a pipe that nobody reads would stop them in the end
        self._said = log.open()
        self._servers: list[Server] = []
        self.router = self._begun("--role", "router", command=(COMMAND,)).address

    def _begun(self, *arguments: str, command: Any = PAIRS) -> Server:
        self._servers.append(Server(*arguments, cache=self._cache, command=command, stderr=self._log))
        return self._servers[-1]

    def engine(self, *arguments: str) -> Server:
        return self._begun(*SMALL, "--role", "engine", "--router", self.router, *arguments)

    async def without_engines(self) -> None:
        """Kill those of other tests."""
        for server in self._servers[1:]:
            server.process.kill()
        await self.until()

    def end(self) -> None:
        for server in self._servers:
            server.process.send_signal(signal.SIGCONT)
            server.kill()
        self._log.close()
        self._said.close()

    async def gone(self, address: str) -> float:
        """When the router noticed that an engine had ended, in unix seconds, by its log: this process may be busy."""
        line = ""
        while not (found := re.search(rf'"time": "([^"]+)".*\bengine {address} is gone.*\n', line)):
            line = ("" if line.endswith("\n") else line) + self._said.readline()
            if not line.endswith("\n"):
                await asyncio.sleep(0.02)
        return datetime.fromisoformat(found[1]).timestamp()

    async def engines(self) -> dict[str, int]:
        """Epochs, by address."""
        async with jaxctx.aio.Client(self.router, timeout_s=10) as client:
            return {each.address: each.epoch for each in await client.engines()}

    async def until(self, *there: Server) -> None:
        """Wait until these engines are there and no others."""
        async with asyncio.timeout(120):
            while (await self.engines()).keys() != {each.address for each in there}:
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def cluster(compile_cache: Path, tmp_path_factory: Any) -> Iterator[Cluster]:
    found = Cluster(compile_cache, tmp_path_factory.mktemp("log") / "log")
    yield found
    found.end()


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[SessionServiceStub]:
    async with grpc.aio.insecure_channel(cluster.router) as channel:
        yield SessionServiceStub(channel)


async def begun(reading: Any) -> str:
    """What has been said, once something has."""
    return str((await anext(reading)).text)


@pytest.mark.slow
async def test_killed_frozen_and_restarted(cluster: Cluster, stub: SessionServiceStub) -> None:
    first, second = cluster.engine(), cluster.engine()
    await cluster.until(first, second)
    by_address = {each.address: each for each in (first, second)}
    caller = await ProgramCaller(stub).begin()
    story = expected_text("Tell: ", 900)

    async def telling() -> tuple[Any, Server, str]:
        """A story that is being told, and by whom."""
        ids = await caller.call("Tell: {{story}}", story=output_of(900))
        reading = aiter(caller.read(ids["story"]))
        beginning = ""
        while len(beginning) < 100:  # enough to be tokenised otherwise
            beginning += await begun(reading)
        return reading, by_address[(await caller("GetGraph")).tasks[-1].engine_id], beginning

    async def rest(reading: Any, beginning: str) -> str:
        told = beginning + "".join([part.text async for part in reading])
        assert (await caller("GetGraph")).tasks[-1].engine_id == other.address  # it went on there
        return told

    # Frozen: lost after three heartbeats, its work goes on. Taken back in a new incarnation, it says nothing late.
    reading, frozen, beginning = await telling()
    epoch = (await cluster.engines())[frozen.address]
    frozen.process.send_signal(signal.SIGSTOP)
    (other,) = {first, second} - {frozen}
    await cluster.until(other)
    assert await rest(reading, beginning) == story
    frozen.process.send_signal(signal.SIGCONT)
    await cluster.until(first, second)
    assert (await cluster.engines())[frozen.address] > epoch

    # Killed.
    reading, killed, beginning = await telling()
    killed.process.send_signal(signal.SIGKILL)
    (other,) = {first, second} - {killed}
    await cluster.until(other)
    assert await rest(reading, beginning) == story

    # The last one too: what is asked waits for an engine, until its time is over.
    other.process.send_signal(signal.SIGKILL)
    await cluster.until()
    waiting = await caller.call("Say {{o}}", o=output_of(20))
    asked = asyncio.create_task(caller.get(waiting["o"]))
    timed = await caller(
        "SubmitCall", template="Now {{o}}", parameters=[{"name": "o", **output_of(20)}], timeout={"seconds": 1}
    )
    with pytest.raises(errors.DeadlineExceeded):
        await caller.get(timed.outputs[0].variable_id)
    assert not asked.done()
    cluster.engine()
    assert await asked == expected_text("Say ", 20)


@pytest.mark.slow
async def test_ending_an_engine_drains_it(cluster: Cluster, stub: SessionServiceStub) -> None:
    """SIGTERM: what it has it finishes; it gets nothing new, and no work is done twice."""
    engine = cluster.engine()
    async with asyncio.timeout(120):
        while engine.address not in await cluster.engines():
            await asyncio.sleep(0.02)
    caller = await ProgramCaller(stub).begin()
    ids = [(await caller.call(f"Tell {n}: {{{{o}}}}", o=output_of(700)))["o"] for n in range(6)]
    readings = [aiter(caller.read(each)) for each in ids]
    beginnings = [await begun(each) for each in readings]
    engine.process.send_signal(signal.SIGTERM)
    for number, (reading, beginning) in enumerate(zip(readings, beginnings, strict=True)):
        assert beginning + "".join([part.text async for part in reading]) == expected_text(f"Tell {number}: ", 700)
    assert engine.end()[0] == 0


@pytest.mark.slow
async def test_contexts_by_a_router(cluster: Cluster, tmp_path: Path) -> None:
    """They end with their engine, which is said; what was saved is there with the next engine on the same store."""
    await cluster.without_engines()
    engines = [cluster.engine("--store", str(tmp_path)) for _ in range(2)]
    await cluster.until(*engines)
    greedy: Any = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with jaxctx.aio.Client(cluster.router, timeout_s=20) as client:
        context = await client.create(SYSTEM, context_id="story")
        story = Story(SYSTEM)
        assert str(await context.complete(**greedy)) == story.say(20)
        await context.save("story", durable=True)
        again = await client.create(SYSTEM)  # where that is cached
        for engine in engines:
            async with jaxctx.aio.Client(engine.address, timeout_s=20) as there:
                if ids := {each.id async for each in there.contexts()}:
                    assert ids == {context.id, again.id}
                    engine.process.kill()
                else:
                    other = engine
        await cluster.until(other)
        with pytest.raises(errors.Unavailable) as error:
            await context.complete(**greedy)
        assert error.value.reason == "ENGINE_LOST"
        assert [each async for each in client.contexts()] == []
        await cluster.until(other, cluster.engine("--store", str(tmp_path)))
        opened = await client.open("story", context_id="story")
        assert str(await opened.complete(**greedy)) == story.say(20)


@pytest.mark.slow
async def test_contexts_of_an_engine_that_is_told_to_end_go_on_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    """SIGTERM: at the other engine on the same store, character for character, also behind what was being told then."""
    await cluster.without_engines()
    engines = {each.address: each for each in (cluster.engine("--store", str(tmp_path)) for _ in range(2))}
    await cluster.until(*engines.values())
    greedy: Any = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with jaxctx.aio.Client(cluster.router, timeout_s=60) as client:
        idle = await client.create(SYSTEM, context_id="idle", labels={"a": "b"})
        story = Story(SYSTEM)
        assert str(await idle.complete(**greedy)) == story.say(20)
        busy = await client.create(SYSTEM + "Tell: ")  # where that is cached
        pieces = busy.generate(**greedy | {"max_tokens": 700})
        told = (await anext(pieces)).text
        (address,) = [one for one in engines if {each async for each in ids_on(one)} == {idle.id, busy.id}]
        leaving = engines.pop(address)
        leaving.process.send_signal(signal.SIGTERM)
        assert str(await idle.complete(**greedy)) == story.say(20)
        tale = Story(SYSTEM + "Tell: ")
        assert told + "".join([piece.text async for piece in pieces]) == tale.say(700)
        assert (await asyncio.to_thread(leaving.end))[0] == 0
        await cluster.until(*engines.values())
        assert str(await busy.complete(**greedy)) == tale.say(20)
        assert str(await idle.complete(**greedy)) == story.say(20)
        assert {each.id: each.info.labels async for each in client.contexts()} == {idle.id: {"a": "b"}, busy.id: {}}
        assert [each async for each in client.snapshots()] == []


async def ids_on(address: str) -> AsyncIterator[str]:
    """Of the contexts that an engine has."""
    async with jaxctx.aio.Client(address, timeout_s=20) as client:
        async for each in client.contexts():
            yield each.id


@pytest.mark.campaign
@pytest.mark.timeout(6 * 3600)
async def test_a_thousand_kills_of_one_of_two_engines(cluster: Cluster, stub: SessionServiceStub) -> None:
    """Under load: every request ends once, with all of its text; the router notices an end within a second."""
    rng = random.Random(8)
    engines = [cluster.engine() for _ in range(2)]
    ready: asyncio.Queue[Server] = asyncio.Queue(1)
    done, slowest, slowest_since_kill, stop = 0, 0.0, 0.0, False

    async def start() -> None:
        """Engines that take the places of those killed; most of the time that a kill takes."""
        while not stop:
            await ready.put(await asyncio.to_thread(cluster.engine))

    async def work(number: int) -> None:
        nonlocal done
        caller, ended = (
            await ProgramCaller(stub, timeout_s=120.0).begin(),
            0,
        )  # engines begin beside it, on the same routers
        while not stop:
            prompt, tokens = f"{SYSTEM} Worker {number}, request {ended}: ", 20 + (ended * 37) % 200
            ids = await caller.call(prompt + "{{a}} and {{b}}", a=output_of(tokens), b=output_of(20))
            b = await caller.get(ids["b"])
            a = await caller.get(ids["a"])
            story = Story(prompt)
            assert a == story.say(tokens)
            assert b == story.fill(" and ").say(20)
            ended, done = ended + 1, done + 1
            if ended % 10 == 0:
                await caller("DeleteSession")
                await caller.begin()

    workers = [asyncio.create_task(work(number)) for number in range(8)]
    starters = [asyncio.create_task(start()) for _ in range(2)]
    for kill in range(KILLS):
        await asyncio.sleep(rng.random() * 0.5)
        victim = engines.pop(0)
        while victim.address not in await cluster.engines():
            await asyncio.sleep(0.02)
        killed = time.time()
        victim.process.kill()
        exited = asyncio.create_task(asyncio.to_thread(exit_of, victim))
        async with asyncio.timeout(60):
            while (noticed := await cluster.gone(victim.address)) < killed:
                pass  # it had been taken for lost before, and came back
        slowest = max(slowest, noticed - await exited)
        slowest_since_kill = max(slowest_since_kill, noticed - killed)
        victim.process.communicate()
        engines.append(await ready.get())
        for worker in (*workers, *starters):
            if worker.done():
                worker.result()
        if kill % 10 == 9:
            told = f"slowest to notice {slowest:.2f} s behind the end, {slowest_since_kill:.2f} s behind the kill"
            print(f"{kill + 1} kills, {done} requests, {told}", flush=True)
    stop = True
    await asyncio.wait_for(asyncio.gather(*workers), 60)
    while not all(starter.done() for starter in starters):  # what they have begun is there to be ended
        with suppress(asyncio.QueueEmpty):
            ready.get_nowait()
        await asyncio.sleep(0.02)
    assert done > KILLS
    assert slowest < 1.0
    assert slowest_since_kill < 5.0  # a process takes its time to end where others want its processors


def exit_of(server: Server) -> float:
    """When the process has ended, in unix seconds. Waits for that."""
    server.process.wait()
    return time.time()


def test_what_the_echo_says_would_be_tokenised_otherwise() -> None:
    """Else nothing here could fail where a text is tokenised again."""
    story = Story("Tell: ")
    begin = len(story._ids)
    text = story.say(900)
    assert text.isascii()
    assert pairs_text().tokenizer.encode(text) != story._ids[begin:]
