"""The dispatcher: order, groups, prefixes and turns of waiting tasks, and what becomes of those that engines refuse."""

import asyncio
import itertools
import random
from collections import defaultdict
from typing import Any, ClassVar

import pytest

from jaxctx.errors import (
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.programs.dispatcher import MIN_RETRY_S, Dispatcher, Policy
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.programs.tasks import CallContext, Task, TaskGroup
from jaxctx.types import Criterion, TaskPhase
from tests.jaxctx.programs.builders import RecordedResults, make_call
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop, until
from tests.jaxctx.programs.scripted import ScriptedEngine, encode


@pytest.mark.parametrize(
    ("criterion", "loads"), [(Criterion.LATENCY, [4, 4, 0, 0]), (Criterion.THROUGHPUT, [8, 0, 0, 0])]
)
async def test_latency_sensitive_calls_spread_and_others_fill_one_engine(
    criterion: Criterion, loads: list[int]
) -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    for engine in engines:
        engine.gate.clear()
    for i in range(8):
        session.request(call(session, f"Call {i}: {{{{o}}}}", o=output("o"))["o"], criterion)
    await run_event_loop()
    assert harness.loads() == loads


async def test_a_group_goes_together_and_its_consumer_after_the_last() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    for engine in engines:
        engine.gate.clear()
    maps = [call(session, f"{i} map {{{{o}}}}", o=output("o"))["o"] for i in range(16)]
    places = "".join(f"{{{{m{i}}}}} " for i in range(16))
    inputs = {f"m{i}": (variable,) for i, variable in enumerate(maps)}
    reduced = call(session, f"All: {places}{{{{o}}}}", **inputs, o=output("o"))["o"]
    asking = asyncio.create_task(ask(session, reduced))
    await run_event_loop()
    assert sorted(harness.loads()) == [0, 0, 0, 16]
    busy = next(engine for engine in engines if engine.running)
    assert len(busy.did("generate")) == 16
    for engine in engines:
        engine.gate.set()
    await asking
    log = [(text, engine.name) for engine in engines for text in engine.did("generate")]
    assert len(log) == 17
    last = next(text for text, _ in log if text.startswith("All: "))
    assert all(session.variable(variable).text in last for variable in maps)


async def test_a_group_that_fits_nowhere_is_split() -> None:
    engines = [ScriptedEngine(f"e{i}", max_batch=6) for i in range(2)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    maps = [call(session, f"{i} map {{{{o}}}}", o=output("o"))["o"] for i in range(16)]
    inputs = {f"m{i}": (variable,) for i, variable in enumerate(maps)}
    places = "".join(f"{{{{m{i}}}}} " for i in range(16))
    await ask(session, call(session, f"All: {places}{{{{o}}}}", **inputs, o=output("o"))["o"])
    assert all(engine.most_running == 6 for engine in engines)
    assert sum(len(engine.did("generate")) for engine in engines) == 17


async def test_what_an_older_request_needs_goes_first() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    session = harness.session()
    asked = []
    for i in range(4):
        a = call(session, f"A{i} {{{{o}}}}", o=output("o"))["o"]
        b = call(session, f"B{i} {{{{a}}}}: {{{{o}}}}", a=(a,), o=output("o"))["o"]
        asked.append(asyncio.create_task(ask(session, b)))
    await asyncio.gather(*asked)
    assert [text[:2] for text in engine.did("generate")] == ["A0", "B0", "A1", "B1", "A2", "B2", "A3", "B3"]
    assert engine.most_running == 1


async def test_an_older_request_goes_first_whatever_session_it_is_of() -> None:
    """Sessions that made fewer requests before do not overtake it."""
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    old = harness.session()
    for i in range(5):
        await ask(old, call(old, f"warm {i} {{{{o}}}}", o=output("o"))["o"])
    engine.gate.clear()
    asked = [(old, "blocks"), (old, "older"), *((harness.session(), f"newer {i}") for i in range(3))]
    made = []
    for session, prompt in asked:
        made.append(session.request(call(session, f"{prompt} {{{{o}}}}", o=output("o"))["o"], Criterion.LATENCY))
        await run_event_loop()
    engine.gate.set()
    await asyncio.gather(*(variable.wait() for variable in made))
    assert engine.did("generate")[5:] == [f"{prompt} " for _, prompt in asked]


async def test_without_app_order_tasks_go_as_they_become_ready() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1), policy=Policy(app_order=False))
    session = harness.session()
    asked = []
    for i in range(2):
        a = call(session, f"A{i} {{{{o}}}}", o=output("o"))["o"]
        asked.append(
            asyncio.create_task(ask(session, call(session, f"B{i} {{{{a}}}}: {{{{o}}}}", a=(a,), o=output("o"))["o"]))
        )
    await asyncio.gather(*asked)
    assert [text[:2] for text in engine.did("generate")] == ["A0", "A1", "B0", "B1"]


