"""No method sees a request that is not valid, and what a request costs is its caller's, not others'."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from jaxctx import errors
from jaxctx.rpc import METHODS
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import session_service_pb2
from jaxctx_server.grpc import interceptor
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.service import request_reader
from jaxctx_server.service.request_reader import RequestReader
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.server.harness import KEYS, bearer, create, failure, method_of
from tests.server.validate.wire_format import field

UNKNOWN = 99  # a value that no enum has
FILL = "/jaxctx.v1.ContextService/Fill"


def enums(kind: Any, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The way to each field of a message, or in it, that holds an enum."""
    for each in kind.fields:
        if each.enum_type is not None:
            yield (*path, each)
        if each.message_type is not None and not each.message_type.GetOptions().map_entry:
            yield from enums(each.message_type, (*path, each))


ENUMS = [(rpc, path) for rpc, method in METHODS.items() for path in enums(method.input_type)]


def holding(path: tuple[FieldDescriptor, ...], value: Any) -> dict[str, Any]:
    """The fields of a message that has a value at the end of a way."""
    for each in reversed(path):
        value = {each.name: [value] if each.is_repeated else value}
    return dict(value)


def named(path: tuple[FieldDescriptor, ...]) -> str:
    return ".".join(f"{each.name}[0]" if each.is_repeated else each.name for each in path)


def test_the_contract_has_enums_in_requests() -> None:
    assert {(rpc, named(path)) for rpc, path in ENUMS} >= {
        ("ReadVariable", "criterion"),
        ("GetVariable", "criterion"),
        ("SubmitCall", "parameters[0].output.criterion"),
    }


@pytest.mark.parametrize(("rpc_name", "path"), ENUMS, ids=[f"{rpc}.{named(path)}" for rpc, path in ENUMS])
@pytest.mark.parametrize("value", [UNKNOWN, -1, 2**31 - 1])
async def test_an_unknown_value_of_an_enum(grpc_server: Any, rpc_name: str, path: Any, value: int) -> None:
    """Is refused by name, whatever else is wrong; it was INTERNAL where a method looked at it first."""
    method = METHODS[rpc_name]
    request = GetMessageClass(method.input_type)(**holding(path, value))
    call = method_of(grpc_server.channel, rpc_name)(request)
    error = await failure(call.read() if method.server_streaming else call)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert named(path) in [each.field for each in error.violations]


async def test_read_variable_as_bytes(grpc_server: Any) -> None:
    call = grpc_server.channel.unary_stream("/jaxctx.v1.SessionService/ReadVariable")(bytes.fromhex("0a01781805"))
    error = await failure(call.read())
    assert [each.field for each in error.violations] == ["variable_id", "criterion"]


