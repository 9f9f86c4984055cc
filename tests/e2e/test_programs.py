"""Programs over gRPC: sessions, variables, calls and native steps, against the engine on the echo model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

import jaxctx
from jaxctx.programs.executor import PREFIX_TIMEOUT_S
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from tests.e2e.conftest import TENANTS
from tests.e2e.program_callers import SYSTEM, ProgramCaller, check_forks_of_a_running_call, context_ids, output_of
from tests.engines import Clock


@pytest.fixture
async def stub(address: str) -> AsyncIterator[SessionServiceStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield SessionServiceStub(channel)


@pytest.fixture
async def caller(stub: SessionServiceStub) -> ProgramCaller:
    return await ProgramCaller(stub).begin()


async def test_a_program(caller: ProgramCaller, client: jaxctx.aio.Client) -> None:
    """Two calls, one of the other's output; what they say is what the same prompts say without programs."""
    topic = (await caller("CreateVariable", name="topic", description="what it is about")).variable.variable_id
    drafts = await caller.call(SYSTEM + "Draft {{topic}}: {{draft}}", topic={"variable_id": topic}, draft=output_of())
    review = await caller.call(
        "Review of {{text}}: {{review}}", text={"variable_id": drafts["draft"]}, review=output_of(5)
    )
    asking = asyncio.create_task(caller.get(review["review"]))
    await asyncio.sleep(0.05)
    assert (await client.stats()).tokens_generated == 0
    await caller("SetVariable", variable_id=topic, text="pages")
    text = await asking

    async def alone(prompt: str, tokens: int) -> str:
        async with await client.create(prompt, salt="alone") as context:
            return str(await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True))

    draft = await alone(SYSTEM + "Draft pages: ", 8)
    assert await caller.get(drafts["draft"]) == draft
    assert text == await alone(f"Review of {draft}: ", 5)
    assert "".join([part.text async for part in caller.read(review["review"])]) == text
    tasks = (await caller("GetGraph")).tasks
    assert [each.phase for each in tasks] == [pb.TASK_PHASE_DONE] * 2
    assert tasks[1].inputs == [tasks[0].output]
    assert tasks[0].engine_id == "local"
    assert tasks[0].why
    session = (await caller("GetSession")).session
    assert (session.variables, session.calls, session.started) == (3, 2, 0)
    await caller("DeleteSession")
    assert [each async for each in client.contexts()] == []
    left = [each async for each in client.contexts(include_program_contexts=True)]
    assert [each.info.labels for each in left] == [{"jaxctx": "program"}]  # the constant prefix
    await left[0].close()
    assert (await client.stats()).pages_held == 0


async def test_contexts_of_programs_are_shown_to_who_asks_for_them(
    caller: ProgramCaller, client: jaxctx.aio.Client
) -> None:
    seen: dict[bool, set[str]] = {True: set(), False: set()}

    async def watch(programs: bool) -> None:
        async for event in client.watch(include_program_contexts=programs):
            seen[programs].add(event.context_id)

    watching = [asyncio.create_task(watch(programs)) for programs in seen]
    mine = await client.create("Mine. ", labels={"jaxctx": "other", "a": "program"})
    ids = await caller.call(SYSTEM + "Tell: {{o}}", o=output_of(200))
    reading = caller.read(ids["o"])
    await reading.read()
    assert await context_ids(client, programs=False) == {mine.id}
    (made,) = await context_ids(client, programs=True) - {mine.id}
    found = await client.context(made)
    assert found.info.labels == {"jaxctx": "program"}
    await caller.get(ids["o"])
    async with asyncio.timeout(20):
        while not seen[True] >= {made, mine.id} or mine.id not in seen[False]:
            await asyncio.sleep(0.01)
    later = await client.create()
    async with asyncio.timeout(20):
        while later.id not in seen[False]:  # so that all before it has been told
            await asyncio.sleep(0.01)
    assert seen[False] == {mine.id, later.id}
    for each in watching:
        each.cancel()


