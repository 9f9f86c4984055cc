"""The graph: who runs when, with which criterion and in which group, and what fails together."""

import asyncio
import itertools
from typing import Any

import pytest

from jaxctx.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
)
from jaxctx.programs.graph import Graph
from jaxctx.programs.tasks import Task
from jaxctx.programs.variables import Variable
from jaxctx.types import Criterion, TaskPhase, VariableState
from tests.jaxctx.programs.builders import make_call
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output, run_event_loop, step
from tests.jaxctx.programs.scripted import ScriptedEngine


async def test_only_what_somebody_asks_for_runs_once_its_inputs_are_set() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    x = session.create_variable("x")
    a = call(session, "A of {{x}}: {{a}}", x=(x.id,), a=output("a"))["a"]
    b = call(session, "B of {{a}}: {{b}}", a=(a,), b=output("b"))["b"]
    call(session, "nobody asks {{c}}", c=output("c"))
    await run_event_loop()
    assert engine.log == []
    waiting = asyncio.create_task(ask(session, b))
    await run_event_loop()
    assert engine.log == []
    session.set_variable(x.id, "it")
    text = await waiting
    prompts = engine.did("generate")
    assert prompts == ["A of it: ", f"B of {session.variable(a).text}: "]
    assert text == session.variable(b).text == f"<{prompts[1][-12:]}>"
    await run_event_loop()
    assert engine.contexts == {}


async def test_an_output_may_be_asked_for_at_submission() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    a = call(session, "Say {{a}}", a=output("a", criterion=Criterion.LATENCY))["a"]
    assert await session.variable(a).wait() == "<Say >"
    assert engine.did("generate") == ["Say "]


@pytest.mark.parametrize("each_is_stripped", [False, True])
async def test_a_group_is_found_through_native_steps(each_is_stripped: bool) -> None:
    engines = [ScriptedEngine(f"e{i}") for i in range(2)]
    harness = ProgramsHarness(*engines)
    session = harness.session()
    for engine in engines:
        engine.gate.clear()
    maps = [call(session, f"{i} map {{{{o}}}}", o=output("o"))["o"] for i in range(6)]
    if each_is_stripped:
        maps = [step(session, "strip", text=(each,)) for each in maps]
        places = "".join(f"{{{{m{i}}}}}" for i in range(6))
        inputs = {f"m{i}": (each,) for i, each in enumerate(maps)}
        reduced = call(session, places + " {{o}}", **inputs, o=output("o"))["o"]
    else:
        joined = step(session, "join", **{str(i): (each,) for i, each in enumerate(maps)})
        reduced = call(session, "{{j}} {{o}}", j=(joined,), o=output("o"))["o"]
    asking = asyncio.create_task(ask(session, reduced))
    await run_event_loop()
    assert sorted(harness.loads()) == [0, 6]
    for engine in engines:
        engine.gate.set()
    await asking


async def test_a_failed_input_fails_what_needs_it() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    a = call(session, "A {{o}}", o=output("o"))["o"]
    b = call(session, "{{a}} B {{o}}", a=(a,), o=output("o"))["o"]
    engine.failure = ResourceExhausted("never", reason="NEVER_FITS")
    with pytest.raises(ResourceExhausted):
        await ask(session, b)
    engine.failure = None
    with pytest.raises(ResourceExhausted):
        await ask(session, call(session, "{{b}} C {{o}}", b=(b,), o=output("o"))["o"])


async def test_a_very_long_chain_fails_as_a_whole() -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    first = last = session.create_variable("x").id
    for _ in range(3000):
        last = call(session, "{{x}}: {{o}}", x=(last,), o=output("o"))["o"]
    session.request(last, Criterion.LATENCY)
    session.cancel(next(iter(session.calls)))
    with pytest.raises(Cancelled):
        await session.variable(last).wait()
    assert session.variable(first).state is VariableState.UNSET


async def test_a_stronger_request_upgrades_what_has_not_started() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine(max_batch=1))
    session = harness.session()
    engine.gate.clear()
    first = call(session, "one {{o}}", o=output("o"))["o"]
    second = call(session, "two {{o}}", o=output("o"))["o"]
    session.request(first, Criterion.THROUGHPUT)
    session.request(second, Criterion.THROUGHPUT)
    await run_event_loop()
    session.request(second, Criterion.LATENCY)
    session.request(second, Criterion.THROUGHPUT)
    assert session.graph.producer(session.variable(second)).criterion is Criterion.LATENCY
    assert session.graph.producer(session.variable(first)).criterion is Criterion.THROUGHPUT
    engine.gate.set()
    await session.variable(second).wait()