LONG_PREFIX = "You are a careful assistant who answers in one short sentence and never guesses. "


PREFIXES = [f"{i} of four: {LONG_PREFIX}" for i in range(4)]


async def request_calls_with_prefixes(harness: ProgramsHarness, order: list[int], criterion: Criterion) -> None:
    """Ask for a call with each of these prefixes, in their order."""
    session = harness.session()
    for n, i in enumerate(order):
        session.request(call(session, PREFIXES[i] + "{{q}}? {{o}}", q=f"question {n}", o=output("o"))["o"], criterion)
    await run_event_loop()


async def test_calls_land_where_their_prefix_is() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    for node, prefix in zip(harness.nodes, PREFIXES, strict=True):  # each engine gets to hold one
        others = [each for each in harness.nodes if each is not node]
        for other in others:
            del harness.registry.handles[other.id]
        session = harness.session()
        await ask(session, call(session, prefix + "{{q}}? {{o}}", q="first", o=output("o"))["o"])
        for other in others:
            harness.registry.handles[other.id] = other
    for engine in engines:
        engine.gate.clear()
        engine.log.clear()
    await request_calls_with_prefixes(harness, [3, 2, 1, 0] * 4, Criterion.THROUGHPUT)
    for engine, prefix in zip(engines, PREFIXES, strict=True):
        assert len(engine.running) == 4
        assert all(text.startswith(prefix) for text in engine.running.values())
        assert not any(prefix in text for text in engine.did("compute"))


async def test_cold_calls_of_one_prefix_land_together() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines)
    for engine in engines:
        engine.gate.clear()
    await request_calls_with_prefixes(harness, [0, 1, 2, 3] * 4, Criterion.LATENCY)
    assert harness.loads() == [4, 4, 4, 4]
    for engine in engines:
        assert len({text[:10] for text in engine.running.values()}) == 1
        assert len([text for text in engine.did("compute") if LONG_PREFIX in text]) == 1


async def test_without_grouping_cold_calls_of_one_prefix_scatter() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(4)]
    harness = ProgramsHarness(*engines, policy=Policy(same_prefix=False, cached_prefix=False))
    for engine in engines:
        engine.gate.clear()
    await request_calls_with_prefixes(harness, [0, 1, 2, 3] * 4, Criterion.LATENCY)
    assert any(len({text[:10] for text in engine.running.values()}) > 1 for engine in engines)


async def test_the_longest_match_wins_over_any() -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(2)]
    harness = ProgramsHarness(*engines)
    short, long = LONG_PREFIX, LONG_PREFIX + LONG_PREFIX.upper()
    session = harness.session()
    for node, text in zip(harness.nodes, (short, long), strict=True):
        other = next(each for each in harness.nodes if each is not node)
        del harness.registry.handles[other.id]
        await ask(session, call(session, text + "{{o}}", o=output("o"))["o"])
        harness.registry.handles[other.id] = other
    asked = call(session, "{{t}} and on {{o}}", t=long + "!", o=output("o"))["o"]
    await ask(session, asked)
    task = session.graph.producer(session.variable(asked))
    assert task.engine_id == "e1"
    assert task.placement_reason == f"holds {len(long) // 64 * 64} characters of its prompt"


