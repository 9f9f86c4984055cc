"""The servers under load: ours through gRPC, a peer through the OpenAI API. Both clients do the same work per token."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, Sequence
from typing import TYPE_CHECKING, cast

import grpc

from bench_serving.load import Answer
from jaxctx.v1 import admin_service_pb2, content_pb2, generation_pb2, model_service_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.admin_service_pb2_grpc import AdminServiceStub
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub

if TYPE_CHECKING:
    import aiohttp

    from jaxctx.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from jaxctx.v1.context_service_pb2_grpc import ContextServiceAsyncStub
    from jaxctx.v1.model_service_pb2_grpc import ModelServiceAsyncStub

REQUEST_TIMEOUT_S = 600.0
GREEDY = generation_pb2.SamplingParams(temperature=0)


class ServerError(Exception):
    """A server did not do what was asked: the comparison would mean nothing."""


class JaxctxServer:
    """Ours. A request is one fresh context: created, filled, continued, closed."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._contexts = cast("ContextServiceAsyncStub", ContextServiceStub(channel))
        self._models = cast("ModelServiceAsyncStub", ModelServiceStub(channel))
        self._admin = cast("AdminServiceAsyncStub", AdminServiceStub(channel))

    async def model(self) -> model_service_pb2.Model:
        """The model it serves."""
        response = await self._models.GetModel(model_service_pb2.GetModelRequest(), timeout=REQUEST_TIMEOUT_S)
        return response.model

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """See `load.Target`. The fill is deferred, so that one call computes the prompt and samples from it."""
        begin = time.perf_counter()
        created = await self._contexts.CreateContext(pb.CreateContextRequest(), timeout=REQUEST_TIMEOUT_S)
        context_id = created.context.context_id
        fill = pb.FillRequest(context_id=context_id, tokens=content_pb2.TokenIds(ids=prompt), defer=True)
        await self._contexts.Fill(fill, timeout=REQUEST_TIMEOUT_S)
        generate = pb.GenerateRequest(context_id=context_id, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True)
        first_s = last_s = 0.0
        tokens = first_tokens = 0
        cached: int | None = None
        async for piece in self._contexts.Generate(generate, timeout=REQUEST_TIMEOUT_S):
            if piece.token_ids:
                last_s = time.perf_counter() - begin
                if not tokens:
                    first_s, first_tokens = last_s, len(piece.token_ids)
                tokens += len(piece.token_ids)
            if piece.HasField("usage"):
                cached = piece.usage.cached_tokens
        await self._contexts.CloseContext(pb.CloseContextRequest(context_id=context_id), timeout=REQUEST_TIMEOUT_S)
        return _checked(Answer(first_s, last_s, tokens, first_tokens, cached), max_tokens)

    async def drafts(self) -> tuple[int, int] | None:
        """See `load.Target`. Not told to those who may not ask, nor by a server from before there were drafts."""
        try:
            response = await self._admin.GetStats(admin_service_pb2.GetStatsRequest(), timeout=REQUEST_TIMEOUT_S)
            stats = [engine.stats for engine in response.engines]
            return sum(each.tokens_drafted for each in stats), sum(each.tokens_accepted for each in stats)
        except (grpc.RpcError, AttributeError):
            return None


class OpenAIServer:
    """A peer with an OpenAI-compatible `/v1/completions` that takes token ids."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._model = ""

    async def model(self) -> str:
        """The name of the first model it serves, which all requests will use."""
        async with self._session.get(f"{self._url}/v1/models") as response:
            if response.status != 200:
                raise ServerError(f"/v1/models answered {response.status}")
            listed = await response.json()
        self._model = str(listed["data"][0]["id"])
        return self._model

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """See `load.Target`."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ServerError(f"/v1/completions answered {response.status}: {(await response.text())[:400]}")
            return _checked(await read_events(response.content, begin), max_tokens)

    async def drafts(self) -> tuple[int, int] | None:
        """See `load.Target`; the API has no word for it."""
        return None


async def read_events(lines: AsyncIterable[bytes], begin: float) -> Answer:
    """The server-sent events of one streamed completion, as they come. Without usage, one event counts as one token."""
    first_s = last_s = 0.0
    events = 0
    usage: dict[str, object] = {}
    async for line in lines:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        usage = event.get("usage") or usage
        if event.get("choices"):
            last_s = time.perf_counter() - begin
            first_s = first_s or last_s
            events += 1
    tokens = usage.get("completion_tokens", events)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Answer(first_s, last_s, tokens if isinstance(tokens, int) else events, 1, cached)


def _checked(answer: Answer, max_tokens: int) -> Answer:
    if answer.tokens != max_tokens:
        raise ServerError(f"{answer.tokens} tokens came where {max_tokens} were asked for")
    return answer
