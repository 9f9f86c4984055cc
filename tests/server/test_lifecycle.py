"""The state of a server: what is served while it loads, serves, drains and has stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.model.text import ModelText
from jaxctx.programs.dispatcher import Policy
from jaxctx_server.lifecycle import LocalModel, ProgramSettings, ServerLifecycle, ServingState, State
from jaxctx_server.server import drain
from jaxctx_server.tokenizer_pool import TokenizerPool
from jaxctx_server.validate import Limits
from tests.server.fake_engine import FakeEngine


@pytest.fixture
async def lifecycle() -> AsyncIterator[ServerLifecycle]:
    """Of a server that loads."""
    lifecycle = ServerLifecycle()
    yield lifecycle
    lifecycle.stop()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def state(engine: FakeEngine, text: ModelText, limits: Limits) -> ServingState:
    """What a server of an engine serves."""
    return ServingState.of(engine, text, limits)


async def test_a_server_that_loads_serves_nothing_yet(lifecycle: ServerLifecycle) -> None:
    assert lifecycle.state is State.LOADING
    for ask in (lifecycle.served, lifecycle.model):
        with pytest.raises(errors.Unavailable) as raised:
            ask()
        assert (raised.value.reason, raised.value.retry_after_s) == ("NOT_SERVING", 1.0)
    with pytest.raises(errors.Unavailable):
        await lifecycle.drain()
    assert lifecycle.state is State.LOADING


async def test_what_is_served_is_known_once_it_is_ready(lifecycle: ServerLifecycle, state: ServingState) -> None:
    lifecycle.set_ready(state)
    assert lifecycle.state is State.READY
    assert lifecycle.served() is state


async def test_a_server_that_has_stopped_serves_nothing_more(lifecycle: ServerLifecycle, state: ServingState) -> None:
    lifecycle.set_ready(state)
    lifecycle.stop()
    assert lifecycle.state is State.STOPPED
    with pytest.raises(errors.Unavailable) as raised:
        lifecycle.served()
    assert (raised.value.reason, raised.value.retry_after_s) == ("NOT_SERVING", 5.0)


async def test_a_server_can_stop_while_it_loads(lifecycle: ServerLifecycle) -> None:
    lifecycle.stop()
    assert lifecycle.state is State.STOPPED


async def test_the_model_is_found_by_its_name_or_without_one(
    lifecycle: ServerLifecycle, state: ServingState, engine: FakeEngine
) -> None:
    lifecycle.set_ready(state)
    assert lifecycle.model().engine is engine
    assert lifecycle.model("fake").engine is engine
    with pytest.raises(errors.NotFound) as raised:
        lifecycle.model("other")
    assert raised.value.reason == "MODEL_NOT_FOUND"


async def test_a_router_has_no_model(lifecycle: ServerLifecycle, limits: Limits) -> None:
    lifecycle.set_ready(ServingState.router(limits))
    for model_id in ("", "fake"):
        with pytest.raises(errors.FailedPrecondition) as raised:
            lifecycle.model(model_id)
        assert raised.value.reason == "WRONG_ROLE"


async def test_a_drain_ends_when_running_work_has(
    lifecycle: ServerLifecycle, state: ServingState, engine: FakeEngine
) -> None:
    lifecycle.set_ready(state)
    engine.drained.clear()
    draining = asyncio.create_task(lifecycle.drain())
    while not engine.draining:
        await asyncio.sleep(0)
    assert lifecycle.state is State.DRAINING
    assert lifecycle.served() is state, "all else is still answered"
    assert not draining.done()
    engine.drained.set()
    async with asyncio.timeout(10):
        await draining
    assert lifecycle.state is State.DRAINING


async def test_a_drain_goes_on_if_its_caller_leaves(
    lifecycle: ServerLifecycle, state: ServingState, engine: FakeEngine
) -> None:
    lifecycle.set_ready(state)
    engine.drained.clear()
    first = asyncio.create_task(lifecycle.drain())
    while not engine.draining:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    engine.draining = False
    second = asyncio.create_task(lifecycle.drain())
    engine.drained.set()
    async with asyncio.timeout(10):
        await second
    assert not engine.draining, "the engine was asked once"


class Work:
    """Long work of a transport."""

    def __init__(self) -> None:
        self.is_unfinished = True
        self.is_ended = False
        self.may_finish = asyncio.Event()

    async def finish(self) -> None:
        await self.may_finish.wait()
        self.is_unfinished = False

    async def end(self) -> None:
        self.is_ended = True


async def test_a_drain_waits_for_long_work_before_the_engine_refuses_anything(
    lifecycle: ServerLifecycle, state: ServingState, engine: FakeEngine
) -> None:
    lifecycle.set_ready(state)
    work = Work()
    lifecycle.long_work.append(work)
    draining = asyncio.create_task(lifecycle.drain())
    while not lifecycle.finishes_long_work:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert not engine.draining
    work.may_finish.set()
    async with asyncio.timeout(10):
        await draining
    assert (engine.draining, lifecycle.finishes_long_work, work.is_ended) == (True, False, False)


async def test_long_work_is_ended_when_the_time_is_up(
    lifecycle: ServerLifecycle, state: ServingState, engine: FakeEngine
) -> None:
    lifecycle.set_ready(state)
    work = Work()
    lifecycle.long_work.append(work)
    assert not await drain(lifecycle, 0.01)
    assert (work.is_ended, engine.draining) == (True, False)


async def test_a_router_drains_its_programs(lifecycle: ServerLifecycle, limits: Limits) -> None:
    state = ServingState.router(limits)
    lifecycle.set_ready(state)
    call = object()
    state.programs.working.add(call)
    draining = asyncio.create_task(lifecycle.drain())
    while not state.programs.draining:
        await asyncio.sleep(0)
    assert not draining.done()
    state.programs.working.discard(call)
    async with asyncio.timeout(10):
        await draining


async def test_each_change_of_the_state_can_be_waited_for(lifecycle: ServerLifecycle, state: ServingState) -> None:
    for change, entered in ((lambda: lifecycle.set_ready(state), State.READY), (lifecycle.stop, State.STOPPED)):
        changed = lifecycle.changed
        assert not changed.is_set()
        change()
        assert changed.is_set()
        assert lifecycle.state is entered
        assert lifecycle.changed is not changed


async def test_programs_run_while_the_server_does(lifecycle: ServerLifecycle, state: ServingState) -> None:
    lifecycle.set_ready(state)
    async with asyncio.timeout(10):
        while not state.engine_handles():
            await asyncio.sleep(0)
        (handle,) = state.engine_handles()
        assert (handle.id, handle.engine) == ("local", state.model.engine if state.model else None)
        lifecycle.stop()
        while state.engine_handles():
            await asyncio.sleep(0)


async def test_a_router_has_no_engine_before_one_registers(lifecycle: ServerLifecycle, limits: Limits) -> None:
    state = ServingState.router(limits)
    lifecycle.set_ready(state)
    await asyncio.sleep(0)
    assert state.engine_handles() == []


async def test_texts_of_programs_have_special_tokens_only_at_the_start(text: ModelText, limits: Limits) -> None:
    asked: list[tuple[str, bool, bool]] = []

    class RecordingTexts(TokenizerPool):
        async def tokens(self, request, position):  # type: ignore[no-untyped-def]
            asked.append((request.text, request.add_special_tokens, await position.is_empty()))
            return [1]

    texts = RecordingTexts(text, limits)
    model = LocalModel(FakeEngine(), texts)  # type: ignore[arg-type]
    assert await model.encode(Caller(), "a", True) == [1]
    assert await model.encode(Caller(), "b", False) == [1]
    assert asked == [("a", True, True), ("b", False, False)]
    texts.close()


def test_settings_of_programs_reach_them() -> None:
    settings = ProgramSettings(policy=Policy(least_impact=False), prefix_timeout_s=7.0, heartbeat_s=2.0)
    programs = settings.programs(lambda: 5.0)
    assert programs.clock() == 5.0
    assert programs.dispatcher.engines.silence_s == 6.0
    assert programs.native_functions is not None
