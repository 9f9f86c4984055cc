# ruff: noqa: N802 - gRPC names the methods
"""SessionService over gRPC: sessions, variables and calls. Each method calls its namesake of the service layer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.session_service_pb2_grpc import SessionServiceServicer
from jaxctx_server.grpc.caller import CallerFactory, Context
from jaxctx_server.service.interface import SessionService


class SessionServicer(SessionServiceServicer):
    """See the service in protos/jaxctx/v1/session_service.proto."""

    def __init__(self, service: SessionService, callers: CallerFactory) -> None:
        self._service = service
        self._callers = callers

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        return await self._service.create_session(self._callers.caller(context), request)

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        return await self._service.get_session(self._callers.caller(context), request)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        return await self._service.list_sessions(self._callers.caller(context), request)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        return await self._service.delete_session(self._callers.caller(context), request)

    async def CreateVariable(self, request: pb.CreateVariableRequest, context: Context) -> pb.CreateVariableResponse:
        return await self._service.create_variable(self._callers.caller(context), request)

    async def SetVariable(self, request: pb.SetVariableRequest, context: Context) -> pb.SetVariableResponse:
        return await self._service.set_variable(self._callers.caller(context), request)

    async def GetVariable(self, request: pb.GetVariableRequest, context: Context) -> pb.GetVariableResponse:
        return await self._service.get_variable(self._callers.caller(context), request)

    async def ReadVariable(
        self, request: pb.ReadVariableRequest, context: Context
    ) -> AsyncGenerator[pb.ReadVariableResponse, None]:
        caller = self._callers.caller(context)
        async with aclosing(self._service.read_variable(caller, request)) as responses:
            async for response in responses:
                yield response

    async def ListVariables(self, request: pb.ListVariablesRequest, context: Context) -> pb.ListVariablesResponse:
        return await self._service.list_variables(self._callers.caller(context), request)

    async def SubmitCall(self, request: pb.SubmitCallRequest, context: Context) -> pb.SubmitCallResponse:
        return await self._service.submit_call(self._callers.caller(context), request)

    async def CancelCall(self, request: pb.CancelCallRequest, context: Context) -> pb.CancelCallResponse:
        return await self._service.cancel_call(self._callers.caller(context), request)

    async def GetGraph(self, request: pb.GetGraphRequest, context: Context) -> pb.GetGraphResponse:
        return await self._service.get_graph(self._callers.caller(context), request)
