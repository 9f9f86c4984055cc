"""The same requests through gRPC and HTTP get the same decision: the same outputs, or the same refusal.

A request is made of fields with values that are right and of some that are wrong: at the bounds, far beyond them, no
number, too many, of another model, without a key. Through gRPC it is CreateContext, Fill and Generate, through HTTP one
POST /v1/completions with the same values. Both must do what is known of the values: all are right, or one is wrong.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from jaxctx import rpc
from jaxctx.errors import JaxctxError
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.auth import Key
from jaxctx_server.http.errors import http_status
from jaxctx_server.services import Backend
from tests.e2e.conftest import CONFIG, TENANTS, grpc_address
from tests.echo import VOCAB_SIZE
from tests.server.http.client import HttpClient, http_server

LONGEST = CONFIG.max_context_tokens
INT32, INT64 = 2**31 - 1, 2**63 - 1
NAN, INFINITY = math.nan, math.inf
AT_ONCE = 8


@dataclass(frozen=True)
class Values:
    """Values of one field: those that are right and those that are wrong."""

    right: list[Any]
    wrong: list[Any] = field(default_factory=list)


SAMPLING = {
    "temperature": Values([0, 0.0, 0.5, 1, 100, 1e-9], [-1, -1e-9, 100.1, NAN, INFINITY, -INFINITY, 1e308]),
    "top_k": Values([0, 1, 5, VOCAB_SIZE], [-2, VOCAB_SIZE + 1, INT32, -INT32 - 1]),
    "top_p": Values([1, 0.5, 1e-9], [0, -0.5, 1.1, NAN, INFINITY]),
    "min_p": Values([0, 0.5, 1], [-0.1, 1.1, NAN, -INFINITY]),
    "repetition_penalty": Values([1, 0.5, 10, 1e-9], [0, -1, 10.1, NAN]),
    "presence_penalty": Values([0, -2, 2, 0.5], [-2.1, 2.1, NAN, INFINITY]),
    "frequency_penalty": Values([0, -2, 2, 0.5], [-2.1, 2.1, NAN, 1e300]),
    "seed": Values([0, 1, 7, INT64], [-2, -INT64 - 1]),  # -1 is none over HTTP, as in other servers
    "allowed_token_ids": Values(
        [[], [5], [0, VOCAB_SIZE - 1], list(range(1, 400))],
        [[-1], [VOCAB_SIZE], [5, INT32], [1] * 1025],
    ),
    "bad_words": Values(
        [[], ["a"], ["the", "sea shore", " x"], ["x" * 256], ["é日本"], [f"{number} " for number in range(64)]],
        [[""], ["a", ""], ["x" * 257], ["é" * 129], ["a"] * 65],
    ),
    "logit_bias": Values(
        [{}, {5: 100}, {0: -100, VOCAB_SIZE - 1: 0.5}, dict.fromkeys(range(300), 1)],
        [{-1: 1}, {VOCAB_SIZE: 1}, {5: 100.5}, {5: NAN}, {5: -INFINITY}, dict.fromkeys(range(301), 1)],
    ),
}
GENERATE = {
    "n": Values([1, 2, 3], [-1, 0, 129, INT32]),
    "stop": Values(
        [[], ["a"], ["ab", "zz", "\n"], ["x" * 256], [f"{number} " for number in range(16)], ["é", "日本"]],
        [[""], ["a", ""], ["x" * 257], ["é" * 129], [f"{number} " for number in range(17)], ["a"] * 5000],
    ),
    "stop_token_ids": Values(
        [[], [5], [0, VOCAB_SIZE - 1], list(range(64))],
        [[-1], [VOCAB_SIZE], [5, INT32], list(range(65)), [1] * 5000],
    ),
    "ignore_eos": Values([True, False]),
    "include_stop": Values([True, False]),
}
LENGTHS = Values(  # max_tokens and min_tokens; None: not set
    [(1, None), (3, 0), (5, 2), (4, 4), (12, None)],
    [(-1, None), (LONGEST + 1, None), (INT32, None), (-INT32 - 1, None), (5, 6), (5, -1), (5, INT32)],
)
PROMPTS = Values(
    [
        "the sea",
        "a",
        "é日本\n\x00 🦀",
        "<|im_end|>",
        "word " * 100,
        [5],
        [0, VOCAB_SIZE - 1, 256, 257],
        list(range(200)),
        [1] * (LONGEST - 1),
    ],
    ["", [], [-1], [VOCAB_SIZE], [1, 2, INT32], [1] * (LONGEST + 1), "~" * (LONGEST + 1), "~" * 100_000, [1] * LONGEST],
)
MODELS = Values(["", "echo"], ["other", "Echo", "x" * 256, "x" * 257, "é\n"])
SALTS = Values(["", "pepper", "x" * 64], ["x" * 257])
KEYS = Values(list(TENANTS), [None, "", "carol", "x" * 600])
HTTP_NAMES = {
    "model_id": "model",
    "salt": "cache_salt",
    "include_stop": "include_stop_str_in_output",
    "text": "prompt",
    "tokens": "prompt",
}
FINISH = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass
class Request:
    """A request in the words of the contract."""

    key: str | None
    model: str
    salt: str
    prompt: str | list[int]
    lengths: tuple[int, int | None]
    sampling: dict[str, Any]
    generate: dict[str, Any]
    wrong: list[str]  # what is wrong with it


@dataclass(frozen=True)
class Outputs:
    """What was generated: texts and reasons to finish, and the usage."""

    texts: tuple[tuple[str, str], ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Refusal:
    """The status, its reason, and the first field that is wrong, by its name in HTTP and without what is in it."""

    status: int
    reason: str
    field: str | None


def make_request(rng: random.Random, number: int) -> Request:
    """A random request. Every second one has something wrong, each field in turn."""
    request = Request(TENANTS[0], "echo", "", "the sea", (4, None), {}, {}, [])
    names = [*SAMPLING, *GENERATE, "key", "model", "salt", "prompt", "lengths"]
    wrong_name = names[number // 2 % len(names)] if number % 2 else ""
    more_wrong = rng.choice(names) if wrong_name and rng.random() < 0.1 else ""

    def choose(name: str, values: Values) -> Any:
        if name in (wrong_name, more_wrong) and values.wrong:
            request.wrong.append(name)
            return rng.choice(values.wrong)
        return rng.choice(values.right)

    request.key = choose("key", KEYS)
    request.model = choose("model", MODELS)
    request.salt = choose("salt", SALTS)
    request.prompt = choose("prompt", PROMPTS)
    request.lengths = choose("lengths", LENGTHS)
    for name, values in SAMPLING.items():
        if name in (wrong_name, more_wrong) or rng.random() < 0.25:
            request.sampling[name] = choose(name, values)
    for name, values in GENERATE.items():
        if name in (wrong_name, more_wrong) or rng.random() < 0.25:
            request.generate[name] = choose(name, values)
    if "seed" not in request.sampling:  # else outputs could differ
        request.sampling["seed"] = 7
    return request


class GrpcTransport:
    """Requests as three calls of the contract."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._contexts = ContextServiceStub(channel)

    async def __call__(self, request: Request, number: int) -> Outputs | Refusal:
        metadata = () if request.key is None else (("authorization", f"Bearer {request.key}"),)
        create, fill, generate = self._messages(request, f"c{number}")
        try:
            await self._contexts.CreateContext(create, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return refusal_of(rpc.from_rpc_error(error))
        try:
            await self._contexts.Fill(fill, metadata=metadata)
            return await self._outputs(generate, metadata)
        except grpc.aio.AioRpcError as error:
            return refusal_of(rpc.from_rpc_error(error))
        finally:
            await self._contexts.CloseContext(pb.CloseContextRequest(context_id=create.context_id), metadata=metadata)

    def _messages(
        self, request: Request, context_id: str
    ) -> tuple[pb.CreateContextRequest, pb.FillRequest, pb.GenerateRequest]:
        create = pb.CreateContextRequest(context_id=context_id, model_id=request.model, salt=request.salt)
        create.ttl.duration.seconds = 60
        fill = pb.FillRequest(context_id=context_id)
        if isinstance(request.prompt, str):
            fill.text = request.prompt
        else:
            fill.tokens.SetInParent()
            fill.tokens.ids.extend(request.prompt)
        generate = pb.GenerateRequest(context_id=context_id, sampling=request.sampling, **request.generate)
        generate.max_tokens, min_tokens = request.lengths
        generate.min_tokens = min_tokens or 0
        return create, fill, generate

    async def _outputs(self, generate: pb.GenerateRequest, metadata: Any) -> Outputs:
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        prompt_tokens = completion_tokens = 0
        context_ids = set()
        async for part in self._contexts.Generate(generate, metadata=metadata):
            texts[part.index] = texts.get(part.index, "") + part.text
            completion_tokens += len(part.token_ids)
            context_ids.add(part.context_id)
            if part.finish:
                reasons[part.index] = FINISH[part.finish]
                prompt_tokens = part.usage.prompt_tokens
        for context_id in context_ids - {generate.context_id}:
            await self._contexts.CloseContext(pb.CloseContextRequest(context_id=context_id), metadata=metadata)
        ends = tuple((texts[index], reasons[index]) for index in range(len(texts)))
        return Outputs(ends, prompt_tokens, completion_tokens)


def refusal_of(error: JaxctxError) -> Refusal:
    """An error of gRPC as HTTP would tell it."""
    path = error.violations[0].field if error.violations else None
    if error.reason == "MODEL_NOT_FOUND":
        path = "model"  # which only HTTP names: NOT_FOUND has no fields in gRPC
    return Refusal(http_status(error), error.reason, None if path is None else base_name(path))


def base_name(path: str) -> str:
    """The field of a path, by its name in HTTP, without what is in it."""
    name = path.removeprefix("sampling.").partition("[")[0].partition(".")[0]
    return HTTP_NAMES.get(name, name)


class HttpTransport:
    """Requests as one POST /v1/completions."""

    def __init__(self, web: HttpClient) -> None:
        self._web = web

    async def __call__(self, request: Request) -> Outputs | Refusal:
        headers = {} if request.key is None else {"authorization": f"Bearer {request.key}"}
        body = json.dumps(self._body(request)).encode()  # with NaN, which this server's parser takes too
        answer = await self._web(
            "POST", "/v1/completions", body, headers={"content-type": "application/json", **headers}
        )
        if answer.status != 200:
            error = answer.json["error"]
            path = error["param"]
            return Refusal(answer.status, error["code"], None if path is None else base_name(path))
        choices = sorted(answer.json["choices"], key=lambda choice: choice["index"])
        texts = tuple((choice["text"], choice["finish_reason"]) for choice in choices)
        usage = answer.json["usage"]
        return Outputs(texts, usage["prompt_tokens"], usage["completion_tokens"])

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request.model, "cache_salt": request.salt, "prompt": request.prompt}
        body["max_tokens"], min_tokens = request.lengths
        if min_tokens is not None:
            body["min_tokens"] = min_tokens
        body |= request.sampling
        body |= {HTTP_NAMES.get(name, name): value for name, value in request.generate.items()}
        return body


