"""Sessions, variables and calls, through both clients."""

from __future__ import annotations

from typing import Any

import pytest

import jaxctx
from jaxctx import Criterion, TaskPhase, VariableState, errors
from jaxctx.v1 import session_service_pb2


async def test_sessions(either: Any, client: Any, fake: Any) -> None:
    for name in ("a", "b", "c"):
        await either(client.create_session(name, ttl_s=90.0))
    assert fake.requests["CreateSession"][0].ttl.seconds == 90
    await either(client.create_session())
    assert not fake.requests["CreateSession"][-1].HasField("session_id")
    assert not fake.requests["CreateSession"][-1].HasField("ttl")
    listed = await either.list(client.sessions(page=2))
    assert {"a", "b", "c"} < {session.id for session in listed}
    assert [request.limit for request in fake.requests["ListSessions"]] == [2, 2]
    session = await either(client.session("a"))
    info = await either(session.info())
    assert (info.session_id, info.ttl_s, info.variables) == ("a", 90.0, 0)
    with pytest.raises(errors.NotFound) as raised:
        await either(client.session("none"))
    assert raised.value.reason == "SESSION_NOT_FOUND"


async def test_leaving_the_block_deletes_the_session(either: Any, client: Any, fake: Any) -> None:
    session = await either.enter(await either(client.create_session("a")))
    await either.exit(session)
    assert fake.sessions == {}
    await either(session.close())  # what is gone already is no error


async def test_variables(either: Any, client: Any, fake: Any) -> None:
    session = await either(client.create_session("s"))
    given = await either(session.create_variable("given", text="hello", description="a note"))
    later = await either(session.create_variable("later"))
    assert fake.requests["CreateVariable"][0].description == "a note"
    assert not fake.requests["CreateVariable"][1].HasField("text")
    assert await either(given.get()) == "hello"
    assert await either.list(given.read(Criterion.THROUGHPUT)) == list("hello")
    assert fake.requests["ReadVariable"][0].criterion == session_service_pb2.CRITERION_THROUGHPUT
    assert (await either(later.inspect())).state is VariableState.UNSET
    assert fake.requests["GetVariable"][-1].criterion == session_service_pb2.CRITERION_UNSPECIFIED
    assert (await either(later.set("text"))).text == "text"
    with pytest.raises(errors.AlreadyExists):
        await either(later.set("again"))
    listed = await either.list(session.variables(page=1))
    assert [(each.id, each.name) for each in listed] == [("vgiven", "given"), ("vlater", "later")]
    found = await either(session.variable("vgiven"))
    assert (found.id, found.name) == ("vgiven", "given")
    with pytest.raises(errors.NotFound):
        await either(session.variable("none"))
    assert {request.session_id for request in fake.requests["GetVariable"]} == {"s"}


async def test_calls(either: Any, client: Any, fake: Any) -> None:
    session = await either(client.create_session("s"))
    source = await either(session.create_variable("i", text="x"))
    call = await either(
        session.call(
            "{{text}} {{variable}} {{o}} {{p}}",
            text="hello",
            variable=source,
            o=jaxctx.Output(max_tokens=4, stop=".", temperature=0.0),
            p=jaxctx.Output(criterion=Criterion.LATENCY),
        )
    )
    assert (call.id, list(call.outputs)) == ("c1", ["o", "p"])
    request = fake.requests["SubmitCall"][0]
    assert (request.session_id, request.template, request.WhichOneof("work")) == (
        "s",
        "{{text}} {{variable}} {{o}} {{p}}",
        "template",
    )
    assert not request.HasField("timeout")
    text, variable, output, asked = request.parameters
    assert (text.name, text.text) == ("text", "hello")
    assert (variable.name, variable.variable_id) == ("variable", "vi")
    assert (output.output.max_tokens, output.output.stop, output.output.sampling.temperature) == (4, ["."], 0.0)
    assert output.output.sampling.HasField("temperature")
    assert asked.output.criterion == session_service_pb2.CRITERION_LATENCY
    assert await either(session.gather(call["o"], call["p"])) == ["VO", "VP"]
    assert [request.wait for request in fake.requests["GetVariable"]] == [False, False, True, True]
    await either(session.cancel(call.id))
    with pytest.raises(errors.NotFound):
        await either(session.cancel("none"))
    (task,) = await either(session.graph())
    assert (task.output, task.inputs, task.phase, task.criterion) == ("vo", ("vi",), TaskPhase.DONE, None)


async def test_native_steps_and_settings_of_a_template(either: Any, client: Any, fake: Any) -> None:
    session = await either(client.create_session("s"))
    step = jaxctx.Template(function="strip", limit_s=1.5)
    await either(session.call(step, text=" x ", o=jaxctx.Output()))
    request = fake.requests["SubmitCall"][0]
    assert (request.function, request.WhichOneof("work"), request.timeout.nanos) == ("strip", "function", 500_000_000)
    await either(session.call(jaxctx.Template(text="{{o}}", model_id="m"), o=jaxctx.Output()))
    assert fake.requests["SubmitCall"][1].model_id == "m"


@pytest.mark.parametrize(
    ("output", "field"),
    [
        (jaxctx.Output(max_tokens=2**40), "parameters[1].output.max_tokens"),
        (jaxctx.Output(temperature="hot"), "parameters[1].output.sampling.temperature"),  # type: ignore[arg-type]
    ],
)
async def test_calls_that_no_message_can_hold(either: Any, client: Any, output: Any, field: str) -> None:
    session = await either(client.create_session("s"))
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(session.call("{{a}}{{o}}", a="x", o=output))
    assert [violation.field for violation in raised.value.violations] == [field]
