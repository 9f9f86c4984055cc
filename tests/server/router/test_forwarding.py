"""Calls that a router forwards: which method of an engine, what is new work, and which error of several it returns."""

import re
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.rpc import METHODS, SERVICES
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
from jaxctx_server.router.snapshot_service import RouterSnapshotService

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
        "ContextService": RouterContextService(forwarder, lister, unused, unused, unused),
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
