"""The way in and out of a call: errors, keys, deadlines, cancellation, slow readers, health, reflection, limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from jaxctx import errors
from jaxctx.types import FinishReason, GeneratePiece, TokenLogprob
from jaxctx.v1 import (
    admin_service_pb2,
    engine_service_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_service_pb2,
)
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.auth import METHODS, Role
from jaxctx_server.grpc.caller import MAX_DEADLINE_S
from jaxctx_server.grpc.server import SERVICES, options
from jaxctx_server.service import pipeline
from tests.server.harness import KEYS, bearer, create, eventually, failure

STREAMED = ("Generate", "WatchContexts", "ReadVariable", "Register")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error_class", errors.BY_CODE.values(), ids=errors.BY_CODE)
async def test_errors_of_the_engine_arrive_with_their_details(grpc_server: Any, error_class: Any) -> None:
    raised = error_class("why", reason="SOME_REASON", violations=[errors.FieldViolation("f", "d")], retry_after_s=1.5)
    grpc_server.engine.error = raised
    error = await failure(grpc_server.contexts.Flush(pb.FlushRequest(context_id="a")))
    assert type(error) is error_class
    assert (error.message, error.reason, error.retry_after_s) == ("why", "SOME_REASON", 1.5)
    assert error.violations == raised.violations
    grpc_server.engine.error = raised
    error = await failure(grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a")).read())
    assert (type(error), error.reason) == (error_class, "SOME_REASON")


async def test_error_info_is_always_there(grpc_server: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await grpc_server.contexts.GetContext(pb.GetContextRequest(context_id="nobody"))
    status = rpc_status.from_call(raised.value)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("jaxctx", "CONTEXT_NOT_FOUND")


@pytest.mark.parametrize("streamed", [False, True])
async def test_unknown_exceptions_are_opaque(
    grpc_server: Any, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    grpc_server.engine.error = ValueError("the prompt was: my secret")
    with caplog.at_level(logging.INFO):
        call = (
            grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a")).read()
            if streamed
            else grpc_server.contexts.Flush(pb.FlushRequest(context_id="a"))
        )
        error = await failure(call)
    assert isinstance(error, errors.Internal)
    found = re.fullmatch(r"internal error, incident ([0-9a-f]{16})", error.message)
    assert found
    (record,) = [each for each in caplog.records if each.name == "jaxctx.server"]
    logged: dict[str, Any] = record.__dict__
    assert (logged["incident"], logged["exception"]) == (found[1], "ValueError")
    assert "secret" not in str(logged)
    assert any("conftest.py" in place for place in logged["where"]), logged["where"]
    await create(grpc_server)  # the next call is none the worse


async def test_a_missing_template_has_a_reason(open_grpc_server: Any, text: Any) -> None:
    async with open_grpc_server(text=replace(text, chat_template=None)) as grpc_server:
        request = model_service_pb2.ApplyChatTemplateRequest(messages={"messages": [{"role": "user"}]})
        error = await failure(grpc_server.models.ApplyChatTemplate(request))
        assert (type(error), error.reason) == (errors.FailedPrecondition, "NO_CHAT_TEMPLATE")


async def test_request_ids(grpc_server: Any) -> None:
    for given, echoed in [("my-id.7", "my-id.7"), ("no good", None), ("x" * 129, None), (None, None)]:
        metadata = () if given is None else (("x-request-id", given),)
        call = grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=metadata)
        await call
        returned = dict(await call.trailing_metadata())["x-request-id"]
        assert returned == echoed or (echoed is None and re.fullmatch(r"[0-9a-f]{16}", returned))
    call = grpc_server.contexts.GetContext(pb.GetContextRequest(context_id="no"), metadata=(("x-request-id", "mine"),))
    await failure(call)
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine"


# --- keys -------------------------------------------------------------------------------------------------------------


def test_every_method_of_every_service_has_a_role() -> None:
    files = [
        pb,
        engine_service_pb2,
        session_service_pb2,
        snapshot_service_pb2,
        model_service_pb2,
        admin_service_pb2,
        health_pb2,
        reflection_pb2,
    ]
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {method for method in methods if "Health/List" not in method} == METHODS.keys()
    assert {method for method, role in METHODS.items() if role is Role.ADMIN} == {
        f"/jaxctx.v1.AdminService/{name}" for name in ("GetStats", "Drain", "ClearCache")
    }
    assert {method for method, role in METHODS.items() if role is Role.CLUSTER} == {"/jaxctx.v1.EngineService/Register"}
    assert {method for method, role in METHODS.items() if role is Role.ANYONE} == {
        f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")
    }


async def test_without_a_key_nothing_but_health(open_grpc_server: Any) -> None:
    async with open_grpc_server(keys=KEYS) as grpc_server:
        for service in SERVICES:
            stub = grpc_server.stub(service.rpartition(".")[2])
            for name in (name for name in METHODS if name.startswith(f"/{service}/")):
                method = name.rpartition("/")[2]
                call = getattr(stub, method)(_request(method))
                error = await failure(call.read() if method in STREAMED else call)
                assert isinstance(error, errors.Unauthenticated), method
        assert {name for name, *_ in grpc_server.engine.calls} <= {"stats"}  # which the server asks for by itself
        health = health_pb2_grpc.HealthStub(grpc_server.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(grpc_server.channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            ).read()
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


def _request(method: str) -> Any:
    modules = (
        pb,
        session_service_pb2,
        snapshot_service_pb2,
        model_service_pb2,
        admin_service_pb2,
        engine_service_pb2,
    )
    return next(getattr(module, f"{method}Request") for module in modules if hasattr(module, f"{method}Request"))()


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "Bearer wrong", "bearer a-ke", "Basic a-key", "a-key", "Bearer " + "x" * 600],
)
async def test_unknown_keys(open_grpc_server: Any, header: str) -> None:
    async with open_grpc_server(keys=KEYS) as grpc_server:
        metadata = (("authorization", header),)
        error = await failure(grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=metadata))
        assert isinstance(error, errors.Unauthenticated)
        assert "x" * 20 not in error.message


async def test_keys_are_tenants_and_roles(open_grpc_server: Any) -> None:
    async with open_grpc_server(keys=KEYS) as grpc_server:
        await create(grpc_server, metadata=bearer("a-key"))
        assert grpc_server.last("create")[0].tenant == "red"
        foreign = await failure(
            grpc_server.contexts.GetContext(pb.GetContextRequest(context_id="a"), metadata=bearer("b-key"))
        )
        unknown = await failure(
            grpc_server.contexts.GetContext(pb.GetContextRequest(context_id="z"), metadata=bearer("b-key"))
        )
        assert (
            (type(foreign), foreign.reason) == (type(unknown), unknown.reason) == (errors.NotFound, "CONTEXT_NOT_FOUND")
        )
        assert foreign.message.replace("'a'", "'z'") == unknown.message
        denied = await failure(
            grpc_server.admin.GetStats(admin_service_pb2.GetStatsRequest(), metadata=bearer("a-key"))
        )
        assert isinstance(denied, errors.PermissionDenied)
        await grpc_server.admin.GetStats(admin_service_pb2.GetStatsRequest(), metadata=bearer("r-key"))
        await grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=bearer("r-key"))


async def test_methods_that_do_not_exist(open_grpc_server: Any) -> None:
    async with open_grpc_server(keys=KEYS) as grpc_server:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await grpc_server.channel.unary_unary("/jaxctx.v1.ContextService/Nope")(b"")
        assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_method_missing_from_the_table_is_refused(
    open_grpc_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(METHODS, "/jaxctx.v1.ContextService/Flush")
    for keys in (None, KEYS):
        async with open_grpc_server(keys=keys) as grpc_server:
            call = grpc_server.contexts.Flush(pb.FlushRequest(context_id="a"), metadata=bearer("r-key"))
            assert isinstance(await failure(call), errors.PermissionDenied)


# --- deadlines and cancellation ---------------------------------------------------------------------------------------


async def test_deadlines_reach_the_engine(grpc_server: Any) -> None:
    await create(grpc_server)
    await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="x"), timeout=50)
    deadline = grpc_server.last("fill")[0].deadline
    assert 1000 < deadline < 1051  # the grpc_server's clock stands at 1000
    async for _ in grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"), timeout=70):
        pass
    assert 1051 < grpc_server.last("generate")[0].deadline < 1071
    await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="x"))
    assert grpc_server.last("fill")[0].deadline == 1000 + MAX_DEADLINE_S  # nobody waits for ever


async def test_cancelling_a_unary_call_cancels_the_engine(grpc_server: Any) -> None:
    await create(grpc_server)
    grpc_server.engine.hang = True
    call = asyncio.ensure_future(grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="x")))
    await eventually(lambda: any(name == "fill" for name, *_ in grpc_server.engine.calls))
    call.cancel()
    await eventually(lambda: grpc_server.engine.cancelled == ["fill"])


async def test_a_deadline_that_passes_cancels_the_engine(grpc_server: Any) -> None:
    await create(grpc_server)
    grpc_server.engine.hang = True
    error = await failure(grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="x"), timeout=0.3))
    assert isinstance(error, errors.DeadlineExceeded)
    await eventually(lambda: grpc_server.engine.cancelled == ["fill"])


@pytest.mark.parametrize("how", ["cancel", "channel"])
async def test_leaving_a_stream_closes_the_engines_iterator(grpc_server: Any, how: str) -> None:
    await create(grpc_server)
    grpc_server.engine.hang = True
    call = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))
    assert (await call.read()).text == "a"
    if how == "cancel":
        call.cancel()
    else:
        await grpc_server.channel.close()
    await eventually(lambda: grpc_server.engine.cancelled == ["generate"])


async def test_leaving_before_the_first_piece(grpc_server: Any) -> None:
    await create(grpc_server)
    grpc_server.engine.hang = True
    for _ in range(20):
        call = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))
        await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.read()
    await eventually(
        lambda: len(grpc_server.engine.cancelled) == sum(name == "generate" for name, *_ in grpc_server.engine.calls)
    )


# --- slow readers -----------------------------------------------------------------------------------------------------


def long_outputs(tokens: int, n: int = 2) -> list[GeneratePiece]:
    pieces = []
    for place in range(tokens):
        for index in range(n):
            pieces.append(
                GeneratePiece(
                    index=index,
                    context_id="a",
                    text=f"{place} ",
                    token_ids=[place],
                    logprobs=[TokenLogprob(token_id=place, logprob=-1.0)],
                    finish=FinishReason.LENGTH if place == tokens - 1 else None,
                )
            )
    return pieces


async def test_of_long_outputs_nothing_is_lost(grpc_server: Any) -> None:
    await create(grpc_server)
    grpc_server.engine.pieces = long_outputs(600)
    received: dict[int, list[Any]] = {0: [], 1: []}
    async for piece in grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a", n=2)):
        received[piece.index].append(piece)
    for pieces in received.values():
        assert "".join(piece.text for piece in pieces) == "".join(f"{place} " for place in range(600))
        assert [token for piece in pieces for token in piece.token_ids] == list(range(600))
        assert [each.token_id for piece in pieces for each in piece.logprobs] == list(range(600))
        assert [bool(piece.finish) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_a_slow_reader_holds_only_its_own_bounded_buffer(grpc_server: Any) -> None:
    await create(grpc_server)
    size, text = 20_000, "x" * 2000  # far more than the transport's windows hold
    grpc_server.engine.pieces = [GeneratePiece(index=0, context_id="a", text=text, token_ids=[1]) for _ in range(size)]
    call = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))
    total = len((await call.read()).text)
    pulled = -1
    while pulled != grpc_server.engine.pulled:  # until it no longer moves
        pulled = grpc_server.engine.pulled
        await asyncio.sleep(0.2)
    assert pulled < size
    await asyncio.wait_for(create(grpc_server, "b"), 120)  # a neighbour does not notice
    while (piece := await call.read()) is not grpc.aio.EOF:
        total += len(piece.text)
    assert total == size * len(text)
    assert grpc_server.engine.cancelled == []


async def test_an_error_after_some_pieces(grpc_server: Any, make_engine: Any) -> None:
    class Broken(make_engine):  # type: ignore[misc]
        async def generate(self, caller: Any, request: Any) -> Any:
            yield GeneratePiece(index=0, context_id="a", text="x", token_ids=[1])
            raise errors.Unavailable("gone")

    served = grpc_server.lifecycle.served()
    grpc_server.lifecycle.set_ready(replace(served, model=replace(served.model, engine=Broken())))
    call = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))
    assert (await call.read()).text == "x"
    assert isinstance(await failure(call.read()), errors.Unavailable)


# --- health, reflection, limits ---------------------------------------------------------------------------------------


async def test_health_from_loading_to_drained(open_grpc_server: Any) -> None:
    async with open_grpc_server(ready=False) as grpc_server:
        health = health_pb2_grpc.HealthStub(grpc_server.channel)

        async def check(service: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        unread = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))  # holds nobody up
        assert (await watch.read()).status == NOT_SERVING
        assert await check("") == SERVING
        assert [await check(service) for service in SERVICES] == [NOT_SERVING] * len(SERVICES)
        error = await failure(grpc_server.contexts.ListContexts(pb.ListContextsRequest()))
        assert (type(error), error.reason, error.retry_after_s) == (errors.Unavailable, "NOT_SERVING", 1.0)
        error = await failure(grpc_server.admin.Drain(admin_service_pb2.DrainRequest()))
        assert isinstance(error, errors.Unavailable)

        grpc_server.lifecycle.set_ready(grpc_server.state)
        assert (await watch.read()).status == SERVING
        assert [await check(service) for service in SERVICES] == [SERVING] * len(SERVICES)

        grpc_server.engine.drained.clear()  # there is running work
        drain = grpc_server.admin.Drain(admin_service_pb2.DrainRequest())
        waiting = asyncio.ensure_future(drain)
        assert (await watch.read()).status == NOT_SERVING
        assert grpc_server.engine.draining
        assert await check(SERVICES[0]) == NOT_SERVING
        assert await check("") == SERVING
        assert not waiting.done()
        drain.cancel()  # it goes on all the same
        again = asyncio.ensure_future(grpc_server.admin.Drain(admin_service_pb2.DrainRequest()))
        await asyncio.sleep(0.05)
        assert not again.done()
        grpc_server.engine.drained.set()
        await again
        grpc_server.lifecycle.stop()
        assert await watch.read() is grpc.aio.EOF
        unread.cancel()


async def test_health_of_unknown_services(grpc_server: Any) -> None:
    health = health_pb2_grpc.HealthStub(grpc_server.channel)
    assert isinstance(await failure(health.Check(health_pb2.HealthCheckRequest(service="x"))), errors.NotFound)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="x"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_reflection_lists_the_services(grpc_server: Any) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(grpc_server.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxctx.v1.ContextService"),
    ]
    listed, file = [response async for response in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health"} <= names
    assert len(file.file_descriptor_response.file_descriptor_proto) >= 1


async def test_calls_without_a_key_have_a_limit_of_their_own(
    open_grpc_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MAX_OPEN_CALLS", 2)
    async with open_grpc_server(keys=KEYS, max_calls=4) as grpc_server:  # of which the transport lets four in at once
        health = health_pb2_grpc.HealthStub(grpc_server.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        error = await failure(health.Check(health_pb2.HealthCheckRequest()))
        assert (type(error), error.reason) == (errors.ResourceExhausted, "QUEUE_FULL")
        await create(grpc_server, metadata=bearer("a-key"))
        for watch in watches:
            watch.cancel()


async def test_calls_beyond_the_limit_are_refused(open_grpc_server: Any) -> None:
    async with open_grpc_server(max_calls=2) as grpc_server:
        await create(grpc_server)
        grpc_server.engine.hang = True
        streams = [grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a")) for _ in range(2)]
        for stream in streams:
            await stream.read()
        # The transport itself lets two calls of a connection in at once, so the third comes from another one.
        async with grpc.aio.insecure_channel(grpc_server.target, [("grpc.use_local_subchannel_pool", 1)]) as other:
            call = other.unary_unary("/jaxctx.v1.ContextService/ListContexts", pb.ListContextsRequest.SerializeToString)
            error = await failure(call(pb.ListContextsRequest()))
            assert (type(error), error.reason) == (errors.ResourceExhausted, "QUEUE_FULL")
            assert error.retry_after_s == 1.0
            streams[0].cancel()
            await eventually(lambda: len(grpc_server.engine.cancelled) == 1)
            await call(pb.ListContextsRequest())


async def test_messages_and_headers_beyond_the_limit_are_refused(grpc_server: Any) -> None:
    too_large = pb.FillRequest(context_id="a", text="x" * (9 << 20))
    assert (await failure(grpc_server.contexts.Fill(too_large))).code == "RESOURCE_EXHAUSTED"
    many = tuple((f"header-{i}", "x" * 1000) for i in range(40))
    refused = await failure(grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=many))
    assert refused.code == "RESOURCE_EXHAUSTED"
    await create(grpc_server)


def test_options_of_the_transport() -> None:
    names = dict(options(5))
    assert names["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert names["grpc.keepalive_permit_without_calls"] == 1
    assert names["grpc.so_reuseport"] == 0
    assert names["grpc.max_concurrent_streams"] == 5


# --- special tokens ---------------------------------------------------------------------------------------------------


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
