"""Rules between fields of a request, and the limits of one server."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from jaxctx import rpc
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2
from jaxctx_server.validate import validate
from tests.server.validate.requests import refused_fields


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (context_service_pb2.FillRequest(context_id="a"), "content"),
        (context_service_pb2.PlanRequest(context_id="a"), "content"),
        (context_service_pb2.PlanRequest(context_id="a", text="x", salt="s"), "salt"),
        (context_service_pb2.PlanRequest(context_id="a", text="x", model_id="fake"), "model_id"),
        (context_service_pb2.CreateContextRequest(pin_for={"seconds": 1}), "pin_for"),
        (context_service_pb2.UpdateContextRequest(context_id="a", pinned=False, pin_for={"seconds": 1}), "pin_for"),
        (context_service_pb2.UpdateContextRequest(context_id="a", pin_for={"seconds": 1}), "pin_for"),
        (
            context_service_pb2.ForwardRequest(
                context_id="a", tokens=[1] * 1025, masks=[{"bounds": range(128)}] * 1025
            ),
            "masks",
        ),
        (context_service_pb2.ForkRequest(context_id="a", n=3, child_ids=["x", "y"]), "n"),
        (context_service_pb2.FillRequest(context_id="a", text="x" * 20_001), "text"),
        (
            context_service_pb2.FillRequest(
                context_id="a", messages={"messages": [{"role": "u", "content": "x" * 20_001}]}
            ),
            "messages",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
async def test_fields_that_are_wrong_together(grpc_server: Any, request_: Any, named: str) -> None:
    await grpc_server.contexts.CreateContext(context_service_pb2.CreateContextRequest(context_id="a"))
    name = type(request_).__name__.removesuffix("Request")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await getattr(grpc_server.contexts, name)(request_)
    error = rpc.from_rpc_error(raised.value)
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [named]


def test_only_a_single_output_can_be_resumed(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(context_id="a", max_tokens=9, resume_tokens=8)
    validate(limits, request)
    request.n = 1
    validate(limits, request)
    request.n = 2
    assert refused_fields(limits, request) == ["n"]


def test_logits_fit_into_an_answer(limits: Any) -> None:
    big = dataclasses.replace(limits, vocab_size=1 << 20)  # 4 MiB a row
    outputs = [{"index": i, "logits": True} for i in range(13)]
    validate(big, context_service_pb2.ForwardRequest(context_id="a", tokens=[1] * 13, outputs=outputs[:12]))
    with pytest.raises(InvalidArgument, match="up to 12 tokens, not 13"):
        validate(big, context_service_pb2.ForwardRequest(context_id="a", tokens=[1] * 13, outputs=outputs))
