"""The call pipeline: keys, roles and the limit of calls."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxctx import errors
from jaxctx.v1 import (
    admin_service_pb2,
    engine_service_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_service_pb2,
)
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.auth import CERTIFIED, LOCAL, METHODS, Key, Role
from jaxctx_server.call_record import CallRecord, current_record
from jaxctx_server.grpc.server import SERVICES
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.metrics.calls import CallMetrics
from jaxctx_server.service import pipeline
from jaxctx_server.service.pipeline import MAX_OPEN_CALLS, Call, CallMetadata, CallPipeline
from jaxctx_server.service.request_reader import RequestReader
from tests.server.harness import KEYS, bearer, create, eventually, failure, key
from tests.server.metrics.exposition import value, values_of

STREAMED = ("Generate", "WatchContexts", "ReadVariable", "Register")


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


ADMIN_METHODS = ("GetStats", "Drain", "ClearCache", "LoadAdapter", "UnloadAdapter", "ListAdapters")


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
        f"/jaxctx.v1.AdminService/{name}" for name in ADMIN_METHODS
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


async def test_calls_without_a_key_have_a_limit_of_their_own(
    open_grpc_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MAX_OPEN_CALLS", 2)
    async with open_grpc_server(keys=KEYS, max_calls=4) as grpc_server:  # of which the transport lets four in at once
        health = health_pb2_grpc.HealthStub(grpc_server.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        error = await failure(health.Watch(health_pb2.HealthCheckRequest()).read())
        assert (type(error), error.reason) == (errors.ResourceExhausted, "QUEUE_FULL")
        await health.Check(health_pb2.HealthCheckRequest())  # or anybody could make probes fail
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


# --- without a transport ----------------------------------------------------------------------------------------------


FILL = "/jaxctx.v1.ContextService/Fill"


def call_of(method: str = FILL, secret: str | None = None, **metadata: Any) -> Call:
    """A call as any transport describes it."""
    fields = dict.fromkeys(("request_id", "tenant", "incarnation")) | {"transport": "grpc"} | metadata
    authorization = None if secret is None else f"Bearer {secret}"
    return Call(CallMetadata(method=method, peer="a connection", authorization=authorization, **fields))


@pytest.fixture
def admitting() -> CallPipeline:
    """A pipeline of two calls at once, with keys."""
    keys = [*KEYS, key("cluster", "c-key", "", Role.CLUSTER)]
    return CallPipeline(KeyStore(keys), RequestReader(ServerLifecycle()), max_calls=2, incarnation="this one")


async def test_a_call_is_admitted_as_its_keys_tenant(admitting: CallPipeline) -> None:
    call = call_of(secret="a-key", request_id="mine", tenant="blue")
    async with admitting.admit(call):
        assert call.key.tenant == "red"  # only a router may name another tenant
        assert call.request_id == "mine"
        assert call.budget_owner == ("alice", "red")
    assert call.outcome == "OK"


async def test_a_router_calls_for_any_tenant_and_for_one_incarnation(admitting: CallPipeline) -> None:
    call = call_of(secret="c-key", tenant="blue", incarnation="this one")
    async with admitting.admit(call):
        assert call.key.tenant == "blue"
    with pytest.raises(errors.Unavailable) as raised:
        async with admitting.admit(call_of(secret="c-key", incarnation="an earlier one")):
            raise AssertionError("it is not admitted")
    assert raised.value.reason == "ENGINE_LOST"


async def test_calls_of_a_router_have_a_limit_of_their_own(admitting: CallPipeline) -> None:
    async with admitting.admit(call_of(secret="a-key")), admitting.admit(call_of(secret="a-key")):
        with pytest.raises(errors.ResourceExhausted):
            async with admitting.admit(call_of(secret="b-key")):
                raise AssertionError("it is not admitted")
        async with admitting.admit(call_of(secret="c-key", incarnation="this one")):
            pass


async def test_calls_that_a_router_forwards_cannot_keep_out_its_heartbeats(admitting: CallPipeline) -> None:
    """They have a limit too."""
    of_router = {"secret": "c-key", "incarnation": "this one"}
    async with AsyncExitStack() as stack:
        for method, limit in ((FILL, 2), (pipeline.HEARTBEAT, MAX_OPEN_CALLS)):
            for _ in range(limit):
                await stack.enter_async_context(admitting.admit(call_of(method, **of_router)))
            with pytest.raises(errors.ResourceExhausted):
                await stack.enter_async_context(admitting.admit(call_of(method, **of_router)))


async def test_those_without_a_key_cannot_use_up_the_probes(admitting: CallPipeline) -> None:
    """As many watch the health as may: a check goes on, and so does the call of a key."""
    async with AsyncExitStack() as watching:
        for _ in range(MAX_OPEN_CALLS):
            await watching.enter_async_context(admitting.admit(call_of("/grpc.health.v1.Health/Watch")))
        with pytest.raises(errors.ResourceExhausted):
            await watching.enter_async_context(admitting.admit(call_of("/grpc.health.v1.Health/Watch")))
        async with admitting.admit(call_of("/grpc.health.v1.Health/Check")), admitting.admit(call_of(secret="a-key")):
            pass


@pytest.mark.parametrize("without_keys", [LOCAL, CERTIFIED])
async def test_without_keys_each_connection_has_a_budget_of_its_own(without_keys: Key) -> None:
    keys = KeyStore(None, without_keys=without_keys)
    admitting = CallPipeline(keys, RequestReader(ServerLifecycle()), max_calls=2, incarnation="this one")
    call = call_of()
    async with admitting.admit(call):
        assert call.budget_owner == ("a connection", "")


async def test_a_defect_leaves_as_an_incident_and_a_transports_error_as_it_is(admitting: CallPipeline) -> None:
    call = call_of(secret="a-key")
    with pytest.raises(errors.Internal, match=r"internal error, incident [0-9a-f]{16}"):
        async with admitting.admit(call):
            raise ZeroDivisionError("a secret")
    assert call.outcome == "INTERNAL"
    with pytest.raises(ConnectionError):
        async with admitting.admit(call_of(secret="a-key"), transport_errors=(ConnectionError,)):
            raise ConnectionError


async def test_no_request_is_read_while_the_server_loads(admitting: CallPipeline) -> None:
    async def receive() -> bytes:
        return b""

    call = call_of(secret="a-key")
    with pytest.raises(errors.Unavailable) as raised:
        async with admitting.admit(call):
            await admitting.read_request(call, receive)
    assert raised.value.reason == "NOT_SERVING"


class NumberedSpan:
    """A span that notes how it ended."""

    traceparent = "a span"

    def __init__(self) -> None:
        self.ended: list[tuple[str, str | None]] = []

    def end(self, record: CallRecord, code: str, reason: str | None) -> None:
        self.ended.append((code, reason))


class NotingTracer:
    """A tracer that notes the spans it began, by method."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, NumberedSpan]] = []

    def start(self, method: str, **_: Any) -> NumberedSpan:
        self.spans.append((method, NumberedSpan()))
        return self.spans[-1][1]


