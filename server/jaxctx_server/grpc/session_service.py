# ruff: noqa: N802 - gRPC names the methods
"""SessionService: sessions, variables, and calls of whoever calls."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from jaxctx.answers import Criterion
from jaxctx.apps.sessions import Session
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1 import session_service_pb2_grpc
from jaxctx.v1.requests import SubmitCallRequest
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import M, Service, one_more, page_of, told
from jaxctx_server.validate.requests import Part, made

SESSION_TTL_S = 3600.0


def of_session(
    parts: Sequence[Part], method: Callable[..., Any], kind: type[M], field: str = ""
) -> Callable[..., Awaitable[M]]:
    """A method that hands its request to the session's `method`, with an argument for each of `parts`, see `made`.

    What comes of it goes back as a message of class `kind`, or as this `field` of one.
    """

    async def call(self: "SessionService", request: Message, context: Context) -> M:
        session = self.session(context, request)
        found = method(session, *(made(request, part) for part in parts))
        infos = [each.info for each in found] if isinstance(found, list) else found and found.info
        return told(infos, kind, field)

    return call


class SessionService(Service, session_service_pb2_grpc.SessionServiceServicer):
    """See the service in protos/jaxctx/v1/session_service.proto."""

    GetSession = of_session([], lambda session: session, pb.GetSessionResponse, "session")
    CreateVariable = of_session(
        ["name", "description", "text"], Session.add_variable, pb.CreateVariableResponse, "variable"
    )
    SetVariable = of_session(["variable_id", "text"], Session.set, pb.SetVariableResponse, "variable")
    SubmitCall = of_session([SubmitCallRequest], Session.submit, pb.SubmitCallResponse)
    CancelCall = of_session(["call_id"], Session.cancel, pb.CancelCallResponse)
    GetGraph = of_session([], Session.tasks, pb.GetGraphResponse, "tasks")

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        served, caller = self.valid(context, request)
        ttl_s = request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else SESSION_TTL_S
        session = served.programs.create(caller.tenant, ttl_s, made(request, "session_id"))
        return told(session.info, pb.CreateSessionResponse, "session")

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        served, caller = self.valid(context, request)
        behind = [each for each in served.programs.sessions(caller.tenant) if each.id > request.page_token]
        found = (each.info for each in behind[: one_more(request)])
        return page_of(request, found, pb.ListSessionsResponse, "sessions", "session_id")

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        served, caller = self.valid(context, request)
        await served.programs.delete(caller.tenant, request.session_id)
        return pb.DeleteSessionResponse()

    async def GetVariable(self, request: pb.GetVariableRequest, context: Context) -> pb.GetVariableResponse:
        session = self.session(context, request)
        variable = session.variable(request.variable_id)
        if request.criterion:
            session.ask(variable.id, Criterion(request.criterion))
        if request.wait:
            await variable.wait()
        return told(variable.info, pb.GetVariableResponse, "variable")

    async def ReadVariable(
        self, request: pb.ReadVariableRequest, context: Context
    ) -> AsyncIterator[pb.ReadVariableResponse]:
        criterion = Criterion(request.criterion or Criterion.LATENCY)
        async for part in self.session(context, request).ask(request.variable_id, criterion).read():
            yield pb.ReadVariableResponse(text=part)

    async def ListVariables(self, request: pb.ListVariablesRequest, context: Context) -> pb.ListVariablesResponse:
        variables = sorted(self.session(context, request).variables.items())
        found = (replace(each.info, text="") for _, each in variables)
        return page_of(request, found, pb.ListVariablesResponse, "variables", "variable_id")

    def session(self, context: Context, request: Any) -> Session:
        """The session that a request is about, which is used by that."""
        served, caller = self.valid(context, request)
        return served.programs.session(caller.tenant, request.session_id)
