"""SessionService on the programs of this process, which in every role run here."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from jaxctx import convert
from jaxctx.engine.interface import Caller
from jaxctx.programs.sessions import Programs, Session
from jaxctx.types import Criterion
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.paging import entries_to_find, page_by_id

SESSION_TTL_S = 3600.0  # of a session that is created without a time to live


class LocalSessionService:
    """Implements `jaxctx_server.service.interface.SessionService`."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    def _programs(self) -> Programs:
        return self._lifecycle.served().programs

    def _session(self, caller: Caller, session_id: str) -> Session:
        """The caller's session, whose time to live begins again by that. Raises NotFound (SESSION_NOT_FOUND)."""
        return self._programs().session(caller.tenant, session_id)

    async def create_session(self, caller: Caller, request: pb.CreateSessionRequest) -> pb.CreateSessionResponse:
        ttl_s = request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else SESSION_TTL_S
        session_id = request.session_id if request.HasField("session_id") else None
        session = self._programs().create(caller.tenant, ttl_s, session_id)
        return pb.CreateSessionResponse(session=convert.session_info_to_proto(session.info))

    async def get_session(self, caller: Caller, request: pb.GetSessionRequest) -> pb.GetSessionResponse:
        session = self._session(caller, request.session_id)
        return pb.GetSessionResponse(session=convert.session_info_to_proto(session.info))

    async def list_sessions(self, caller: Caller, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        page = page_by_id(
            self._programs().sessions(caller.tenant),
            lambda session: session.id,
            page_token=request.page_token,
            found=entries_to_find(request.limit),
        )
        return pb.ListSessionsResponse(
            sessions=[convert.session_info_to_proto(session.info) for session in page.entries],
            next_page_token=page.next_page_token,
        )

    async def delete_session(self, caller: Caller, request: pb.DeleteSessionRequest) -> pb.DeleteSessionResponse:
        await self._programs().delete(caller.tenant, request.session_id)
        return pb.DeleteSessionResponse()

    async def create_variable(self, caller: Caller, request: pb.CreateVariableRequest) -> pb.CreateVariableResponse:
        text = request.text if request.HasField("text") else None
        session = self._session(caller, request.session_id)
        variable = session.create_variable(request.name, request.description, text)
        return pb.CreateVariableResponse(variable=convert.variable_info_to_proto(variable.info))

    async def set_variable(self, caller: Caller, request: pb.SetVariableRequest) -> pb.SetVariableResponse:
        variable = self._session(caller, request.session_id).set_variable(request.variable_id, request.text)
        return pb.SetVariableResponse(variable=convert.variable_info_to_proto(variable.info))

    async def get_variable(self, caller: Caller, request: pb.GetVariableRequest) -> pb.GetVariableResponse:
        session = self._session(caller, request.session_id)
        variable = session.variable(request.variable_id)
        if request.criterion:
            session.request(variable.id, Criterion(request.criterion))
        if request.wait:
            await variable.wait()
        return pb.GetVariableResponse(variable=convert.variable_info_to_proto(variable.info))

    async def read_variable(
        self, caller: Caller, request: pb.ReadVariableRequest
    ) -> AsyncGenerator[pb.ReadVariableResponse, None]:
        criterion = Criterion(request.criterion) if request.criterion else Criterion.LATENCY
        variable = self._session(caller, request.session_id).request(request.variable_id, criterion)
        async for text in variable.read():
            yield pb.ReadVariableResponse(text=text)

    async def list_variables(self, caller: Caller, request: pb.ListVariablesRequest) -> pb.ListVariablesResponse:
        session = self._session(caller, request.session_id)
        page = page_by_id(
            [variable.info for variable in session.variables.values()],
            lambda info: info.variable_id,
            page_token=request.page_token,
            found=entries_to_find(request.limit),
        )
        return pb.ListVariablesResponse(
            variables=[convert.variable_info_to_proto(replace(info, text="")) for info in page.entries],
            next_page_token=page.next_page_token,
        )

    async def submit_call(self, caller: Caller, request: pb.SubmitCallRequest) -> pb.SubmitCallResponse:
        call = self._session(caller, request.session_id).submit(convert.submit_call_request_from_proto(request))
        return convert.submit_call_result_to_proto(call.info)

    async def cancel_call(self, caller: Caller, request: pb.CancelCallRequest) -> pb.CancelCallResponse:
        self._session(caller, request.session_id).cancel(request.call_id)
        return pb.CancelCallResponse()

    async def get_graph(self, caller: Caller, request: pb.GetGraphRequest) -> pb.GetGraphResponse:
        tasks = self._session(caller, request.session_id).tasks()
        return pb.GetGraphResponse(tasks=[convert.graph_task_to_proto(task.info) for task in tasks])
