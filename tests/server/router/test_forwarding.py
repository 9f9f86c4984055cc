"""Calls that a router forwards: which method of an engine, what is new work, and which error of several it returns."""

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.rpc import METHODS, SERVICES
from jaxctx.types import CreateContextRequest
from jaxctx.v1 import context_service_pb2 as contexts
from jaxctx.v1 import rules_pb2
from jaxctx.v1 import snapshot_service_pb2 as snapshots
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.model_service_pb2_grpc import ModelServiceStub
from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceStub
from jaxctx_server.router.context_service import RouterContextService
from jaxctx_server.router.forwarding import ForwardedCall, Forwarder, Refusals, chosen_names
from jaxctx_server.router.listing import Lister
from jaxctx_server.router.model_service import RouterModelService
from jaxctx_server.router.placement import ContextKey, Placement
from jaxctx_server.router.snapshot_service import RouterSnapshotService
from tests.server.router.fake_router import FakeRouter

WORK = {"CreateContext", "Fill", "Flush", "Generate", "Forward", "Fork", "Save", "Open", "Take"}
OF_A_MODEL = {"CreateContext", "GetModel", "Tokenize", "Detokenize", "ApplyChatTemplate"}


class Recorded(Exception):
    """A call was recorded, and goes no further."""


class PathChannel:
    """A channel for stubs whose methods are their own paths."""

    def unary_unary(self, path: str, **_: Any) -> str:
        return path

    unary_stream = unary_unary


class RecordingForwarder(Forwarder):
    """Records a call and the path of the engine's method, instead of asking an engine."""

    def __init__(self) -> None:
        channel: Any = PathChannel()
        self.engine: Any = SimpleNamespace(
            contexts=ContextServiceStub(channel),
            snapshots=SnapshotServiceStub(channel),
            models=ModelServiceStub(channel),
        )
        self.path = ""
        self.call: Any = None

    async def ask(self, call: ForwardedCall[Any], method: Any) -> Any:
        self.call, self.path = call, method(self.engine)
        raise Recorded

    async def stream(self, call: ForwardedCall[Any], method: Any) -> AsyncGenerator[Any, None]:
        yield await self.ask(call, method)


async def no_responses(*_: Any, **__: Any) -> dict[Any, Any]:
    return {}


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def test_chosen_names_have_the_method_that_finds_them() -> None:
    assert list(chosen_names(contexts.CreateContextRequest(context_id="a"))) == [("GetContext", "a")]
    assert list(chosen_names(contexts.ForkRequest(context_id="p", child_ids=["b", "a"]))) == [
        ("GetContext", "a"),
        ("GetContext", "b"),
    ]
    assert list(chosen_names(snapshots.SaveRequest(context_id="a", name="n"))) == [("GetSnapshot", "n")]
    assert list(chosen_names(snapshots.SaveRequest(context_id="a", name="n", overwrite_version=1))) == []
    assert list(chosen_names(contexts.FillRequest(context_id="a"))) == []


async def test_every_method_that_finds_a_chosen_name_can_be_called() -> None:
    finders = {
        field.GetOptions().Extensions[rules_pb2.found_by]
        for method in METHODS.values()
        for field in method.input_type.fields
    }
    for find_rpc in finders - {""}:
        forwarder = RecordingForwarder()
        with pytest.raises(Recorded):
            await forwarder.find(Caller("alice"), find_rpc, "a")
        assert forwarder.path == path_of(METHODS[find_rpc])
        assert METHODS[find_rpc].input_type == type(forwarder.call.request).DESCRIPTOR


