"""The registry of engines: watching one ends when it is cancelled, whatever the engine answers just then."""

import asyncio
from dataclasses import replace

import pytest

from jaxctx.errors import NotFound, Unavailable
from jaxctx.programs.engine_registry import DEFAULT_MODEL_KEPT_S, EngineRegistry
from jaxctx.types import Criterion, EngineStats
from tests.jaxctx.programs.builders import make_call
from tests.jaxctx.programs.scripted import ScriptedEngine, encode
from tests.server.fake_engine import STATS


class EngineThatAnswersLater(ScriptedEngine):
    """An engine that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answer_of_stats: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()

    async def stats(self) -> EngineStats:
        self.asked.set()
        return await self.answer_of_stats


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("fails", [False, True])
async def test_watching_that_is_cancelled_ends_though_the_engine_answers_at_that_moment(
    ticks: int, fails: bool
) -> None:
    registry, engine = EngineRegistry(lambda: None, lambda node: None, heartbeat_s=60.0), EngineThatAnswersLater()
    watching = asyncio.create_task(registry.watch("e", engine, encode))
    await engine.asked.wait()
    assert ("e" in registry.handles, registry.lost) == (True, 0)
    if fails:
        engine.answer_of_stats.set_exception(OSError("gone"))
    else:
        engine.answer_of_stats.set_result(STATS)
    for _ in range(ticks):
        await asyncio.sleep(0)
    watching.cancel()
    done, _ = await asyncio.wait([watching], timeout=30.0)
    watching.cancel()
    assert done
    assert watching.cancelled()
    assert "e" not in registry.handles
    assert registry.lost == 1


async def test_each_heartbeat_without_an_answer_ends_the_calls_of_the_engine() -> None:
    """Those that began on it after it was lost, too."""
    registry, engine = EngineRegistry(lambda: None, lambda node: None, heartbeat_s=0.01), ScriptedEngine()
    ended: list[bool] = []  # whether the engine was registered then

    def end_calls() -> None:
        ended.append("e" in registry.handles)

    watching = asyncio.create_task(registry.watch("e", engine, encode, end_calls=end_calls))
    async with asyncio.timeout(30):
        while "e" not in registry.handles:
            await asyncio.sleep(0)
        await asyncio.sleep(0.03)
        assert ended == []
        engine.failure = OSError("gone")
        while len(ended) < 2:
            await asyncio.sleep(0.01)
    assert not any(ended)
    watching.cancel()


def test_the_default_model_is_the_first_that_is_not_gone_for_good() -> None:
    now = 0.0
    registry = EngineRegistry(lambda: None, lambda node: None, clock=lambda: now)
    with pytest.raises(Unavailable):
        registry.find_model("")
    first = registry.register("1", ScriptedEngine(model_id="a", max_context_tokens=100), encode)
    second = registry.register("2", ScriptedEngine(model_id="b", max_context_tokens=200), encode)
    assert registry.find_model("") == ("a", 100)
    registry.lose(first)
    now += DEFAULT_MODEL_KEPT_S - 1  # its engine may be starting again
    assert registry.find_model("") == ("a", 100)
    now += 2
    assert registry.find_model("") == ("b", 200)
    assert registry.find_model("a") == ("a", 100)  # who names it is told that no engine is there
    again = registry.register("1", ScriptedEngine(model_id="a", max_context_tokens=100), encode)
    assert registry.find_model("") == ("a", 100)
    registry.lose(again)
    registry.lose(second)
    now += DEFAULT_MODEL_KEPT_S + 1
    assert registry.find_model("") == ("a", 100)  # all are gone: the first
    with pytest.raises(NotFound):
        registry.find_model("c")


@pytest.mark.parametrize("others", [0, 3, 9])
@pytest.mark.parametrize("running", [0, 1, 4, 8])
def test_an_engine_never_has_capacity_for_more_than_its_free_places(running: int, others: int) -> None:
    registry = EngineRegistry(lambda: None, lambda node: None)
    engine = ScriptedEngine(max_batch=8)
    handle = registry.register("e", engine, encode)
    handle.running.update(make_call(["a"]).tasks[0] for _ in range(running))
    handle.update_load(replace(STATS, running=running + others, waiting=0, pages_reserved=0))
    tasks = [make_call(["a"]).tasks[0] for _ in range(20)]
    assert handle.free_places == max(0 if running else 1, 8 - running - others)
    assert handle.count_fitting(tasks) == handle.free_places
    tasks[1].criterion = Criterion.LATENCY
    assert handle.count_fitting(tasks) <= handle.free_places
    handle.draining = True
    assert (handle.free_places, handle.count_fitting(tasks)) == (0, 0)
