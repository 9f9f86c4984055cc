"""One request: the calls of services that it makes are checked like any other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.v1 import admin_service_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.auth import Key, Role
from jaxctx_server.service import request_reader
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of


async def test_a_method_gets_the_caller_of_the_key(backend: Backend) -> None:
    call = call_of(backend)
    created = await call.unary(call.services.contexts.create_context, pb.CreateContextRequest(context_id="a"))
    assert created.context.context_id == "a"
    other = call_of(backend, Key("bob", b"", "blue", Role.USER))
    with pytest.raises(errors.NotFound):
        await other.unary(other.services.contexts.get_context, pb.GetContextRequest(context_id="a"))


async def test_a_message_that_is_not_valid_reaches_no_service(backend: Backend) -> None:
    async def never(caller: Any, request: Any) -> Any:
        raise AssertionError

    call = call_of(backend)
    with pytest.raises(errors.InvalidArgument) as raised:
        await call.unary(never, pb.CreateContextRequest(context_id="a", priority=101))
    assert [each.field for each in raised.value.violations] == ["priority"]


@pytest.mark.parametrize("size", [100, 70_000])
async def test_a_text_of_any_size_is_checked(backend: Backend, size: int) -> None:
    call = call_of(backend)
    with pytest.raises(errors.InvalidArgument) as raised:
        await call.unary(call.services.contexts.fill, pb.FillRequest(context_id="no id!", text="x" * size))
    assert [each.field for each in raised.value.violations] == ["context_id"]


async def test_a_stream_is_checked_and_closed(backend: Backend) -> None:
    ended = False

    async def parts(caller: Any, request: Any) -> AsyncIterator[Any]:
        nonlocal ended
        try:
            while True:
                yield pb.GenerateResponse()
        finally:
            ended = True

    call = call_of(backend)
    stream: Any = parts
    async with aclosing(call.stream(stream, pb.GenerateRequest(context_id="a"))) as responses:
        assert await anext(responses) == pb.GenerateResponse()
    assert ended
    with pytest.raises(errors.InvalidArgument):
        await anext(call.stream(stream, pb.GenerateRequest(context_id="a", min_tokens=-1)))


async def test_a_method_of_another_role(backend: Backend) -> None:
    request = admin_service_pb2.GetStatsRequest()
    call = call_of(backend)
    with pytest.raises(errors.PermissionDenied):
        await call.unary(call.services.admin.get_stats, request)
    call = call_of(backend, Key("root", b"", "ops", Role.ADMIN))
    assert (await call.unary(call.services.admin.get_stats, request)).engines


@pytest.mark.parametrize("size", [10, 5_000, 100_000])
async def test_a_body_of_any_size_is_parsed(backend: Backend, size: int) -> None:
    assert await call_of(backend, body=b"x" * size).parse_body(len) == size


async def test_who_sends_many_large_bodies_waits(backend: Backend) -> None:
    call = call_of(backend, body=b"x" * 100_000)
    budget = backend.pipeline._reader._budget(call.call.budget_owner)
    budget.large_bytes = request_reader.MAX_LARGE_BYTES
    with pytest.raises(errors.ResourceExhausted) as raised:
        await call.parse_body(len)
    assert raised.value.reason == "QUEUE_FULL"
    others = call_of(backend, Key("bob", b"", "blue", Role.USER), b"x" * 100_000)
    assert await others.parse_body(len) == 100_000
