"""ContextService on an engine: content to tokens."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.errors import PermissionDenied
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import (
    model_service_pb2,
)
from jaxctx_server.call_record import CURRENT_RECORD, CallRecord
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.service.contexts import LocalContextService
from tests.server.fake_engine import FakeEngine
from tests.server.harness import create


@pytest.fixture
def text_with_bos(text: Any) -> Any:
    """The echo text with a tokenizer that begins every text with token 257, and a template that writes it too."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    from jaxctx.model.text import ChatTemplate, Tokenizer

    backend = Backend.from_str(text.tokenizer._backend.to_str())
    backend.post_processor = TemplateProcessing(single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", 257)])
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", special_tokens={"bos_token": "<|startoftext|>"})
    return replace(text, tokenizer=Tokenizer(backend), bos_id=257, chat_template=template)


async def test_special_tokens_only_at_the_start_of_a_context(open_grpc_server: Any, text_with_bos: Any) -> None:
    async with open_grpc_server(text=text_with_bos) as grpc_server:

        async def filled(context_id: str, **content: Any) -> list[int]:
            await grpc_server.contexts.Fill(pb.FillRequest(context_id=context_id, **content))
            tokens: list[int] = grpc_server.last("fill")[1][1]
            return tokens

        await create(grpc_server)
        assert await filled("a", text="A") == [257, 65]
        assert await filled("a", text="B") == [66]
        assert await filled("a", text="C", add_special_tokens=True) == [257, 67]
        await create(grpc_server, "b")
        assert await filled("b", text="A", add_special_tokens=False) == [65]
        await create(grpc_server, "c")
        chat = {"messages": [{"role": "user", "content": "A"}]}
        assert await filled("c", messages=chat) == [257, 65]
        assert await filled("c", messages=chat) == [65]
        await grpc_server.contexts.Plan(pb.PlanRequest(context_id="c", text="A"))
        assert grpc_server.last("plan")[1][0] == [65]
        await grpc_server.contexts.Plan(pb.PlanRequest(text="A"))
        assert grpc_server.last("plan")[1][0] == [257, 65]
        tokenized = await grpc_server.models.Tokenize(model_service_pb2.TokenizeRequest(text="A"))
        assert list(tokenized.tokens) == [257, 65]


async def test_long_texts_do_not_hold_up_others(open_grpc_server: Any, text: Any) -> None:
    release = threading.Event()

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        assert text == "" or release.wait(30)
        return [1, 2, 3]

    slow = SimpleNamespace(encode=encode, decode=text.tokenizer.decode, max_token_bytes=None)
    async with open_grpc_server(text=replace(text, tokenizer=slow)) as grpc_server:
        await create(grpc_server)
        request = pb.FillRequest(context_id="a", text="lorem ipsum " * 1000)
        long = asyncio.ensure_future(grpc_server.contexts.Fill(request))
        for _ in range(3):
            await grpc_server.contexts.ListContexts(pb.ListContextsRequest())
        assert not long.done()
        release.set()
        assert (await long).computed == 3


async def test_a_calls_record_has_its_tokens(text: Any, limits: Any) -> None:
    lifecycle, generations = ServerLifecycle(), GenerationMetrics()
    lifecycle.set_ready(ServingState.of(FakeEngine(), text, limits))
    contexts = LocalContextService(lifecycle, generations)
    record, caller = CallRecord(), Caller("alice")
    token = CURRENT_RECORD.set(record)
    try:
        await contexts.create_context(caller, pb.CreateContextRequest(context_id="a"))
        await contexts.fill(caller, pb.FillRequest(context_id="a", text="ABCD"))
        assert (record.prompt_tokens, record.cached_tokens) == (7, 3)  # the engine found 1 on the device, 2 elsewhere
        await contexts.flush(caller, pb.FlushRequest(context_id="a"))
        assert record.prompt_tokens == 7
        parts = contexts.generate(caller, pb.GenerateRequest(context_id="a", n=2))
        assert len([part async for part in parts]) == 4
    finally:
        CURRENT_RECORD.reset(token)
        lifecycle.stop()
    assert (record.completion_tokens, record.finish_reasons, record.model_id) == (4, ["length"] * 2, "fake")
    assert (generations.first_token.count, generations.between_tokens.count) == (2, 2)
    assert dict(generations.outputs) == {"length": 2}


async def test_an_output_that_is_read_no_further_counts_as_cancelled(text: Any, limits: Any) -> None:
    lifecycle, generations = ServerLifecycle(), GenerationMetrics()
    engine = FakeEngine()
    lifecycle.set_ready(ServingState.of(engine, text, limits))
    contexts = LocalContextService(lifecycle, generations)
    await contexts.create_context(Caller("alice"), pb.CreateContextRequest(context_id="a"))
    parts = contexts.generate(Caller("alice"), pb.GenerateRequest(context_id="a"))
    await anext(parts)
    await parts.aclose()
    lifecycle.stop()
    assert dict(generations.outputs) == {"cancelled": 1}
    assert engine.cancelled == ["generate"]


async def test_only_a_server_of_the_cluster_asks_for_tenants(lifecycle: ServerLifecycle, engine: FakeEngine) -> None:
    service = LocalContextService(lifecycle)
    for tenant in ("", "b", "a", "c", "a"):
        await service.create_context(Caller(tenant), pb.CreateContextRequest())
    request = pb.ListContextsRequest(tenants_only=True, limit=2)
    with pytest.raises(PermissionDenied, match="tenants_only"):
        await service.list_contexts(Caller("a"), request)
    router = Caller(of_cluster=True)
    first = await service.list_contexts(router, request)
    assert (list(first.tenants), first.next_page_token, list(first.contexts)) == (["a", "b"], "b", [])
    request.page_token = first.next_page_token
    last = await service.list_contexts(router, request)
    assert (list(last.tenants), last.next_page_token) == (["c"], "")
