# ruff: noqa: N802 - gRPC names the methods
"""SessionService: sessions, variables, and calls of whoever calls."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from jaxctx.programs.sessions import Session
from jaxctx.types import Criterion, SubmitCallRequest
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.grpc.interceptor import Context
from jaxctx_server.grpc.service import Service, page_of, told
from jaxctx_server.validate.cross_field import Part, made

SESSION_TTL_S = 3600.0


def of_session(rpc: str, method: Callable[..., Any], parts: Sequence[Part] = ()) -> Callable[..., Awaitable[Any]]:
    """A call of the contract that hands parts of its request, see `made`, to this method of the session, and tells the
    `info` of what comes of it.
    """

    async def call(self: "SessionService", request: Message, context: Context) -> Any:
        found = method(self.session(context, request), *(made(request, part) for part in parts))
        return told(rpc, [each.info for each in found] if isinstance(found, list) else found and found.info)

    return call


class SessionService(Service):
    """See the service in protos/jaxctx/v1/session_service.proto."""

    GetSession = of_session("GetSession", lambda session: session)
    CreateVariable = of_session("CreateVariable", Session.create_variable, ["name", "description", "text"])
    SetVariable = of_session("SetVariable", Session.set_variable, ["variable_id", "text"])
    SubmitCall = of_session("SubmitCall", Session.submit, [SubmitCallRequest])
    CancelCall = of_session("CancelCall", Session.cancel, ["call_id"])
    GetGraph = of_session("GetGraph", Session.tasks)

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> Any:
        served, caller = self.valid(context, request)
        ttl_s = request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else SESSION_TTL_S
        return told("CreateSession", served.programs.create(caller.tenant, ttl_s, made(request, "session_id")).info)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> Any:
        served, caller = self.valid(context, request)
        return page_of("ListSessions", request, (each.info for each in served.programs.sessions(caller.tenant)))

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        served, caller = self.valid(context, request)
        await served.programs.delete(caller.tenant, request.session_id)
        return pb.DeleteSessionResponse()

    async def GetVariable(self, request: pb.GetVariableRequest, context: Context) -> Any:
        session = self.session(context, request)
        variable = session.variable(request.variable_id)
        if request.criterion:
            session.request(variable.id, Criterion(request.criterion))
        if request.wait:
            await variable.wait()
        return told("GetVariable", variable.info)

    async def ReadVariable(
        self, request: pb.ReadVariableRequest, context: Context
    ) -> AsyncIterator[pb.ReadVariableResponse]:
        criterion = Criterion(request.criterion or Criterion.LATENCY)
        async for part in self.session(context, request).request(request.variable_id, criterion).read():
            yield pb.ReadVariableResponse(text=part)

    async def ListVariables(self, request: pb.ListVariablesRequest, context: Context) -> Any:
        variables = self.session(context, request).variables.values()
        return page_of("ListVariables", request, (replace(each.info, text="") for each in variables))

    def session(self, context: Context, request: Any) -> Session:
        """The session that a request is about, which is used by that."""
        served, caller = self.valid(context, request)
        return served.programs.session(caller.tenant, request.session_id)