async def test_pages_of_a_list_are_full_without_those_of_programs(
    caller: ProgramCaller, client: jaxctx.aio.Client
) -> None:
    for n in range(3):
        await caller.get((await caller.call(f"{n} " + SYSTEM + "{{o}}", o=output_of(2)))["o"])
    mine = {(await client.create()).id for _ in range(5)}
    assert {each.id async for each in client.contexts(page=2)} == mine
    assert len([each async for each in client.contexts(page=2, include_program_contexts=True)]) == 8


@pytest.mark.parametrize("end", ["deleted", "expired"])
async def test_what_a_session_leaves_ends_too(
    stub: SessionServiceStub, client: jaxctx.aio.Client, clock: Clock, end: str
) -> None:
    """One call is generated, one waits for an input between its outputs, one is done: with the session nothing of them
    is left but the constant prefix, and that ends after its time.
    """
    before = (await client.stats()).pages_held
    caller = ProgramCaller(stub)
    caller.session_id = (await caller("CreateSession", ttl=Duration(seconds=30))).session.session_id
    late = (await caller("CreateVariable", name="late")).variable.variable_id
    halves = await caller.call(
        SYSTEM + "{{a}} of {{late}} {{b}}", a=output_of(), late={"variable_id": late}, b=output_of()
    )
    waiting = asyncio.create_task(caller.get(halves["b"]))
    await caller.get(halves["a"])
    await caller.get((await caller.call(SYSTEM + "{{o}}", o=output_of()))["o"])
    if end == "deleted":
        reading = caller.read((await caller.call(SYSTEM + "{{o}}", o=output_of(1000)))["o"])
        await reading.read()
        await caller("DeleteSession")
    else:
        clock.offset += 31
    with pytest.raises(jaxctx.errors.Cancelled):
        await waiting
    assert await context_ids(client, programs=False) == set()
    async with asyncio.timeout(20):
        while len(await context_ids(client, programs=True)) > 1:  # what expired is given back in the background
            await asyncio.sleep(0.01)
    (prefix,) = await context_ids(client, programs=True)
    assert (await client.context(prefix)).info.seq_len <= len(await client.tokenize(SYSTEM))
    clock.offset += PREFIX_TIMEOUT_S + 1
    assert await context_ids(client, programs=True) == set()
    async with asyncio.timeout(20):
        while (await client.stats()).pages_held != before:
            await asyncio.sleep(0.01)


async def test_a_task_names_its_context_which_can_be_forked(caller: ProgramCaller, client: jaxctx.aio.Client) -> None:
    """While its output comes, and after it for as long as the call goes on. The forks are the caller's own."""
    await check_forks_of_a_running_call(caller, client, "local")


async def test_a_step_between_calls(caller: ProgramCaller, client: jaxctx.aio.Client) -> None:
    drafts = await caller.call("Draft: {{draft}}", draft=output_of())
    parameters = [{"name": "text", "variable_id": drafts["draft"]}, {"name": "separator", "text": " "}]
    step = await caller("SubmitCall", function="split", parameters=[*parameters, {"name": "word", "output": {}}])
    (word,) = step.outputs
    assert (word.name, word.state) == ("word", pb.VARIABLE_STATE_UNSET)
    review = await caller.call(
        "Review of {{text}}: {{review}}", text={"variable_id": word.variable_id}, review=output_of(5)
    )
    text = await caller.get(review["review"])
    draft = await caller.get(drafts["draft"])
    assert await caller.get(word.variable_id) == draft.split(" ")[0]
    async with await client.create(f"Review of {draft.split(' ')[0]}: ", salt="alone") as context:
        assert text == str(await context.complete(max_tokens=5, temperature=0, ignore_eos=True))
    tasks = (await caller("GetGraph")).tasks
    assert [each.function for each in tasks] == ["", "split", ""]
    assert (tasks[1].call_id, tasks[1].engine_id, tasks[1].phase) == (step.call_id, "", pb.TASK_PHASE_DONE)
    assert (await caller("GetSession")).session.calls == 3


