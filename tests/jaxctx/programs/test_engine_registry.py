"""The registry of engines: attending one ends when it is told to, whatever the engine answers just then."""

import asyncio

import pytest

from jaxctx.programs.engine_registry import EngineRegistry
from jaxctx.types import EngineStats
from tests.jaxctx.programs.scripted import ScriptedEngine, encode
from tests.server.conftest import STATS


class PendingEngine(ScriptedEngine):
    """An engine that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()

    async def stats(self) -> EngineStats:
        self.asked.set()
        return await self.answer


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_attendance_ends_though_the_engine_answers_at_that_moment(ticks: int, fails: bool) -> None:
    engines, engine = EngineRegistry(lambda: None, lambda node: None, heartbeat_s=60.0), PendingEngine()
    attending = asyncio.create_task(engines.watch("e", engine, encode))
    await engine.asked.wait()
    assert "e" in engines.handles
    if fails:
        engine.answer.set_exception(OSError("gone"))
    else:
        engine.answer.set_result(STATS)
    for _ in range(ticks):
        await asyncio.sleep(0)
    attending.cancel()
    done, _ = await asyncio.wait([attending], timeout=30.0)
    attending.cancel()
    assert done
    assert attending.cancelled()
    assert "e" not in engines.handles