async def test_tenants_take_turns() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    many, few = harness.session("many"), harness.session("few")
    engine.gate.clear()
    for i in range(6):
        many.request(call(many, f"m{i} {{{{o}}}}", o=output("o"))["o"], Criterion.THROUGHPUT)
    await run_event_loop()
    asked = [call(few, f"f{i} {{{{o}}}}", o=output("o"))["o"] for i in range(2)]
    for each in asked:
        few.request(each, Criterion.THROUGHPUT)
    engine.gate.set()
    await until(lambda: len(engine.did("generate")) == 8)
    assert [text[:2] for text in engine.did("generate")] == ["m0", "f0", "m1", "f1", "m2", "m3", "m4", "m5"]


async def test_a_task_that_a_full_engine_refuses_is_tried_again() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    engine.failure = ResourceExhausted("queue", reason="QUEUE_FULL", retry_after_s=0.01)
    asking = asyncio.create_task(ask(session, call(session, "say {{o}}", o=output("o"))["o"]))
    await until(lambda: len(engine.did("create")) > 2)
    engine.failure = None
    assert await asking == "<say >"


async def test_a_task_states_its_engine_and_the_reason() -> None:
    harness = ProgramsHarness(ScriptedEngine())
    session = harness.session()
    o = call(session, "say {{o}}", o=output("o"))["o"]
    task = session.graph.producer(session.variable(o))
    assert task.phase is TaskPhase.IDLE
    assert task.placement_reason == ""
    await ask(session, o)
    assert (task.phase, task.engine_id, task.placement_reason) == (TaskPhase.DONE, "e", "least impact")


# --- A dispatcher alone


class DispatcherHarness:
    """A dispatcher whose tasks end when the test says so, over engines that are only asked for their size."""

    def __init__(self, *engines: ScriptedEngine, make: type[Dispatcher] = Dispatcher, **settings: Any) -> None:
        self.dispatcher = make(self._run, **settings)
        self.handles = [self.dispatcher.engines.register(each.name, each, encode) for each in engines]
        self.started: list[tuple[Task, EngineHandle]] = []
        self.results = RecordedResults()
        self._ends: dict[Task, asyncio.Future[None]] = {}

    async def _run(self, task: Task, engine: EngineHandle) -> None:
        self.started.append((task, engine))
        self._ends[task] = asyncio.get_running_loop().create_future()
        await self._ends[task]

    async def submit(self, *prompts: str, **fields: Any) -> list[Task]:
        """Submit a task for each prompt, each of a call of its own."""
        tasks = [make_call([prompt], results=self.results, **fields).tasks[0] for prompt in prompts]
        for task in tasks:
            task.measure_prompt()
            self.dispatcher.submit(task)
        await run_event_loop()
        return tasks

    async def end(self, task: Task, error: Exception | None = None) -> None:
        """The engine is done with a task, or raises."""
        if error is None:
            self._ends[task].set_result(None)
        else:
            self._ends[task].set_exception(error)
        await run_event_loop()

    def is_cancelled(self, task: Task) -> bool:
        """Whether the engine's work on a task was cancelled."""
        return self._ends[task].cancelled()

    def started_tasks(self) -> list[Task]:
        return [task for task, _ in self.started]


async def test_a_task_that_is_done_is_reported_and_leaves_its_engine() -> None:
    harness = DispatcherHarness(ScriptedEngine())
    (task,) = await harness.submit("a")
    assert harness.handles[0].running == {task}
    assert (task.engine_id, task.placement_reason) == ("e", "least impact")
    await harness.end(task)
    assert harness.results.finished == [task]
    assert harness.handles[0].running == set()


async def test_a_task_waits_until_there_is_an_engine_with_room() -> None:
    harness = DispatcherHarness()
    (task,) = await harness.submit("a")
    assert harness.started == []
    engine = ScriptedEngine("late", max_batch=1)
    harness.dispatcher.engines.register("late", engine, encode)
    (second,) = await harness.submit("b")
    assert harness.started_tasks() == [task]
    await harness.end(task)
    assert harness.started_tasks() == [task, second]


async def test_a_task_that_has_ended_is_not_queued() -> None:
    harness = DispatcherHarness(ScriptedEngine())
    task = make_call(["a"], results=harness.results).tasks[0]
    task.phase = TaskPhase.FAILED
    harness.dispatcher.submit(task)
    await run_event_loop()
    assert harness.started == []


