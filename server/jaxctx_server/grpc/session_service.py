# ruff: noqa: N802 - gRPC names the methods
"""SessionService: sessions, variables, calls and steps of whoever calls."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from jaxctx.apps.graph import Criterion, Node, Phase, Step, Task
from jaxctx.apps.sessions import CALL_TIMEOUT_S, CallRequest, Parameter, Session, StepRequest
from jaxctx.apps.variables import Variable
from jaxctx.codec import decode
from jaxctx.engine.interface import GenerateRequest
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1 import session_service_pb2_grpc
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import PAGE_SIZE, Service

SESSION_TTL_S = 3600.0


class SessionService(Service, session_service_pb2_grpc.SessionServiceServicer):
    """See the service in protos/jaxctx/v1/session_service.proto."""

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        served, caller = self.begin(context, request)
        ttl_s = request.ttl.ToNanoseconds() / 1e9 if request.HasField("ttl") else SESSION_TTL_S
        session = served.programs.create(caller.tenant, ttl_s, request.session_id or None)
        return pb.CreateSessionResponse(session=_session(session))

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        return pb.GetSessionResponse(session=_session(self._of(context, request)))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        served, caller = self.begin(context, request)
        found = [each for each in served.programs.sessions(caller.tenant) if each.id > request.page_token]
        page = found[: request.limit or PAGE_SIZE]
        more = page[-1].id if len(page) < len(found) else ""
        return pb.ListSessionsResponse(sessions=map(_session, page), next_page_token=more)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        served, caller = self.begin(context, request)
        await served.programs.delete(caller.tenant, request.session_id)
        return pb.DeleteSessionResponse()

    async def CreateVariable(self, request: pb.CreateVariableRequest, context: Context) -> pb.CreateVariableResponse:
        text = request.text if request.HasField("text") else None
        made = self._of(context, request).add_variable(request.name, request.description, text)
        return pb.CreateVariableResponse(variable=_variable(made))

    async def SetVariable(self, request: pb.SetVariableRequest, context: Context) -> pb.SetVariableResponse:
        variable = self._of(context, request).set(request.variable_id, request.text)
        return pb.SetVariableResponse(variable=_variable(variable))

    async def GetVariable(self, request: pb.GetVariableRequest, context: Context) -> pb.GetVariableResponse:
        session = self._of(context, request)
        variable = session.variable(request.variable_id)
        if request.criterion:
            session.ask(variable.id, Criterion(request.criterion))
        if request.wait:
            await variable.wait()
        return pb.GetVariableResponse(variable=_variable(variable))

    async def ReadVariable(
        self, request: pb.ReadVariableRequest, context: Context
    ) -> AsyncIterator[pb.ReadVariableResponse]:
        session = self._of(context, request)
        async for part in session.ask(request.variable_id, Criterion(request.criterion or Criterion.LATENCY)).read():
            yield pb.ReadVariableResponse(text=part)

    async def ListVariables(self, request: pb.ListVariablesRequest, context: Context) -> pb.ListVariablesResponse:
        variables = list(self._of(context, request).variables.values())
        token = request.page_token or "0"
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise InvalidArgument.field("page_token", "must be of the answer before")
        start, stop = int(token), int(token) + (request.limit or PAGE_SIZE)
        page = [_variable(each, with_text=False) for each in variables[start:stop]]
        return pb.ListVariablesResponse(variables=page, next_page_token=str(stop) if stop < len(variables) else "")

    async def SubmitCall(self, request: pb.SubmitCallRequest, context: Context) -> pb.SubmitCallResponse:
        session = self._of(context, request)
        wanted = CallRequest(
            model_id=request.model_id,
            template=request.template,
            parameters=[_parameter(each) for each in request.parameters],
            timeout_s=request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else CALL_TIMEOUT_S,
        )
        call, outputs = session.submit(wanted)
        return pb.SubmitCallResponse(call_id=call.id, outputs=map(_variable, outputs))

    async def CancelCall(self, request: pb.CancelCallRequest, context: Context) -> pb.CancelCallResponse:
        self._of(context, request).cancel(request.call_id)
        return pb.CancelCallResponse()

    async def SubmitStep(self, request: pb.SubmitStepRequest, context: Context) -> pb.SubmitStepResponse:
        session = self._of(context, request)
        wanted = StepRequest(
            function=request.function,
            inputs={each.name: each.variable_id for each in request.inputs},
            settings=dict(request.settings),
            outputs=list(request.outputs),
        )
        return pb.SubmitStepResponse(outputs=map(_variable, session.add_step(wanted)))

    async def ListFunctions(self, request: pb.ListFunctionsRequest, context: Context) -> pb.ListFunctionsResponse:
        served, _ = self.begin(context, request)
        functions = [
            pb.Function(name=name, description=function.__doc__ or "")
            for name, function in sorted(served.programs.functions.items())
        ]
        return pb.ListFunctionsResponse(functions=functions)

    async def GetGraph(self, request: pb.GetGraphRequest, context: Context) -> pb.GetGraphResponse:
        return pb.GetGraphResponse(nodes=map(_node, self._of(context, request).nodes()))

    def _of(self, context: Context, request: Any) -> Session:
        """The session that a request is about, which is used by that."""
        served, caller = self.begin(context, request)
        return served.programs.session(caller.tenant, request.session_id)


def _parameter(told: pb.Parameter) -> Parameter:
    match told.WhichOneof("value"):
        case "text":
            return Parameter(name=told.name, text=told.text)
        case "variable_id":
            return Parameter(name=told.name, variable_id=told.variable_id)
    output = told.output
    return Parameter(
        name=told.name,
        variable_id=output.variable_id or None,
        criterion=Criterion(output.criterion) if output.criterion else None,
        settings=decode(output, GenerateRequest, context_id="", n=1, logprobs=False, top_logprobs=0),
    )


def _session(session: Session) -> pb.Session:
    started = sum(node.phase is Phase.STARTED for node in session.nodes())
    told = pb.Session(
        session_id=session.id, variables=len(session.variables), calls=len(session.calls), started=started
    )
    told.ttl.FromTimedelta(timedelta(seconds=session.ttl_s))
    return told


def _variable(variable: Variable, *, with_text: bool = True) -> pb.Variable:
    return pb.Variable(
        variable_id=variable.id,
        name=variable.name,
        description=variable.description,
        state=pb.VariableState.Value(f"VARIABLE_STATE_{variable.state.name}"),
        text=variable.text if with_text else "",
        error_reason=variable.error.reason if variable.error else "",
        error_message=variable.error.message if variable.error else "",
    )


def _node(node: Node) -> pb.GraphNode:
    of = {}
    if isinstance(node, Task):
        of = {"call_id": node.call.id, "engine_id": node.engine_id, "why": node.why}
    elif isinstance(node, Step):
        of = {"function": node.name}
    return pb.GraphNode(
        phase=node.phase.value,
        criterion=0 if node.phase is Phase.IDLE else int(node.criterion),
        inputs=[variable.id for variable in node.inputs],
        outputs=[variable.id for variable in node.outputs],
        **of,
    )