@pytest.mark.parametrize(
    "method",
    [
        method
        for service in ("ContextService", "SnapshotService", "ModelService")
        for method in SERVICES[service].methods
        if method.name != "WatchContexts"  # a router watches each of its engines by itself
    ],
    ids=lambda method: method.name,
)
async def test_a_method_calls_the_engines_method_and_is_work_as_the_contract_says(method: MethodDescriptor) -> None:
    forwarder = RecordingForwarder()
    engines: Any = SimpleNamespace(by_load=list, ask_each=no_responses)
    lister = Lister(engines, forwarder)
    unused: Any = None
    services: dict[str, Any] = {
        "ContextService": RouterContextService(forwarder, lister, unused, unused, unused, unused),
        "SnapshotService": RouterSnapshotService(forwarder, lister, unused),
        "ModelService": RouterModelService(forwarder, lister),
    }
    service = services[method.containing_service.name]
    fields = {"context_id": "a"} if "context_id" in method.input_type.fields_by_name else {}
    request = GetMessageClass(method.input_type)(**fields)
    call = getattr(service, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())(Caller(), request)
    with pytest.raises(Recorded):
        await (anext(call) if method.server_streaming else call)
    assert forwarder.path == path_of(method)
    assert forwarder.call.is_work == method.GetOptions().Extensions[rules_pb2.work]
    assert forwarder.call.is_work == (method.name in WORK)
    assert forwarder.call.context_id == fields.get("context_id", "")
    assert forwarder.call.model_id == ("" if method.name in OF_A_MODEL else None)


def test_not_found_says_least() -> None:
    refusals = Refusals()
    assert refusals.most_specific() is None
    refusals.add(errors.NotFound("no such context"))
    draining = errors.Unavailable("it drains", reason="DRAINING")
    refusals.add(draining)
    refusals.add(errors.FailedPrecondition("another model", reason="MODEL_MISMATCH"))
    assert refusals.most_specific() is draining
    with pytest.raises(errors.Unavailable):
        refusals.add(errors.Unavailable("it is gone", reason="ENGINE_LOST"))


# --- which engine is asked --------------------------------------------------------------------------------------------

ALICE = Caller("alice", 1060.0)
GET = contexts.GetContextRequest(context_id="x")


def get_call(caller: Caller = ALICE) -> ForwardedCall[contexts.GetContextRequest]:
    return ForwardedCall(caller=caller, request=GET, context_id="x")


def fill_call() -> ForwardedCall[contexts.FillRequest]:
    request = contexts.FillRequest(context_id="x", tokens={"ids": [1]})
    return ForwardedCall(caller=ALICE, request=request, context_id="x", is_work=True)


def create_call(context_id: str = "", caller: Caller = ALICE) -> ForwardedCall[contexts.CreateContextRequest]:
    request = contexts.CreateContextRequest(context_id=context_id or None)
    return ForwardedCall(caller=caller, request=request, context_id=context_id, model_id="", is_work=True)


async def get(router: FakeRouter) -> str:
    """The engine that answers GetContext."""
    handle, _ = await router.forwarder.ask(get_call(), lambda engine: engine.contexts.GetContext)
    return handle.id


async def fill(router: FakeRouter) -> str:
    """The engine that answers Fill."""
    handle, _ = await router.forwarder.ask(fill_call(), lambda engine: engine.contexts.Fill)
    return handle.id


async def create(router: FakeRouter, context_id: str = "", caller: Caller = ALICE) -> str:
    """The engine that answers CreateContext."""
    call = create_call(context_id, caller)
    handle, _ = await router.forwarder.ask(call, lambda engine: engine.contexts.CreateContext)
    return handle.id


async def add_context(router: FakeRouter, address: str) -> None:
    """The context "x" on an engine."""
    await router.connections[address].fake.create(ALICE, CreateContextRequest(context_id="x"))


def remember(router: FakeRouter, address: str) -> Placement:
    """Have the router know that the context "x" is on an engine."""
    key = ContextKey("alice", "x")
    router.placements.add_unknown(key, router.handle(address))
    placement = router.placements.get(key)
    assert placement is not None
    return placement


def asked(router: FakeRouter, address: str) -> list[str]:
    """The RPCs that an engine was asked for."""
    return [name for name, _, _ in router.connections[address].requests]