async def test_a_step_fails_and_is_cancelled_as_a_call_is(caller: ProgramCaller) -> None:
    asked = {"name": "o", "output": {"criterion": pb.CRITERION_LATENCY}}
    step = await caller("SubmitCall", function="json_pointer", parameters=[{"name": "text", "text": "{"}, asked])
    with pytest.raises(jaxctx.errors.FailedPrecondition):
        await caller.get(step.outputs[0].variable_id)
    unset = (await caller("CreateVariable")).variable.variable_id
    parameters = [{"name": "text", "variable_id": unset}, {"name": "o", "output": {}}]
    step = await caller("SubmitCall", function="strip", parameters=parameters)
    await caller("CancelCall", call_id=step.call_id)
    with pytest.raises(jaxctx.errors.Cancelled):
        await caller.get(step.outputs[0].variable_id)


async def test_a_reader_sees_parts_as_they_come(caller: ProgramCaller) -> None:
    ids = await caller.call("Tell: {{story}}", story=output_of(64))
    parts = [part.text async for part in caller.read(ids["story"])]
    assert len(parts) > 1
    assert "".join(parts) == await caller.get(ids["story"])


async def test_a_reader_that_leaves_stops_nothing(caller: ProgramCaller) -> None:
    ids = await caller.call("Tell: {{story}}", story=output_of(200))
    call = caller.read(ids["story"])
    await call.read()
    call.cancel()
    assert await caller.get(ids["story"])


async def test_a_reader_gets_the_error_of_what_failed(caller: ProgramCaller) -> None:
    long = (await caller("CreateVariable", text="x" * 5000)).variable.variable_id
    ids = await caller.call("Of {{x}}: {{o}}", x={"variable_id": long}, o=output_of())
    with pytest.raises(jaxctx.errors.InvalidArgument):
        await caller.get(ids["o"])
    with pytest.raises(grpc.RpcError) as error:
        await caller.read(ids["o"]).read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    failed = (await caller("GetVariable", variable_id=ids["o"])).variable
    assert (failed.state, failed.error_reason) == (pb.VARIABLE_STATE_FAILED, "INVALID_FIELD")