@pytest.mark.parametrize("rpc_name", METHODS)
async def test_no_method_sees_an_invalid_request(
    grpc_server: Any, rpc_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every method: a field that is refused is refused before the engine is asked for anything."""

    def refuse(limits: Any, request: Any) -> None:
        raise errors.InvalidArgument.field("all", "is refused")

    monkeypatch.setattr(request_reader, "validate", refuse)
    called = len([name for name, *_ in grpc_server.engine.calls if name != "stats"])
    method = METHODS[rpc_name]
    call = method_of(grpc_server.channel, rpc_name)(GetMessageClass(method.input_type)())
    error = await failure(call.read() if method.server_streaming else call)
    assert [each.field for each in error.violations] == ["all"]
    assert len([name for name, *_ in grpc_server.engine.calls if name != "stats"]) == called


async def test_bytes_that_are_no_message_and_no_message(grpc_server: Any) -> None:
    call = grpc_server.channel.unary_unary(FILL)
    for data in (b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff", b"\xff" * 100_000):
        error = await failure(call(data))
        assert [each.field for each in error.violations] == ["request"]
    nothing = grpc_server.channel.stream_unary(FILL)
    error = await failure(nothing(iter([])))
    assert (error.code, [each.field for each in error.violations]) == ("INVALID_ARGUMENT", ["request"])
    await create(grpc_server)


@pytest.mark.parametrize(
    ("method", "data", "name"),
    [
        ("SessionService/SubmitCall", b"\x22\x00" * 4_194_240, "parameters"),
        ("ContextService/Forward", field(6, b"") * 4_194_240, "outputs"),
        ("ContextService/Forward", field(4, b"") * 4_194_240, "masks"),
        ("ContextService/Fork", field(3, b"") * 4_194_240, "child_ids"),
        ("ContextService/CloseContext", b"\xf8\x07\x00" * 2_000_000, "request"),
    ],
)
async def test_a_message_of_empty_entries(
    grpc_server: Any, method: str, data: bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before it is parsed."""
    monkeypatch.setattr(request_reader, "parse_and_validate", None)
    error = await failure(grpc_server.channel.unary_unary(f"/jaxctx.v1.{method}")(data))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert [each.field for each in error.violations] == [name]
    monkeypatch.undo()
    await create(grpc_server)


async def test_large_requests_that_are_valid(open_grpc_server: Any) -> None:
    """More of them than a caller may have read at its share at once, one after another."""
    async with open_grpc_server(keys=KEYS) as grpc_server:
        await create(grpc_server, metadata=bearer("a-key"))
        for request in (
            pb.FillRequest(context_id="a", tokens={"ids": [7] * 10_000}),
            pb.FillRequest(context_id="a", tokens={"ids": [300] * 10_000}, add_special_tokens=False),
        ):
            await grpc_server.contexts.Fill(request, metadata=bearer("a-key"))
            assert grpc_server.last("fill")[1][1] == list(request.tokens.ids)
        many = pb.ForwardRequest(context_id="a", tokens=[1] * 10_000, masks=[{"bounds": [0, 4]}] * 10_000)
        await grpc_server.contexts.Forward(many, metadata=bearer("a-key"))
        assert len(grpc_server.last("forward")[1].masks) == 10_000
        text = session_service_pb2.SetVariableRequest(session_id="x", variable_id="y", text="x" * (2 << 20))
        for _ in range(5):
            call = grpc_server.stub("SessionService").SetVariable(text, metadata=bearer("a-key"))
            assert (await failure(call)).reason == "SESSION_NOT_FOUND"


async def test_a_message_of_a_service_that_is_not_the_contracts(grpc_server: Any) -> None:
    call = grpc_server.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert (await failure(call(field(1, b"x" * interceptor.MAX_FOREIGN_BYTES)))).code == "INVALID_ARGUMENT"
    assert (await failure(call(b"\xff"))).code == "INVALID_ARGUMENT"
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    stream = grpc_server.channel.stream_stream(reflection)(iter([field(7, b"x" * interceptor.MAX_FOREIGN_BYTES)]))
    assert (await failure(stream.read())).code == "INVALID_ARGUMENT"


async def test_who_has_no_key_is_refused_before_anything_is_received(open_grpc_server: Any) -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    async with open_grpc_server(keys=KEYS) as grpc_server, asyncio.timeout(60):
        error = await failure(grpc_server.channel.stream_unary(FILL)(never()))
        assert error.code == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("method", "number", "name"), [("Forward", 2, "tokens"), ("Forward", 4, "masks"), ("Fork", 3, "child_ids")]
)
async def test_a_router_counts_what_it_passes_on(method: str, number: int, name: str) -> None:
    """It has no model, and so no limits of its own; an engine's would be none to it while that is away."""
    lifecycle = ServerLifecycle()
    server = make_server(Backend.make(lifecycle, None, max_calls=10, is_router=True))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    lifecycle.set_ready(ServingState.router(Limits(queue_limit=64)))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            data = field(number, b"") * 4_194_240 if number != 2 else field(number, bytes((8 << 20) - 100))
            error = await failure(channel.unary_unary(f"/jaxctx.v1.ContextService/{method}")(data))
            assert [each.field for each in error.violations] == [name]
            request = pb.ForwardRequest(context_id="a", tokens=[1] * request_reader.ROUTER_CONTEXT_TOKENS)
            error = await failure(method_of(channel, "Forward")(request))
            assert error.reason == "ENGINE_LOST"
    finally:
        lifecycle.stop()
        await server.stop(None)


