"""Outputs of the bundled model in float32 whose engines are killed or frozen: each says what it says undisturbed.

A real tokenizer (byte-level BPE) and real arithmetic: greedy and seeded outputs, with penalties, with stop strings that
begin before a loss and end behind it. On the echo model, in the quick suite: tests/jaxctx/programs/test_executor.py.

    scripts/campaign tests/e2e/test_engine_losses.py -s       # JAXCTX_KILLS: how many, 1000 if it is not set
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from tests.e2e.program_callers import ProgramCaller
from tests.e2e.server_processes import COMMAND, SMALL, PreparedServer, Server

KILLS = int(os.environ.get("JAXCTX_KILLS", "1000"))
WORKERS = 6
FREEZE_EVERY = 20  # of so many losses one is of an engine that is stopped, not killed

Case = tuple[str, dict[str, Any]]  # a prompt, and the fields of its output


def cases() -> list[Case]:
    """Prompts with settings of each kind; those with stop strings get them once it is known what is said."""
    seeded = {"temperature": 0.8, "top_p": 0.95}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    found: list[Case] = []
    for number in range(8):
        prompt = f"# module number {number}\nimport "
        found += [
            (prompt, {"max_tokens": 250, "ignore_eos": True, "sampling": {"temperature": 0}}),
            (prompt, {"max_tokens": 200, "ignore_eos": True, "sampling": {**seeded, "seed": number}}),
            (prompt, {"max_tokens": 200, "sampling": {**seeded, **penalties, "seed": 100 + number}, "min_tokens": 150}),
        ]
    return found


def with_stops(case: Case, text: str) -> Case:
    """The same output ended by a string near its end, with others that nearly come; every second one keeps it."""
    prompt, settings = case
    at = len(text) * 3 // 4
    stop, near = text[at : at + 6], text[at // 2 : at // 2 + 5] + "\0"
    return prompt, {**settings, "min_tokens": 0, "stop": [near, stop], "include_stop": len(text) % 2 == 0}


class Fleet:
    """A router, and engines that come and go."""

    def __init__(self, cache: Path, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._log = (folder / "router").open("w")
        self.router = Server("--role", "router", cache=cache, command=(COMMAND,), stderr=self._log)
        self.engines: list[PreparedServer] = []

    def begin(self) -> PreparedServer:
        arguments = (*SMALL, "--dtype", "float32", "--role", "engine", "--router", self.router.address)
        engine = PreparedServer(*arguments, cache=self._cache, folder=self._folder)
        self.engines.append(engine)
        return engine

    async def registered(self) -> set[str]:
        async with jaxctx.aio.Client(self.router.address, timeout_s=60) as client:
            return {each.address for each in await client.engines()}

    async def until_registered(self, engine: PreparedServer) -> None:
        async with asyncio.timeout(300):
            while engine.address not in await self.registered():
                await asyncio.sleep(0.02)

    async def until_lost(self, engine: PreparedServer) -> None:
        async with asyncio.timeout(300):
            while engine.address in await self.registered():
                await asyncio.sleep(0.02)

    def interrupted(self) -> int:
        """Outputs that lost the engine which was at work on them, by the router's log."""
        log = (self._folder / "router").read_text()
        return sum(map(int, re.findall(r"is gone, epoch \d+, with (\d+) tasks", log)))

    def end(self) -> None:
        for engine in self.engines:
            engine.kill()
        self.router.kill()
        self._log.close()


async def output(caller: ProgramCaller, case: Case) -> str:
    prompt, settings = case
    ids = await caller.call(prompt + "{{o}}", o={"output": settings})
    return await caller.get(ids["o"])


@pytest.mark.campaign
@pytest.mark.timeout(6 * 3600)
async def test_a_thousand_losses_change_no_output(compile_cache: Path, tmp_path: Path) -> None:
    fleet = Fleet(compile_cache, tmp_path)
    try:
        async with grpc.aio.insecure_channel(fleet.router.address) as channel:
            await losses(fleet, SessionServiceStub(channel))
    finally:
        fleet.end()


async def losses(fleet: Fleet, stub: SessionServiceStub) -> None:
    rng = random.Random(21)
    first = await asyncio.to_thread(fleet.begin)
    await fleet.until_registered(first)
    caller = await ProgramCaller(stub, timeout_s=600.0).begin()

    async def undisturbed(found: list[Case]) -> list[str]:
        return [await output(caller, case) for case in found]

    plain = cases()
    said = await undisturbed(plain)
    stopping = [with_stops(case, text) for case, text in zip(plain, said, strict=True)]
    all_cases, expected = [*plain, *stopping], [*said, *await undisturbed(stopping)]
    together = await asyncio.gather(*(output(caller, case) for case in all_cases))
    assert list(together) == expected, "a near tie: sums of another order chose another token; take another prompt"
    print(f"{len(all_cases)} outputs of {min(map(len, expected))} to {max(map(len, expected))} characters", flush=True)

    engines = [first, await asyncio.to_thread(fleet.begin)]
    ready: asyncio.Queue[PreparedServer] = asyncio.Queue(1)
    numbers, done, stop = itertools.count(), 0, False

    async def start() -> None:
        while not stop:
            await ready.put(await asyncio.to_thread(fleet.begin))

    async def work() -> None:
        nonlocal done
        mine = await ProgramCaller(stub, timeout_s=600.0).begin()
        while not stop:
            number = next(numbers) % len(all_cases)
            told = await output(mine, all_cases[number])
            assert told == expected[number], all_cases[number]
            done += 1
            if done % 20 == 0:
                await mine("DeleteSession")
                await mine.begin()

    workers = [asyncio.create_task(work()) for _ in range(WORKERS)]
    starters = [asyncio.create_task(start()) for _ in range(2)]
    began = time.monotonic()
    for kill in range(1, KILLS + 1):
        victim = engines.pop(0)
        await fleet.until_registered(victim)
        await asyncio.sleep(rng.random())
        if kill % FREEZE_EVERY == 0:
            victim.send_signal(signal.SIGSTOP)
            await fleet.until_lost(victim)
        await asyncio.to_thread(victim.kill)
        fleet.engines.remove(victim)
        engines.append(await ready.get())
        for each in (*workers, *starters):
            if each.done():
                each.result()
        if kill % 10 == 0:
            told = f"{kill} losses, {done} outputs, {fleet.interrupted()} interruptions"
            print(f"{told}, {time.monotonic() - began:.0f} s", flush=True)
    stop = True
    await asyncio.wait_for(asyncio.gather(*workers), 600)
    while not all(starter.done() for starter in starters):  # what they have begun is there to be ended
        with suppress(asyncio.QueueEmpty):
            ready.get_nowait()
        await asyncio.sleep(0.02)
    assert fleet.interrupted() > KILLS / 2
