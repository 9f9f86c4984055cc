"""HTTP requests as bytes: a valid one for every route, and mutations of them, as broken clients send."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

JSON_TYPE = b"content-type: application/json\r\n"
GREEDY = {"temperature": 0, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {
    "session_id": "s1",
    "template": "def {{name}}(n):{{body}}",
    "parameters": [{"name": "name", "text": "fib"}, {"name": "body", "output": {"max_tokens": 3, "criterion": 4}}],
}
STEP = {
    "session_id": "s1",
    "function": "strip",
    "parameters": [{"name": "text", "text": " a "}, {"name": "bare", "output": {}}],
}
USER = [{"role": "user", "content": "hi"}]
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "one"}, {"value": "other"}]}
# Bodies of paths that have one; several of some. Other paths with a body get {}.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "echo", "prompt": "the sea", "max_tokens": 3, **GREEDY},
        {"prompt": [1, 2, 3], "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}, **GREEDY},
        {"prompt": "a", "max_tokens": 2, "n": 2, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1.5}},
    ],
    "/v1/chat/completions": [
        {"model": "echo", "messages": USER, "max_tokens": 3, **GREEDY},
        {"messages": USER, "max_tokens": 40, "stream": True, "tools": [TOOL], **GREEDY},
    ],
    "/v1/decisions": [
        {"model": "echo", "input": "the sea", "questions": [{"type": "predicate", "instructions": "It is."}, CHOICE]},
        {
            "input": USER,
            "questions": [CHOICE, {"type": "text", "instructions": "Why?", "max_tokens": 20}],
            "stream": True,
        },
    ],
    "/v1/responses": [
        {"model": "echo", "input": "hi", "max_output_tokens": 3, "store": False},
        {"input": USER, "max_output_tokens": 30, "stream": True, "store": False},
    ],
    "/v1/responses/input_tokens": [{"input": "hi"}],
    "/v1/conversations": [{"metadata": {"a": "b"}}],
    "/v1/messages": [
        {"model": "echo", "messages": USER, "max_tokens": 3},
        {"model": "echo", "messages": USER, "max_tokens": 30, "stream": True},
    ],
    "/v1/messages/count_tokens": [{"model": "echo", "messages": USER}],
    "/v1/session": [{"session_id": "s1", "ttl": "600s"}],
    "/v1/semantic_var": [{"session_id": "s1", "name": "topic", "text": "pages"}],
    "/v1/semantic_var/{variable_id}": [{"session_id": "s1", "text": "pages"}],
    "/v1/semantic_call": [CALL],
    "/v1/native_call": [STEP],
    "/tokenize": [{"prompt": "the sea"}, {"messages": USER, "return_token_strs": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
QUERIES = {
    "/v1/semantic_var": "?session_id=s1&limit=5",
    "/v1/semantic_var/{variable_id}": "?session_id=s1&criterion=CRITERION_LATENCY",
    "/v1/semantic_var/{variable_id}/text": "?session_id=s1",
    "/v1/semantic_call/{call_id}": "?session_id=s1",
}
IDS = {"session_id": "s1", "model_id": "echo"}


@dataclass(frozen=True)
class Sent:
    """What a client sends, and how it behaves."""

    data: bytes
    pieces: int = 1  # in how many parts it is sent
    leaves_after: float | None = None  # seconds until the client is gone; None: it waits for the whole answer


def valid_requests(app: Starlette) -> list[bytes]:
    """A request or more for each route of the application. The connection ends with the answer."""
    requests = []
    for route in app.routes:
        if not isinstance(route, Route):
            continue  # a WebSocket: `odd_header` asks for one
        target = re.sub(r"{(\w+)(:path)?}", lambda found: IDS.get(found[1], "x1"), route.path)
        for method in sorted(route.methods or ()):
            if method in ("POST", "PUT", "PATCH"):
                requests += [request_bytes(method, target, body) for body in BODIES.get(route.path, [{}])]
            else:
                requests.append(request_bytes(method, target + QUERIES.get(route.path, "")))
    return requests


def request_bytes(method: str, target: str, body: Any = None) -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n".encode()
    if body is None:
        return head + b"\r\n"
    data = json.dumps(body).encode()
    return head + JSON_TYPE + b"content-length: %d\r\n\r\n%b" % (len(data), data)


def with_body(request: bytes, body: bytes, *, length: int | None = None) -> bytes:
    """The same request with another body, and with the length of it unless another one is given."""
    head = request.partition(b"\r\n\r\n")[0]
    head = re.sub(rb"\r\ncontent-length: \d+", b"", head)
    return head + b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body) if length is None else length, body)


def flip(rng: random.Random, request: bytes) -> bytes:
    data = bytearray(request)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def flip_in_body(rng: random.Random, request: bytes) -> bytes:
    body = request.partition(b"\r\n\r\n")[2]
    return with_body(request, flip(rng, body)) if body else flip(rng, request)


def truncate(rng: random.Random, request: bytes) -> bytes:
    return request[: rng.randrange(len(request))]


def insert(rng: random.Random, request: bytes) -> bytes:
    place = rng.randrange(len(request))
    odd = [b"\x00", b"\r\n", b"\xff" * 5, b"\r\n\r\n", b'{"a":', b"[" * 50, "é🦀".encode(), rng.randbytes(20)]
    return request[:place] + rng.choice(odd) + request[place:]


def cut_out(rng: random.Random, request: bytes) -> bytes:
    start = rng.randrange(len(request))
    return request[:start] + request[start + rng.randint(1, 30) :]


def repeat_a_header(rng: random.Random, request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    lines.insert(rng.randint(1, len(lines)), rng.choice(lines))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def odd_header(rng: random.Random, request: bytes) -> bytes:
    odd = [
        b"x-big: " + b"a" * rng.choice([1000, 17_000, 70_000]),
        b"content-length: " + rng.choice([b"-1", b"1e3", b"99999999999999999999", b"0", b"5, 5", b""]),
        b"transfer-encoding: " + rng.choice([b"chunked", b"gzip", b"chunked, chunked", b"identity"]),
        b"content-type: " + rng.choice([b"text/plain", b"application/json; charset=utf-16", b""]),
        b"content-encoding: gzip",
        b"expect: 100-continue",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\nsec-websocket-version: 13",
        b"authorization: " + rng.choice([b"Bearer", b"Basic eDp5", b"Bearer " + b"k" * 2000]),
        b"x-request-id: " + rng.choice([b"a" * 300, b"\xff", b"ok"]),
        b"x-session-id: s1",
        b"host: elsewhere",
        b"range: bytes=0-1",
    ]
    line, _, rest = request.partition(b"\r\n")
    return line + b"\r\n" + rng.choice(odd) + b"\r\n" + rest


def other_method(rng: random.Random, request: bytes) -> bytes:
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 99]
    return rng.choice(methods).encode() + b" " + request.partition(b" ")[2]


def other_path(rng: random.Random, request: bytes) -> bytes:
    method, _, rest = request.partition(b" ")
    target, _, rest = rest.partition(b" ")
    odd = [target + end for end in (b"/", b"%2F..%2F", b"?a=%ff&limit=x")]
    return method + b" " + rng.choice([*odd, target * 30, target[:-1], b"*", b"//", b"/%00"]) + b" " + rest


def wrong_length(rng: random.Random, request: bytes) -> bytes:
    body = request.partition(b"\r\n\r\n")[2]
    return with_body(request, body, length=max(0, len(body) + rng.choice([-5, -1, 1, 100, 10**9])))


def chunked(rng: random.Random, request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    head = re.sub(rb"\r\ncontent-length: \d+", b"", head) + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    place = rng.randint(0, len(body))
    parts = [part for part in (body[:place], body[place:]) if part]
    data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return head + (data if rng.random() < 0.5 else flip(rng, data))


def pipelined(rng: random.Random, request: bytes) -> bytes:
    kept_open = request.replace(b"connection: close\r\n", b"")
    return kept_open * rng.randint(1, 3) + request


def other_json(rng: random.Random, request: bytes) -> bytes:
    odd = [
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"{",
        b"",
        b"[" * 5000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800", "messages": "\\ud800"}',
        b'{"max_tokens": 1e400}',
        b"\xff\xfe{}",
        json.dumps(dict.fromkeys(map(str, range(2000)))).encode(),
    ]
    return with_body(request, rng.choice(odd))


def other_value(rng: random.Random, request: bytes) -> bytes:
    """Another value for one of the fields."""
    try:
        fields = json.loads(request.partition(b"\r\n\r\n")[2])
        name = rng.choice(list(fields.keys()))
    except (ValueError, IndexError, AttributeError, RecursionError):
        return other_json(rng, request)
    values: list[Any] = [None, -1, 0, 2**31, 2**63, 2**70, 1e308, -0.5, "", "x" * 3000, "\ud800", "\x00", [], {}, True]
    values += [[[]], [None] * 300, {"a": {"b": {}}}, [{}], "é", [-1], [2**40], [1.5], {"type": "json_schema"}]
    return with_body(request, json.dumps({**fields, name: rng.choice(values)}).encode())


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    *(flip, flip_in_body, truncate, insert, cut_out, repeat_a_header, odd_header, other_method, other_path),
    *(wrong_length, chunked, pipelined, other_json, other_value, other_value),
]


def mutated(rng: random.Random, requests: list[bytes]) -> Sent:
    """A request with one mutation or two, or a valid one of a client that leaves."""
    request = rng.choice(requests)
    if rng.random() < 0.1:
        sent = request[: rng.randrange(len(request))] if rng.random() < 0.3 else request
        return Sent(sent, pieces=rng.randint(1, 3), leaves_after=rng.choice([0.0, 0.001, 0.01, 0.03]))
    for _ in range(rng.choice([1, 1, 2])):
        request = rng.choice(MUTATIONS)(rng, request or b" ")
    return Sent(request, pieces=rng.choice([1, 1, 1, 2, 5]))