async def test_engines_are_asked_in_turn_until_one_knows_the_context(router: FakeRouter) -> None:
    await add_context(router, "b")
    assert await get(router) == "b"
    assert (asked(router, "a"), asked(router, "b")) == (["GetContext"], ["GetContext"])


async def test_the_engine_where_a_context_is_remembered_is_asked_first(router: FakeRouter) -> None:
    await add_context(router, "b")
    remember(router, "b")
    router.handle("b").forwarded = 9
    assert await get(router) == "b"
    assert asked(router, "a") == []


async def test_what_no_engine_knows_is_not_found(router: FakeRouter) -> None:
    with pytest.raises(errors.NotFound):
        await get(router)
    assert (asked(router, "a"), asked(router, "b")) == (["GetContext"], ["GetContext"])


async def test_new_work_goes_past_an_engine_that_drains(router: FakeRouter) -> None:
    router.connections["a"].errors["CreateContext"] = [errors.Unavailable("it drains", reason="DRAINING")]
    assert await create(router) == "b"


async def test_work_on_a_context_of_an_engine_that_drains_is_told_so(router: FakeRouter) -> None:
    await add_context(router, "a")
    router.connections["a"].errors["Fill"] = [errors.Unavailable("it drains", reason="DRAINING")]
    with pytest.raises(errors.Unavailable) as raised:
        await fill(router)
    assert raised.value.reason == "DRAINING"
    assert asked(router, "b") == ["Fill"], "it may have been there"