def pipeline_of(**settings: Any) -> CallPipeline:
    reader = RequestReader(ServerLifecycle())
    return CallPipeline(KeyStore(KEYS), reader, max_calls=2, incarnation="this one", **settings)


async def test_a_call_is_counted_and_traced_however_it_ends() -> None:
    metrics, tracer = CallMetrics(), NotingTracer()
    admitting = pipeline_of(metrics=metrics, tracer=tracer)
    async with admitting.admit(call_of(secret="a-key")):
        assert current_record().traceparent == "a span"
    with pytest.raises(errors.NotFound):
        async with admitting.admit(call_of(secret="a-key")):
            raise errors.NotFound("no such context", reason="CONTEXT_NOT_FOUND")
    with pytest.raises(asyncio.CancelledError):
        async with admitting.admit(call_of(secret="a-key")):
            raise asyncio.CancelledError
    with pytest.raises(errors.Unauthenticated):
        async with admitting.admit(call_of(secret="unknown")):
            raise AssertionError("it is not admitted")
    ended = [("OK", None), ("NOT_FOUND", "CONTEXT_NOT_FOUND"), ("CANCELLED", None)]
    assert [span.ended for _, span in tracer.spans] == [[each] for each in ended]  # an unknown caller has no span
    values = values_of(metrics.families())
    for code in ("OK", "NOT_FOUND", "CANCELLED", "UNAUTHENTICATED"):
        labels = {"method": FILL.removeprefix("/"), "transport": "grpc", "code": code}
        assert value(values, "jaxctx_calls_total", **labels) == 1
    assert value(values, "jaxctx_calls_in_progress", transport="grpc") == 0


async def test_probes_have_no_span() -> None:
    tracer = NotingTracer()
    async with pipeline_of(tracer=tracer).admit(call_of("/grpc.health.v1.Health/Check")):
        pass
    assert tracer.spans == []


async def test_without_a_tracer_the_callers_trace_goes_on(admitting: CallPipeline) -> None:
    sent = f"00-{'a' * 32}-{'b' * 16}-01"
    for traceparent, expected in ((sent, sent), ("not one", ""), (None, "")):
        call = call_of(secret="a-key", traceparent=traceparent)
        async with admitting.admit(call):
            assert current_record() is call.record
            assert call.record.traceparent == expected


async def test_the_line_of_a_call(admitting: CallPipeline, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jaxctx.calls")
    with pytest.raises(errors.Aborted):
        async with admitting.admit(call_of(secret="a-key", request_id="mine")):
            current_record().add_fill(resident=4, restored=2, computed=3)
            current_record().add_tokens(5)
            raise errors.Aborted("busy", reason="CONTEXT_BUSY")
    (line,) = caplog.records
    fields = {
        "method": FILL,
        "transport": "grpc",
        "request_id": "mine",
        "caller": "alice",
        "tenant": "red",
        "code": "ABORTED",
        "reason": "CONTEXT_BUSY",
        "prompt_tokens": 9,
        "cached_tokens": 6,
        "completion_tokens": 5,
    }
    assert {name: line.__dict__[name] for name in fields} == fields
    assert 0 <= line.__dict__["seconds"] < 10


async def test_what_a_call_does_not_have_is_not_in_its_line(
    admitting: CallPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jaxctx.calls")
    async with admitting.admit(call_of(secret="a-key")):
        pass
    (line,) = caplog.records
    assert line.__dict__.keys().isdisjoint({"reason", "prompt_tokens", "cached_tokens", "completion_tokens"})
