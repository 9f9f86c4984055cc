"""SessionService over gRPC: each method's message and caller arrive, and its response comes back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.rpc import SERVICES
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.auth import Key, Role
from jaxctx_server.grpc.caller import CURRENT_KEY, CallerFactory
from jaxctx_server.grpc.session_service import SessionServicer
from tests.server.harness import KEYS, bearer, failure

METHODS = SERVICES["SessionService"].methods
UNARY = [method for method in METHODS if not method.server_streaming]


class CallContext:
    def time_remaining(self) -> float:
        return 60.0


class RecordingService:
    """Records each call, and returns an empty response of its method."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Caller, Any]] = []
        self.closed = 0  # streams that have ended, or were closed

    def __getattr__(self, name: str) -> Any:
        method = next(method for method in METHODS if snake_case(method.name) == name)

        async def call(caller: Caller, request: Any) -> Any:
            self.calls.append((name, caller, request))
            return GetMessageClass(method.output_type)()

        return call

    async def read_variable(self, caller: Caller, request: Any) -> AsyncGenerator[Any, None]:
        self.calls.append(("read_variable", caller, request))
        try:
            for text in ("a", "b"):
                yield pb.ReadVariableResponse(text=text)
        finally:
            self.closed += 1


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@pytest.fixture
def service() -> RecordingService:
    return RecordingService()


@pytest.fixture
def servicer(service: RecordingService) -> SessionServicer:
    CURRENT_KEY.set(Key("alice", b"", "red", Role.USER))
    recording: Any = service
    return SessionServicer(recording, CallerFactory(lambda: 1000.0))


@pytest.mark.parametrize("method", UNARY, ids=lambda method: method.name)
async def test_a_method_calls_its_namesake_for_the_caller(
    servicer: SessionServicer, service: RecordingService, method: MethodDescriptor
) -> None:
    request = GetMessageClass(method.input_type)()
    response = await getattr(servicer, method.name)(request, CallContext())
    assert type(response).DESCRIPTOR is method.output_type
    assert service.calls == [(snake_case(method.name), Caller("red", 1060.0), request)]
    assert service.calls[0][2] is request


async def test_a_text_comes_as_a_stream(servicer: SessionServicer, service: RecordingService) -> None:
    request, context = pb.ReadVariableRequest(variable_id="v"), CallContext()
    responses: Any = servicer.ReadVariable(request, context)  # type: ignore[arg-type]
    assert [response.text async for response in responses] == ["a", "b"]
    assert service.calls == [("read_variable", Caller("red", 1060.0), request)]
    assert service.closed == 1


async def test_a_stream_that_is_left_is_closed_at_once(servicer: SessionServicer, service: RecordingService) -> None:
    responses: Any = servicer.ReadVariable(pb.ReadVariableRequest(), CallContext())  # type: ignore[arg-type]
    await anext(responses)
    await responses.aclose()
    assert service.closed == 1


async def test_a_session_over_grpc(grpc_server: Any) -> None:
    """Every field of its messages, with texts that are empty and texts that are not there."""
    stub = grpc_server.stub("SessionService")
    created = await stub.CreateSession(pb.CreateSessionRequest(session_id="s", ttl={"seconds": 30}))
    assert created.session == pb.Session(session_id="s", ttl={"seconds": 30})
    unset = (await stub.CreateVariable(pb.CreateVariableRequest(session_id="s", name="topic"))).variable
    assert (unset.name, unset.state, unset.text) == ("topic", pb.VARIABLE_STATE_UNSET, "")
    request = pb.SetVariableRequest(session_id="s", variable_id=unset.variable_id, text=" a ")
    assert (await stub.SetVariable(request)).variable.state == pb.VARIABLE_STATE_SET
    parameters: Any = [{"name": "text", "variable_id": unset.variable_id}, {"name": "bare", "output": {}}]
    call = await stub.SubmitCall(pb.SubmitCallRequest(session_id="s", function="strip", parameters=parameters))
    (output,) = call.outputs
    read = stub.ReadVariable(pb.ReadVariableRequest(session_id="s", variable_id=output.variable_id))
    assert "".join([response.text async for response in read]) == "a"
    (task,) = (await stub.GetGraph(pb.GetGraphRequest(session_id="s"))).tasks
    assert (task.call_id, task.phase) == (call.call_id, pb.TASK_PHASE_DONE)
    session = (await stub.GetSession(pb.GetSessionRequest(session_id="s"))).session
    assert (session.variables, session.calls, session.started) == (2, 1, 0)
    await stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
    assert list((await stub.ListSessions(pb.ListSessionsRequest())).sessions) == []


async def test_a_session_of_another_tenant_is_not_found(open_grpc_server: Any) -> None:
    async with open_grpc_server(keys=KEYS) as grpc_server:
        stub = grpc_server.stub("SessionService")
        await stub.CreateSession(pb.CreateSessionRequest(session_id="s"), metadata=bearer("a-key"))
        error = await failure(stub.GetSession(pb.GetSessionRequest(session_id="s"), metadata=bearer("b-key")))
        assert isinstance(error, errors.NotFound)
        assert error.reason == "SESSION_NOT_FOUND"
        await stub.GetSession(pb.GetSessionRequest(session_id="s"), metadata=bearer("a-key"))


async def test_waiting_for_a_variable_ends_with_the_deadline(grpc_server: Any) -> None:
    stub = grpc_server.stub("SessionService")
    await stub.CreateSession(pb.CreateSessionRequest(session_id="s"))
    unset = (await stub.CreateVariable(pb.CreateVariableRequest(session_id="s"))).variable.variable_id
    request = pb.GetVariableRequest(session_id="s", variable_id=unset, wait=True)
    async with asyncio.timeout(30):
        assert isinstance(await failure(stub.GetVariable(request, timeout=0.1)), errors.DeadlineExceeded)
    await stub.SetVariable(pb.SetVariableRequest(session_id="s", variable_id=unset, text="late"))
    assert (await stub.GetVariable(request)).variable.text == "late"