async def test_one_task_too_many_of_a_tenant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxctx.programs.dispatcher.MAX_WAITING", 2)
    harness = DispatcherHarness()
    tasks = await harness.submit("a", "b", "c")
    ((failed, error),) = harness.results.failed
    assert failed is tasks[2]
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 1.0)
    await harness.submit("d", tenant="another")
    assert len(harness.results.failed) == 1


@pytest.mark.parametrize("event", ["loss", "drain", "refusal"])
async def test_a_task_that_was_accepted_waits_again_however_many_others_do(
    monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """Only new tasks are refused: one that runs must not fail because its engine was lost, drains or is full."""
    monkeypatch.setattr("jaxctx.programs.dispatcher.MAX_WAITING", 2)
    harness = DispatcherHarness(ScriptedEngine("one", max_batch=1))
    (accepted,) = await harness.submit("a")
    waiting = await harness.submit("b", "c")
    harness.handles[0].draining = True  # it takes nothing else, so that those that wait go on waiting
    if event == "loss":
        harness.dispatcher.engines.lose(harness.handles[0])
    elif event == "drain":
        await harness.end(accepted, Unavailable("draining", reason="DRAINING"))
    else:
        await harness.end(accepted, ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.0))
        await asyncio.sleep(2 * MIN_RETRY_S)
    assert harness.results.failed == []
    await harness.submit("d")
    assert len(harness.results.failed) == 1  # the limit is still one for new tasks
    harness.dispatcher.engines.register("two", ScriptedEngine("two"), encode)
    await run_event_loop()
    assert set(harness.started_tasks()[1:]) == {accepted, *waiting}


@pytest.mark.parametrize("runs", [False, True])
async def test_a_withdrawn_task_neither_runs_nor_is_reported(runs: bool) -> None:
    harness = DispatcherHarness(*([ScriptedEngine()] if runs else []))
    (task,) = await harness.submit("a")
    harness.dispatcher.withdraw(task)
    await run_event_loop()
    if runs:
        assert harness.handles[0].running == set()
        assert harness.is_cancelled(task)
    else:
        harness.dispatcher.engines.register("e", ScriptedEngine(), encode)
        await run_event_loop()
        assert harness.started == []
    assert (harness.results.finished, harness.results.failed) == ([], [])


async def test_an_error_of_a_task_is_reported_and_a_defect_without_its_words() -> None:
    harness = DispatcherHarness(ScriptedEngine())
    refused, broken = await harness.submit("a", "b")
    error = InvalidArgument("no")
    await harness.end(refused, error)
    await harness.end(broken, ValueError("the secret prompt"))
    assert harness.results.failed[0] == (refused, error)
    task, defect = harness.results.failed[1]
    assert task is broken
    assert isinstance(defect, Internal)
    assert "secret" not in defect.message


async def test_a_task_of_a_draining_engine_goes_to_another() -> None:
    harness = DispatcherHarness(ScriptedEngine("one"), ScriptedEngine("two"))
    (task,) = await harness.submit("a")
    first = harness.started[0][1]
    await harness.end(task, Unavailable("draining", reason="DRAINING"))
    assert first.draining
    assert [engine.id for _, engine in harness.started] == ["one", "two"]
    assert (harness.results.finished, harness.results.failed) == ([], [])


async def test_tasks_of_a_lost_engine_go_to_another_and_count_the_loss() -> None:
    harness = DispatcherHarness(ScriptedEngine("one"), ScriptedEngine("two"))
    generating, preparing = await harness.submit("a", "b")
    assert [engine.id for _, engine in harness.started] == ["one", "one"]
    generating.generating = True
    harness.dispatcher.engines.lose(harness.handles[0])
    await run_event_loop()
    assert [engine.id for _, engine in harness.started[2:]] == ["two", "two"]
    assert (generating.failure_score, preparing.failure_score) == (4, 1)


async def test_a_task_that_several_engines_in_turn_are_lost_with_fails() -> None:
    harness = DispatcherHarness(*(ScriptedEngine(f"e{number}") for number in range(4)))
    (task,) = await harness.submit("a")
    for losses in range(1, 4):
        task.generating = True
        harness.dispatcher.engines.lose(harness.started[-1][1])
        await run_event_loop()
        assert bool(harness.results.failed) == (losses == 3)
    ((failed, error),) = harness.results.failed
    assert failed is task
    assert isinstance(error, Unavailable)
    assert error.reason == "ENGINE_FAILED"


