"""The paths of programs. Each handler is named after the method of the contract that it calls."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.routing import Route

from jaxctx.convert import graph_task_from_proto, variable_info_from_proto
from jaxctx.errors import JaxctxError
from jaxctx.types import VariableInfo
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.graph_svg import graph_svg
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream, Handler, api_route
from jaxctx_server.http.errors import ErrorForm, openai_error_body
from jaxctx_server.http.events import DONE, data_event, typed_event
from jaxctx_server.http.messages import message_fields, message_from_body, message_from_query, message_response

VARIABLES_PER_PAGE = 1000


def error_event(error: JaxctxError, _events_before: int) -> str:
    """An error as the last event of a stream, with a type of its own."""
    return typed_event("error", openai_error_body(error))


PROGRAM_ERRORS = ErrorForm(openai_error_body, error_event)


def program_routes() -> list[Route]:
    """All paths of programs."""
    return [
        program_route("/v1/session", create_session, "CreateSession", ["POST"]),
        program_route("/v1/session", list_sessions, "ListSessions"),
        program_route("/v1/session/{session_id}", get_session, "GetSession"),
        program_route("/v1/session/{session_id}", delete_session, "DeleteSession", ["DELETE"]),
        program_route("/v1/session/{session_id}/graph", get_graph, "GetGraph"),
        program_route("/v1/session/{session_id}/graph.svg", get_graph_svg, "GetGraph"),
        program_route("/v1/semantic_var", create_variable, "CreateVariable", ["POST"]),
        program_route("/v1/semantic_var", list_variables, "ListVariables"),
        program_route("/v1/semantic_var/{variable_id}", set_variable, "SetVariable", ["PUT"]),
        program_route("/v1/semantic_var/{variable_id}", get_variable, "GetVariable"),
        program_route("/v1/semantic_var/{variable_id}/text", read_variable, "ReadVariable"),
        program_route("/v1/semantic_call", submit_call, "SubmitCall", ["POST"]),
        program_route("/v1/native_call", submit_call, "SubmitCall", ["POST"]),
        program_route("/v1/semantic_call/{call_id}", cancel_call, "CancelCall", ["DELETE"]),
    ]


def program_route(path: str, handler: Handler, method: str, methods: Sequence[str] = ("GET",)) -> Route:
    """A route that stands for a method of SessionService."""
    return api_route(path, handler, methods, method=f"/jaxctx.v1.SessionService/{method}", errors=PROGRAM_ERRORS)


async def create_session(call: HttpCall) -> Response:
    """POST /v1/session."""
    message = await message_from_body(call, pb.CreateSessionRequest())
    response = await call.unary(call.services.sessions.create_session, message)
    return message_response(response)


async def get_session(call: HttpCall) -> Response:
    """GET /v1/session/{session_id}."""
    message = message_from_query(call, pb.GetSessionRequest())
    response = await call.unary(call.services.sessions.get_session, message)
    return message_response(response)


async def list_sessions(call: HttpCall) -> Response:
    """GET /v1/session."""
    message = message_from_query(call, pb.ListSessionsRequest())
    response = await call.unary(call.services.sessions.list_sessions, message)
    return message_response(response)


async def delete_session(call: HttpCall) -> Response:
    """DELETE /v1/session/{session_id}."""
    message = message_from_query(call, pb.DeleteSessionRequest())
    response = await call.unary(call.services.sessions.delete_session, message)
    return message_response(response)


async def create_variable(call: HttpCall) -> Response:
    """POST /v1/semantic_var."""
    message = await message_from_body(call, pb.CreateVariableRequest())
    response = await call.unary(call.services.sessions.create_variable, message)
    return message_response(response)


async def set_variable(call: HttpCall) -> Response:
    """PUT /v1/semantic_var/{variable_id}."""
    message = await message_from_body(call, pb.SetVariableRequest())
    response = await call.unary(call.services.sessions.set_variable, message)
    return message_response(response)


async def get_variable(call: HttpCall) -> Response:
    """GET /v1/semantic_var/{variable_id}."""
    message = message_from_query(call, pb.GetVariableRequest())
    response = await call.unary(call.services.sessions.get_variable, message)
    return message_response(response)


async def list_variables(call: HttpCall) -> Response:
    """GET /v1/semantic_var."""
    message = message_from_query(call, pb.ListVariablesRequest())
    response = await call.unary(call.services.sessions.list_variables, message)
    return message_response(response)


async def submit_call(call: HttpCall) -> Response:
    """POST /v1/semantic_call, and POST /v1/native_call for steps that the server runs itself."""
    message = await message_from_body(call, pb.SubmitCallRequest())
    response = await call.unary(call.services.sessions.submit_call, message)
    return message_response(response)


async def cancel_call(call: HttpCall) -> Response:
    """DELETE /v1/semantic_call/{call_id}."""
    message = message_from_query(call, pb.CancelCallRequest())
    response = await call.unary(call.services.sessions.cancel_call, message)
    return message_response(response)


async def get_graph(call: HttpCall) -> Response:
    """GET /v1/session/{session_id}/graph."""
    message = message_from_query(call, pb.GetGraphRequest())
    response = await call.unary(call.services.sessions.get_graph, message)
    return message_response(response)


async def read_variable(call: HttpCall) -> Response:
    """GET /v1/semantic_var/{variable_id}/text: its text as it comes, as server-sent events.

    The response begins with the first part of the text, so that an error before it has a status of its own. The last
    event is `[DONE]`, or an error.
    """
    return EventStream(variable_events(call, message_from_query(call, pb.ReadVariableRequest())))


async def variable_events(call: HttpCall, message: pb.ReadVariableRequest) -> AsyncGenerator[str, None]:
    """The parts of a text as server-sent events."""
    async with aclosing(call.stream(call.services.sessions.read_variable, message)) as parts:
        async for part in parts:
            yield data_event(message_fields(part))
    yield DONE


async def get_graph_svg(call: HttpCall) -> Response:
    """GET /v1/session/{session_id}/graph.svg: the graph of a session as a picture, as it is now."""
    message = message_from_query(call, pb.GetGraphRequest())
    graph = await call.unary(call.services.sessions.get_graph, message)
    variables = await all_variables(call, message.session_id)
    # On a thread: of a session with thousands of calls it takes a second or more.
    picture = await asyncio.to_thread(draw_graph, graph, variables)
    return Response(picture, media_type="image/svg+xml", headers={"content-security-policy": "sandbox"})


def draw_graph(graph: pb.GetGraphResponse, variables: Sequence[VariableInfo]) -> bytes:
    """The picture of a graph as an SVG."""
    return graph_svg([graph_task_from_proto(task) for task in graph.tasks], variables).encode()


async def all_variables(call: HttpCall, session_id: str) -> list[VariableInfo]:
    """The variables of a session, all pages of them."""
    variables: list[VariableInfo] = []
    message = pb.ListVariablesRequest(session_id=session_id, limit=VARIABLES_PER_PAGE)
    while True:
        response = await call.unary(call.services.sessions.list_variables, message)
        variables += [variable_info_from_proto(variable) for variable in response.variables]
        if not response.next_page_token:
            return variables
        message.page_token = response.next_page_token
