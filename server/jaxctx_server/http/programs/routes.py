"""The paths of programs. Each handler is named after the method of the contract that it calls."""

from collections.abc import AsyncIterator

import grpc
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jaxctx.convert import graph_task_from_proto, variable_info_from_proto
from jaxctx.rpc import from_rpc_error
from jaxctx.types import VariableInfo
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.graph_svg import graph_svg
from jaxctx_server.http.backend import backend_of, call_stream, call_unary, read_stream
from jaxctx_server.http.errors import error_json
from jaxctx_server.http.headers import api_route
from jaxctx_server.http.messages import message_from_body, message_from_query, message_json, message_response

VARIABLES_PER_PAGE = 1000


def program_routes() -> list[Route]:
    """All paths of programs."""
    return [
        api_route("/v1/session", create_session, ["POST"]),
        api_route("/v1/session", list_sessions),
        api_route("/v1/session/{session_id}", get_session),
        api_route("/v1/session/{session_id}", delete_session, ["DELETE"]),
        api_route("/v1/session/{session_id}/graph", get_graph),
        api_route("/v1/session/{session_id}/graph.svg", get_graph_svg),
        api_route("/v1/semantic_var", create_variable, ["POST"]),
        api_route("/v1/semantic_var", list_variables),
        api_route("/v1/semantic_var/{variable_id}", set_variable, ["PUT"]),
        api_route("/v1/semantic_var/{variable_id}", get_variable),
        api_route("/v1/semantic_var/{variable_id}/text", read_variable),
        api_route("/v1/semantic_call", submit_call, ["POST"]),
        api_route("/v1/native_call", submit_call, ["POST"]),
        api_route("/v1/semantic_call/{call_id}", cancel_call, ["DELETE"]),
    ]


async def create_session(request: Request) -> Response:
    """POST /v1/session."""
    message = await message_from_body(request, pb.CreateSessionRequest())
    response = await call_unary(request, backend_of(request).sessions.CreateSession, message)
    return message_response(response)


async def get_session(request: Request) -> Response:
    """GET /v1/session/{session_id}."""
    message = message_from_query(request, pb.GetSessionRequest())
    response = await call_unary(request, backend_of(request).sessions.GetSession, message)
    return message_response(response)


async def list_sessions(request: Request) -> Response:
    """GET /v1/session."""
    message = message_from_query(request, pb.ListSessionsRequest())
    response = await call_unary(request, backend_of(request).sessions.ListSessions, message)
    return message_response(response)


async def delete_session(request: Request) -> Response:
    """DELETE /v1/session/{session_id}."""
    message = message_from_query(request, pb.DeleteSessionRequest())
    response = await call_unary(request, backend_of(request).sessions.DeleteSession, message)
    return message_response(response)


async def create_variable(request: Request) -> Response:
    """POST /v1/semantic_var."""
    message = await message_from_body(request, pb.CreateVariableRequest())
    response = await call_unary(request, backend_of(request).sessions.CreateVariable, message)
    return message_response(response)


async def set_variable(request: Request) -> Response:
    """PUT /v1/semantic_var/{variable_id}."""
    message = await message_from_body(request, pb.SetVariableRequest())
    response = await call_unary(request, backend_of(request).sessions.SetVariable, message)
    return message_response(response)


async def get_variable(request: Request) -> Response:
    """GET /v1/semantic_var/{variable_id}."""
    message = message_from_query(request, pb.GetVariableRequest())
    response = await call_unary(request, backend_of(request).sessions.GetVariable, message)
    return message_response(response)


async def list_variables(request: Request) -> Response:
    """GET /v1/semantic_var."""
    message = message_from_query(request, pb.ListVariablesRequest())
    response = await call_unary(request, backend_of(request).sessions.ListVariables, message)
    return message_response(response)


async def submit_call(request: Request) -> Response:
    """POST /v1/semantic_call, and POST /v1/native_call for steps that the server runs itself."""
    message = await message_from_body(request, pb.SubmitCallRequest())
    response = await call_unary(request, backend_of(request).sessions.SubmitCall, message)
    return message_response(response)


async def cancel_call(request: Request) -> Response:
    """DELETE /v1/semantic_call/{call_id}."""
    message = message_from_query(request, pb.CancelCallRequest())
    response = await call_unary(request, backend_of(request).sessions.CancelCall, message)
    return message_response(response)


async def get_graph(request: Request) -> Response:
    """GET /v1/session/{session_id}/graph."""
    message = message_from_query(request, pb.GetGraphRequest())
    response = await call_unary(request, backend_of(request).sessions.GetGraph, message)
    return message_response(response)


async def read_variable(request: Request) -> Response:
    """GET /v1/semantic_var/{variable_id}/text: its text as it comes, as server-sent events.

    The response begins with the first part of the text, so that an error before it has a status of its own. The last
    event is `[DONE]`, or an event `error`.
    """
    message = message_from_query(request, pb.ReadVariableRequest())
    call = call_stream(request, backend_of(request).sessions.ReadVariable, message)
    first = await read_stream(call)
    events = variable_events(call, first)
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def variable_events(
    call: grpc.aio.UnaryStreamCall[pb.ReadVariableRequest, pb.ReadVariableResponse],
    first: pb.ReadVariableResponse | None,
) -> AsyncIterator[str]:
    """The parts of a text as server-sent events; the first has been read already."""
    try:
        if first is not None:
            yield f"data: {message_json(first)}\n\n"
        while (part := await read_stream(call)) is not None:
            yield f"data: {message_json(part)}\n\n"
        yield "data: [DONE]\n\n"
    except grpc.RpcError as error:
        yield f"event: error\ndata: {error_json(from_rpc_error(error))}\n\n"
    except ClientDisconnect:
        pass
    finally:
        call.cancel()


async def get_graph_svg(request: Request) -> Response:
    """GET /v1/session/{session_id}/graph.svg: the graph of a session as a picture, as it is now."""
    message = message_from_query(request, pb.GetGraphRequest())
    graph = await call_unary(request, backend_of(request).sessions.GetGraph, message)
    variables = await all_variables(request, message.session_id)
    picture = graph_svg([graph_task_from_proto(task) for task in graph.tasks], variables)
    return Response(picture, media_type="image/svg+xml", headers={"content-security-policy": "sandbox"})


async def all_variables(request: Request, session_id: str) -> list[VariableInfo]:
    """The variables of a session, all pages of them."""
    variables: list[VariableInfo] = []
    message = pb.ListVariablesRequest(session_id=session_id, limit=VARIABLES_PER_PAGE)
    while True:
        response = await call_unary(request, backend_of(request).sessions.ListVariables, message)
        variables += [variable_info_from_proto(variable) for variable in response.variables]
        if not response.next_page_token:
            return variables
        message.page_token = response.next_page_token
