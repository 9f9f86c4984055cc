"""JSON that may be large: written on a thread within its caller's budget of time, where it would hold up others."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response

from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import JSON_MEDIA_TYPE, json_text

SIZE_LIMIT = 1 << 20  # up to here sizes are told apart: everything above is large
BYTES_OF_NUMBER = 24
BYTES_OF_ENTRY = 4  # quotes, a comma, a colon
MAX_BYTES_OF_CHARACTER = 6  # an escaped control character
T = TypeVar("T")


def json_size(value: Any) -> int:
    """About how many characters the JSON of a value has. Looks at no more of it than a size of `SIZE_LIMIT` takes."""
    size, rest = 0, [value]
    while rest and size < SIZE_LIMIT:
        each = rest.pop()
        size += BYTES_OF_ENTRY
        match each:
            case str():
                size += len(each)
            case dict():
                size += sum(len(name) + BYTES_OF_ENTRY for name in each)
                rest += each.values()
            case list() | tuple():
                size += BYTES_OF_ENTRY * len(each)
                rest += each
            case _:
                size += BYTES_OF_NUMBER
    return size


def is_surely_within(value: Any, max_bytes: int) -> bool:
    """Whether the JSON of a value certainly has no more bytes, whatever its characters are."""
    return json_size(value) * MAX_BYTES_OF_CHARACTER <= min(max_bytes, SIZE_LIMIT)


async def write_json(call: HttpCall, value: Any, write: Callable[[Any], T], *, patient: bool = False) -> T:
    """The result of `write` for a value, which must not be changed meanwhile. Raises as `HttpCall.convert`."""
    return await call.convert(json_size(value), partial(write, value), patient=patient)


async def large_json_response(call: HttpCall, value: Any) -> Response:
    """A response with a value as JSON. It waits for its turn instead of being refused: the work for it is done."""
    return Response(await write_json(call, value, json_text, patient=True), media_type=JSON_MEDIA_TYPE)
