"""Headers: those that change what a request means to other servers are refused rather than ignored."""

from collections.abc import Collection

from starlette.requests import Request

from jaxctx.errors import InvalidArgument

CONTEXT_CACHE_HEADERS = ("x-session-id", "x-session-ttl", "x-session-mode")
UNSUPPORTED_HEADERS = (
    *CONTEXT_CACHE_HEADERS,
    "x-http-method-override",
    "x-http-method",
    "x-method-override",
    "grpc-timeout",
)


def check_headers(request: Request, read: Collection[str] = ()) -> None:
    """Raise InvalidArgument for an unsupported header, with its name. `read`: those that the path reads."""
    for name in UNSUPPORTED_HEADERS:
        if name in request.headers and name not in read:
            raise InvalidArgument.field(name, "is a header that is not supported here")
