"""Headers: those that change what a request means to other servers are refused rather than ignored."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request

from jaxctx.errors import InvalidArgument

ID_HEADER, TTL_HEADER, MODE_HEADER = CONTEXT_CACHE_HEADERS = ("x-session-id", "x-session-ttl", "x-session-mode")
AFFINITY_HEADER = "x-session-affinity"  # by which balancers send the requests of a client's session to one server
UNSUPPORTED_HEADERS = (
    *CONTEXT_CACHE_HEADERS,
    "x-http-method-override",
    "x-http-method",
    "x-method-override",
    "grpc-timeout",
)


def check_headers(request: Request, read: Collection[str] = ()) -> None:
    """Raise InvalidArgument for an unsupported header, with its name. `read`: those that the path reads."""
    ignored = (ID_HEADER,) if names_a_session_of_the_client(request.headers) else ()
    for name in UNSUPPORTED_HEADERS:
        if name in request.headers and name not in read and name not in ignored:
            raise InvalidArgument.field(name, "is a header that is not supported here")


def names_a_session_of_the_client(headers: Headers) -> bool:
    """Whether the id is that of a client's own session, which is no context here.

    opencode sends the id of its session in both headers with every request, several at a time, and knows of no context.
    Who does mean a context, and balances by its id too, says so with x-session-mode or x-session-ttl.
    """
    session_id = headers.get(ID_HEADER)
    says_more = MODE_HEADER in headers or TTL_HEADER in headers
    return session_id is not None and session_id == headers.get(AFFINITY_HEADER) and not says_more
