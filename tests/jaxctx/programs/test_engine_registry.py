"""The registry of engines: attending one ends when it is told to, whatever the engine answers just then."""

import asyncio

import pytest

from jaxctx.programs.engine_registry import EngineRegistry
from jaxctx.types import EngineStats
from tests.jaxctx.programs.scripted import ScriptedEngine, encode
from tests.server.fake_engine import STATS


class Asked(ScriptedEngine):
    """An engine that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.told: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()

    async def stats(self) -> EngineStats:
        return await self.told


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_attendance_ends_though_the_engine_answers_at_that_moment(ticks: int, fails: bool) -> None:
    engines, engine = EngineRegistry(lambda: None, lambda node: None, heartbeat_s=0.01), Asked()
    attending = asyncio.create_task(engines.watch("e", engine, encode))
    await asyncio.sleep(0.01)
    assert "e" in engines.handles
    if fails:
        engine.told.set_exception(OSError("gone"))
    else:
        engine.told.set_result(STATS)
    for _ in range(ticks):
        await asyncio.sleep(0)
    attending.cancel()
    done, _ = await asyncio.wait([attending], timeout=1.0)
    attending.cancel()
    assert done
    assert attending.cancelled()
    assert "e" not in engines.handles
