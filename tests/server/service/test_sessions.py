"""SessionService on the programs of this process: sessions, variables and calls of a tenant."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import Criterion
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.sessions import SESSION_TTL_S, LocalSessionService

ALICE = Caller("alice", 1060.0)
BOB = Caller("bob", 1060.0)


@pytest.fixture
async def service(lifecycle: ServerLifecycle) -> LocalSessionService:
    """Of a server with an engine, in which alice has the session "s"."""
    service = LocalSessionService(lifecycle)
    async with asyncio.timeout(10):
        while not lifecycle.served().engine_handles():
            await asyncio.sleep(0)
    await service.create_session(ALICE, pb.CreateSessionRequest(session_id="s"))
    return service


async def variable(service: LocalSessionService, **fields: Any) -> str:
    """The id of a new variable."""
    response = await service.create_variable(ALICE, pb.CreateVariableRequest(session_id="s", **fields))
    return response.variable.variable_id


async def strip(service: LocalSessionService, variable_id: str) -> pb.SubmitCallResponse:
    """A native step of a variable's text."""
    parameters: Any = [{"name": "text", "variable_id": variable_id}, {"name": "bare", "output": {}}]
    request = pb.SubmitCallRequest(session_id="s", function="strip", parameters=parameters)
    return await service.submit_call(ALICE, request)


async def get(service: LocalSessionService, variable_id: str, **fields: Any) -> pb.Variable:
    request = pb.GetVariableRequest(session_id="s", variable_id=variable_id, **fields)
    return (await service.get_variable(ALICE, request)).variable


# --- sessions ---------------------------------------------------------------------------------------------------------


async def test_a_session_has_the_id_and_time_to_live_of_the_request(service: LocalSessionService) -> None:
    request = pb.CreateSessionRequest(session_id="t", ttl={"seconds": 2, "nanos": 500_000_000})
    session = (await service.create_session(ALICE, request)).session
    assert (session.session_id, session.ttl.ToTimedelta().total_seconds()) == ("t", 2.5)
    with pytest.raises(errors.AlreadyExists):
        await service.create_session(ALICE, request)
    await service.create_session(BOB, request)


async def test_a_session_without_them_gets_an_id_and_an_hour(service: LocalSessionService) -> None:
    sessions = [(await service.create_session(ALICE, pb.CreateSessionRequest())).session for _ in range(2)]
    assert sessions[0].session_id != sessions[1].session_id
    assert sessions[0].ttl.seconds == SESSION_TTL_S


async def test_sessions_of_the_tenant_come_in_pages(service: LocalSessionService) -> None:
    for session_id in ("r", "t"):
        await service.create_session(ALICE, pb.CreateSessionRequest(session_id=session_id))
    await service.create_session(BOB, pb.CreateSessionRequest(session_id="q"))
    first = await service.list_sessions(ALICE, pb.ListSessionsRequest(limit=2))
    assert ([each.session_id for each in first.sessions], first.next_page_token) == (["r", "s"], "s")
    rest = await service.list_sessions(ALICE, pb.ListSessionsRequest(limit=2, page_token="s"))
    assert ([each.session_id for each in rest.sessions], rest.next_page_token) == (["t"], "")


async def test_a_deleted_session_is_not_found(service: LocalSessionService) -> None:
    waiting = asyncio.create_task(get(service, await variable(service), wait=True))
    await asyncio.sleep(0)
    await service.delete_session(ALICE, pb.DeleteSessionRequest(session_id="s"))
    with pytest.raises(errors.Cancelled):
        await waiting
    with pytest.raises(errors.NotFound) as raised:
        await service.get_session(ALICE, pb.GetSessionRequest(session_id="s"))
    assert raised.value.reason == "SESSION_NOT_FOUND"


async def test_nothing_of_another_tenants_session_can_be_reached(service: LocalSessionService) -> None:
    secret = await variable(service, text="secret")
    for call in (
        service.get_session(BOB, pb.GetSessionRequest(session_id="s")),
        service.delete_session(BOB, pb.DeleteSessionRequest(session_id="s")),
        service.create_variable(BOB, pb.CreateVariableRequest(session_id="s")),
        service.set_variable(BOB, pb.SetVariableRequest(session_id="s", variable_id=secret, text="x")),
        service.get_variable(BOB, pb.GetVariableRequest(session_id="s", variable_id=secret)),
        anext(service.read_variable(BOB, pb.ReadVariableRequest(session_id="s", variable_id=secret))),
        service.list_variables(BOB, pb.ListVariablesRequest(session_id="s")),
        service.submit_call(BOB, pb.SubmitCallRequest(session_id="s", function="strip")),
        service.cancel_call(BOB, pb.CancelCallRequest(session_id="s", call_id="c")),
        service.get_graph(BOB, pb.GetGraphRequest(session_id="s")),
    ):
        with pytest.raises(errors.NotFound) as raised:
            await call
        assert raised.value.reason == "SESSION_NOT_FOUND"
    assert (await get(service, secret)).text == "secret"


# --- variables --------------------------------------------------------------------------------------------------------


async def test_a_variable_is_unset_until_it_has_a_text(service: LocalSessionService) -> None:
    unset = await variable(service, name="topic", description="what it is about")
    found = await get(service, unset)
    assert (found.name, found.description, found.state) == ("topic", "what it is about", pb.VARIABLE_STATE_UNSET)
    empty = await get(service, await variable(service, text=""))
    assert empty.state == pb.VARIABLE_STATE_SET, "an empty text is a text"
    request = pb.SetVariableRequest(session_id="s", variable_id=unset, text="pages")
    assert (await service.set_variable(ALICE, request)).variable.text == "pages"
    with pytest.raises(errors.AlreadyExists):
        await service.set_variable(ALICE, request)