# --- A graph alone


class GraphHarness:
    """A graph that keeps what it starts and stops. Tasks end when the test says so."""

    def __init__(self) -> None:
        self.started: list[Task] = []
        self.stopped: list[Task] = []
        self.now = 100.0
        self.joined: list[Task] = []
        self.graph = Graph(
            self.started.append, self.stopped.append, self.joined.append, lambda: self.now, itertools.count(1)
        )

    def add(self, *prompts: Any, **fields: Any) -> list[Task]:
        """The tasks of a new call."""
        call = make_call(*prompts, results=self.graph, **fields)
        self.graph.add(call)
        return call.tasks


@pytest.fixture
async def harness() -> GraphHarness:
    return GraphHarness()


async def test_a_variable_of_a_client_has_no_producer(harness: GraphHarness) -> None:
    (task,) = harness.add(["say"])
    assert harness.graph.producer(task.output) is task
    assert harness.graph.producer(Variable("x")) is None


async def test_adding_starts_nothing(harness: GraphHarness) -> None:
    (task,) = harness.add(["say"])
    assert harness.started == []
    assert task.phase is TaskPhase.IDLE


async def test_a_task_starts_once_it_is_asked_for_and_its_inputs_are_set(harness: GraphHarness) -> None:
    x, y = Variable("x"), Variable("y")
    (task,) = harness.add([x, y])
    harness.graph.request(task.output, Criterion.LATENCY)
    assert task.phase is TaskPhase.WAITING
    for variable in (x, y):
        assert harness.started == []
        variable.set("text")
        harness.graph.variable_set(variable)
    assert harness.started == [task]
    harness.graph.request(task.output, Criterion.LATENCY)
    harness.graph.variable_set(x)
    assert harness.started == [task]


async def test_asking_activates_producers_first_with_the_number_of_the_request(harness: GraphHarness) -> None:
    (first,) = harness.add(["a"])
    (second,) = harness.add([first.output])
    (other,) = harness.add(["b"])
    harness.graph.request(second.output, Criterion.LATENCY)
    harness.graph.request(other.output, Criterion.LATENCY)
    assert harness.started == [first, other]
    assert (first.request_number, second.request_number, other.request_number) == (1, 1, 2)


async def test_a_later_task_of_a_call_needs_the_one_before(harness: GraphHarness) -> None:
    first, second = harness.add(["a"], ["b"])
    harness.graph.request(second.output, Criterion.LATENCY)
    assert harness.started == [first]
    harness.graph.finish(first)
    assert harness.started == [first, second]
    assert harness.stopped == [first]


async def test_finishing_sets_the_output_and_starts_its_consumers(harness: GraphHarness) -> None:
    (first,) = harness.add(["a"])
    (second,) = harness.add([first.output])
    harness.graph.request(second.output, Criterion.LATENCY)
    first.output.append("text")
    harness.graph.finish(first)
    assert (first.phase, first.output.state, first.output.text) == (TaskPhase.DONE, VariableState.SET, "text")
    assert harness.started == [first, second]


async def test_what_joins_a_group_is_told_also_of_tasks_that_were_started(harness: GraphHarness) -> None:
    (first,), (second,), (alone,) = (harness.add([text]) for text in "abc")
    (consumer,) = harness.add([first.output, second.output])
    harness.graph.request(first.output, Criterion.LATENCY)
    harness.graph.request(alone.output, Criterion.LATENCY)
    assert harness.started == [first, alone]
    assert harness.joined == []
    harness.graph.request(consumer.output, Criterion.LATENCY)
    assert harness.joined == [first, second]
    assert first.group is second.group is not None


async def test_a_lone_producer_gets_the_criterion_of_its_consumer(harness: GraphHarness) -> None:
    (first,) = harness.add(["a"])
    (second,) = harness.add([first.output])
    harness.graph.request(second.output, Criterion.TIME_TO_FIRST_TOKEN)
    assert first.criterion is second.criterion is Criterion.TIME_TO_FIRST_TOKEN
    assert first.group is None


async def test_several_producers_of_one_consumer_are_a_group_for_throughput(harness: GraphHarness) -> None:
    producers = [harness.add([text])[0] for text in "abc"]
    (consumer,) = harness.add([task.output for task in producers])
    harness.graph.request(consumer.output, Criterion.LATENCY)
    assert consumer.criterion is Criterion.LATENCY
    assert {task.criterion for task in producers} == {Criterion.THROUGHPUT}
    assert harness.started == producers  # in the order of the inputs
    assert producers[0].group is not None
    assert producers[0].group is producers[1].group is producers[2].group
    assert consumer.group is None


