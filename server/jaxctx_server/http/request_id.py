"""The request id of an answer that no endpoint makes. Those of endpoints have the id of their call (`endpoint.py`)."""

from starlette.requests import HTTPConnection

from jaxctx_server.service.pipeline import request_id_of

REQUEST_ID_HEADER = b"x-request-id"


def request_id_header(request: HTTPConnection | None) -> tuple[bytes, bytes]:
    """The header of an answer: with the id that the request has, else a new one. None: no request could be parsed."""
    given = None if request is None else request.headers.get(REQUEST_ID_HEADER.decode())
    return REQUEST_ID_HEADER, request_id_of(given).encode()