async def test_refusals_in_turn_are_tried_again_later_each_time() -> None:
    harness = DispatcherHarness(ScriptedEngine())
    (task,) = await harness.submit("a")
    for refusals in (1, 2):
        await harness.end(task, ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.0))
        assert task.refusals == refusals
        assert len(harness.started) == refusals  # not at once
        await until(lambda count=refusals: len(harness.started) > count)  # type: ignore[misc]
    assert harness.results.failed == []


async def test_a_refusal_for_good_fails_the_task() -> None:
    harness = DispatcherHarness(ScriptedEngine())
    (task,) = await harness.submit("a")
    error = ResourceExhausted("never", reason="NEVER_FITS")
    await harness.end(task, error)
    assert harness.results.failed == [(task, error)]


@pytest.mark.parametrize(("reason", "fails"), [("DEADLINE_UNREACHABLE", True), ("QUEUE_FULL", False)])
async def test_a_task_that_could_not_be_done_in_time_fails_rather_than_wait_past_its_deadline(
    reason: str, fails: bool
) -> None:
    harness = DispatcherHarness(ScriptedEngine())
    (task,) = await harness.submit("a")
    task.deadline_timer = asyncio.get_running_loop().call_later(1.0, lambda: None)
    await harness.end(task, ResourceExhausted("late", reason=reason, retry_after_s=2.0))
    assert bool(harness.results.failed) == fails
    task.deadline_timer.cancel()


async def test_the_context_of_a_call_and_its_group_choose_the_engine() -> None:
    harness = DispatcherHarness(ScriptedEngine("one"), ScriptedEngine("two"))
    in_context, in_group = (make_call([text], results=harness.results).tasks[0] for text in "ab")
    in_context.call.context = CallContext(harness.handles[1], "c")
    in_group.group = TaskGroup()
    in_group.group.engine = harness.handles[1]
    for task in (in_context, in_group):
        harness.dispatcher.submit(task)
    await run_event_loop()
    assert [task.engine_id for task in (in_context, in_group)] == ["two", "two"]
    assert in_context.placement_reason == "its call's context is there"
    assert in_group.placement_reason == "its task group is there"


async def test_without_least_impact_the_first_engine_with_capacity_is_taken() -> None:
    harness = DispatcherHarness(
        ScriptedEngine("one", max_batch=1), ScriptedEngine("two"), policy=Policy(least_impact=False)
    )
    tasks = await harness.submit("a", "b")
    assert [task.engine_id for task in tasks] == ["one", "two"]
    assert tasks[0].placement_reason == "first with capacity"


async def test_absence_saves_up_no_turns() -> None:
    """A tenant that asked for nothing while another was served twice does not get three turns in a row."""
    harness = DispatcherHarness(ScriptedEngine(max_batch=1))
    early = await harness.submit("a", "b", "c", "d", tenant="early")
    for task in early[:2]:
        await harness.end(task)
    late = await harness.submit("e", "f", tenant="late")
    for _ in range(4):
        await harness.end(harness.started[-1][0])
    assert harness.started_tasks() == [*early[:3], late[0], early[3], late[1]]


async def test_another_model_is_not_held_up_by_the_first_in_line() -> None:
    harness = DispatcherHarness(ScriptedEngine())
    model = harness.handles[0].engine.info.model_id
    (waits,) = await harness.submit("a", model_id="of no engine")
    (runs,) = await harness.submit("b", model_id=model)
    assert harness.started_tasks() == [runs]
    assert waits.phase is TaskPhase.IDLE


# --- The order of placement, and what it costs