async def test_a_producer_of_several_consumers_is_visited_once(harness: GraphHarness) -> None:
    """Else the time would double with each of these layers, whose two tasks both need both tasks of the one before."""
    layer = [harness.add([text])[0] for text in "ab"]
    for _ in range(40):
        layer = [harness.add([task.output for task in layer])[0] for _ in range(2)]
    harness.graph.request(layer[0].output, Criterion.LATENCY)
    assert len(harness.started) == 2


async def test_producers_that_have_ended_are_in_no_group(harness: GraphHarness) -> None:
    done, running = (harness.add([text])[0] for text in "ab")
    harness.graph.request(done.output, Criterion.LATENCY)
    harness.graph.finish(done)
    (consumer,) = harness.add([done.output, running.output])
    harness.graph.request(consumer.output, Criterion.LATENCY)
    assert (done.group, running.group) == (None, None)
    assert running.criterion is Criterion.LATENCY


async def test_what_feeds_a_native_step_joins_the_group_of_the_step(harness: GraphHarness) -> None:
    feeding, beside = (harness.add([text])[0] for text in "ab")
    (strip,) = harness.add([feeding.output], function="strip")
    (consumer,) = harness.add([strip.output, beside.output])
    harness.graph.request(consumer.output, Criterion.LATENCY)
    assert feeding.group is strip.group is beside.group
    assert feeding.group is not None
    assert feeding.criterion is Criterion.THROUGHPUT


async def test_a_stronger_request_reaches_the_producers_and_a_weaker_one_changes_nothing(harness: GraphHarness) -> None:
    (first,) = harness.add(["a"])
    (second,) = harness.add([first.output])
    for asked, expected in (
        (Criterion.TIME_PER_OUTPUT_TOKEN, Criterion.TIME_PER_OUTPUT_TOKEN),
        (Criterion.LATENCY, Criterion.LATENCY),
        (Criterion.THROUGHPUT, Criterion.LATENCY),
    ):
        harness.graph.request(second.output, asked)
        assert first.criterion is second.criterion is expected
    assert harness.started == [first]


async def test_a_failure_reaches_consumers_and_later_tasks_but_nothing_that_has_ended(harness: GraphHarness) -> None:
    before, failing, after = harness.add(["a"], ["b"], ["c"])
    (consumer,) = harness.add([failing.output])
    (bystander,) = harness.add([before.output])
    harness.graph.request(after.output, Criterion.LATENCY)
    harness.graph.finish(before)
    error = Internal("broken")
    harness.graph.fail(failing, error)
    assert [task.phase for task in (before, failing, after, consumer, bystander)] == [
        TaskPhase.DONE,
        TaskPhase.FAILED,
        TaskPhase.FAILED,
        TaskPhase.FAILED,
        TaskPhase.IDLE,
    ]
    assert {task.output.error for task in (failing, after, consumer)} == {error}
    assert sorted(harness.stopped, key=id) == sorted([before, failing, after, consumer], key=id)
    harness.graph.fail(failing, Internal("again"))
    assert failing.output.error is error
    assert harness.stopped.count(failing) == 1


async def test_a_task_with_a_failed_input_fails_when_it_is_added(harness: GraphHarness) -> None:
    x, error = Variable("x"), Internal("broken")
    x.fail(error)
    (task,) = harness.add([x])
    assert (task.phase, task.output.error) == (TaskPhase.FAILED, error)
    harness.graph.request(task.output, Criterion.LATENCY)
    assert harness.started == []


async def test_a_task_fails_at_its_deadline_which_begins_when_it_is_asked_for(harness: GraphHarness) -> None:
    x = Variable("x")
    (task,) = harness.add([x], timeout_s=0.01)
    harness.now = 500.0
    harness.graph.request(task.output, Criterion.LATENCY)
    assert task.deadline == 500.01
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(task.output.wait(), 5)
    assert harness.stopped == [task]


async def test_a_task_that_ended_has_no_deadline(harness: GraphHarness) -> None:
    (task,) = harness.add(["a"])
    harness.graph.request(task.output, Criterion.LATENCY)
    harness.graph.finish(task)
    assert task.deadline_timer is not None
    assert task.deadline_timer.cancelled()