@pytest.fixture
def keys(two_tenants: list[Key]) -> list[Key]:
    return two_tenants


@pytest.fixture
async def transports(backend: Backend) -> AsyncIterator[tuple[GrpcTransport, HttpTransport]]:
    async with (
        grpc_address(backend) as address,
        http_server(backend) as web,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield GrpcTransport(channel), HttpTransport(web)


def summary(request: Request) -> str:
    """A request in one line."""
    return repr(request)[:2000]


@pytest.mark.parametrize(
    "count", [60, pytest.param(200, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.campaign)]
)
async def test_the_same_requests_get_the_same_decisions(
    transports: tuple[GrpcTransport, HttpTransport], backend: Backend, count: int
) -> None:
    rng = random.Random(count)
    over_grpc, over_http = transports
    limit = asyncio.Semaphore(AT_ONCE)
    accepted, refused = [], []

    async def compare(number: int, request: Request) -> None:
        async with limit:
            by_grpc, by_http = await asyncio.gather(over_grpc(request, number), over_http(request))
        if len(request.wrong) <= 1:
            assert by_http == by_grpc, summary(request)
        assert isinstance(by_grpc, Refusal) == bool(request.wrong), f"{by_grpc} {summary(request)}"
        assert isinstance(by_http, Refusal) == bool(request.wrong), f"{by_http} {summary(request)}"
        (refused if request.wrong else accepted).append(by_http)

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(compare(number, make_request(rng, number)))
    assert len(accepted) > count / 4
    assert len(refused) > count / 4
    assert {each.status for each in refused} >= {400, 401}
