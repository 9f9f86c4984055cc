"""Every field of every method out of its range: INVALID_ARGUMENT that names it, over gRPC."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from jaxctx import rpc
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2
from tests.server.validate.requests import METHODS, TABLE, out_of_range_cases, request_with


def test_the_table_has_every_field_of_every_request() -> None:
    assert TABLE.keys() == METHODS.keys()
    for name, (_, method) in METHODS.items():
        assert TABLE[name].keys() == {field.name for field in method.input_type.fields}, name
    sampling = METHODS["GenerateRequest"][1].input_type.fields_by_name["sampling"].message_type
    assert TABLE["GenerateRequest"]["sampling"].keys() == {field.name for field in sampling.fields}


async def test_each_field_out_of_range_is_refused_by_name(grpc_server: Any) -> None:
    """One server for all cases: none of them may leave it any different."""
    await grpc_server.contexts.CreateContext(context_service_pb2.CreateContextRequest(context_id="a"))
    calls = len(grpc_server.engine.calls)
    for case in out_of_range_cases():
        name, path, value, named = case.values
        service, method = METHODS[name]
        call = getattr(grpc_server.stub(service), method.name)(request_with(name, path, value))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            if method.server_streaming:
                _ = [piece async for piece in call]
            else:
                await call
        error = rpc.from_rpc_error(raised.value)
        assert isinstance(error, InvalidArgument), case.id
        assert error.reason == "INVALID_FIELD"
        fields = [violation.field for violation in error.violations]
        assert len(fields) == 1, (case.id, fields)
        assert fields[0] == named or fields[0].startswith(named), (case.id, fields)
    assert len(grpc_server.engine.calls) == calls


async def test_all_wrong_fields_are_reported_together(grpc_server: Any) -> None:
    call = grpc_server.contexts.Generate(
        context_service_pb2.GenerateRequest(
            context_id="", max_tokens=0, n=0, sampling={"temperature": math.nan, "top_p": 2}, stop=[""]
        )
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    error = rpc.from_rpc_error(raised.value)
    fields = {violation.field for violation in error.violations}
    assert fields == {"context_id", "max_tokens", "n", "sampling.temperature", "sampling.top_p", "stop[0]"}


async def test_no_more_than_16_are_reported(grpc_server: Any) -> None:
    request = context_service_pb2.FillRequest(context_id="a", tokens={"ids": [600] * 1000})
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await grpc_server.contexts.Fill(request)
    assert len(rpc.from_rpc_error(raised.value).violations) == 16


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x02\xff\xfe", b"\x0a\x7fshort", b"\xff\xff\xff\xff"],
    ids=["wrong UTF-8", "cut short", "no message"],
)
async def test_bytes_that_are_no_message(grpc_server: Any, data: bytes) -> None:
    for path, kind in [("Fill", "unary_unary"), ("Generate", "unary_stream")]:
        call = getattr(grpc_server.channel, kind)(f"/jaxctx.v1.ContextService/{path}")(data)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await (call if kind == "unary_unary" else call.read())
        error = rpc.from_rpc_error(raised.value)
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == ["request"]