async def test_without_keys_each_connection_has_a_budget(grpc_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who used up its own holds up nobody else's calls."""
    callers = list[Any]()
    original = RequestReader.read

    async def noted(self: Any, method: str, caller: Any, receive: Any) -> Any:
        callers.append(caller)
        self._charge(self._budget(callers[0]), 1.0)
        return await original(self, method, caller, receive)

    monkeypatch.setattr(RequestReader, "read", noted)
    async with grpc.aio.insecure_channel(grpc_server.target, [("grpc.use_local_subchannel_pool", 1)]) as other:
        request = pb.ListContextsRequest()
        error = await failure(grpc_server.contexts.ListContexts(request))
        assert error.reason == "QUEUE_FULL"
        await method_of(other, "ListContexts")(request)
        error = await failure(grpc_server.contexts.ListContexts(request))
        assert error.reason == "QUEUE_FULL"
    assert callers[0] == callers[2] != callers[1]


async def test_with_keys_each_of_them_has_a_budget(open_grpc_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = list[Any]()
    original = RequestReader.read

    async def noted(self: Any, method: str, caller: Any, receive: Any) -> Any:
        callers.append(caller)
        return await original(self, method, caller, receive)

    monkeypatch.setattr(RequestReader, "read", noted)
    apart = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        open_grpc_server(keys=KEYS) as grpc_server,
        grpc.aio.insecure_channel(grpc_server.target, apart) as other,
    ):
        for channel in (grpc_server.channel, other):
            for secret in ("a-key", "b-key"):
                call = method_of(channel, "ListContexts")
                await call(pb.ListContextsRequest(), metadata=bearer(secret))
    assert callers == [("alice", "red"), ("bob", "blue")] * 2


class TestBudget:
    """Of one caller's large requests."""

    @pytest.fixture
    def reader(self, limits: Any) -> RequestReader:
        served = SimpleNamespace(limits=limits, model=object())
        return RequestReader(SimpleNamespace(served=lambda: served), lambda: self.now)  # type: ignore[arg-type]

    now = 1000.0
    LARGE = pb.FillRequest(context_id="a", text="x" * (1 << 20)).SerializeToString()
    SHORT = pb.FillRequest(context_id="a", text="x").SerializeToString()

    async def read(self, reader: RequestReader, data: bytes = SHORT, caller: str = "a") -> Any:
        async def receive() -> bytes:
            return data

        return await reader.read(FILL, caller, receive)

    async def test_small_requests_cost_nothing(self, reader: RequestReader) -> None:
        for _ in range(50):
            assert (await self.read(reader)).text == "x"
        assert reader._budget("a").free_at == 0

    async def test_large_requests_cost_their_caller(self, reader: RequestReader) -> None:
        assert (await self.read(reader, self.LARGE)).context_id == "a"
        assert reader._budget("a").free_at > 1000 - request_reader.BURST_S
        assert reader._budget("b").free_at == 0

    async def test_who_used_up_its_share_waits_and_nobody_else_does(
        self, reader: RequestReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept = list[float]()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            self.now += seconds

        monkeypatch.setattr(request_reader.asyncio, "sleep", sleep)
        reader._charge(reader._budget("a"), request_reader.SHARE * (request_reader.BURST_S + 3))
        assert (await self.read(reader, caller="b")).text == "x"
        assert not slept
        assert (await self.read(reader)).text == "x"
        assert sum(slept) == pytest.approx(3)

    async def test_a_wait_that_is_too_long_is_refused(self, reader: RequestReader) -> None:
        wait_s = request_reader.MAX_WAIT_S + 5
        reader._charge(reader._budget("a"), request_reader.SHARE * (request_reader.BURST_S + wait_s))
        with pytest.raises(errors.ResourceExhausted) as raised:
            await self.read(reader)
        assert raised.value.reason == "QUEUE_FULL"
        assert raised.value.retry_after_s == pytest.approx(wait_s)

    async def test_what_was_refused_has_cost_as_well(self, reader: RequestReader) -> None:
        for data in (self.LARGE + b"\x80", field(3, b"") * 40_000, b"\xf8\x07\x00" * 3000):
            before = reader._budget("a").free_at
            with pytest.raises(errors.InvalidArgument):
                await self.read(reader, data)
            assert reader._budget("a").free_at > before

    async def test_large_requests_of_a_caller_wait_for_each_other(
        self, reader: RequestReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As many as their bytes allow; beyond that, one more is refused at once."""
        monkeypatch.setattr(request_reader, "MAX_LARGE_BYTES", 6 * len(self.LARGE))
        async with reader._budget("a").turn:
            waiting = [asyncio.create_task(self.read(reader, self.LARGE)) for _ in range(6)]
            await asyncio.sleep(0)
            with pytest.raises(errors.ResourceExhausted) as raised:
                await self.read(reader, self.LARGE)
            assert (raised.value.reason, raised.value.retry_after_s) == ("QUEUE_FULL", 1.0)
            assert (await self.read(reader)).text == "x"
            assert (await self.read(reader, self.LARGE, "b")).context_id == "a"
            assert not any(each.done() for each in waiting)
        assert len(await asyncio.gather(*waiting)) == 6
        assert reader._budget("a").large_bytes == 0

    async def test_one_large_request_is_read_whatever_its_size(
        self, reader: RequestReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request_reader, "MAX_LARGE_BYTES", 1)
        assert (await self.read(reader, self.LARGE)).context_id == "a"

    async def test_a_wait_for_others_that_is_too_long_is_refused(
        self, reader: RequestReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request_reader, "MAX_WAIT_S", 0.01)
        budget = reader._budget("a")
        async with budget.turn:
            with pytest.raises(errors.ResourceExhausted) as raised:
                await self.read(reader, self.LARGE)
            assert raised.value.reason == "QUEUE_FULL"
            assert raised.value.retry_after_s
            patient = asyncio.create_task(reader.convert("a", len(self.LARGE), lambda: "large", patient=True))
            await asyncio.sleep(0.05)
            assert not patient.done()
        assert await patient == "large"
        assert budget.large_bytes == 0

    async def test_a_request_that_is_cancelled_is_paid_for(self, reader: RequestReader) -> None:
        """The thread goes on with it: until it is done with that, the caller's next one waits."""
        begun, goes_on = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            goes_on.wait(60)
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass

        budget = reader._budget("a")
        reading = asyncio.create_task(reader.convert("a", len(self.LARGE), work))
        await asyncio.to_thread(begun.wait, 60)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (budget.large_bytes, budget.turn.locked()) == (len(self.LARGE), True)
        paid_before = budget.free_at
        goes_on.set()
        assert await reader.convert("a", len(self.LARGE), lambda: "next", patient=True) == "next"
        cost_s = request_reader.CONVERSION_FACTOR * 0.02
        assert budget.free_at - max(paid_before, self.now - request_reader.BURST_S) >= cost_s / request_reader.SHARE
        assert budget.large_bytes == 0

    async def test_who_leaves_while_it_waits_pays_nothing(self, reader: RequestReader) -> None:
        budget = reader._budget("a")
        async with budget.turn:
            reading = asyncio.create_task(self.read(reader, self.LARGE))
            await asyncio.sleep(0)
            assert budget.large_bytes
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        assert (budget.large_bytes, budget.free_at, budget.turn.locked()) == (0, 0, False)

    async def test_what_is_converted_is_charged_and_refused_as_requests_are(self, reader: RequestReader) -> None:
        assert await reader.convert("a", 10, lambda: "small") == "small"
        assert reader._budget("a").free_at == 0
        assert await reader.convert("a", len(self.LARGE), lambda: "large") == "large"
        assert reader._budget("a").free_at > 0
        reader._budget("a").large_bytes = request_reader.MAX_LARGE_BYTES
        with pytest.raises(errors.ResourceExhausted):
            await reader.convert("a", len(self.LARGE), lambda: "large")

    async def test_the_end_of_what_is_done_waits_instead(
        self, reader: RequestReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def sleep(seconds: float) -> None:
            self.now += seconds

        monkeypatch.setattr(request_reader.asyncio, "sleep", sleep)
        wait_s = request_reader.MAX_WAIT_S + 5
        reader._charge(reader._budget("a"), request_reader.SHARE * (request_reader.BURST_S + wait_s))
        reader._budget("a").large_bytes = request_reader.MAX_LARGE_BYTES
        assert await reader.convert("a", len(self.LARGE), lambda: "large", patient=True) == "large"
        await reader.check("a", pb.FillRequest(context_id="a", text="x" * (1 << 20)), patient=True)

    async def test_many_fields_are_read_elsewhere(self, reader: RequestReader, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = list[str]()
        original = request_reader.validate

        def noted(*args: Any) -> None:
            threads.append(threading.current_thread().name)
            original(*args)

        monkeypatch.setattr(request_reader, "validate", noted)
        plain = pb.FillRequest(context_id="a", text="x" * request_reader.MAX_UNSCANNED_BYTES)
        many = pb.FillRequest(context_id="a", messages={"messages": [{"role": "user"}] * 1024})
        for request in (plain, many):
            await self.read(reader, request.SerializeToString())
        assert [each.startswith("jaxctx-reading") for each in threads] == [False, True]

    async def test_callers_without_debts_are_forgotten(self, reader: RequestReader) -> None:
        reader._charge(reader._budget("debtor"), 1.0)
        for each in range(2 * request_reader.MAX_IDLE_BUDGETS):
            reader._budget(each)
        assert len(reader._budgets) <= request_reader.MAX_IDLE_BUDGETS + 1
        assert reader._budget("debtor").free_at > 0