async def test_only_a_call_that_says_so_waits(service: LocalSessionService) -> None:
    unset = await variable(service)
    assert (await get(service, unset)).state == pb.VARIABLE_STATE_UNSET
    waiting = asyncio.create_task(get(service, unset, wait=True))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    await service.set_variable(ALICE, pb.SetVariableRequest(session_id="s", variable_id=unset, text="late"))
    assert (await waiting).text == "late"


async def test_what_nobody_asks_for_is_not_computed(service: LocalSessionService) -> None:
    output = (await strip(service, await variable(service, text=" a "))).outputs[0].variable_id
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await get(service, output)).state == pb.VARIABLE_STATE_UNSET
    found = await get(service, output, criterion=pb.CRITERION_LATENCY, wait=True)
    assert (found.text, found.state) == ("a", pb.VARIABLE_STATE_SET)


async def test_reading_a_variable_asks_for_it(service: LocalSessionService) -> None:
    output = (await strip(service, await variable(service, text=" a "))).outputs[0].variable_id
    request = pb.ReadVariableRequest(session_id="s", variable_id=output)
    async with asyncio.timeout(10), aclosing(service.read_variable(ALICE, request)) as parts:
        assert "".join([part.text async for part in parts]) == "a"


@pytest.mark.parametrize(
    ("criterion", "asked"),
    [(pb.CRITERION_UNSPECIFIED, Criterion.LATENCY), (pb.CRITERION_THROUGHPUT, Criterion.THROUGHPUT)],
)
async def test_a_reader_wants_its_text_soon_unless_it_says_otherwise(
    service: LocalSessionService,
    lifecycle: ServerLifecycle,
    monkeypatch: pytest.MonkeyPatch,
    criterion: Any,
    asked: Any,
) -> None:
    session = lifecycle.served().programs.session("alice", "s")
    criteria = []
    request_variable = session.request

    def record(variable_id: str, criterion: Criterion) -> Any:
        criteria.append(criterion)
        return request_variable(variable_id, criterion)

    monkeypatch.setattr(session, "request", record)
    request = pb.ReadVariableRequest(session_id="s", variable_id=await variable(service, text="a"), criterion=criterion)
    assert [part.text async for part in service.read_variable(ALICE, request)] == ["a"]
    assert criteria == [asked]


async def test_a_list_of_variables_has_their_names_and_no_texts(service: LocalSessionService) -> None:
    ids = sorted([await variable(service, name=f"v{n}", text="a long text") for n in range(3)])
    first = await service.list_variables(ALICE, pb.ListVariablesRequest(session_id="s", limit=2))
    assert [each.variable_id for each in first.variables] == ids[:2]
    assert {each.text for each in first.variables} == {""}
    assert all(each.name for each in first.variables)
    request = pb.ListVariablesRequest(session_id="s", limit=2, page_token=first.next_page_token)
    rest = await service.list_variables(ALICE, request)
    assert ([each.variable_id for each in rest.variables], rest.next_page_token) == (ids[2:], "")


async def test_a_variable_that_is_not_there(service: LocalSessionService) -> None:
    with pytest.raises(errors.NotFound) as raised:
        await get(service, "none")
    assert raised.value.reason == "VARIABLE_NOT_FOUND"


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_a_call_is_shown_in_the_graph(service: LocalSessionService) -> None:
    source = await variable(service, text=" a ")
    call = await strip(service, source)
    (task,) = (await service.get_graph(ALICE, pb.GetGraphRequest(session_id="s"))).tasks
    assert (task.call_id, task.function, list(task.inputs)) == (call.call_id, "strip", [source])
    assert task.output == call.outputs[0].variable_id


async def test_a_call_that_is_cancelled_fails_its_outputs(service: LocalSessionService) -> None:
    call = await strip(service, await variable(service))
    waiting = asyncio.create_task(get(service, call.outputs[0].variable_id, criterion=pb.CRITERION_LATENCY, wait=True))
    for _ in range(5):
        await asyncio.sleep(0)
    await service.cancel_call(ALICE, pb.CancelCallRequest(session_id="s", call_id=call.call_id))
    with pytest.raises(errors.Cancelled):
        await waiting
    with pytest.raises(errors.NotFound) as raised:
        await service.cancel_call(ALICE, pb.CancelCallRequest(session_id="s", call_id="none"))
    assert raised.value.reason == "CALL_NOT_FOUND"


async def test_a_router_has_sessions_without_engines(router_lifecycle: ServerLifecycle) -> None:
    service = LocalSessionService(router_lifecycle)
    await service.create_session(ALICE, pb.CreateSessionRequest(session_id="s"))
    output = (await strip(service, await variable(service, text=" a "))).outputs[0].variable_id
    async with asyncio.timeout(10):
        assert (await get(service, output, criterion=pb.CRITERION_LATENCY, wait=True)).text == "a"


async def test_a_server_that_drains_takes_no_calls(service: LocalSessionService, lifecycle: ServerLifecycle) -> None:
    source = await variable(service, text=" a ")
    lifecycle.served().programs.draining = True
    with pytest.raises(errors.Unavailable) as raised:
        await strip(service, source)
    assert raised.value.reason == "DRAINING"
    assert (await get(service, source)).text == " a "