class PlainDispatcher(Dispatcher):
    """Sorts all tasks that wait at each dispatch, and looks through them for what goes together with the first."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ready: dict[str, dict[Task, None]] = defaultdict(dict)  # in the order of becoming ready
        self.turns: dict[str, int] = defaultdict(int)

    def _put_back(self, task: Task) -> None:
        if not task.ended:
            tenant = task.call.tenant
            self.ready[tenant][task] = None
            self.turns[tenant] = max(self.turns[tenant], self._current_turn)
            self.schedule_dispatch()

    def regroup(self, task: Task) -> None:
        pass

    def withdraw(self, task: Task) -> None:
        self.ready[task.call.tenant].pop(task, None)
        super().withdraw(task)

    def _take(self, task: Task) -> None:
        tenant = task.call.tenant
        del self.ready[tenant][task]
        self._current_turn = self.turns[tenant]
        self.turns[tenant] += 1

    def _dispatch(self) -> None:
        self._is_scheduled = False
        turns = []
        for tenant, ready in self.ready.items():
            tasks = sorted(ready, key=lambda task: task.request_number if self.policy.app_order else 0)
            turns += [(self.turns[tenant] + position, task) for position, task in enumerate(tasks)]
        waiting = [task for _, task in sorted(turns, key=lambda turn: turn[0])]
        while waiting:
            first = waiting[0]
            unit = [task for task in waiting if self._belong_together(first, task)]
            placed = unit[: self._place(unit)]
            if placed:
                waiting = [task for task in waiting if task not in placed]
            else:
                waiting = [task for task in waiting if task.call.model_id != first.call.model_id]

    def _belong_together(self, task: Task, other: Task) -> bool:
        if task is other:
            return True
        call, other_call = task.call, other.call
        if self.policy.task_groups and (task.group or other.group):
            return task.group is other.group and call.model_id == other_call.model_id
        if not self.policy.same_prefix or call.prefix == "":
            return False
        if task.prompt_appended or other.prompt_appended or call.tokens or other_call.tokens:
            return False
        return (call.tenant, call.model_id, call.prefix) == (other_call.tenant, other_call.model_id, other_call.prefix)


class Twins:
    """Two dispatchers of different kinds with the same engines, to which the same happens."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.policy = Policy(
            task_groups=draw.random() < 0.8, same_prefix=draw.random() < 0.8, app_order=draw.random() < 0.8
        )
        self.harnesses = [DispatcherHarness(make=kind, policy=self.policy) for kind in (Dispatcher, PlainDispatcher)]
        self.tasks: list[tuple[Task, Task]] = []  # that have not ended
        self.numbers: dict[Task, int] = {}  # the same of both twins
        self.groups: dict[tuple[str, int], tuple[TaskGroup, TaskGroup]] = {}
        self.engines = 0

    def register(self) -> None:
        """A new engine, of one of two models."""
        self.engines += 1
        model_id, max_batch = self.draw.choice("mn"), self.draw.randint(1, 5)
        for harness in self.harnesses:
            engine = ScriptedEngine(f"e{self.engines}", max_batch=max_batch, model_id=model_id)
            harness.dispatcher.engines.register(engine.name, engine, encode, latency_bound=2)

    def lose(self) -> None:
        """An engine is gone."""
        there = list(self.harnesses[0].dispatcher.engines.handles)
        if there:
            name = self.draw.choice(there)
            for harness in self.harnesses:
                harness.dispatcher.engines.lose(harness.dispatcher.engines.handles[name])

    def submit(self) -> None:
        """A task of any tenant, model, prefix, group and request."""
        draw = self.draw
        tenant, prefix = draw.choice("abc"), draw.choice(["", "", "p" * 80, "q" * 80])
        fields = {"tenant": tenant, "model_id": draw.choice("mn"), "prefix": prefix}
        one, other = (make_call([f"{prefix} and on"], results=each.results, **fields) for each in self.harnesses)
        pair = one.tasks[0], other.tasks[0]
        number, criterion, appended = draw.randrange(8), draw.choice(list(Criterion)), draw.random() < 0.1
        for task in pair:
            task.request_number, task.criterion, task.prompt_appended = number, criterion, appended
            task.measure_prompt()
            self.numbers[task] = len(self.numbers) // 2
        if draw.random() < 0.3:
            self._join_group(pair)
        for harness, task in zip(self.harnesses, pair, strict=True):
            harness.dispatcher.submit(task)
        self.tasks.append(pair)

    def regroup(self) -> None:
        """A task that was submitted joins a group."""
        alone = [pair for pair in self.tasks if pair[0].group is None]
        if alone:
            pair = self.draw.choice(alone)
            self._join_group(pair)
            for harness, task in zip(self.harnesses, pair, strict=True):
                harness.dispatcher.regroup(task)

    def _join_group(self, pair: tuple[Task, Task]) -> None:
        key = pair[0].call.tenant, self.draw.randrange(3)
        groups = self.groups.setdefault(key, (TaskGroup(), TaskGroup()))
        for task, group in zip(pair, groups, strict=True):
            task.group = group

    def withdraw(self) -> None:
        """A task is given up, whether it waits or runs."""
        if self.tasks:
            pair = self.tasks.pop(self.draw.randrange(len(self.tasks)))
            for harness, task in zip(self.harnesses, pair, strict=True):
                harness.dispatcher.withdraw(task)

    async def end(self) -> None:
        """A task that runs is done."""
        running = [pair for pair in self.tasks if pair[0] in self.harnesses[0].dispatcher._placements]
        if running:
            pair = self.draw.choice(running)
            self.tasks.remove(pair)
            for harness, task in zip(self.harnesses, pair, strict=True):
                await harness.end(task)

    def placements(self, harness: DispatcherHarness) -> list[tuple[int, str]]:
        """What was started by one of the two: which task, and on which engine."""
        return [(self.numbers[task], engine.id) for task, engine in harness.started]


