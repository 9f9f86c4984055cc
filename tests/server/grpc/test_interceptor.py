"""The gRPC side of the call pipeline: errors as statuses, request ids, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import (
    model_service_pb2,
)
from jaxctx_server.services import MAX_DEADLINE_S
from tests.server.harness import KEYS, bearer, create, eventually, failure


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
    assert any("fake_engine.py" in place for place in logged["where"]), logged["where"]
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


async def test_who_is_refused_gets_an_id_too(open_grpc_server: Any) -> None:
    async with open_grpc_server(keys=KEYS) as grpc_server:
        request = pb.GetContextRequest(context_id="a")
        call = grpc_server.contexts.GetContext(request, metadata=(*bearer("unknown"), ("x-request-id", "mine")))
        assert (await failure(call)).code == "UNAUTHENTICATED"
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"


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


async def test_a_callers_trace_reaches_the_engine(grpc_server: Any) -> None:
    await create(grpc_server)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    for sent, expected in ((trace, trace), ("no trace", "")):
        metadata = (("traceparent", sent),)
        await grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="x"), metadata=metadata)
        assert grpc_server.last("fill")[0].traceparent == expected
