"""Errors as HTTP responses: {"error": {"message", "type", "code", "param"}}.

Errors of the gRPC server keep their reason as `code` and the name of the first wrong field as `param`. Errors of HTTP
itself (an unknown path, a body that is too large) have the code "HTTP".
"""

import json
import math
from typing import cast

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from jaxctx.errors import Internal, JaxctxError
from jaxctx.rpc import from_rpc_error

JSON_MEDIA_TYPE = "application/json"
HTTP_STATUS = {  # by the name of the gRPC status; 500 for all others
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
CLIENT_GONE_STATUS = 499
TYPE_OF_HTTP_STATUS = {408: "deadline_exceeded", 503: "unavailable"}  # "invalid_argument" for all others


def error_json(error: JaxctxError) -> str:
    """The JSON of an error of the server."""
    field = error.violations[0].field if error.violations else None
    body = {"message": error.message, "type": error.code.lower(), "code": error.reason, "param": field}
    return json.dumps({"error": body}, ensure_ascii=False)


def http_error_json(status: int, message: str) -> str:
    """The JSON of an error of HTTP itself."""
    kind = TYPE_OF_HTTP_STATUS.get(status, "invalid_argument")
    return json.dumps({"error": {"message": message, "type": kind, "code": "HTTP", "param": None}})


def error_response(error: JaxctxError) -> Response:
    """The response for an error of the server, with `retry-after` in whole seconds if the error names a time."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(math.ceil(error.retry_after_s))}
    return Response(error_json(error), HTTP_STATUS.get(error.code, 500), headers, JSON_MEDIA_TYPE)


def http_error_response(status: int, message: str) -> Response:
    """The response for an error of HTTP itself."""
    return Response(http_error_json(status, message), status, media_type=JSON_MEDIA_TYPE)


async def handle_server_error(request: Request, error: Exception) -> Response:
    """For an error that this process or the client library raised."""
    return error_response(cast(JaxctxError, error))


async def handle_rpc_error(request: Request, error: Exception) -> Response:
    """For an error with which a call of the gRPC server ended."""
    return error_response(from_rpc_error(cast(grpc.RpcError, error)))


async def handle_http_error(request: Request, error: Exception) -> Response:
    """For an error of HTTP itself."""
    http_error = cast(HTTPException, error)
    body = http_error_json(http_error.status_code, http_error.detail)
    return Response(body, http_error.status_code, http_error.headers, JSON_MEDIA_TYPE)


async def handle_client_gone(request: Request, error: Exception) -> Response:
    """For a client that disconnected before its answer, which is not read."""
    return Response(status_code=CLIENT_GONE_STATUS)


async def handle_defect(request: Request, error: Exception) -> Response:
    """For everything else: a defect. Uvicorn logs its traceback."""
    return error_response(Internal("internal error of the gateway"))


EXCEPTION_HANDLERS: dict[type[Exception], ExceptionHandler] = {
    JaxctxError: handle_server_error,
    grpc.RpcError: handle_rpc_error,
    HTTPException: handle_http_error,
    ClientDisconnect: handle_client_gone,
    Exception: handle_defect,
}