@pytest.mark.parametrize("seed", range(20))
async def test_tasks_are_placed_in_the_order_in_which_sorting_them_all_would(seed: int) -> None:
    draw = random.Random(seed)
    twins = Twins(draw)
    for _ in range(3):
        twins.register()
    for _ in range(150):
        for _ in range(draw.randrange(6)):
            twins.submit()
        happens = draw.choice([twins.register, twins.lose, twins.regroup, twins.withdraw, None, None, None])
        if happens is None:
            await twins.end()
        else:
            happens()
        await run_event_loop()
        new, plain = (twins.placements(harness) for harness in twins.harnesses)
        assert new == plain
    assert len(new) > 30


class CountedNumber(int):
    """A request number that counts how often it is compared with another one."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        CountedNumber.compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        CountedNumber.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


class WatchedTask(Task):
    """A task that notes that it was looked at."""

    seen: ClassVar[set[int]] = set()  # ids of objects

    def __getattribute__(self, name: str) -> Any:
        WatchedTask.seen.add(id(self))
        return super().__getattribute__(name)


@pytest.mark.parametrize("prefix", ["", "one of all: "])
async def test_a_dispatch_costs_what_it_places_and_not_what_waits(prefix: str) -> None:
    """With eight times as many that wait it compares a little more, and looks at no more tasks."""
    costs = []
    for waiting in (100, 800):
        harness, numbers = DispatcherHarness(), itertools.count()
        for tenant in "abcdefghij":
            for _ in range(waiting):
                task = make_call(["a"], results=harness.results, tenant=tenant, prefix=prefix).tasks[0]
                task.request_number, task.__class__ = CountedNumber(next(numbers)), WatchedTask
                harness.dispatcher.submit(task)
        await run_event_loop()
        for number in range(4):
            harness.dispatcher.engines.register(str(number), ScriptedEngine(str(number), max_batch=8), encode)
        CountedNumber.compared = 0
        WatchedTask.seen.clear()
        harness.dispatcher._dispatch()
        costs.append((CountedNumber.compared, len(WatchedTask.seen)))
        await run_event_loop()
        assert len(harness.started) == 32
    (few_compared, few_seen), (many_compared, many_seen) = costs
    assert many_compared < 2 * few_compared
    assert many_seen == few_seen <= 32 + 10  # those that were placed, and the first one of each tenant


async def test_a_task_that_joins_a_group_while_it_waits_goes_with_it() -> None:
    harness = DispatcherHarness()
    tasks = await harness.submit("a", "b", "c")
    group = TaskGroup()
    for task in (tasks[0], tasks[2]):
        task.group = group
        harness.dispatcher.regroup(task)
    for name in ("one", "two"):
        harness.dispatcher.engines.register(name, ScriptedEngine(name, max_batch=2), encode)
    await run_event_loop()
    assert [(task, engine.id) for task, engine in harness.started] == [
        (tasks[0], "one"),
        (tasks[2], "one"),
        (tasks[1], "two"),
    ]
