"""What a router knows of a call from the contract's options, and which error of several it returns."""

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.rpc import METHODS, SERVICES
from jaxctx.v1 import context_service_pb2 as contexts
from jaxctx.v1 import rules_pb2
from jaxctx.v1 import snapshot_service_pb2 as snapshots
from jaxctx_server.router.forwarding import ForwardedCall, Refusals, chosen_names, find_call


def test_chosen_names_have_the_method_that_finds_them() -> None:
    assert list(chosen_names(contexts.CreateContextRequest(context_id="a"))) == [("GetContext", "a")]
    assert list(chosen_names(contexts.ForkRequest(context_id="p", child_ids=["b", "a"]))) == [
        ("GetContext", "a"),
        ("GetContext", "b"),
    ]
    assert list(chosen_names(snapshots.SaveRequest(context_id="a", name="n"))) == [("GetSnapshot", "n")]
    assert list(chosen_names(snapshots.SaveRequest(context_id="a", name="n", overwrite_version=1))) == []
    assert list(chosen_names(contexts.FillRequest(context_id="a"))) == []


def test_every_method_that_finds_a_chosen_name_can_be_called() -> None:
    finders = {
        field.GetOptions().Extensions[rules_pb2.found_by]
        for method in METHODS.values()
        for field in method.input_type.fields
    }
    for find_rpc in finders - {""}:
        call = find_call(Caller("alice"), find_rpc, "a")
        assert METHODS[find_rpc].input_type == type(call.request).DESCRIPTOR


def test_new_work_is_what_the_contract_says() -> None:
    work = {"CreateContext", "Fill", "Flush", "Generate", "Forward", "Fork", "Save", "Open", "Take"}
    for service in ("ContextService", "SnapshotService", "ModelService"):
        for method in SERVICES[service].methods:
            call = ForwardedCall(rpc=method.name, caller=Caller(), request=contexts.FillRequest())
            assert call.is_work == (method.name in work), method.name


def test_not_found_says_least() -> None:
    refusals = Refusals()
    assert refusals.most_telling() is None
    refusals.add(errors.NotFound("no such context"))
    draining = errors.Unavailable("it drains", reason="DRAINING")
    refusals.add(draining)
    refusals.add(errors.FailedPrecondition("another model", reason="MODEL_MISMATCH"))
    assert refusals.most_telling() is draining
    with pytest.raises(errors.Unavailable):
        refusals.add(errors.Unavailable("it is gone", reason="ENGINE_LOST"))
