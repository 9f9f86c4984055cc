"""Errors survive the way through gRPC trailers, on a real in-process server, sync and asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from jaxctx import errors, rpc
from jaxctx.v1 import error_reason_pb2

Abort = Callable[[grpc.ServicerContext], None]
METHOD = "/test.Service/Fail"


@pytest.fixture
def failing() -> Iterator[SimpleNamespace]:
    """A server whose only method ends as `failing.abort(context)` says; `failing.target` is its address."""
    state = SimpleNamespace()

    def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
        state.abort(context)
        return b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.unary_unary_rpc_method_handler(fail)

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Handler(),))
    state.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield state
    server.stop(None).wait()


def through_sync(failing: SimpleNamespace, abort: Abort) -> errors.JaxctxError:
    failing.abort = abort
    with grpc.insecure_channel(failing.target) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(METHOD)(b"", timeout=10)
        return rpc.from_rpc_error(raised.value)


async def through_aio(failing: SimpleNamespace, abort: Abort) -> errors.JaxctxError:
    failing.abort = abort
    async with grpc.aio.insecure_channel(failing.target) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            await channel.unary_unary(METHOD)(b"", timeout=10)
        return rpc.from_rpc_error(raised.value)


def same(ours: errors.JaxctxError, theirs: errors.JaxctxError) -> bool:
    def parts(error: errors.JaxctxError) -> Any:
        return type(error), error.code, error.message, error.reason, error.violations, error.retry_after_s

    return bool(parts(ours) == parts(theirs))


FULL = {
    "message": "über alles: line\nbreak",
    "reason": "SOME_LATER_REASON",
    "violations": [
        errors.FieldViolation("sampling.top_p", "above 0, up to 1"),
        errors.FieldViolation("stop[3]", "empty"),
    ],
    "retry_after_s": 1.25,
}


@pytest.mark.parametrize("error_class", [*errors.BY_CODE.values(), errors.JaxctxError], ids=lambda c: c.code)
async def test_every_class_comes_back_whole(failing: SimpleNamespace, error_class: type[errors.JaxctxError]) -> None:
    plain = error_class("plain")
    full = error_class(**FULL)  # type: ignore[arg-type]
    for error in (plain, full):
        abort: Abort = lambda context, error=error: context.abort_with_status(rpc.to_status(error))  # noqa: E731
        assert same(through_sync(failing, abort), error)
        assert same(await through_aio(failing, abort), error)


def test_every_default_reason_is_on_the_list() -> None:
    listed = set(error_reason_pb2.ErrorReason.keys())
    for error_class in errors.BY_CODE.values():
        assert f"ERROR_REASON_{error_class.default_reason}" in listed


@pytest.mark.parametrize(
    ("code", "error_class", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable, "NOT_SERVING"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted, "UNSPECIFIED"),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound, "UNSPECIFIED"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.JaxctxError, "UNSPECIFIED"),
    ],
)
def test_status_without_details(
    failing: SimpleNamespace, code: grpc.StatusCode, error_class: type[errors.JaxctxError], reason: str
) -> None:
    error = through_sync(failing, lambda context: context.abort(code, "said the proxy"))
    assert (type(error), error.code, error.reason, error.message) == (error_class, code.name, reason, "said the proxy")


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x08\x05\x12\x01x"], ids=["not a Status", "of another code"])
def test_rewritten_details_leave_code_and_message(failing: SimpleNamespace, garbage: bytes) -> None:
    def abort(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", garbage),))
        context.abort(grpc.StatusCode.ABORTED, "held")

    error = through_sync(failing, abort)
    assert (type(error), error.message, error.violations) == (errors.Aborted, "held", ())


@pytest.mark.parametrize("letter", ["x", "é", "\N{PILE OF POO}", "\ud800"], ids=["ascii", "two", "four", "surrogate"])
def test_the_longest_error_still_fits_into_the_trailers(failing: SimpleNamespace, letter: str) -> None:
    violations = [errors.FieldViolation(letter * 5000, letter * 5000)] * 1000
    long = errors.InvalidArgument(letter * 100_000, violations=violations)
    error = through_sync(failing, lambda context: context.abort_with_status(rpc.to_status(long)))
    assert type(error) is errors.InvalidArgument
    assert error.reason == "INVALID_FIELD"
    assert len(error.violations) == rpc.MAX_VIOLATIONS


def test_the_longest_label_is_named_whole(failing: SimpleNamespace) -> None:
    sent = errors.InvalidArgument.field(f"labels[{'k' * 64}]", "must be text of 0 to 256 bytes")
    error = through_sync(failing, lambda context: context.abort_with_status(rpc.to_status(sent)))
    assert error.violations == sent.violations