@pytest.mark.parametrize(
    "error",
    [
        errors.Unavailable("it is gone", reason="ENGINE_LOST"),
        errors.FailedPrecondition("it is busy", reason="CONTEXT_BUSY"),
        errors.ResourceExhausted("it is full", reason="QUEUE_FULL"),
        errors.InvalidArgument.field("context_id", "is wrong"),
        errors.DeadlineExceeded("too late"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_after_which_a_call_may_have_been_done_is_not_tried_elsewhere(
    router: FakeRouter, error: errors.JaxctxError
) -> None:
    router.connections["a"].errors["CreateContext"] = [error]
    with pytest.raises(type(error)) as raised:
        await create(router)
    assert raised.value is error
    assert asked(router, "b") == []


async def test_without_engines_nothing_can_be_asked(empty_router: FakeRouter) -> None:
    with pytest.raises(errors.Unavailable) as raised:
        await get(empty_router)
    assert (raised.value.reason, raised.value.message) == ("ENGINE_LOST", "no engine has come yet")


async def test_a_context_of_a_lost_engine_is_unavailable_rather_than_not_found(router: FakeRouter) -> None:
    await add_context(router, "a")
    remember(router, "a")
    router.lose("a")
    with pytest.raises(errors.Unavailable) as raised:
        await get(router)
    assert raised.value.reason == "ENGINE_LOST"
    with pytest.raises(errors.NotFound):  # another tenant's context of that id never was there
        await router.forwarder.ask(get_call(Caller("bob")), lambda engine: engine.contexts.GetContext)


async def test_a_context_that_has_ended_is_not_found_once_its_engine_has_come_back(router: FakeRouter) -> None:
    await add_context(router, "a")
    remember(router, "a")
    router.lose("a")
    connection = router.connections["a"]
    await connection.fake.close(ALICE, "x")  # as when it expires
    with pytest.raises(errors.Unavailable):
        await get(router)
    again = router.state.engines.register("a", connection, connection.encode)
    with pytest.raises(errors.NotFound):
        await get(router)
    router.state.engines.lose(again)
    router.add_engine("a")  # another process at the same address knows nothing of what was there
    with pytest.raises(errors.Unavailable) as raised:
        await get(router)
    assert raised.value.reason == "ENGINE_LOST"


async def test_what_a_move_left_behind_is_not_the_context(router: FakeRouter) -> None:
    """It is empty, and stays until it could be closed: calls would go on with it."""
    key = ContextKey("alice", "x")
    remember(router, "b")
    await router.connections["a"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    router.connections["a"].errors["CloseContext"] = [errors.Unavailable("busy", reason="ENGINE_LOST")] * 9
    router.leftovers.close_later(key, router.handle("a"))
    router.lose("b")
    with pytest.raises(errors.Unavailable) as raised:
        await router.forwarder.ask(fill_call(), lambda engine: engine.contexts.Fill)
    assert raised.value.reason == "ENGINE_LOST"
    assert "Fill" not in asked(router, "a")


async def test_while_an_engine_may_come_back_nothing_is_not_found(router: FakeRouter) -> None:
    router.lose("a", may_come_back=True)
    with pytest.raises(errors.Unavailable) as raised:
        await get(router)
    assert raised.value.reason == "ENGINE_LOST"
    assert await create(router) == "b", "an id that nobody chose cannot be taken"
    assert await create(router, "drawn", replace(ALICE, draws_ids=True)) == "b", "nor one that the router itself drew"
    save = ForwardedCall(
        caller=replace(ALICE, draws_ids=True),
        request=snapshots.SaveRequest(context_id="drawn", name="n"),
        context_id="drawn",
    )
    handle, _ = await router.forwarder.ask(save, lambda engine: engine.snapshots.Save)
    assert handle.id == "b"
    with pytest.raises(errors.Unavailable):
        await create(router, "x")


# --- load, drain and cancellation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "load"), [(get, 0), (fill, 1)])
async def test_new_work_counts_for_the_load_while_it_runs(router: FakeRouter, call: Any, load: int) -> None:
    await add_context(router, "a")
    rpc = {get: "GetContext", fill: "Fill"}[call]
    router.connections["a"].gates[rpc] = asyncio.Event()
    running = asyncio.create_task(call(router))
    await router.connections["a"].until_asked(rpc)
    assert router.handle("a").forwarded == load
    assert len(router.state.programs.working) == load
    router.connections["a"].gates[rpc].set()
    await running
    assert router.handle("a").forwarded == 0
    assert len(router.state.programs.working) == 0


async def test_a_call_that_is_cancelled_counts_no_more(router: FakeRouter) -> None:
    await add_context(router, "a")
    router.connections["a"].gates["Fill"] = asyncio.Event()
    running = asyncio.create_task(fill(router))
    await router.connections["a"].until_asked("Fill")
    assert router.placements.is_in_use(ContextKey("alice", "x"))
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert (router.handle("a").forwarded, len(router.state.programs.working)) == (0, 0)
    assert not router.placements.is_in_use(ContextKey("alice", "x"))


async def test_a_router_that_drains_refuses_new_work_only(router: FakeRouter) -> None:
    await add_context(router, "a")
    router.state.programs.draining = True
    with pytest.raises(errors.Unavailable) as raised:
        await fill(router)
    assert (raised.value.reason, asked(router, "a")) == ("DRAINING", [])
    assert await get(router) == "a"


# --- ids that calls choose --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["a", "b"])
async def test_an_id_that_any_engine_has_is_taken(router: FakeRouter, address: str) -> None:
    await add_context(router, address)
    with pytest.raises(errors.AlreadyExists):
        await create(router, "x")
    assert "CreateContext" not in asked(router, "a") + asked(router, "b")


async def test_of_calls_that_choose_an_id_at_once_one_makes_it(router: FakeRouter) -> None:
    router.handle("a").forwarded = 1  # each is about as loaded, so that they would go to both
    done = await asyncio.gather(*(create(router, "x") for _ in range(4)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["AlreadyExists"] * 3 + ["str"]


async def test_calls_that_choose_an_id_wait_for_each_other_but_for_no_other_tenants(router: FakeRouter) -> None:
    gate = router.connections["a"].gates["GetContext"] = asyncio.Event()
    creating = [asyncio.create_task(create(router, "x", caller)) for caller in (ALICE, ALICE, Caller("bob"))]
    await router.connections["a"].until_asked("GetContext", times=2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert [caller.tenant for _, caller, _ in router.connections["a"].requests] == ["alice", "bob"]
    gate.set()
    done = await asyncio.gather(*creating, return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["AlreadyExists", "str", "str"]


async def test_what_was_on_a_lost_engine_can_be_made_again(router: FakeRouter) -> None:
    await add_context(router, "a")
    remember(router, "a")
    router.lose("a")
    assert await create(router, "x") == "b"


async def test_an_id_whose_context_moves_is_free_only_if_it_is_not_there_afterwards(router: FakeRouter) -> None:
    placement = remember(router, "a")
    moved = asyncio.Event()

    async def move() -> None:
        await moved.wait()
        await add_context(router, "b")
        placement.handle = router.handle("b")

    placement.moving = asyncio.create_task(move())
    creating = asyncio.create_task(create(router, "x"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert asked(router, "a") == [], "it waits for the move"
    moved.set()
    with pytest.raises(errors.AlreadyExists):
        await creating


# --- contexts that move -----------------------------------------------------------------------------------------------


async def test_a_call_waits_for_the_move_of_its_context(router: FakeRouter) -> None:
    placement = remember(router, "a")
    moved = asyncio.Event()

    async def move() -> None:
        await moved.wait()
        await add_context(router, "b")
        placement.handle = router.handle("b")

    placement.moving = asyncio.create_task(move())
    asking = asyncio.create_task(get(router))
    for _ in range(5):
        await asyncio.sleep(0)
    assert asked(router, "a") == []
    moved.set()
    assert await asking == "b"
    assert asked(router, "a") == []


async def test_a_first_fill_moves_the_context_to_where_its_prompt_is_cached(router: FakeRouter) -> None:
    await add_context(router, "a")
    remember(router, "a").created = contexts.CreateContextRequest(context_id="x")
    router.connections["b"].responses["Plan"] = contexts.PlanResponse(resident=100)
    assert await fill(router) == "b"
    assert asked(router, "b") == ["Plan", "CreateContext", "Fill"]
    assert asked(router, "a") == ["Plan", "CloseContext"]


async def test_only_a_first_fill_moves_a_context(router: FakeRouter) -> None:
    await add_context(router, "a")
    remember(router, "a").created = contexts.CreateContextRequest(context_id="x")
    router.connections["b"].responses["Plan"] = contexts.PlanResponse(resident=100)
    assert await get(router) == "a"
    assert await fill(router) == "a"
    assert asked(router, "b") == []


# --- streams ----------------------------------------------------------------------------------------------------------


async def generate(router: FakeRouter) -> list[str]:
    """The engine of each response of Generate."""
    request = contexts.GenerateRequest(context_id="x")
    call = ForwardedCall(caller=ALICE, request=request, context_id="x", is_work=True)
    return [handle.id async for handle, _ in router.forwarder.stream(call, lambda engine: engine.contexts.Generate)]


async def test_a_stream_comes_from_the_engine_that_knows_the_context(router: FakeRouter) -> None:
    await add_context(router, "b")
    assert await generate(router) == ["b", "b"]
    assert asked(router, "a") == ["Generate"]
    assert router.handle("b").forwarded == 0


async def test_a_stream_that_no_engine_knows_is_not_found(router: FakeRouter) -> None:
    with pytest.raises(errors.NotFound):
        await generate(router)


async def test_a_stream_whose_engine_is_lost_is_not_begun_elsewhere(router: FakeRouter) -> None:
    await add_context(router, "a")
    router.connections["a"].fake.error = errors.Unavailable("it is gone", reason="ENGINE_LOST")
    with pytest.raises(errors.Unavailable):
        await generate(router)
    assert asked(router, "b") == []


async def test_a_router_that_drains_begins_no_stream(router: FakeRouter) -> None:
    router.state.programs.draining = True
    with pytest.raises(errors.Unavailable) as raised:
        await generate(router)
    assert raised.value.reason == "DRAINING"
