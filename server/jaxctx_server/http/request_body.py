"""Bodies of HTTP requests: what is read of them, and how much JSON they may hold.

A few bytes of JSON can take much memory and time (an empty list of two bytes takes 56 bytes in memory), so that what a
body holds is counted before it is parsed.
"""

import json
import math
import re
from typing import Any, NoReturn

from google.protobuf import json_format
from starlette.requests import Request

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.errors import JSON_MEDIA_TYPE, HttpError, is_unicode

MAX_BODY_BYTES = 8 << 20  # as large as a message of the gRPC server
MAX_DEPTH = 100  # lists and objects inside each other: as many as JSON of a message of the contract may have
QUOTED = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

BRACKET = re.compile(rb"[\[\]{}]")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # escaped in JSON; most are pairs, which are one character

PARSE_ERRORS = (
    json_format.ParseError,
    ValueError,
    OverflowError,
    TypeError,
    AttributeError,
    RecursionError,
    SystemError,
)
"""Errors of parsing: json_format has none of its own for a body that is no object, or a lone surrogate in a name."""


async def read_body(request: Request) -> bytes:
    """All of the body.

    Raises HttpError for a body that is too large, that is compressed, or that is not declared as JSON: a form of
    any web page could send such a body without asking this server first.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != JSON_MEDIA_TYPE:
        raise HttpError(415, "the body must be application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpError(415, "the body must not be compressed: content-encoding is not supported here")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, f"the body must have up to {MAX_BODY_BYTES} bytes")
    return bytes(body)


def has_no_body(request: Request) -> bool:
    """Whether a request has no body, and says of none what it is; for paths that need none.

    A page of any other site can have a browser send such a request without asking this server first. That tells where
    it is from, and has no key: a header with a key can be sent only by pages that this server allows.
    """
    headers = request.headers
    is_of_a_page = "origin" in headers and "authorization" not in headers
    says_of_a_body = "content-type" in headers or "transfer-encoding" in headers
    return not is_of_a_page and not says_of_a_body and headers.get("content-length", "0") == "0"


def parse_json(data: bytes, *, max_values: int, max_parts: int) -> Any:
    """The value of a JSON text of up to `max_values` values, with up to `max_parts` texts, names, lists and objects.

    Raises InvalidArgument for more, and for more than `MAX_DEPTH` lists and objects inside each other, before anything
    is parsed; and for a lone surrogate, NaN or an infinite number, which JSON does not have. Raises what `json.loads`
    raises for what is no JSON: also for another encoding than UTF-8, in which bytes could not be counted.
    """
    text = data.decode("utf-8-sig")  # of bytes, json.loads would take other encodings, and half characters
    parts = data.count(b'"') // 2 + data.count(b"[") + data.count(b"{")
    values = data.count(b",") + 1
    if parts > max_parts or values > max_values:
        # Punctuation inside of texts was counted as well: count again without the texts.
        bare, texts = QUOTED.subn(b"", data, count=max_parts + 1)
        parts = texts + bare.count(b"[") + bare.count(b"{")
        values = bare.count(b",") + 1
        if parts > max_parts:
            raise InvalidArgument(f"the body must have up to {max_parts} texts, lists and objects")
        if values > max_values:
            raise InvalidArgument(f"the body must have up to {max_values} values")
    check_depth(data)
    numbers = NumberReader()
    value = json.loads(text, parse_constant=numbers.read, parse_float=numbers.read)
    if not numbers.all_finite:
        refuse_infinite(value)
    if SURROGATE.search(data) is not None:
        check_is_unicode(value)
    return value


def check_depth(data: bytes) -> None:
    """Raise InvalidArgument for a JSON text with more than `MAX_DEPTH` lists and objects inside each other."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in BRACKET.findall(QUOTED.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            message = f"must have up to {MAX_DEPTH} lists and objects inside each other"
            raise InvalidArgument.field("request", message)


class NumberReader:
    """Reads numbers that are not whole, and remembers whether all of them are finite."""

    def __init__(self) -> None:
        self.all_finite = True

    def read(self, text: str) -> float:
        """A number, also NaN or one that is too large, which becomes infinite."""
        number = float(text)
        self.all_finite = self.all_finite and math.isfinite(number)
        return number


def refuse_infinite(value: Any) -> NoReturn:
    """Raise InvalidArgument for a value with a number that is not finite, naming the field in which it is."""
    if isinstance(value, dict):
        for name, entry in value.items():
            try:
                json.dumps(entry, allow_nan=False)
            except ValueError:
                raise InvalidArgument.field(name, "must be a finite number") from None
    raise InvalidArgument("the body must have finite numbers")


def check_is_unicode(value: Any) -> None:
    """Raise InvalidArgument if a text or a name has half of a character, which no text of the contract can hold.

    The error names the field of the body in which it is.
    """
    if isinstance(value, dict):
        for name, entry in value.items():
            if is_unicode(name) and not is_unicode(json.dumps(entry, ensure_ascii=False)):
                raise InvalidArgument.field(name, "has a lone surrogate")
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise InvalidArgument("the body has a lone surrogate")