async def test_waiting_ends_with_the_deadline_and_the_variable_does_not(
    stub: SessionServiceStub, caller: ProgramCaller
) -> None:
    unset = (await caller("CreateVariable")).variable.variable_id
    request = pb.GetVariableRequest(session_id=caller.session_id, variable_id=unset, wait=True)
    with pytest.raises(grpc.RpcError) as error:
        await stub.GetVariable(request, timeout=0.1)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await caller("SetVariable", variable_id=unset, text="late")
    assert await caller.get(unset) == "late"


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        ("GetSession", {"session_id": "none"}, "SESSION_NOT_FOUND"),
        ("GetVariable", {"variable_id": "none"}, "VARIABLE_NOT_FOUND"),
        ("CancelCall", {"call_id": "none"}, "CALL_NOT_FOUND"),
        (
            "SubmitCall",
            {"template": "a", "parameters": [{"name": "x", "text": ""}], "model_id": "none"},
            "MODEL_NOT_FOUND",
        ),
    ],
)
async def test_what_is_not_there(caller: ProgramCaller, method: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(jaxctx.errors.NotFound) as error:
        await caller(method, **fields)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        (
            "SubmitCall",
            {"template": "a {{o}}", "parameters": [{"name": "o", **output_of()}, {"name": "p", "text": ""}]},
            "parameters[1].name",
        ),
        ("SubmitCall", {"template": "a {{o}}", "parameters": [{"name": "o"}]}, "parameters[0].value"),
        (
            "SubmitCall",
            {"template": "a {{o}}", "parameters": [{"name": "o", **output_of(criterion=9)}]},
            "parameters[0].output.criterion",
        ),
        (
            "SubmitCall",
            {"template": "a {{o}}", "parameters": [{"name": "o", **output_of(0)}]},
            "parameters[0].output.max_tokens",
        ),
        ("GetVariable", {"variable_id": "x", "criterion": 9}, "criterion"),
        ("SubmitCall", {"parameters": [{"name": "o", **output_of()}]}, "work"),
        ("SubmitCall", {"template": "", "parameters": [{"name": "o", **output_of()}]}, "template"),
        ("SubmitCall", {"function": "", "parameters": [{"name": "o", **output_of()}]}, "function"),
        ("SubmitCall", {"function": "x" * 65, "parameters": [{"name": "o", **output_of()}]}, "function"),
        ("SubmitCall", {"function": "rm", "parameters": [{"name": "o", "output": {}}]}, "function"),
        ("SubmitCall", {"function": "join", "parameters": []}, "parameters"),
        (
            "SubmitCall",
            {"function": "join", "parameters": [{"name": "o", "output": {}}], "model_id": "echo"},
            "model_id",
        ),
        ("SubmitCall", {"function": "join", "parameters": [{"name": "o", "text": ""}]}, "parameters"),
        ("SubmitCall", {"function": "strip", "parameters": [{"name": "o", "output": {}}]}, "parameters"),
        ("SubmitCall", {"function": "join", "parameters": [{"name": "o", **output_of()}]}, "parameters[0].output"),
    ],
)
async def test_bad_fields_are_named(caller: ProgramCaller, method: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(jaxctx.errors.InvalidArgument) as error:
        await caller(method, **fields)
    assert field in [each.field for each in error.value.violations]


async def test_lists_come_in_pages(caller: ProgramCaller, stub: SessionServiceStub) -> None:
    others = [await ProgramCaller(stub).begin() for _ in range(4)]
    ids = sorted(each.session_id for each in (caller, *others))
    first = await caller("ListSessions", limit=3)
    rest = await caller("ListSessions", limit=3, page_token=first.next_page_token)
    assert [each.session_id for each in (*first.sessions, *rest.sessions)] == ids
    assert rest.next_page_token == ""
    made = [(await caller("CreateVariable", name=str(i), text="t")).variable.variable_id for i in range(5)]
    first = await caller("ListVariables", limit=2)
    rest = await caller("ListVariables", page_token=first.next_page_token)
    assert [each.variable_id for each in (*first.variables, *rest.variables)] == sorted(made)


async def test_a_session_with_an_id_and_a_time_to_live(caller: ProgramCaller, clock: Any) -> None:
    ttl = Duration(seconds=5)
    await caller("CreateSession", session_id="mine", ttl=ttl)
    with pytest.raises(jaxctx.errors.AlreadyExists):
        await caller("CreateSession", session_id="mine")
    clock.offset += 6
    async with asyncio.timeout(5):
        while "mine" in [each.session_id for each in (await caller("ListSessions")).sessions]:
            await asyncio.sleep(0.1)


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: Any) -> Any:
        return two_tenants

    async def test_nothing_of_another_tenants(self, stub: SessionServiceStub) -> None:
        alice, bob = [await ProgramCaller(stub, key).begin() for key in TENANTS]
        secret = (await alice("CreateVariable", text="secret")).variable.variable_id
        with pytest.raises(jaxctx.errors.NotFound) as there:
            await bob("GetVariable", session_id=alice.session_id, variable_id=secret)
        with pytest.raises(jaxctx.errors.NotFound) as nowhere:
            await bob("GetVariable", session_id="0" * 32, variable_id=secret)
        assert (there.value.reason, there.value.message) == (nowhere.value.reason, nowhere.value.message)
        with pytest.raises(jaxctx.errors.NotFound):
            await bob("GetVariable", variable_id=secret)
        assert len((await bob("ListSessions")).sessions) == 1
